"""Rows by store id, wherever they live: ids go to their owners, rows come back, gradients go home.

Owners are found in the partition's assignment, which stays on disk; a rank asks for a row once, however often it needs
it. U distinct ids asked for here.
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
from gnnfleet.sharded.full_batch.grad_accumulator import GradAccumulator
from gnnfleet.sharded.full_batch.partition_blocks import PartitionBlocks


class OwnershipMap:
    """The part of every node, by node type and store id. Making it takes a word from all ranks."""

    def __init__(self, shard: Shard, part: PartitionBlocks, ring: RingExchange) -> None:
        self._shard = shard
        own = torch.tensor([rows.num_dst for rows in part.nodes.values()])
        counts = sum_over_ranks(ring.world, own).tolist()
        self.counts: Mapping[str, int] = dict(zip(part.nodes, counts, strict=True))

    @cached_property
    def _assignment(self) -> Tensor:
        return assignment_of(self._shard)

    def owner_of(self, kind: str, ids: Tensor) -> Tensor:
        """[n] the part of each node; raises InputError for ids that are none of the type's."""
        if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise InputError(f"store ids are whole numbers of shape [n], found {ids.dtype} of shape {list(ids.shape)}")
        count = self.counts[kind]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise InputError(f"node {wrong} is not in this graph: it has {count} nodes of type {kind}")
        kinds = list(self.counts)
        start = sum(self.counts[before] for before in kinds[: kinds.index(kind)])
        return gather(self._assignment[:, None], ids + start)[:, 0] if len(ids) else ids


@dataclass(frozen=True, eq=False)
class _LookupPlan:
    """Distinct ids by owner: where they are in the answer, and the way of the rows."""

    ring: RingExchange
    places: tuple[Tensor, ...]  # P lists of places in the answer
    own: Tensor  # [·] int64: own rows that this rank asked itself for
    routes: ExchangePlan


def lookup_rows(
    ring: RingExchange, owners: OwnershipMap, kind: str, x: Tensor, *, ids: Tensor, places: RowIndex
) -> Tensor:
    """[n, …] rows of x by store id; x has a row for each own node of the type. All ranks call it, with ids or none."""
    owner = owners.owner_of(kind, ids)
    distinct, inverse = torch.unique(ids, return_inverse=True)
    if ring.world.size == 1:
        return take_rows(x, places.rows(ids))
    first = torch.empty_like(distinct).scatter_(0, inverse, torch.arange(len(ids)))
    request = _plan_lookup(ring, distinct, owner[first], places)
    flat = x.reshape(len(x), x.shape[1:].numel())
    found: Tensor = _LookupRows.apply(request, flat)  # type: ignore[no-untyped-call]
    return take_rows(found, inverse).view(len(ids), *x.shape[1:])


def _plan_lookup(ring: RingExchange, distinct: Tensor, owner: Tensor, places: RowIndex) -> _LookupPlan:
    """Tell every owner which of its rows are wanted here."""
    world = ring.world
    mine = [(owner == q).nonzero()[:, 0] for q in range(world.size)]
    asked = torch.zeros(world.size, world.size, dtype=torch.int64)
    asked[world.rank] = torch.tensor([len(found) for found in mine])
    asked = sum_over_ranks(world, asked)
    give: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * world.size
    # Ids travel as rows of one column: what this rank asks of q is what it gives to q.
    routes = ExchangePlan(
        tuple(found if q != world.rank else found[:0] for q, found in enumerate(mine)),
        tuple(0 if q == world.rank else int(asked[q, world.rank]) for q in range(world.size)),
    )

    def hear(q: int, rows: list[Tensor]) -> None:
        if q != world.rank:
            give[q] = places.rows(rows[0][:, 0].clone())

    ring.run([RowTable(routes, distinct[:, None].contiguous())], hear, op="ids of take")
    need = tuple(0 if q == world.rank else len(found) for q, found in enumerate(mine))
    return _LookupPlan(ring, tuple(mine), places.rows(distinct[mine[world.rank]]), ExchangePlan(tuple(give), need))


class _LookupRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: _LookupPlan, x: Tensor) -> Tensor:
        ctx.request, ctx.form = request, (x.shape, x.dtype)
        found = x.new_empty(sum(len(place) for place in request.places), x.shape[1])
        rank = request.ring.world.rank

        def visit(q: int, rows: list[Tensor]) -> None:
            found[request.places[q]] = rows[0][request.own] if q == rank else rows[0]

        request.ring.run([RowTable(request.routes, x.detach().contiguous())], visit, op="rows of take")
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        if not ctx.needs_input_grad[1]:
            return None, None
        request: _LookupPlan = ctx.request
        shape, dtype = ctx.form
        home = GradAccumulator(request.ring.world.rank, [(request.routes, grad)])

        def visit(q: int, rows: list[Tensor]) -> list[Tensor]:
            part = grad[request.places[q]]
            if q != request.ring.world.rank:
                return [part]
            own = grad.new_zeros(shape)
            own[request.own] = part
            return [own]

        request.ring.run([], visit, returns=home.returns, on_returns=home.add, op="gradients of take")
        return None, home.totals[0].to(dtype)
