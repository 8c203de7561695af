"""R-GCN (Schlichtkrull et al., https://arxiv.org/abs/1703.06103). R relations: the edge types of the view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import overload

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.views.merged_relations import CombinesRelations
from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.nn.linear import glorot_

Near = Mapping[EdgeType, Tensor]


class RGCNConv(torch.nn.Module):
    """x'_i = Θ_root x_i + Σ_r mean_{j ∈ N_r(i)} Θ_r x_j + b, Θ_r = Σ_b comp_rb V_b with ``num_bases``.

    Parameters ``weight`` [R or bases, in, out], ``comp`` [R, bases], ``root`` [in, out], ``bias``, as PyG's.
    ``relations`` names the edge type each weight belongs to; without it they are the view's, in the view's order.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        aggr: str = "mean",
        root_weight: bool = True,
        bias: bool = True,
        *,
        relations: Sequence[EdgeType] | None = None,
    ) -> None:
        super().__init__()
        assert relations is None or len(relations) == num_relations
        self.in_channels, self.out_channels, self.num_relations = in_channels, out_channels, num_relations
        self.num_bases, self.aggr = num_bases, "sum" if aggr == "add" else aggr
        self.relations = None if relations is None else {kind: i for i, kind in enumerate(relations)}
        matrices = num_relations if num_bases is None else num_bases
        self.weight = torch.nn.Parameter(torch.empty(matrices, in_channels, out_channels))
        self.comp = None if num_bases is None else torch.nn.Parameter(torch.empty(num_relations, num_bases))
        self.root = torch.nn.Parameter(torch.empty(in_channels, out_channels)) if root_weight else None
        self.bias = torch.nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for matrix in (self.weight, self.comp, self.root):
            if matrix is not None:
                glorot_(matrix)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    @overload
    def forward(
        self, view: GraphView, x: Tensor, *, only: str | None = None, aggregated: Near | None = None
    ) -> Tensor: ...

    @overload
    def forward(
        self, view: GraphView, x: Mapping[str, Tensor], *, only: str | None = None, aggregated: Near | None = None
    ) -> dict[str, Tensor]: ...

    def forward(
        self,
        view: GraphView,
        x: Tensor | Mapping[str, Tensor],
        *,
        only: str | None = None,
        aggregated: Near | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """{node type: [N_src, in]} → {node type: [N_dst, out]}, or a tensor to a tensor where there is one node type.

        Just the node type ``only`` when that is given. ``aggregated`` is what neighbours amount to, by edge type.
        """
        if isinstance(x, Tensor):
            if len(view.node_types) != 1:
                raise ConfigError(f"give features by node type: the graph has {', '.join(view.node_types)}")
            (kind,) = view.node_types
            if aggregated is None and self.aggr in ("sum", "mean") and (out := self._combine(view, x)) is not None:
                return out
            return self._relate(view, {kind: x}, only=None, near=aggregated)[kind]
        return self._relate(view, x, only=only, near=aggregated)

    def _combine(self, view: GraphView, x: Tensor) -> Tensor | None:
        """With few bases for many relations: a weighted sum over all edges for each basis, then one product for each.

        Σ_r mean_r(x) Θ_r = Σ_b (Σ_r comp_rb mean_r(x)) V_b; nothing has a row for every node and relation.
        """
        if self.comp is None or self.num_relations <= 2 * len(self.weight) or not isinstance(view, CombinesRelations):
            return None
        place = self._places(list(view.edge_types))
        rows = torch.tensor([place[kind] for kind in view.edge_types])
        out = self._own(view, x)
        for basis, matrix in enumerate(self.weight):
            near = view.combine_relations(x, self.comp[rows, basis], reduce=self.aggr)
            out = _add_product(out, near, matrix)
        return out

    def _relate(
        self, view: GraphView, x: Mapping[str, Tensor], *, only: str | None, near: Near | None
    ) -> dict[str, Tensor]:
        if near is None:  # without names all edge types are needed: weights go by their order
            near = view.aggregate_relations(x, reduce=self.aggr, into=only if self.relations else None)
        place = self._places(list(near))
        weight: Tensor = self.weight
        if self.comp is not None:
            weight = (self.comp @ weight.flatten(1)).view(-1, self.in_channels, self.out_channels)
        out = {kind: self._own(view.for_type(kind), rows) for kind, rows in x.items() if only in (None, kind)}
        for kind, rows in near.items():
            if kind.dst in out:
                out[kind.dst] = _add_product(out[kind.dst], rows, weight[place[kind]])
        return out

    def _own(self, view: GraphView, x: Tensor) -> Tensor:
        own = first_rows(x, view.num_dst)
        if self.root is None:
            out = own.new_zeros(own.shape[0], self.out_channels)
            return out if self.bias is None else out + self.bias
        return own @ self.root if self.bias is None else torch.addmm(self.bias, own, self.root)

    def _places(self, found: list[EdgeType]) -> Mapping[EdgeType, int]:
        if self.relations is None:
            if len(found) != self.num_relations:
                raise ConfigError(
                    f"this layer was made for {self.num_relations} edge types, the graph has {len(found)}"
                )
            return {kind: i for i, kind in enumerate(found)}
        strange = [str(kind) for kind in found if kind not in self.relations]
        if strange:
            raise ConfigError(f"the model was made without the edge types {', '.join(strange)}")
        return self.relations


def _add_product(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cpu") or out.dtype != x.dtype:
        return out + x @ weight
    return out.addmm_(x, weight)
