"""Graph convolution with symmetric normalisation, and its deep variant with a carried first residual."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gnnfleet.graph.view import GraphView
from gnnfleet.nn.linear import Linear, glorot_


def normalised(view: GraphView, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """D^−½ (A + I) D^−½ x: self-loops are terms of the verb, degrees those of the whole graph."""
    degree = (view.graph_degree(weighted=weight is not None) + 1).to(_wide(x))
    scale = degree.clamp(min=1e-12).rsqrt()
    out = view.aggregate(x * scale[:, None].to(x.dtype), weight=weight, loops=True)
    return out * scale[: view.num_dst, None].to(out.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class GCNConv(nn.Module):
    """x' = D^−½ (A + I) D^−½ x W + b (Kipf and Welling, 2017). Parameters as PyG's: ``lin.weight``, ``bias``."""

    def __init__(self, in_channels: int, out_channels: int, *, bias: bool = True) -> None:
        super().__init__()
        self.lin = Linear(in_channels, out_channels, bias=False, glorot=True)
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    def precompute(self, view: GraphView, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """What does not depend on parameters: the aggregate of x."""
        return normalised(view, x, weight)

    def forward(
        self, view: GraphView, x: Tensor, *, weight: Tensor | None = None, gathered: Tensor | None = None
    ) -> Tensor:
        out: Tensor
        if gathered is not None:
            out = self.lin(gathered)
        elif self.lin.out_channels < self.lin.in_channels:  # the narrower side is aggregated
            out = normalised(view, self.lin(x), weight)
        else:
            out = self.lin(normalised(view, x, weight))
        return out if self.bias is None else out.add_(self.bias)


class GCN2Conv(nn.Module):
    """x' = ((1 − α) Â x + α x₀) ((1 − β) I + β W), β = ln(θ / layer + 1) (Chen et al., 2020)."""

    def __init__(
        self,
        channels: int,
        alpha: float,
        theta: float | None = None,
        layer: int | None = None,
        shared_weights: bool = True,
    ) -> None:
        super().__init__()
        self.channels, self.alpha = channels, alpha
        self.beta = 1.0 if theta is None or layer is None else math.log(theta / layer + 1)
        self.weight1 = nn.Parameter(glorot_(torch.empty(channels, channels)))
        self.weight2 = None if shared_weights else nn.Parameter(glorot_(torch.empty(channels, channels)))

    def forward(self, view: GraphView, x: Tensor, x_0: Tensor, *, weight: Tensor | None = None) -> Tensor:
        x = normalised(view, x, weight) * (1 - self.alpha)
        x_0 = x_0[: view.num_dst] * self.alpha
        if self.weight2 is None:
            x = x + x_0
            return torch.addmm(x, x, self.weight1, beta=1 - self.beta, alpha=self.beta)
        out = torch.addmm(x, x, self.weight1, beta=1 - self.beta, alpha=self.beta)
        return out + torch.addmm(x_0, x_0, self.weight2, beta=1 - self.beta, alpha=self.beta)
