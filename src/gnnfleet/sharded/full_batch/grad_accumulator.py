"""Gradients of local rows, summed as other ranks return them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnfleet.comm.halo_exchange import ExchangePlan, ReturnPath
from gnnfleet.ops.aggregate import accumulate_dtype, sum_rows
from gnnfleet.ops.csr import CSR


class GradAccumulator:
    """The return arguments of ``RingExchange.run``; afterwards ``totals`` are the sums, [n, F] each.

    ``tables`` has, for each sum, the plan its rows were sent by and a tensor [·, F] of their width and dtype.
    """

    def __init__(self, rank: int, tables: Sequence[tuple[ExchangePlan, Tensor]]) -> None:
        self._rank = rank
        self.returns = [ReturnPath(plan, int(like.shape[1]), like.dtype) for plan, like in tables]
        self.totals: list[Tensor] = []

    def add(self, q: int, grads: list[Tensor]) -> None:
        """The local gradients come first, with all rows, and become the totals."""
        if q == self._rank:
            assert not self.totals
            self.totals = [grad.to(accumulate_dtype(grad.dtype)) for grad in grads]
            return
        for total, path, grad in zip(self.totals, self.returns, grads, strict=True):
            add_rows(total, path.plan.send_rows[q], grad)


def add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """Compute ``total[rows] += values``; rows are distinct."""
    count = len(rows)
    identity = CSR(torch.arange(count + 1), torch.arange(count, dtype=torch.int32), count)
    sum_rows(identity, values, rows=rows.to(torch.int32).contiguous(), out=total)
