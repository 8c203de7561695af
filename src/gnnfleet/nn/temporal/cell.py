"""Memory update of TGN (Rossi et al., https://arxiv.org/abs/2006.10637): mail → memory.

n rows, D columns of a memory, F of an event's features, T of a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnfleet.nn.temporal.time_encoding import TimeEncoding
from gnnfleet.ops.gru import gru


class MemoryCell(torch.nn.Module):
    """s' = GRU([mail, e, Phi(time between the last two mails)], s), e the features of the mail's event.

    Weights are those of torch.nn.GRUCell.
    """

    def __init__(self, width: int, edge_width: int, time_encoding: TimeEncoding) -> None:
        super().__init__()
        self.clock, time_width = time_encoding, len(time_encoding.bias)
        bound = 1 / math.sqrt(width)
        self.weight_ih = _uniform(bound, 3 * width, 2 * width + edge_width + time_width)
        self.weight_hh = _uniform(bound, 3 * width, width)
        self.bias_ih = _uniform(bound, 3 * width)
        self.bias_hh = _uniform(bound, 3 * width)

    def forward(self, mail: Tensor, edge: Tensor | None, time_delta: Tensor, memory: Tensor) -> Tensor:
        """mails [n, 2 D], features [n, F], times [n], memories [n, D] → [n, D]."""
        # One product for inputs without gradients, another for time: gradients of mails are not computed.
        inputs = mail if edge is None else torch.cat([mail, edge], 1)
        weights = self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh
        return gru([inputs, self.clock(time_delta)], memory, weights)


def _uniform(bound: float, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))
