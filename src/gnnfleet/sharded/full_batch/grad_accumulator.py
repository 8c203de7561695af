"""Gradients of a rank's own rows, added up as others send them home."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnfleet.comm.halo_exchange import Home, Routes
from gnnfleet.ops.aggregate import sum_rows, wide
from gnnfleet.ops.csr import Compressed


class Homecoming:
    """What ``Ring.visit`` needs to bring gradients home; ``totals`` are [n, F] each when it has returned.

    ``forms`` says for each the routes its rows took, and a tensor [·, F] of the width and dtype that travels.
    """

    def __init__(self, rank: int, forms: Sequence[tuple[Routes, Tensor]]) -> None:
        self._rank = rank
        self.ways = [Home(routes, int(like.shape[1]), like.dtype) for routes, like in forms]
        self.totals: list[Tensor] = []

    def take(self, q: int, rows: list[Tensor]) -> None:
        """The rank's own share comes first, with all rows, and becomes the total."""
        if q == self._rank:
            assert not self.totals
            self.totals = [part.to(wide(part.dtype)) for part in rows]
            return
        for total, way, part in zip(self.totals, self.ways, rows, strict=True):
            add_rows(total, way.routes.give[q], part)


def add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """``total[rows] += values``; no row twice."""
    count = len(rows)
    one_each = Compressed(torch.arange(count + 1), torch.arange(count, dtype=torch.int32), count)
    sum_rows(one_each, values, rows=rows.to(torch.int32).contiguous(), out=total)
