"""A learnable row per node, for graphs without features; looked up by store id, so any view finds its own.

First rows are drawn by store id, so a rank that holds the rows of its own nodes only begins with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.graph.views.row_index import RowIndex
from gnnfleet.graph.views.view import GraphView
from gnnfleet.ops.draws import Draws, Purpose


class NodeEmbedding(torch.nn.Module):
    """``weight`` [nodes, width] of one node type; starts normal with rows of length about 1.

    With ``ids`` it has the rows of these nodes alone, in their order: the rest is held by other ranks. Views of other
    nodes than these need ``fetch``, a way to take rows from whoever has them.
    """

    def __init__(self, num_nodes: int, width: int, *, ids: Tensor | None = None, kind: str = "") -> None:
        super().__init__()
        self.num_nodes, self.ids, self.kind = num_nodes, ids, kind
        self.fetch: Callable[[Tensor, Tensor], Tensor] | None = None  # (own rows, store ids) → rows; differentiable
        self.weight = torch.nn.Parameter(torch.empty(num_nodes if ids is None else len(ids), width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        draws = Draws(int(torch.randint(2**62, ())), Purpose.PARAMETERS)
        width = self.weight.shape[1]
        for low in range(0, len(self.weight), 1 << 14):
            rows = self.weight[low : low + (1 << 14)]
            ids = torch.arange(low, low + len(rows)) if self.ids is None else self.ids[low : low + len(rows)]
            rows.copy_(draws.normals_at(ids, width) * width**-0.5)

    @cached_property
    def _places(self) -> RowIndex:
        assert self.ids is not None
        return RowIndex(self.ids)

    def forward(self, view: GraphView) -> Tensor:
        """[N_src, width] the rows of a view of this node type."""
        ids = view.node_ids
        if self.ids is None:
            return functional.embedding(ids, self.weight)
        if ids.data_ptr() == self.ids.data_ptr() and len(ids) == len(self.ids):  # all of them, in this order
            return self.weight.view_as(self.weight)
        if self.fetch is not None:
            return self.fetch(self.weight, ids)
        return functional.embedding(self._places.rows(ids), self.weight)


def embedding_ids(model: torch.nn.Module) -> dict[str, Tensor]:
    """{name of a parameter: [n] store ids of its rows}, for those of which every rank has the rows of its own nodes."""
    return {
        f"{name}.weight" if name else "weight": module.ids
        for name, module in model.named_modules()
        if isinstance(module, NodeEmbedding) and module.ids is not None
    }
