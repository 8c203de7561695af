"""What every part has to do in each layer of a step, counted from the parts alone, all of them in one process.

The same rows and edges as ``ActiveRows`` leaves, without ranks to tell each other: a part's list of rows that it needs from q
is in q's own numbering. L layers, P parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gnnfleet.graph.partition.shard import DIRECTIONS, Shard
from gnnfleet.graph.views.view import MANY_SOURCES
from gnnfleet.sharded.full_batch.active_rows import MAX_ACTIVE_SHARE, Masks, concat_ranges, source_masks
from gnnfleet.sharded.step_tracer import RouteKey


@dataclass(frozen=True)
class LayerLoad:
    """One layer of one part."""

    rows: int  # destinations
    edges: int
    sent_rows: Mapping[RouteKey, tuple[int, ...]]  # rows that go to each part
    received_rows: Mapping[RouteKey, tuple[int, ...]]  # rows that come from each part


@dataclass(frozen=True)
class ActiveRowCounts:
    """Loads by layer and part; ``totals`` are the rows of each level, of all parts together."""

    loads: list[list[LayerLoad]]
    totals: list[int]  # L + 1

    @property
    def many(self) -> tuple[bool, ...]:
        """Whether a layer reads many more rows than it makes (see ``RingView.for_layer``)."""
        return tuple(before > MANY_SOURCES * after for before, after in pairwise(self.totals))


def count_active_rows(shards: Sequence[Shard], wanted: Sequence[Masks] | None, layers: int) -> ActiveRowCounts:
    """``wanted`` are the rows of every part that the loss reads, None: all of them."""
    every = [
        {kind: torch.ones(each.nodes(kind).count, dtype=torch.bool) for kind in each.node_types} for each in shards
    ]
    whole = [_whole(shard) for shard in shards]
    total, level = _count(every), every if wanted is None else list(wanted)
    found: list[list[LayerLoad]] = []
    totals: list[int] = []
    for number in range(layers, -1, -1):
        count = _count(level)
        full = count > MAX_ACTIVE_SHARE * total
        totals.insert(0, total if full else count)
        if number:
            found.insert(0, whole if full else _with_restriction(shards, level))
            level = every if full else _source_rows(shards, level)
    return ActiveRowCounts(found, totals)


def _count(masks: Sequence[Masks]) -> int:
    return sum(int(mask.sum()) for each in masks for mask in each.values())


def _source_rows(shards: Sequence[Shard], targets: Sequence[Masks]) -> list[Masks]:
    """The rows that are read to compute the targets, and the targets themselves."""
    found = [{kind: mask.clone() for kind, mask in each.items()} for each in targets]
    for place, (shard, each) in enumerate(zip(shards, targets, strict=True)):
        read, own = source_masks(shard, each)
        for kind in shard.node_types:
            found[place][kind] |= own[kind]
            for q, (rows, mask) in enumerate(zip(shard.plan(kind, "in").recv, read[kind], strict=True)):
                found[q][kind][rows[mask].long()] = True
    return found


def _whole(shard: Shard) -> LayerLoad:
    plans = {(kind, way): shard.plan(kind, way) for kind in shard.node_types for way in DIRECTIONS}
    edges = sum(len(shard.block(kind, "in", q).cols) for kind in shard.edge_types for q in range(shard.parts))
    return LayerLoad(
        sum(shard.nodes(kind).count for kind in shard.node_types),
        edges,
        {way: tuple(map(len, plan.send)) for way, plan in plans.items()},
        {way: tuple(map(len, plan.recv)) for way, plan in plans.items()},
    )


def _with_restriction(shards: Sequence[Shard], targets: Sequence[Masks]) -> list[LayerLoad]:
    parts, kinds = len(shards), shards[0].node_types
    sent = {(kind, way): torch.zeros(parts, parts, dtype=torch.int64) for kind in kinds for way in DIRECTIONS}
    rows, edges = [], []
    for p, (shard, each) in enumerate(zip(shards, targets, strict=True)):
        read, _ = source_masks(shard, each)
        for kind in kinds:
            sent[kind, "in"][:, p] = torch.tensor([int(mask.sum()) for mask in read[kind]])
            give = shard.plan(kind, "out").send
            sent[kind, "out"][p] = torch.tensor([int(each[kind][rows.long()].sum()) for rows in give])
        rows.append(sum(int(mask.sum()) for mask in each.values()))
        edges.append(sum(_edges(shard, each, q) for q in range(parts)))
    return [
        LayerLoad(
            rows[p],
            edges[p],
            {way: tuple(table[p].tolist()) for way, table in sent.items()},
            {way: tuple(table[:, p].tolist()) for way, table in sent.items()},
        )
        for p in range(parts)
    ]


def _edges(shard: Shard, targets: Masks, q: int) -> int:
    total = 0
    for kind in shard.edge_types:
        block = shard.block(kind, "in", q)
        total += int(block.indptr.diff()[targets[kind.dst][block.rows.long()]].sum())
    return total


@dataclass(frozen=True, eq=False)
class SubPartition:
    """The first rows of a part with all their in-edges, numbered by themselves: [2, E] ends by edge type."""

    rows: Mapping[str, int]  # destinations, which come first
    sources: Mapping[str, int]  # all rows
    edge_index: Mapping[tuple[str, str, str], Tensor]


def sub_partition(shard: Shard, share: float) -> SubPartition:
    """A share of the rows of every node type."""
    rows = {kind: max(1, min(each, round(share * each))) for kind, each in _counts(shard).items()}
    far: dict[str, list[Tensor]] = {kind: [torch.empty(0, dtype=torch.int64)] for kind in rows}
    raw: dict[tuple[str, str, str], tuple[Tensor, Tensor]] = {}
    for kind in shard.edge_types:
        start, lists = _counts(shard)[kind.src], []
        for q in range(shard.parts):
            block = shard.block(kind, "in", q)
            kept = (block.rows < rows[kind.dst]).nonzero()[:, 0]
            count = block.indptr.diff()[kept]
            cols = block.cols[concat_ranges(block.indptr[kept], count)].long()
            # Rows of other parts are numbered after those of this one, part by part.
            lists.append((cols if q == shard.part else cols + start, block.rows[kept].long().repeat_interleave(count)))
            start += 0 if q == shard.part else len(shard.plan(kind.src, "in").recv[q])
        src, dst = (torch.cat(each) for each in zip(*lists, strict=True))
        raw[kind.src, kind.relation, kind.dst] = src, dst
        far[kind.src].append(src[src >= rows[kind.src]])
    beyond = {kind: torch.unique(torch.cat(lists)) for kind, lists in far.items()}
    ends = {}
    for (src_kind, name, dst_kind), (src, dst) in raw.items():
        own = rows[src_kind]
        ends[src_kind, name, dst_kind] = torch.stack(
            [torch.where(src < own, src, own + torch.searchsorted(beyond[src_kind], src)), dst]
        )
    return SubPartition(rows, {kind: count + len(beyond[kind]) for kind, count in rows.items()}, ends)


def _counts(shard: Shard) -> dict[str, int]:
    return {kind: shard.nodes(kind).count for kind in shard.node_types}
