"""GraphSAGE (Hamilton, Ying and Leskovec, https://arxiv.org/abs/1706.02216): mean, max and pool aggregation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.nn.linear import Conv, apply_linear, edge_rows, should_transform_first
from gnnfleet.ops.aggregate import accumulate_dtype
from gnnfleet.ops.linear import bias_relu, multi_linear, sum_linear

AGGRS = ("mean", "max", "sum", "add")


class SAGEConv(Conv):
    """x'_i = W_l aggr_{j ∈ N(i)} x_j + W_r x_i; with ``project`` the x_j are first ReLU(W x_j + b) (pool).

    Parameters ``lin_l.weight``, ``lin_l.bias``, ``lin_r.weight`` and, with ``project``, ``lin.weight``, ``lin.bias``,
    as PyG's. With edge weights the mean is Σ w x / Σ |w|, the sum Σ w x; the maximum takes none. ``edge_dim`` adds
    W_e mean_j e_ji (``lin_edge.weight``), as E-GraphSAGE (https://arxiv.org/abs/2103.16329): a mean for every ``aggr``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        aggr: str = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
        edge_dim: int | None = None,
    ) -> None:
        super().__init__()
        if aggr not in AGGRS:
            raise ConfigError(f"aggr of SAGEConv must be {', '.join(AGGRS)}, found {aggr!r}")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.aggr = "sum" if aggr == "add" else aggr
        self.normalize, self.root_weight, self.project = normalize, root_weight, project
        if project:
            self.lin = torch.nn.Linear(in_channels, in_channels)
        self.lin_l = torch.nn.Linear(in_channels, out_channels, bias=bias)
        if root_weight:
            self.lin_r = torch.nn.Linear(in_channels, out_channels, bias=False)
        self.lin_edge = None if edge_dim is None else torch.nn.Linear(edge_dim, out_channels, bias=False)

    def aggregate(
        self, view: GraphView, x: Tensor, *, weight: Tensor | None = None, edge_attr: Tensor | None = None
    ) -> Tensor | None:
        """[N_dst, in] aggregate of neighbours; None if it is not all that the layer reads of them."""
        if self.project or self.lin_edge is not None:
            return None
        return view.aggregate(x, reduce=self.aggr, weight=self._edge_weight(view, weight, x))

    def column_partial(self, view: GraphView, x: Tensor, columns: slice, *, weight: Tensor | None = None) -> Tensor:
        """[N_dst, out] product of some input columns; ``precomputed_product`` is the sum over all columns."""
        assert not self.project and self.lin_edge is None, "the projection mixes columns"
        aggregated, root = self._aggregate_with_self(view, x, self._edge_weight(view, weight, x))
        terms = [(aggregated, self.lin_l.weight[:, columns])]
        if self.root_weight:
            terms.append((root, self.lin_r.weight[:, columns]))
        return sum_linear(terms, rows=view.num_dst)

    def _edge_weight(self, view: GraphView, weight: Tensor | None, x: Tensor) -> Tensor | None:
        """Weights for ``view.aggregate``."""
        if weight is None or self.aggr != "mean":
            return weight
        return view.relative_weight(weight, accumulate_dtype(x.dtype))

    def _aggregate_with_self(self, view: GraphView, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        if weight is None:
            return view.aggregate_with_self(x, reduce=self.aggr)
        return view.aggregate(x, reduce=self.aggr, weight=weight), first_rows(x, view.num_dst)

    def forward(
        self,
        view: GraphView,
        x: Tensor,
        *,
        weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
        aggregated: Tensor | None = None,
        precomputed_product: Tensor | None = None,
        relu: bool = False,
    ) -> Tensor:
        """[N_src, in] → [N_dst, out]; ``aggregated`` is ``aggregate`` of the same inputs, ``relu`` is fused."""
        is_fused = relu and not self.normalize
        if precomputed_product is not None:
            return self._normalized(
                bias_relu(precomputed_product, self.lin_l.bias, relu=is_fused, fresh=True), relu=relu
            )
        weight, terms = self._edge_weight(view, weight, x), list[tuple[Tensor, Tensor]]()
        attr = None if edge_attr is None else edge_rows(edge_attr, self.lin_edge, edge_attr.dtype)
        if attr is not None and self.lin_edge is not None:
            terms = [(view.mean_attr(attr, accumulate_dtype(x.dtype), weight), self.lin_edge.weight)]
        linear = self.aggr != "max" and not self.project
        if aggregated is None and linear and should_transform_first(view, self.in_channels, self.out_channels):
            weights = [self.lin_l.weight, self.lin_r.weight] if self.root_weight else [self.lin_l.weight]
            product, *others = multi_linear(x, weights, rows=[x.shape[0], view.num_dst][: len(weights)])
            out = view.aggregate(product, reduce=self.aggr, weight=weight)
            for rows in (*others, *(sum_linear([term]) for term in terms)):
                out = out.add_(rows)
            return self._normalized(bias_relu(out, self.lin_l.bias, relu=is_fused, fresh=True), relu=relu)
        if aggregated is None and self.root_weight and not self.project:
            aggregated, x = self._aggregate_with_self(view, x, weight)
        elif aggregated is None:
            messages = apply_linear(self.lin, x, relu=True) if self.project else x
            aggregated = view.aggregate(messages, reduce=self.aggr, weight=weight)
        root = [(x, self.lin_r.weight)] if self.root_weight else []
        terms = [(aggregated, self.lin_l.weight), *root, *terms]
        return self._normalized(sum_linear(terms, self.lin_l.bias, rows=view.num_dst, relu=is_fused), relu=relu)

    def _normalized(self, out: Tensor, *, relu: bool) -> Tensor:
        if not self.normalize:
            return out
        out = functional.normalize(out, dim=-1)
        return torch.relu_(out) if relu else out
