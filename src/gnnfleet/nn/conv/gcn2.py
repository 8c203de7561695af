"""GCNII (Chen, Wei, Huang, Ding and Li, https://arxiv.org/abs/2007.02133)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.nn.conv.gcn import normalized_sum
from gnnfleet.nn.linear import glorot_


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
