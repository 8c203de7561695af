"""Gradients of local rows, summed as other ranks return them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnfleet.comm.halo_exchange import ExchangePlan, FetchedRows, OnRows, ReturnPath, RowExchange, RowTable
from gnnfleet.ops.aggregate import accumulate_dtype, sum_rows
from gnnfleet.ops.csr import CSR


def exchange_grads(
    ring: RowExchange,
    like: Sequence[tuple[ExchangePlan, Tensor]],
    tables: Sequence[RowTable],
    on_rows: OnRows,
    *,
    fetched: FetchedRows | None = None,
    op: str,
) -> list[Tensor]:
    """Run an exchange in which ``on_rows`` returns gradients; their sums for local rows, [n, F] each.

    ``like`` has, for each sum, the plan its rows were sent by and a tensor [·, F] of their width and dtype.
    """
    returns = [ReturnPath(plan, int(tensor.shape[1]), tensor.dtype) for plan, tensor in like]
    totals: list[Tensor] = []

    def on_returns(q: int, grads: list[Tensor]) -> None:
        if q == ring.local_block:  # comes first, with all rows
            totals.extend(grad.to(accumulate_dtype(grad.dtype)) for grad in grads)
            return
        for total, path, grad in zip(totals, returns, grads, strict=True):
            add_rows(total, path.plan.send_rows[q], grad)

    ring.run(tables, on_rows, returns=returns, on_returns=on_returns, fetched=fetched, op=op)
    return totals


def add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """Compute ``total[rows] += values``; rows are distinct."""
    count = len(rows)
    identity = CSR(torch.arange(count + 1), torch.arange(count, dtype=torch.int32), count)
    sum_rows(identity, values, rows=rows.to(torch.int32).contiguous(), out=total)
