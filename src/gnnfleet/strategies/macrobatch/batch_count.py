"""How many mini-batches share a relay: as many as the buffer holds, judged by a foretaste of the first ones.

Rows that several batches read travel and lie in memory once, so rows grow more slowly than batches: the rows that one
more batch adds never increase. What is beyond the foretaste is taken to add as many as its last batch did.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.graph.views.local import LocalView
from gnnfleet.sharded.sampling.feature_store import FeatureStore
from gnnfleet.strategies.macrobatch.fetch import MacrobatchPlan, remote_ids

WARMUP_BATCHES = 8
"""Batches drawn before training."""


@dataclass(frozen=True)
class WarmupSample:
    """What the first batches would need."""

    rows: tuple[float, ...]  # bytes of rows that the first 1, 2, … batches have a relay read or fetch, each row once
    batch_rows: float  # the same of a batch by itself, on average
    blocks: float  # bytes of the blocks of a batch, on average
    scratch: float = 0.0  # bytes that drawing them takes, for the relay that is being drawn

    @classmethod
    def of(cls, plan: MacrobatchPlan, tables: FeatureStore) -> WarmupSample:
        """Rows of other parts are fetched; of this part those of paged tables are read."""
        count = len(plan.sampled)
        blocks, scratch = (sum(block_bytes(s.views) for s in plan.sampled), sum(s.scratch for s in plan.sampled))
        blocks += sum(map(block_bytes, plan.first_batch))

        def reads() -> Iterator[tuple[list[Tensor], float]]:
            for kind in tables.rows:
                yield [remote_ids(one, kind) for one in plan.sampled], tables.row_bytes(kind)
                yield [one.ids[kind][one.nodes[kind].rows] for one in plan.sampled], tables.paged_bytes(kind)

        return cls.of_reads(reads(), count, blocks / count, scratch / count)

    @classmethod
    def of_reads(
        cls, reads: Iterable[tuple[Sequence[Tensor], float]], count: int, blocks: float, scratch: float = 0.0
    ) -> WarmupSample:
        """Of so many batches, given (ids that each of them reads, bytes of a row) of every table."""
        rows, each = [0.0] * count, 0.0
        for ids, weight in reads:
            first = first_list_of(ids) if weight else torch.empty(0)
            for m in range(count):
                rows[m] += weight * int((first <= m).sum())
            each += weight * sum(map(len, ids)) / count
        return cls(tuple(rows), each, blocks, scratch)

    def rows_per_fetch(self, together: int) -> float:
        """Bytes of rows of a relay."""
        if together <= len(self.rows):
            return self.rows[together - 1]
        step = self.rows[-1] - self.rows[-2] if len(self.rows) > 1 else self.rows[-1]
        return self.rows[-1] + (together - len(self.rows)) * step

    def bytes(self, together: int, *, ahead: int, window: int) -> float:
        """What relays hold: rows of those that are fetched, blocks of those that are drawn."""
        drawn = (1 + ahead + window) * together * self.blocks + together * self.scratch
        return (1 + ahead) * self.rows_per_fetch(together) + drawn

    def duplication(self, together: int) -> float:
        """How often a row that is read or fetched once would have been by batches by themselves."""
        return together * self.batch_rows / max(self.rows_per_fetch(together), 1.0)


def choose_batches_per_fetch(foretaste: WarmupSample, limit: float, most: int, *, ahead: int, window: int) -> int:
    """The largest number of batches per relay that fits; 1 where none does."""
    together = 1
    while together < most and foretaste.bytes(together + 1, ahead=ahead, window=window) <= limit:
        together += 1
    return together


def block_bytes(views: Sequence[LocalView]) -> float:
    """What the structure of blocks takes, turned-round copies included."""
    total = 0
    for view in views:
        for relation in view.relations.values():
            cut = relation.structure
            edge = cut.col.element_size() + 8
            total += cut.num_edges * edge * (1 + ("transposed" in cut.__dict__)) + 16 * cut.num_rows
        total += 8 * sum(len(rows.node_ids) for rows in view.nodes.values())
    return float(total)


def first_list_of(ids: Sequence[Tensor]) -> Tensor:
    """For every distinct id, the first list that has it."""
    every = torch.cat(list(ids))
    which = torch.repeat_interleave(torch.arange(len(ids)), torch.tensor([len(one) for one in ids]))
    distinct, inverse = torch.unique(every, return_inverse=True)
    return torch.full((len(distinct),), len(ids)).scatter_reduce(0, inverse, which, "amin")
