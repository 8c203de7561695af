"""Count the active rows and edges of every layer and partition, in one process with all partitions.

The counts are those of ``ActiveRows``. No exchange is needed: a plan lists the rows received from q by q's numbers.
L layers, P partitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from gnnfleet.graph.partition.shard import DIRECTIONS, Shard
from gnnfleet.graph.views.view import MANY_SOURCES
from gnnfleet.sharded.full_batch.active_rows import Masks, active_levels, source_masks
from gnnfleet.sharded.step_tracer import RouteKey


@dataclass(frozen=True)
class LayerLoad:
    rows: int  # destinations
    edges: int
    sent_rows: Mapping[RouteKey, int]  # to all partitions
    received_rows: Mapping[RouteKey, int]  # from all partitions


@dataclass(frozen=True)
class ActiveRowCounts:
    """Loads by layer and partition; ``totals`` are the rows of each level, summed over partitions."""

    loads: list[list[LayerLoad]]
    totals: list[float]  # L + 1

    @property
    def many(self) -> tuple[bool, ...]:
        """True for layers that read many more rows than they compute (see ``RingView.for_layer``)."""
        return tuple(before > MANY_SOURCES * after for before, after in pairwise(self.totals))


def count_active_rows(shards: Sequence[Shard], loss_rows: Sequence[Masks] | None, layers: int) -> ActiveRowCounts:
    """``loss_rows`` are the rows of every partition that the loss reads, None: all of them."""
    all_rows = [
        {kind: torch.ones(shard.nodes(kind).count, dtype=torch.bool) for kind in shard.node_types} for shard in shards
    ]
    full_loads = _restricted_loads(shards, all_rows)
    last = all_rows if loss_rows is None else list(loss_rows)
    levels, is_full, totals = active_levels(last, all_rows, layers, _count, partial(_source_level, shards))
    pairs = list(zip(levels, is_full, strict=True))[1:]
    return ActiveRowCounts([full_loads if full else _restricted_loads(shards, level) for level, full in pairs], totals)


def _count(level: Sequence[Masks]) -> int:
    return sum(int(mask.sum()) for masks in level for mask in masks.values())


def _source_level(shards: Sequence[Shard], targets: Sequence[Masks]) -> list[Masks]:
    """The rows that are read to compute the targets, and the targets themselves."""
    level = [{kind: mask.clone() for kind, mask in masks.items()} for masks in targets]
    for p, (shard, masks) in enumerate(zip(shards, targets, strict=True)):
        remote, local = source_masks(shard, masks)
        for kind in shard.node_types:
            level[p][kind] |= local[kind]
            for q, (rows, mask) in enumerate(zip(shard.plan(kind, "in").recv, remote[kind], strict=True)):
                level[q][kind][rows[mask].long()] = True
    return level


def _restricted_loads(shards: Sequence[Shard], targets: Sequence[Masks]) -> list[LayerLoad]:
    parts, kinds = len(shards), shards[0].node_types
    sent = {
        (kind, direction): torch.zeros(parts, parts, dtype=torch.int64) for kind in kinds for direction in DIRECTIONS
    }
    rows, edges = [], []
    for p, (shard, masks) in enumerate(zip(shards, targets, strict=True)):
        remote, _ = source_masks(shard, masks)
        for kind in kinds:
            sent[kind, "in"][:, p] = torch.tensor([int(mask.sum()) for mask in remote[kind]])
            send_rows = shard.plan(kind, "out").send
            sent[kind, "out"][p] = torch.tensor([int(masks[kind][sent_rows.long()].sum()) for sent_rows in send_rows])
        rows.append(_count([masks]))
        blocks = [(masks[kind.dst], shard.block(kind, "in", q)) for kind in shard.edge_types for q in range(parts)]
        edges.append(sum(int(block.indptr.diff()[mask[block.rows.long()]].sum()) for mask, block in blocks))
    return [
        LayerLoad(
            rows[p],
            edges[p],
            {route: int(counts[p].sum()) for route, counts in sent.items()},
            {route: int(counts[:, p].sum()) for route, counts in sent.items()},
        )
        for p in range(parts)
    ]
