"""GCN (https://arxiv.org/abs/1609.02907), and GCNII (https://arxiv.org/abs/2007.02133) with the same normalisation.

Degrees are those of the whole graph, so an edge has the same weight on a block or a subgraph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.nn.linear import Conv, GlorotLinear, glorot_, should_transform_first
from gnnfleet.ops.aggregate import accumulate_dtype
from gnnfleet.ops.linear import bias_relu, multi_linear, sum_linear


def loop_weights(view: GraphView, weight: Tensor | None, *, fill: float, dtype: torch.dtype) -> float | Tensor:
    """[N_src, 1] weights of self-loops, as PyG adds remaining ones: the last of the store, or ``fill`` without one.

    ``fill`` itself if there are no weights or no self-loops.
    """
    if weight is None or not fill:
        return fill
    weights = view.loop_weight(weight).to(dtype)[:, None]
    is_added = weights.isnan()
    return fill if is_added.all() else torch.where(is_added, fill, weights)


def inverse_sqrt_degree(view: GraphView, weight: Tensor | None, *, loop: float | Tensor, dtype: torch.dtype) -> Tensor:
    """[N_src, 1] d^(−1/2), d = ``loop`` + the sum of in-edge weights; 0 where d is 0.

    With the store's weights, d is the degree in the whole graph. Other weights, for example learnt ones, are summed
    over the edges of the view, differentiably; this needs all nodes as destinations.
    """
    if weight is None or (weight is view.weight and not weight.requires_grad):
        degree = view.graph_degree(weighted=weight is not None).to(dtype)[:, None] + loop
    elif view.num_dst != view.num_src:
        raise ConfigError("weights other than the store's need all nodes as destinations, found a block")
    else:
        ones = torch.ones(view.num_src, 1, dtype=dtype)
        has_loops = isinstance(loop, Tensor) or loop > 0
        degree = view.aggregate(ones, weight=weight, self_loops=has_loops) + (loop - 1 if has_loops else 0)
    return torch.where(degree > 0, degree, torch.inf).rsqrt()


class GCNConv(Conv):
    """x'_i = Θ Σ_{j ∈ N(i) ∪ {i}} e_ji / √(d_j d_i) x_j + b, with d_i = 1 + Σ_j e_ji.

    Parameters ``lin.weight`` [out, in] and ``bias``, as PyG's. A self-loop of the store replaces the added one, with
    its weight; of parallel ones the last counts. With ``add_self_loops=False`` it is an edge, but not part of the
    degree. ``residual`` adds Θ_r x_i (``res.weight``),
    which PyG's GCNConv does not have.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        improved: bool = False,
        add_self_loops: bool | None = None,
        normalize: bool = True,
        bias: bool = True,
        *,
        residual: bool = False,
    ) -> None:
        super().__init__()
        if add_self_loops and not normalize:
            raise ConfigError("GCNConv adds self-loops only when it normalises: set normalize=True")
        self.in_channels, self.out_channels, self.normalize = in_channels, out_channels, normalize
        self.add_self_loops = normalize if add_self_loops is None else add_self_loops
        self.loop = (2.0 if improved else 1.0) if self.add_self_loops else 0.0
        self.lin = GlorotLinear(in_channels, out_channels, bias=False)
        self.res = GlorotLinear(in_channels, out_channels, bias=False) if residual else None
        self.bias = torch.nn.Parameter(torch.zeros(out_channels)) if bias else None

    def aggregate(self, view: GraphView, x: Tensor, *, weight: Tensor | None = None, fresh: bool = False) -> Tensor:
        """[N_dst, in] normalised sum of input rows, the part of the layer that does not depend on its parameters.

        ``fresh`` rows may be scaled in place.
        """
        if not self.normalize:
            return view.aggregate(x, weight=weight)
        return normalized_sum(view, x, weight, loop=self.loop, fresh=fresh)

    def column_partial(self, view: GraphView, x: Tensor, columns: slice, *, weight: Tensor | None = None) -> Tensor:
        """[N_dst, out] product of some input columns; ``precomputed_product`` is the sum over all columns."""
        terms = [(self.aggregate(view, x, weight=weight), self.lin.weight[:, columns])]
        if self.res is not None:
            terms.append((x, self.res.weight[:, columns]))
        return sum_linear(terms, rows=view.num_dst)

    def forward(
        self,
        view: GraphView,
        x: Tensor,
        *,
        weight: Tensor | None = None,
        aggregated: Tensor | None = None,
        precomputed_product: Tensor | None = None,
        relu: bool = False,
    ) -> Tensor:
        """[N_src, in] → [N_dst, out]; ``aggregated`` is ``aggregate`` of the same x, ``relu`` is fused."""
        if precomputed_product is not None:
            return bias_relu(precomputed_product, self.bias, relu=relu, fresh=True)
        residual = [] if self.res is None else [self.res.weight]
        if aggregated is None and should_transform_first(view, self.in_channels, self.out_channels):
            weights = [self.lin.weight, *residual]
            product, *root = multi_linear(x, weights, rows=[x.shape[0], view.num_dst][: len(weights)])
            out = self.aggregate(view, product, weight=weight, fresh=True)
            for rows in root:
                out = out.add_(rows)
            return bias_relu(out, self.bias, relu=relu, fresh=True)
        if aggregated is None:
            aggregated = self.aggregate(view, x, weight=weight)
        terms = [(aggregated, self.lin.weight), *((x, matrix) for matrix in residual)]
        return sum_linear(terms, self.bias, relu=relu, rows=view.num_dst)


def normalized_sum(view: GraphView, x: Tensor, weight: Tensor | None, *, loop: float, fresh: bool) -> Tensor:
    """``scale_i (Σ_j e_ji scale_j x_j + loop_i scale_i x_i)``; ``loop`` is the weight of self-loops that are added."""
    dtype = accumulate_dtype(x.dtype)
    loops = loop_weights(view, weight, fill=loop, dtype=dtype)
    scale = inverse_sqrt_degree(view, weight, loop=loops, dtype=dtype)
    # Rows are scaled on both sides instead of weighting edges: a rank has the degrees of its own rows only.
    in_place = fresh and not scale.requires_grad
    x = x.mul_(scale) if in_place else x * scale
    out = view.aggregate(x, weight=weight, self_loops=loop > 0)
    if isinstance(loops, Tensor):
        out = out + first_rows(x, view.num_dst) * first_rows(loops - 1, view.num_dst)
    elif loop > 1:
        out = out.add_(first_rows(x, view.num_dst), alpha=loop - 1)
    return out * first_rows(scale, view.num_dst) if scale.requires_grad else out.mul_(first_rows(scale, view.num_dst))


class GCN2Conv(torch.nn.Module):
    """x' = ((1 − α) P x + α x_0) ((1 − β) I + β Θ), P the normalised adjacency of GCN, β = log(θ / layer + 1).

    Parameters ``weight1`` and, without ``shared_weights``, ``weight2`` for the x_0 term; as PyG's.
    """

    def __init__(
        self,
        channels: int,
        alpha: float,
        theta: float | None = None,
        layer: int | None = None,
        shared_weights: bool = True,
        add_self_loops: bool = True,
        normalize: bool = True,
    ) -> None:
        super().__init__()
        if (theta is None) != (layer is None):
            raise ConfigError("GCN2Conv takes theta and layer together, or neither")
        self.channels, self.alpha, self.normalize = channels, alpha, normalize
        self.beta = 1.0 if theta is None or layer is None else math.log(theta / layer + 1)
        self.loop = 1.0 if add_self_loops else 0.0
        self.weight1 = torch.nn.Parameter(torch.empty(channels, channels))
        self.weight2 = None if shared_weights else torch.nn.Parameter(torch.empty(channels, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        glorot_(self.weight1)
        if self.weight2 is not None:
            glorot_(self.weight2)

    def forward(self, view: GraphView, x: Tensor, x_0: Tensor, *, weight: Tensor | None = None) -> Tensor:
        """[N_src, F], x_0 at least [N_dst, F] → [N_dst, F]."""
        if self.normalize:
            propagated = normalized_sum(view, x, weight, loop=self.loop, fresh=False)
        else:
            propagated = view.aggregate(x, weight=weight)
        initial = first_rows(x_0, view.num_dst)
        propagated = propagated.mul_(1 - self.alpha)
        if self.weight2 is None:
            mixed = propagated.add_(initial, alpha=self.alpha)
            return torch.addmm(mixed, mixed, self.weight1, beta=1 - self.beta, alpha=self.beta)
        initial = self.alpha * initial
        out = torch.addmm(propagated, propagated, self.weight1, beta=1 - self.beta, alpha=self.beta)
        return out + torch.addmm(initial, initial, self.weight2, beta=1 - self.beta, alpha=self.beta)
