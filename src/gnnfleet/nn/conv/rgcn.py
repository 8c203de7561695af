"""R-GCN (Schlichtkrull et al., https://arxiv.org/abs/1703.06103). R relations: the edge types of the view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.nn.linear import Conv, glorot_

RelationRows = Mapping[EdgeType, Tensor]


class RGCNConv(Conv):
    """x'_i = Θ_root x_i + Σ_r mean_{j ∈ N_r(i)} Θ_r x_j + b, Θ_r = Σ_b comp_rb V_b with ``num_bases``.

    With ``weighted`` edge weights the mean is Σ w x / Σ |w|, the sum Σ w x.
    Parameters ``weight`` [R or bases, in, out], ``comp`` [R, bases], ``root`` [in, out], ``bias``, as PyG's.
    ``relations`` orders the edge types of the weights; by default they are those of the view, in its order.
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
        self.aggr = "sum" if aggr == "add" else aggr
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
        super().reset_parameters()

    def forward(
        self,
        view: GraphView,
        x: Tensor | Mapping[str, Tensor],
        *,
        only: str | None = None,
        aggregated: RelationRows | None = None,
        weighted: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """{node type: [N_src, in]} → {node type: [N_dst, out]}, or tensor → tensor for one node type.

        ``only`` limits the output to one node type. ``aggregated`` is the aggregate of neighbours by edge type.
        """
        if isinstance(x, Tensor):
            if len(view.node_types) != 1:
                raise ConfigError(f"features must come by node type: the graph has {', '.join(view.node_types)}")
            (name,) = view.node_types
            if aggregated is None and self.aggr in ("sum", "mean"):
                combined = self._combine(view, x, weighted=weighted)
                if combined is not None:
                    return combined
            # A torch_geometric module that lends its attributes may have another forward.
            by_type = RGCNConv.forward(self, view, {name: x}, aggregated=aggregated, weighted=weighted)
            assert isinstance(by_type, dict)
            return by_type[name]
        if aggregated is None:  # without ``relations`` weights go by the order of all edge types
            aggregated = self.aggregate(view, x, only=only if self.relations else None, weighted=weighted)
        weight_index = self._weight_index(list(aggregated))
        weight: Tensor = self.weight
        if self.comp is not None:
            weight = (self.comp @ weight.flatten(1)).view(-1, self.in_channels, self.out_channels)
        out = {kind: self._root_term(view.for_type(kind), rows) for kind, rows in x.items() if only in (None, kind)}
        for kind, rows in aggregated.items():
            if kind.dst in out:
                out[kind.dst] = _add_product(out[kind.dst], rows, weight[weight_index[kind]])
        return out

    def aggregate(
        self, view: GraphView, x: Mapping[str, Tensor], *, only: str | None = None, weighted: bool = False
    ) -> RelationRows:
        """[N_dst, in] aggregate of neighbours by edge type, the part that does not depend on the parameters."""
        return view.aggregate_relations(x, reduce=self.aggr, into=only, weighted=weighted and self.aggr != "max")

    def _combine(self, view: GraphView, x: Tensor, *, weighted: bool) -> Tensor | None:
        """Aggregate per basis instead of per relation if that is cheaper; None if it is not.

        Σ_r mean_r(x) Θ_r = Σ_b (Σ_r comp_rb mean_r(x)) V_b, without rows for all pairs of nodes and relations.
        """
        if self.comp is None or self.num_relations <= 2 * len(self.weight):
            return None
        weight_index = self._weight_index(list(view.edge_types))
        indices = torch.tensor([weight_index[kind] for kind in view.edge_types])
        out = self._root_term(view, x)
        for basis, matrix in enumerate(self.weight):
            combined = view.combine_relations(x, self.comp[indices, basis], reduce=self.aggr, weighted=weighted)
            out = _add_product(out, combined, matrix)
        return out

    def _root_term(self, view: GraphView, x: Tensor) -> Tensor:
        rows = first_rows(x, view.num_dst)
        if self.root is None:
            out = rows.new_zeros(rows.shape[0], self.out_channels)
            return out if self.bias is None else out + self.bias
        return rows @ self.root if self.bias is None else torch.addmm(self.bias, rows, self.root)

    def _weight_index(self, edge_types: list[EdgeType]) -> Mapping[EdgeType, int]:
        if self.relations is None:
            if len(edge_types) != self.num_relations:
                raise ConfigError(
                    f"this layer was built for {self.num_relations} edge types, the graph has {len(edge_types)}"
                )
            return {kind: i for i, kind in enumerate(edge_types)}
        unknown = [str(kind) for kind in edge_types if kind not in self.relations]
        if unknown:
            raise ConfigError(f"the model was built without the edge types {', '.join(unknown)}")
        return self.relations


def _add_product(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cpu") or out.dtype != x.dtype:
        return out + x @ weight
    return out.addmm_(x, weight)
