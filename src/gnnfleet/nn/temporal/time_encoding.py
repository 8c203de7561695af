"""Time encoding: cosines of many frequencies (Xu et al., https://arxiv.org/abs/2002.07962)."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.ops.gru import time_features


class TimeEncoding(torch.nn.Module):
    """Phi(t) = cos(w t + b), [n] → [n, T]; w from 1 / ``shortest`` to 1 / ``longest``, log-spaced, b = 0.

    Frequencies are constant unless ``learnt``: Adam moves all weights by similar amounts, so a step changes slow
    frequencies completely, and with them the meaning of all memories.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, width: int, shortest: float = 1.0, longest: float = 1e9, *, learnt: bool = False) -> None:
        super().__init__()
        ends = torch.tensor([shortest, max(longest, shortest)], dtype=torch.float64)
        periods = torch.linspace(0, 1, width, dtype=torch.float64) * (ends[1] / ends[0]).log()
        tensors = {"weight": (-periods).exp().div_(ends[0]).float(), "bias": torch.zeros(width)}
        for name, tensor in tensors.items():
            if learnt:
                self.register_parameter(name, torch.nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)

    def forward(self, time_delta: Tensor) -> Tensor:
        return time_features(time_delta, self.weight, self.bias)

    def zero(self) -> Tensor:
        """[T] encoding of time 0."""
        return torch.cos(self.bias)
