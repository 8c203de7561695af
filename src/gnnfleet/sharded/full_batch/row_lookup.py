"""Distributed row lookup: store ids go to their owners, rows are returned, gradients go back to the owners.

Owners are read from the partition's assignment, which stays on disk. A rank requests a row once, however often it
needs it. U distinct ids requested by this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnfleet.comm.collectives import sum_over_ranks
from gnnfleet.comm.halo_exchange import ExchangePlan, RingExchange, RowTable
from gnnfleet.errors import InputError
from gnnfleet.graph.partition.partitioned_graph import assignment_of
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.graph.views.row_index import RowIndex, take_rows
from gnnfleet.ops.gather import gather
from gnnfleet.sharded.full_batch.grad_exchange import exchange_grads
from gnnfleet.sharded.full_batch.partition_blocks import PartitionBlocks


class OwnershipMap:
    """Collective. The partition of every node, by node type and store id."""

    def __init__(self, shard: Shard, blocks: PartitionBlocks, ring: RingExchange) -> None:
        self._shard = shard
        local_counts = torch.tensor([rows.num_dst for rows in blocks.nodes.values()])
        counts = sum_over_ranks(ring.world, local_counts).tolist()
        self.counts: Mapping[str, int] = dict(zip(blocks.nodes, counts, strict=True))

    @cached_property
    def _assignment(self) -> Tensor:
        return assignment_of(self._shard)

    def owner_of(self, kind: str, ids: Tensor) -> Tensor:
        """[n] the partition of each node; raises InputError for ids that do not exist."""
        if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise InputError(f"store ids must be integers of shape [n], found {ids.dtype} of shape {list(ids.shape)}")
        count = self.counts[kind]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            bad_id = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise InputError(f"node {bad_id} is not in this graph: it has {count} nodes of type {kind}")
        kinds = list(self.counts)
        start = sum(self.counts[before] for before in kinds[: kinds.index(kind)])
        return gather(self._assignment[:, None], ids + start)[:, 0] if len(ids) else ids


@dataclass(frozen=True, eq=False)
class _LookupPlan:
    """Distinct ids by owner, and the exchange of their rows."""

    ring: RingExchange
    positions: tuple[Tensor, ...]  # P lists of positions among the distinct ids
    local_rows: Tensor  # [·] int64: requested rows that this rank owns
    exchange: ExchangePlan


def lookup_rows(
    ring: RingExchange, owners: OwnershipMap, kind: str, x: Tensor, *, ids: Tensor, index: RowIndex
) -> Tensor:
    """Collective. [n, …] rows of x by store id, perhaps of no ids; x has a row for each local node of the type."""
    owner = owners.owner_of(kind, ids)
    distinct, inverse = torch.unique(ids, return_inverse=True)
    if ring.world.size == 1:
        return take_rows(x, index.rows(ids))
    first = torch.empty_like(distinct).scatter_(0, inverse, torch.arange(len(ids)))
    plan = _plan_lookup(ring, distinct, owner[first], index)
    flat = x.reshape(len(x), x.shape[1:].numel())
    distinct_rows: Tensor = _LookupRows.apply(plan, flat)  # type: ignore[no-untyped-call]
    return take_rows(distinct_rows, inverse).view(len(ids), *x.shape[1:])


def _plan_lookup(ring: RingExchange, distinct: Tensor, owner: Tensor, index: RowIndex) -> _LookupPlan:
    """Collective. Send the distinct ids to their owners."""
    world, rank = ring.world, ring.world.rank
    positions = [(owner == q).nonzero()[:, 0] for q in range(world.size)]
    counts = torch.zeros(world.size, world.size, dtype=torch.int64)
    counts[rank] = torch.tensor(list(map(len, positions)))
    counts = sum_over_ranks(world, counts)
    send_rows: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * world.size
    # Ids are exchanged as rows of one column, in the opposite direction of the rows they request.
    request = ExchangePlan(
        tuple(at if q != rank else at[:0] for q, at in enumerate(positions)),
        tuple(0 if q == rank else int(counts[q, rank]) for q in range(world.size)),
    )

    def on_rows(q: int, received: list[Tensor]) -> None:
        if q != rank:
            send_rows[q] = index.rows(received[0][:, 0].clone())

    ring.run([RowTable(request, distinct[:, None].contiguous())], on_rows, op="ids of row lookup")
    recv_counts = tuple(0 if q == rank else len(at) for q, at in enumerate(positions))
    local_rows = index.rows(distinct[positions[rank]])
    return _LookupPlan(ring, tuple(positions), local_rows, ExchangePlan(tuple(send_rows), recv_counts))


class _LookupRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _LookupPlan, x: Tensor) -> Tensor:
        ctx.plan, ctx.shape, ctx.dtype = plan, x.shape, x.dtype
        out = x.new_empty(sum(map(len, plan.positions)), x.shape[1])
        rank = plan.ring.world.rank

        def on_rows(q: int, received: list[Tensor]) -> None:
            out[plan.positions[q]] = received[0][plan.local_rows] if q == rank else received[0]

        plan.ring.run([RowTable(plan.exchange, x.detach().contiguous())], on_rows, op="rows of row lookup")
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        if not ctx.needs_input_grad[1]:
            return None, None
        plan: _LookupPlan = ctx.plan

        def on_rows(q: int, _: list[Tensor]) -> list[Tensor]:
            remote = grad[plan.positions[q]]
            if q != plan.ring.world.rank:
                return [remote]
            local = grad.new_zeros(ctx.shape)
            local[plan.local_rows] = remote
            return [local]

        (total,) = exchange_grads(plan.ring, [(plan.exchange, grad)], [], on_rows, op="gradients of row lookup")
        return None, total.to(ctx.dtype)
