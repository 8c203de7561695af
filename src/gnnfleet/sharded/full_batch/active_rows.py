"""Message-flow graph of a full-batch step: every layer computes only the active rows, those that the loss depends on.

Local rows are ordered by the last layer that needs them: rows of the last layer first, then the other rows of the layer
before, and so on. So the rows of a layer are the first rows of the layer before, as in sampled blocks. Ranks exchange
once which rows they need. A layer that needs most rows, and those before it, keep all rows and share their edges.
L layers; level l has the rows that layer l − 1 computes, level 0 those that the first layer reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from gnnfleet.comm.collectives import sum_over_ranks
from gnnfleet.comm.halo_exchange import ExchangePlan, RingExchange, RowTable
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.partition.shard import HaloPlan, Shard, ShardBlock, ShardNodes
from gnnfleet.ops.csr import inverse_permutation, offsets_of

MAX_ACTIVE_SHARE = 0.75
"""A level that needs a larger share of all rows has all of them: a copy of its edges would cost more than it saves."""

Masks = dict[str, Tensor]
"""{node type: [n] bool} of local rows."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ActiveRows:
    """The order of the local rows, and the rows of each level."""

    shard: Shard
    order: Mapping[str, Tensor]  # [n] int64: rows of the partition, by type
    levels: Sequence[Masks]  # L + 1, in the partition's order
    is_full: Sequence[bool]  # True for a level with all rows, on all ranks
    totals: Sequence[float]  # rows of a level, summed over ranks

    @classmethod
    def compute(cls, shard: Shard, ring: RingExchange, loss_rows: Masks, layers: int) -> ActiveRows | None:
        """Collective. Active rows, given those the loss reads; None if the last layer needs most rows."""
        all_rows = {kind: torch.ones_like(mask) for kind, mask in loss_rows.items()}
        count, below = partial(_total, ring), partial(_source_level, shard, ring)
        levels, is_full, totals = active_levels(loss_rows, all_rows, layers, count, below)
        if is_full[-1]:
            return None
        last_level = {kind: torch.stack([masks[kind] for masks in levels]).sum(0) for kind in shard.node_types}
        order = {kind: torch.argsort(last, descending=True, stable=True) for kind, last in last_level.items()}
        return cls(shard, order, levels, is_full, totals)

    def all_active(self) -> RestrictedShard:
        """All rows, in this order."""
        all_rows = {kind: torch.ones_like(mask) for kind, mask in self.levels[0].items()}
        return RestrictedShard(self, all_rows, all_rows, None)

    def layer(self, index: int, ring: RingExchange) -> RestrictedShard | None:
        """Collective. The shard of a layer; None for a layer that computes all rows."""
        if self.is_full[index + 1]:
            return None
        sources, targets = self.levels[index], self.levels[index + 1]
        return RestrictedShard(self, sources, targets, _RowRequests.of(self.shard, ring, targets))

    @cached_property
    def positions(self) -> dict[str, Tensor]:
        """[n] int64: the position of each row of the partition in this order."""
        return {kind: inverse_permutation(order) for kind, order in self.order.items()}


@dataclass(frozen=True, eq=False)
class _RowRequests:
    """The rows of one layer that are exchanged: masks over the lists of the shard's plans, by node type and rank."""

    recv_in: Mapping[str, Sequence[Tensor]]  # sources this rank reads
    send_in: Mapping[str, Sequence[Tensor]]  # sources other ranks read
    recv_out: Mapping[str, Sequence[Tensor]]  # destinations other ranks compute
    send_out: Mapping[str, Sequence[Tensor]]  # destinations this rank computes

    @classmethod
    def of(cls, shard: Shard, ring: RingExchange, targets: Masks) -> _RowRequests:
        read, _ = source_masks(shard, targets)
        send_in, recv_out, send_out = {}, {}, {}
        for kind in shard.node_types:
            send_in[kind] = _exchange_masks(ring, read[kind], [len(rows) for rows in shard.plan(kind, "in").send])
            plan = shard.plan(kind, "out")
            send_out[kind] = [targets[kind][rows.long()] for rows in plan.send]
            recv_out[kind] = _exchange_masks(ring, send_out[kind], [len(rows) for rows in plan.recv])
        return cls(read, send_in, recv_out, send_out)

    def masks(self, direction: str) -> tuple[Mapping[str, Sequence[Tensor]], Mapping[str, Sequence[Tensor]]]:
        """(masks of received rows, of sent rows) of one direction."""
        return (self.recv_in, self.send_in) if direction == "in" else (self.recv_out, self.send_out)


class RestrictedShard:
    """The shard of one layer: ``sources`` are the local rows that it reads, ``targets`` those that it computes.

    Has the interface of a ``Shard``; blocks are built on first use. Without ``requests``, all rows are exchanged.
    """

    def __init__(self, active_rows: ActiveRows, sources: Masks, targets: Masks, requests: _RowRequests | None) -> None:
        self._shard = active_rows.shard
        self.part, self.parts = self._shard.part, self._shard.parts
        self.node_types, self.edge_types = self._shard.node_types, self._shard.edge_types
        self._active_rows, self._requests = active_rows, requests
        self._blocks: dict[tuple[EdgeType, str, int], ShardBlock] = {}
        self.num_src = {kind: int(mask.sum()) for kind, mask in sources.items()}
        self.num_dst = {kind: int(mask.sum()) for kind, mask in targets.items()}

    def nodes(self, kind: str) -> ShardNodes:
        """Store ids only: features and labels are read once, for the whole partition."""
        rows = self._active_rows.order[kind][: self.num_src[kind]]
        return ShardNodes(store_ids=self._shard.nodes(kind).store_ids[rows])

    def plan(self, kind: str, direction: str) -> HaloPlan:
        plan, positions = self._shard.plan(kind, direction), self._active_rows.positions[kind].to(torch.int32)
        recv, send = list(plan.recv), list(plan.send)
        if self._requests is not None:
            recv_masks, send_masks = self._requests.masks(direction)
            recv = [rows[mask] for rows, mask in zip(recv, recv_masks[kind], strict=True)]
            send = [rows[mask] for rows, mask in zip(send, send_masks[kind], strict=True)]
        return HaloPlan(recv=tuple(recv), send=tuple(positions[rows.long()] for rows in send))

    def edge_data(self, kind: EdgeType, name: str) -> Tensor | None:
        blocks = [self.block(kind, "in", q) for q in range(self.parts)]
        if name == "edge_ids":
            return torch.cat([block.edge_ids for block in blocks])
        if self._shard.edge_data(kind, name) is None:
            return None
        return torch.cat([block.data[name] for block in blocks])

    def block(self, kind: EdgeType, direction: str, q: int) -> ShardBlock:
        if (kind, direction, q) not in self._blocks:
            self._blocks[kind, direction, q] = self._restricted_block(kind, direction, q)
        return self._blocks[kind, direction, q]

    def _restricted_block(self, kind: EdgeType, direction: str, q: int) -> ShardBlock:
        block = self._shard.block(kind, direction, q)
        row_type, col_type = (kind.dst, kind.src) if direction == "in" else (kind.src, kind.dst)
        num_rows, num_cols = (self.num_dst, self.num_src) if direction == "in" else (self.num_src, self.num_dst)
        positions = self._active_rows.positions[row_type][block.rows.long()]
        selected = (positions < num_rows[row_type]).nonzero()[:, 0]
        selected = selected[torch.argsort(positions[selected])]
        count = block.indptr.diff()[selected]
        edges = concat_ranges(block.indptr[selected], count)
        cols = self._columns(col_type, direction, q)[block.cols[edges].long()]
        is_active = cols < num_cols[col_type] if q == self.part else cols >= 0
        if not bool(is_active.all()):
            row = torch.repeat_interleave(torch.arange(len(selected)), count)[is_active]
            count = torch.bincount(row, minlength=len(selected))
            edges, cols = edges[is_active], cols[is_active]
            selected, count = selected[count > 0], count[count > 0]
        return ShardBlock(
            rows=positions[selected].to(torch.int32),
            indptr=offsets_of(count),
            cols=cols.to(torch.int32),
            edge_ids=block.edge_ids[edges],
            data={name: values[edges] for name, values in block.data.items()},
        )

    def _columns(self, kind: str, direction: str, q: int) -> Tensor:
        """The new column of each column of a block, −1 for rows that are not exchanged."""
        if q == self.part:
            return self._active_rows.positions[kind]
        if self._requests is None:
            return torch.arange(len(self._shard.plan(kind, direction).recv[q]))
        mask = self._requests.masks(direction)[0][kind][q]
        return torch.where(mask, mask.long().cumsum(0) - 1, -1)


def active_levels(
    level: T, all_rows: T, layers: int, count: Callable[[T], float], below: Callable[[T], T]
) -> tuple[list[T], list[bool], list[float]]:
    """(levels 0 … L, which of them have all rows, their numbers of rows), from the last one down."""
    total = count(all_rows)
    levels: list[T] = []
    is_full: list[bool] = []
    totals: list[float] = []
    for number in range(layers, -1, -1):
        rows = count(level)
        is_full.insert(0, rows > MAX_ACTIVE_SHARE * total)
        levels.insert(0, all_rows if is_full[0] else level)
        totals.insert(0, total if is_full[0] else rows)
        if number:
            level = all_rows if is_full[0] else below(level)
    return levels, is_full, totals


def concat_ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """Concatenate the ranges starts[i] … starts[i] + counts[i] − 1."""
    offsets = counts.cumsum(0) - counts
    return torch.repeat_interleave(starts - offsets, counts) + torch.arange(int(counts.sum()))


def _source_level(shard: Shard, ring: RingExchange, targets: Masks) -> Masks:
    """The level below: local rows that any rank reads to compute its targets, and the targets themselves."""
    remote, local = source_masks(shard, targets)
    level = {kind: targets[kind] | local[kind] for kind in shard.node_types}
    for kind in shard.node_types:
        sent = shard.plan(kind, "in").send
        for rows, mask in zip(sent, _exchange_masks(ring, remote[kind], [len(rows) for rows in sent]), strict=True):
            level[kind][rows[mask].long()] = True
    return level


def source_masks(shard: Shard, targets: Masks) -> tuple[dict[str, list[Tensor]], Masks]:
    """Sources of the targets' in-edges: (masks over the rows received from every rank, local rows)."""
    remote = {
        kind: [torch.zeros(len(rows), dtype=torch.bool) for rows in shard.plan(kind, "in").recv]
        for kind in shard.node_types
    }
    local = {kind: torch.zeros_like(mask) for kind, mask in targets.items()}
    for kind in shard.edge_types:
        for q in range(shard.parts):
            block = shard.block(kind, "in", q)
            selected = targets[kind.dst][block.rows.long()].nonzero()[:, 0]
            cols = block.cols[concat_ranges(block.indptr[selected], block.indptr.diff()[selected])].long()
            (local[kind.src] if q == shard.part else remote[kind.src][q])[cols] = True
    return remote, local


def _exchange_masks(ring: RingExchange, masks: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Collective. Send a mask to every rank, and receive one of the given length from each."""
    rank = ring.world.rank
    starts = torch.tensor([0, *map(len, masks)]).cumsum(0)
    send_rows = tuple(
        torch.arange(int(starts[q]), int(starts[q + 1])) if q != rank else torch.empty(0, dtype=torch.int64)
        for q in range(len(masks))
    )
    plan = ExchangePlan(send_rows, tuple(0 if q == rank else count for q, count in enumerate(counts)))
    received_masks = [torch.zeros(count, dtype=torch.bool) for count in counts]

    def on_rows(q: int, received: list[Tensor]) -> None:
        if q != rank:
            received_masks[q] = received[0][:, 0].bool()

    table = torch.cat([mask.to(torch.uint8) for mask in masks])[:, None].contiguous()
    ring.run([RowTable(plan, table)], on_rows, op="rows that are needed")
    return received_masks


def _total(ring: RingExchange, masks: Masks) -> float:
    """Collective. The number of rows of all types and ranks."""
    count = torch.tensor(sum(int(mask.sum()) for mask in masks.values()), dtype=torch.float64)
    return float(sum_over_ranks(ring.world, count))
