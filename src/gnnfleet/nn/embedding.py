"""Learnable node embeddings, looked up by store id.

Initial rows are drawn by store id: a rank that holds only the rows of its nodes starts with the same values.
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
    """Embedding table ``weight`` [nodes, width] of one node type; initialised normal with rows of norm about 1.

    With ``ids`` it holds only the rows of these nodes, in their order; other ranks hold the rest. Views of other nodes
    then need ``fetch``, a lookup of remote rows.
    """

    def __init__(self, num_nodes: int, width: int, *, ids: Tensor | None = None, kind: str = "") -> None:
        super().__init__()
        self.num_nodes, self.ids, self.kind = num_nodes, ids, kind
        self.fetch: Callable[[Tensor, Tensor], Tensor] | None = None  # (local rows, store ids) → rows; differentiable
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
    def _row_index(self) -> RowIndex:
        assert self.ids is not None
        return RowIndex(self.ids)

    def forward(self, view: GraphView) -> Tensor:
        """[N_src, width] rows of the view's nodes, which are of this node type."""
        ids = view.node_ids
        if self.ids is None:
            return functional.embedding(ids, self.weight)
        if ids.data_ptr() == self.ids.data_ptr() and len(ids) == len(self.ids):  # all local rows, in order
            return self.weight.view_as(self.weight)
        if self.fetch is not None:
            return self.fetch(self.weight, ids)
        return functional.embedding(self._row_index.rows(ids), self.weight)


def embedding_ids(model: torch.nn.Module) -> dict[str, Tensor]:
    """{parameter name: [n] store ids of its rows} of embedding tables that are sharded over ranks."""
    return {
        f"{name}.weight" if name else "weight": module.ids
        for name, module in model.named_modules()
        if isinstance(module, NodeEmbedding) and module.ids is not None
    }
