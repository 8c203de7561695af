"""How a node's mail changes its memory.

n rows, D columns of a memory, F of an event's features, T of a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnfleet.nn.temporal.time_encoding import TimeEncoding
from gnnfleet.ops.gru import gru


class MemoryCell(torch.nn.Module):
    """A GRU on [mail, features of its event, Phi(time between the last two mails)]; weights as torch.nn.GRUCell's."""

    def __init__(self, width: int, edge_width: int, clock: TimeEncoding) -> None:
        super().__init__()
        self.clock, time_width = clock, len(clock.bias)
        bound = 1 / math.sqrt(width)
        self.weight_ih = _uniform(bound, 3 * width, 2 * width + edge_width + time_width)
        self.weight_hh = _uniform(bound, 3 * width, width)
        self.bias_ih = _uniform(bound, 3 * width)
        self.bias_hh = _uniform(bound, 3 * width)

    def forward(self, mail: Tensor, edge: Tensor | None, since: Tensor, memory: Tensor) -> Tensor:
        """[n, D] from mails [n, 2 D], features [n, F], times [n], memories [n, D]."""
        # What has no gradient is one product, the time another: no gradient of mails is made.
        known = mail if edge is None else torch.cat([mail, edge], 1)
        weights = self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh
        return gru([known, self.clock(since)], memory, weights)


def _uniform(bound: float, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))
