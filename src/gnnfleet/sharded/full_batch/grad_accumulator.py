"""Gradients of a rank's own rows, added up as others send them home."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnfleet.comm.halo_exchange import ExchangePlan, ReturnPath
from gnnfleet.ops.aggregate import accumulate_dtype, sum_rows
from gnnfleet.ops.csr import CSR


class GradAccumulator:
    """What ``RingExchange.run`` needs to bring gradients home; ``totals`` are [n, F] each when it has returned.

    ``forms`` says for each the routes its rows took, and a tensor [·, F] of the width and dtype that travels.
    """

    def __init__(self, rank: int, forms: Sequence[tuple[ExchangePlan, Tensor]]) -> None:
        self._rank = rank
        self.returns = [ReturnPath(routes, int(like.shape[1]), like.dtype) for routes, like in forms]
        self.totals: list[Tensor] = []

    def add(self, q: int, rows: list[Tensor]) -> None:
        """The rank's own share comes first, with all rows, and becomes the total."""
        if q == self._rank:
            assert not self.totals
            self.totals = [part.to(accumulate_dtype(part.dtype)) for part in rows]
            return
        for total, way, part in zip(self.totals, self.returns, rows, strict=True):
            add_rows(total, way.plan.send_rows[q], part)


def add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """``total[rows] += values``; no row twice."""
    count = len(rows)
    one_each = CSR(torch.arange(count + 1), torch.arange(count, dtype=torch.int32), count)
    sum_rows(one_each, values, rows=rows.to(torch.int32).contiguous(), out=total)
