"""The block of DeeperGCN: normalise, activate, drop, convolve with a softmax over messages, add back what came in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gnnfleet.graph.view import GraphView
from gnnfleet.nn.linear import Linear


def _message(
    src: Mapping[str, Tensor], dst: Mapping[str, Tensor], edge: Mapping[str, Tensor], t: Tensor
) -> tuple[Tensor, Tensor]:
    """Each channel is a head of its own: positive messages, weighted by the softmax of themselves."""
    value = torch.relu(src["x"]) + 1e-7
    return value * t, value[..., None]


class GENConv(nn.Module):
    """x' = MLP(x_i + Σ_j softmax_j(t m_j) m_j), m_j = ReLU(x_j) + ε (Li et al., 2020). ``mlp``, ``t``."""

    def __init__(self, in_channels: int, out_channels: int, t: float = 1.0, learn_t: bool = False) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.full((1,), t), requires_grad=learn_t)
        self.mlp = nn.Sequential(
            Linear(in_channels, 2 * in_channels),
            nn.LayerNorm(2 * in_channels),
            nn.ReLU(),
            Linear(2 * in_channels, out_channels),
        )

    def forward(self, view: GraphView, x: Tensor) -> Tensor:
        gathered = view.propagate(_message, src={"x": x}, params=(self.t,), reduce="softmax")[..., 0]
        out: Tensor = self.mlp(gathered + x[: view.num_dst])
        return out


class ResPlus(nn.Module):
    """x' = x + conv(dropout(ReLU(norm(x)))) (DeepGCNLayer, block 'res+'). ``conv``, ``norm``."""

    def __init__(self, channels: int, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.conv = GENConv(channels, channels, learn_t=True)
        self.dropout = dropout

    def forward(self, view: GraphView, x: Tensor) -> Tensor:
        h = view.dropout(torch.relu(self.norm(x)), self.dropout)
        out: Tensor = self.conv(view, h)
        return out + x[: view.num_dst]
