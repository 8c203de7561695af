"""Time as a vector: cosines of many frequencies."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.ops.time_features import time_features


class TimeEncoding(torch.nn.Module):
    """cos(w t + b) [n, T] of time differences [n]; w from 1 / ``shortest`` down to 1 / ``longest``, evenly in the
    logarithm, b zeros.

    They stay as they are unless ``learnt``: an optimizer that moves all weights by as much, as Adam does, turns slow
    frequencies into others in a step, and with them what every memory means.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, width: int, shortest: float = 1.0, longest: float = 1e9, *, learnt: bool = False) -> None:
        super().__init__()
        ends = torch.tensor([shortest, max(longest, shortest)], dtype=torch.float64)
        periods = torch.linspace(0, 1, width, dtype=torch.float64) * (ends[1] / ends[0]).log()
        made = {"weight": (-periods).exp().div_(ends[0]).float(), "bias": torch.zeros(width)}
        for name, value in made.items():
            if learnt:
                self.register_parameter(name, torch.nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    def forward(self, since: Tensor) -> Tensor:
        return time_features(since, self.weight, self.bias)

    def zero(self) -> Tensor:
        """[T]: no time at all."""
        return torch.cos(self.bias)
