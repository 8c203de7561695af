"""Dense products with PyG's initialisations and parameter names."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def glorot_(tensor: Tensor) -> Tensor:
    """Uniform within ±√(6 / (rows + columns)) of the last two dimensions."""
    bound = math.sqrt(6.0 / (tensor.size(-2) + tensor.size(-1)))
    with torch.no_grad():
        return tensor.uniform_(-bound, bound)


class Linear(nn.Module):
    """``x @ weight.T + bias``; glorot weights and zero bias, or torch's own uniform initialisation."""

    bias: nn.Parameter | None

    def __init__(self, in_channels: int, out_channels: int, *, bias: bool = True, glorot: bool = False) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.glorot = in_channels, out_channels, glorot
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.in_channels) if self.in_channels else 0.0
        if self.glorot:
            glorot_(self.weight)
        else:
            nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias) if self.glorot else nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Mlp(nn.Module):
    """Two products with a ReLU between, under PyG's keys ``lins.0``, ``lins.1``."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lins = nn.ModuleList([Linear(in_channels, out_channels), Linear(out_channels, out_channels)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lins[1](torch.relu_(self.lins[0](x)))
        return out
