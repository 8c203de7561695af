"""Remote source rows for code that gathers rows by index: all of them at once, behind the local ones.

The verbs of a view keep one group of remote rows in memory; this keeps all that the local edges read. N local rows, M
rows with the remote ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnfleet.comm.halo_exchange import ExchangePlan, RowExchange, RowTable
from gnnfleet.graph.views.edge_list import EdgeList
from gnnfleet.ops.csr import inverse_permutation
from gnnfleet.sharded.full_batch.grad_exchange import exchange_grads
from gnnfleet.sharded.full_batch.partition_blocks import RelationBlocks, edge_rows


@dataclass(frozen=True, eq=False)
class SourceRows:
    """Positions of remote rows behind the local ones: those of partition q are ``spans[q]``."""

    new_exchange: Callable[[], RowExchange]  # an exchange serves one forward and its backward
    plan: ExchangePlan
    local_block: int
    spans: tuple[slice, ...]
    num_fetched: int

    @classmethod
    def of(
        cls, new_exchange: Callable[[], RowExchange], plan: ExchangePlan, local_block: int, num_local: int
    ) -> SourceRows:
        counts = [0 if q == local_block else count for q, count in enumerate(plan.recv_counts)]
        starts = [num_local, *accumulate(counts, initial=num_local)][1:]
        spans = [slice(start, start + count) for start, count in zip(starts, counts, strict=False)]
        spans[local_block] = slice(0, num_local)
        return cls(new_exchange, plan, local_block, tuple(spans), num_local + sum(counts))

    def fetch(self, x: Tensor) -> Tensor:
        return _Transfer.apply(self, x, True)  # type: ignore[no-untyped-call, no-any-return]

    def send_back(self, x: Tensor) -> Tensor:
        return _Transfer.apply(self, x, False)  # type: ignore[no-untyped-call, no-any-return]

    def _fetched(self, exchange: RowExchange, x: Tensor) -> Tensor:
        out = x.new_empty(self.num_fetched, x.shape[1])

        def on_rows(q: int, rows: list[Tensor]) -> None:
            out[self.spans[q]] = rows[0]

        exchange.run([RowTable(self.plan, x.detach().contiguous())], on_rows, op="rows of sources")
        return out

    def _returned(self, exchange: RowExchange, x: Tensor) -> Tensor:
        def on_rows(q: int, _: list[Tensor]) -> list[Tensor]:
            rows = x.detach()[self.spans[q]]
            # Remote gradients are added to the local rows in place.
            return [rows.clone() if q == self.local_block else rows.contiguous()]

        (total,) = exchange_grads(exchange, [(self.plan, x)], [], on_rows, op="gradients of sources")
        return total.to(x.dtype)


class _Transfer(torch.autograd.Function):
    """Fetches rows or sends them back; each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, rows: SourceRows, x: Tensor, is_fetch: bool) -> Tensor:
        transfer, ctx.transpose = (rows._fetched, rows._returned)[:: 1 if is_fetch else -1]
        ctx.exchange = rows.new_exchange()
        return transfer(ctx.exchange, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.transpose(ctx.exchange, grad), None


def make_edge_list(
    edges: RelationBlocks, source_ids: Tensor, new_exchange: Callable[[], RowExchange], plan: ExchangePlan
) -> EdgeList:
    """List the in-edges of a partition; all but the exchange is cached."""
    rows = SourceRows.of(new_exchange, plan, edges.part, len(source_ids))
    if edges.edge_list is None:
        edges.edge_list = _sorted_edges(edges, source_ids, rows)
    return replace(edges.edge_list, fetch=rows.fetch, send_back=rows.send_back)


def _sorted_edges(edges: RelationBlocks, source_ids: Tensor, rows: SourceRows) -> EdgeList:
    dst = torch.cat([edge_rows(block) for block in edges.in_blocks])
    src = torch.cat([block.structure.col.long() + rows.spans[q].start for q, block in enumerate(edges.in_blocks)])
    order = torch.argsort(edges.edge_ids)
    order = order[torch.argsort(dst[order], stable=True)]
    return EdgeList(
        index=torch.stack([src[order], dst[order]]),
        edge_ids=edges.edge_ids[order],
        source_ids=source_ids,
        num_dst=edges.num_rows,
        num_fetched=rows.num_fetched,
        weight=None if edges.weight is None else edges.weight[order],
        attr=None if edges.attr is None else edges.attr[order],
        edge_type=edges.kind,
        view_order=inverse_permutation(order),
    )
