"""How a node's mail changes its memory.

n rows, D columns of a memory, F of an event's features, T of a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnfleet.nn.linear import widen
from gnnfleet.nn.temporal.clock import TimeEncoding
from gnnfleet.ops.dense import mix


class MemoryCell(torch.nn.Module):
    """A GRU on [mail, features of its event, Phi(time between the last two mails)]; weights as torch.nn.GRUCell's."""

    def __init__(self, width: int, edge_width: int, time_width: int) -> None:
        super().__init__()
        self.widths = [2 * width + edge_width, time_width]
        self.clock = TimeEncoding(time_width)
        bound = 1 / math.sqrt(width)
        self.weight_ih = _uniform(bound, 3 * width, sum(self.widths))
        self.weight_hh = _uniform(bound, 3 * width, width)
        self.bias_ih = _uniform(bound, 3 * width)
        self.bias_hh = _uniform(bound, 3 * width)

    def forward(self, mail: Tensor, edge: Tensor | None, since: Tensor, memory: Tensor) -> Tensor:
        """[n, D] from mails [n, 2 D], features [n, F], times [n], memories [n, D]."""
        # What has no gradient is one product, the time another: no gradient of mails is made.
        known = mail if edge is None else torch.cat([mail, edge], 1)
        by_known, by_time = self.weight_ih.split_with_sizes(self.widths, 1)
        terms = [(known, by_known), (self.clock(since), by_time)]
        given = widen(mix(terms, self.bias_ih))
        kept = widen(mix([(memory, self.weight_hh)], self.bias_hh))
        reset, keep, new = given.chunk(3, 1)
        reset_kept, keep_kept, new_kept = kept.chunk(3, 1)
        candidate = torch.tanh(new + torch.sigmoid(reset + reset_kept) * new_kept)
        return torch.lerp(candidate, memory, torch.sigmoid(keep + keep_kept))


def _uniform(bound: float, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))
