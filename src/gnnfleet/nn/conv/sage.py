"""GraphSAGE (Hamilton, Ying and Leskovec, https://arxiv.org/abs/1706.02216): mean, max and pool aggregation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.linear import apply_linear, should_transform_first
from gnnfleet.ops.linear import bias_relu, multi_linear, sum_linear

AGGRS = ("mean", "max", "sum", "add")


class SAGEConv(torch.nn.Module):
    """x'_i = W_l aggr_{j ∈ N(i)} x_j + W_r x_i; with ``project`` the x_j are first ReLU(W x_j + b) (pool).

    Parameters ``lin_l.weight``, ``lin_l.bias``, ``lin_r.weight`` and, with ``project``, ``lin.weight``, ``lin.bias``,
    as PyG's.
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

    def reset_parameters(self) -> None:
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]

    def aggregate(self, view: GraphView, x: Tensor, *, weight: Tensor | None = None) -> Tensor | None:
        """[N_dst, in] aggregate of neighbours; None if it depends on the parameters of the layer."""
        return None if self.project else view.aggregate(x, reduce=self.aggr)

    def column_partial(self, view: GraphView, x: Tensor, columns: slice, *, weight: Tensor | None = None) -> Tensor:
        """[N_dst, out] product of some input columns; ``precomputed_product`` is the sum over all columns."""
        assert not self.project, "the projection mixes columns"
        aggregated, root = view.aggregate_with_self(x, reduce=self.aggr)
        terms = [(aggregated, self.lin_l.weight[:, columns])]
        if self.root_weight:
            terms.append((root, self.lin_r.weight[:, columns]))
        return sum_linear(terms, rows=view.num_dst)

    def forward(
        self,
        view: GraphView,
        x: Tensor,
        *,
        aggregated: Tensor | None = None,
        precomputed_product: Tensor | None = None,
        relu: bool = False,
    ) -> Tensor:
        """[N_src, in] → [N_dst, out]; ``aggregated`` is ``aggregate`` of the same x, ``relu`` is fused."""
        if precomputed_product is not None:
            out = bias_relu(precomputed_product, self.lin_l.bias, relu=relu and not self.normalize, fresh=True)
            return self._normalized(out, relu=relu)
        linear = self.aggr != "max" and not self.project
        if aggregated is None and linear and should_transform_first(view, self.in_channels, self.out_channels):
            out = self._transform_first(view, x, relu=relu and not self.normalize)
            return self._normalized(out, relu=relu)
        if aggregated is None and self.root_weight and not self.project:
            aggregated, x = view.aggregate_with_self(x, reduce=self.aggr)
        elif aggregated is None:
            messages = apply_linear(self.lin, x, relu=True) if self.project else x
            aggregated = view.aggregate(messages, reduce=self.aggr)
        terms = [(aggregated, self.lin_l.weight)]
        if self.root_weight:
            terms.append((x, self.lin_r.weight))
        out = sum_linear(terms, self.lin_l.bias, rows=view.num_dst, relu=relu and not self.normalize)
        return self._normalized(out, relu=relu)

    def _normalized(self, out: Tensor, *, relu: bool) -> Tensor:
        if not self.normalize:
            return out
        out = functional.normalize(out, dim=-1)
        return torch.relu_(out) if relu else out

    def _transform_first(self, view: GraphView, x: Tensor, *, relu: bool) -> Tensor:
        """Multiply first, then aggregate the narrower rows."""
        weights = [self.lin_l.weight, self.lin_r.weight] if self.root_weight else [self.lin_l.weight]
        product, *root = multi_linear(x, weights, rows=[x.shape[0], view.num_dst][: len(weights)])
        out = view.aggregate(product, reduce=self.aggr)
        for rows in root:
            out = out.add_(rows)
        return bias_relu(out, self.lin_l.bias, relu=relu, fresh=True)
