"""Message flow: every layer of a step computes only the rows that the loss needs, and fetches only what those read.

Rows of a part are laid out by how late they are needed: those of the last layer first, then those that the layer before
needs besides, and so on. So the rows of a layer are the first rows of the layer before, as in sampled blocks. Ranks
tell each other once which rows they need. Where a layer needs most rows anyway, it and those before it keep all: their
edges are then shared. L layers; level l is what layer l − 1 makes, level 0 what the first one reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gnnfleet.comm.collectives import sum_over_ranks
from gnnfleet.comm.halo_exchange import ExchangePlan, RingExchange, RowTable
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.partition.shard import HaloPlan, Shard, ShardBlock, ShardNodes

MAX_ACTIVE_SHARE = 0.75
"""A level that needs a larger share of all rows has all of them: edges of its own would cost more than they spare."""

Masks = dict[str, Tensor]
"""{node type: [n] bool} of own rows."""


@dataclass(frozen=True, eq=False)
class ActiveRows:
    """The rows of a part in the order in which they are needed, and how many of them each level has."""

    shard: Shard
    order: Mapping[str, Tensor]  # [n] int64: rows of the part, by type
    levels: Sequence[Masks]  # L + 1, in the part's own order
    is_full: Sequence[bool]  # whether a level has all rows, on all ranks
    totals: Sequence[float]  # rows of a level, of all ranks together

    @classmethod
    def compute(cls, shard: Shard, ring: RingExchange, wanted: Masks, layers: int) -> ActiveRows | None:
        """From what the loss reads; None where it needs most rows of every layer. All ranks call it together."""
        every = {kind: torch.ones_like(mask) for kind, mask in wanted.items()}
        total = _total(ring, every)
        level = wanted
        levels: list[Masks] = []
        full: list[bool] = []
        totals: list[float] = []
        for number in range(layers, -1, -1):
            count = _total(ring, level)
            full.insert(0, count > MAX_ACTIVE_SHARE * total)
            levels.insert(0, every if full[0] else level)
            totals.insert(0, total if full[0] else count)
            if number:
                level = every if full[0] else _sources_read(shard, ring, level)
        if full[-1]:
            return None
        late = {kind: torch.stack([masks[kind] for masks in levels]).sum(0) for kind in shard.node_types}
        order = {kind: torch.argsort(each, descending=True, stable=True) for kind, each in late.items()}
        return cls(shard, order, levels, full, totals)

    def all_active(self) -> RestrictedShard:
        """All rows, in this order."""
        every = {kind: torch.ones_like(mask) for kind, mask in self.levels[0].items()}
        return RestrictedShard(self, every, every, None)

    def layer(self, index: int, ring: RingExchange) -> RestrictedShard | None:
        """What a layer sees; None where that is the whole. All ranks call it together."""
        if self.is_full[index + 1]:
            return None
        return RestrictedShard(
            self, self.levels[index], self.levels[index + 1], _RowRequests.of(self.shard, ring, self.levels[index + 1])
        )

    @cached_property
    def place(self) -> dict[str, Tensor]:
        """[n] int64: where a row of the part lies in this order."""
        found = {}
        for kind, order in self.order.items():
            found[kind] = torch.empty_like(order)
            found[kind][order] = torch.arange(len(order))
        return found


@dataclass(frozen=True, eq=False)
class _RowRequests:
    """What ranks told each other about one layer: masks over the lists of its plans, by node type, for every rank."""

    recv_in: Mapping[str, Sequence[Tensor]]  # sources this rank reads
    send_in: Mapping[str, Sequence[Tensor]]  # sources others read
    recv_out: Mapping[str, Sequence[Tensor]]  # destinations others compute
    send_out: Mapping[str, Sequence[Tensor]]  # destinations this rank computes

    @classmethod
    def of(cls, shard: Shard, ring: RingExchange, targets: Masks) -> _RowRequests:
        read, _ = source_masks(shard, targets)
        need_out, give_out, give_in = {}, {}, {}
        for kind in shard.node_types:
            give_in[kind] = _exchange_masks(ring, read[kind], [len(rows) for rows in shard.plan(kind, "in").send])
            plan = shard.plan(kind, "out")
            give_out[kind] = [targets[kind][rows.long()] for rows in plan.send]
            need_out[kind] = _exchange_masks(ring, give_out[kind], [len(rows) for rows in plan.recv])
        return cls(read, give_in, need_out, give_out)


class RestrictedShard:
    """A part as one layer sees it: ``sources`` and ``targets`` are those of its rows that it reads and makes.

    Read like a ``Shard``; blocks are made when they are first asked for.
    """

    def __init__(self, flow: ActiveRows, sources: Masks, targets: Masks, talk: _RowRequests | None) -> None:
        self.source_rows = flow.shard
        self.part, self.parts = self.source_rows.part, self.source_rows.parts
        self.node_types, self.edge_types = self.source_rows.node_types, self.source_rows.edge_types
        self._flow, self._talk = flow, talk
        self._blocks: dict[tuple[EdgeType, str, int], ShardBlock] = {}
        self.num_src = {kind: int(mask.sum()) for kind, mask in sources.items()}
        self.num_dst = {kind: int(mask.sum()) for kind, mask in targets.items()}

    def nodes(self, kind: str) -> ShardNodes:
        """The ids alone: features and labels are read once, for the whole part."""
        return ShardNodes(
            store_ids=self.source_rows.nodes(kind).store_ids[self._flow.order[kind][: self.num_src[kind]]]
        )

    def plan(self, kind: str, direction: str) -> HaloPlan:
        plan, place = self.source_rows.plan(kind, direction), self._flow.place[kind].to(torch.int32)
        need, give = list(plan.recv), list(plan.send)
        if self._talk is not None:
            masks = (
                (self._talk.recv_in, self._talk.send_in)
                if direction == "in"
                else (self._talk.recv_out, self._talk.send_out)
            )
            need = [rows[mask] for rows, mask in zip(need, masks[0][kind], strict=True)]
            give = [rows[mask] for rows, mask in zip(give, masks[1][kind], strict=True)]
        return HaloPlan(recv=tuple(need), send=tuple(place[rows.long()] for rows in give))

    def edge_data(self, kind: EdgeType, name: str) -> Tensor | None:
        blocks = [self.block(kind, "in", q) for q in range(self.parts)]
        if name == "edge_ids":
            return torch.cat([block.edge_ids for block in blocks])
        if self.source_rows.edge_data(kind, name) is None:
            return None
        return torch.cat([block.data[name] for block in blocks])

    def block(self, kind: EdgeType, direction: str, q: int) -> ShardBlock:
        if (kind, direction, q) not in self._blocks:
            self._blocks[kind, direction, q] = self._cut(kind, direction, q)
        return self._blocks[kind, direction, q]

    def _cut(self, kind: EdgeType, direction: str, q: int) -> ShardBlock:
        """A block with the rows and edges that are left."""
        block, own = self.source_rows.block(kind, direction, q), q == self.part
        near, far = (kind.dst, kind.src) if direction == "in" else (kind.src, kind.dst)
        limits = (self.num_dst, self.num_src) if direction == "in" else (self.num_src, self.num_dst)
        place = self._flow.place[near][block.rows.long()]
        kept = (place < limits[0][near]).nonzero()[:, 0]
        kept = kept[torch.argsort(place[kept])]
        count = block.indptr.diff()[kept]
        edges = concat_ranges(block.indptr[kept], count)
        columns = self._columns(kind, direction, q)
        cols = columns[block.cols[edges].long()]
        stays = cols < limits[1][far] if own else cols >= 0
        if not bool(stays.all()):
            row = torch.repeat_interleave(torch.arange(len(kept)), count)[stays]
            count = torch.bincount(row, minlength=len(kept))
            edges, cols = edges[stays], cols[stays]
            kept, count = kept[count > 0], count[count > 0]
        indptr = torch.zeros(len(kept) + 1, dtype=torch.int64)
        indptr[1:] = count.cumsum(0)
        return ShardBlock(
            rows=place[kept].to(torch.int32),
            indptr=indptr,
            cols=cols.to(torch.int32),
            edge_ids=block.edge_ids[edges],
            data={name: values[edges] for name, values in block.data.items()},
        )

    def _columns(self, kind: EdgeType, direction: str, q: int) -> Tensor:
        """What the columns of a block become, −1 for those that do not come any more."""
        far = kind.src if direction == "in" else kind.dst
        if q == self.part:
            return self._flow.place[far]
        if self._talk is None:
            return torch.arange(len(self.source_rows.plan(far, direction).recv[q]))
        mask = (self._talk.recv_in if direction == "in" else self._talk.recv_out)[far][q]
        return torch.where(mask, mask.long().cumsum(0) - 1, -1)


def concat_ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """The numbers starts[i] … starts[i] + counts[i] − 1 of all i, one after the other."""
    before = counts.cumsum(0) - counts
    return torch.repeat_interleave(starts - before, counts) + torch.arange(int(counts.sum()))


def _sources_read(shard: Shard, ring: RingExchange, targets: Masks) -> Masks:
    """The level below: own rows that some rank reads to compute its targets, and the targets themselves."""
    read, own = source_masks(shard, targets)
    found = {kind: targets[kind] | own[kind] for kind in shard.node_types}
    for kind in shard.node_types:
        give = shard.plan(kind, "in").send
        for rows, mask in zip(give, _exchange_masks(ring, read[kind], [len(rows) for rows in give]), strict=True):
            found[kind][rows[mask].long()] = True
    return found


def source_masks(shard: Shard, targets: Masks) -> tuple[dict[str, list[Tensor]], Masks]:
    """(masks over the rows needed from every rank, own rows): what the in-edges of the targets begin at."""
    read = {
        kind: [torch.zeros(len(rows), dtype=torch.bool) for rows in shard.plan(kind, "in").recv]
        for kind in shard.node_types
    }
    own = {kind: torch.zeros_like(mask) for kind, mask in targets.items()}
    for kind in shard.edge_types:
        for q in range(shard.parts):
            block = shard.block(kind, "in", q)
            kept = targets[kind.dst][block.rows.long()].nonzero()[:, 0]
            cols = block.cols[concat_ranges(block.indptr[kept], block.indptr.diff()[kept])].long()
            (own[kind.src] if q == shard.part else read[kind.src][q])[cols] = True
    return read, own


def _exchange_masks(ring: RingExchange, masks: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Give a mask to every rank, and hear as many numbers from each as ``counts`` says."""
    rank = ring.world.rank
    starts = torch.tensor([0, *(len(mask) for mask in masks)]).cumsum(0)
    give = tuple(
        torch.arange(int(starts[q]), int(starts[q + 1])) if q != rank else torch.empty(0, dtype=torch.int64)
        for q in range(len(masks))
    )
    routes = ExchangePlan(give, tuple(0 if q == rank else count for q, count in enumerate(counts)))
    heard = [torch.zeros(count, dtype=torch.bool) for count in counts]

    def hear(q: int, rows: list[Tensor]) -> None:
        if q != rank:
            heard[q] = rows[0][:, 0].bool()

    every = torch.cat([mask.to(torch.uint8) for mask in masks])[:, None].contiguous()
    ring.run([RowTable(routes, every)], hear, op="rows that are needed")
    return heard


def _total(ring: RingExchange, masks: Masks) -> float:
    """Rows of all types and ranks."""
    own = torch.tensor(sum(int(mask.sum()) for mask in masks.values()), dtype=torch.float64)
    return float(sum_over_ranks(ring.world, own))
