"""Choose the number of mini-batches per fetch: as many as the buffer holds, judged by sampling the first ones.

A row that several batches read is fetched once, so each further batch adds at most as many rows as the one before.
Beyond the sampled batches, every batch is assumed to add as many rows as the last sampled one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.graph.views.local import LocalView
from gnnfleet.sharded.sampling.dist_sampler import SampledBatch
from gnnfleet.sharded.sampling.feature_store import FeatureStore

WARMUP_BATCHES = 8
"""Batches sampled before training."""


@dataclass(frozen=True)
class WarmupSample:
    """Sizes of the first batches of an epoch."""

    rows: tuple[float, ...]  # bytes of the distinct rows that the first 1, 2, … batches fetch or read from disk
    batch_rows: float  # bytes of the rows of a single batch, on average
    blocks: float  # bytes of the blocks of a batch, on average
    scratch: float = 0.0  # bytes of working memory for sampling a batch

    @classmethod
    def of(
        cls, sampled: Sequence[SampledBatch], first_blocks: Sequence[Sequence[LocalView]], features: FeatureStore
    ) -> WarmupSample:
        """Count rows that are fetched from other ranks, and local rows that are read from files."""
        count = len(sampled)
        blocks = sum(block_bytes(batch.views) for batch in sampled) + sum(map(block_bytes, first_blocks))
        scratch = sum(batch.scratch for batch in sampled)

        def reads() -> Iterator[tuple[list[Tensor], float]]:
            for kind in features.rows:
                yield [batch.remote_ids(kind) for batch in sampled], features.row_bytes(kind)
                yield [batch.ids[kind][batch.nodes[kind].rows] for batch in sampled], features.paged_bytes(kind)

        return cls.of_reads(reads(), count, blocks / count, scratch / count)

    @classmethod
    def of_reads(
        cls, reads: Iterable[tuple[Sequence[Tensor], float]], count: int, blocks: float, scratch: float = 0.0
    ) -> WarmupSample:
        """``reads`` has one entry per table: (ids that each of ``count`` batches reads, bytes of a row)."""
        rows, batch_rows = [0.0] * count, 0.0
        for ids, row_bytes in reads:
            first = first_list_of(ids) if row_bytes else torch.empty(0)
            for m in range(count):
                rows[m] += row_bytes * int((first <= m).sum())
            batch_rows += row_bytes * sum(map(len, ids)) / count
        return cls(tuple(rows), batch_rows, blocks, scratch)

    def rows_per_fetch(self, batches: int) -> float:
        """Bytes of the distinct rows of one fetch."""
        if batches <= len(self.rows):
            return self.rows[batches - 1]
        step = self.rows[-1] - self.rows[-2] if len(self.rows) > 1 else self.rows[-1]
        return self.rows[-1] + (batches - len(self.rows)) * step

    def bytes(self, batches: int, *, prefetch: int, lookahead: int) -> float:
        """Memory of all macrobatches at a time: rows of the fetched ones, blocks of the sampled ones."""
        blocks = (1 + prefetch + lookahead) * batches * self.blocks + batches * self.scratch
        return (1 + prefetch) * self.rows_per_fetch(batches) + blocks

    def duplication(self, batches: int) -> float:
        """Number of uses of a fetched row."""
        return batches * self.batch_rows / max(self.rows_per_fetch(batches), 1.0)


def choose_batches_per_fetch(
    warmup: WarmupSample, limit: float, max_batches: int, *, prefetch: int, lookahead: int
) -> int:
    """The largest number of batches per fetch within ``limit`` bytes, at least 1."""
    batches = 1
    while batches < max_batches and warmup.bytes(batches + 1, prefetch=prefetch, lookahead=lookahead) <= limit:
        batches += 1
    return batches


def block_bytes(views: Sequence[LocalView]) -> float:
    """Memory of the structure of blocks, transposed copies included."""
    total = 0
    for view in views:
        for relation in view.relations.values():
            structure = relation.structure
            edge_bytes = structure.col.element_size() + 8
            has_transposed = "transposed" in structure.__dict__
            total += structure.num_edges * edge_bytes * (1 + has_transposed) + 16 * structure.num_rows
        total += 8 * sum(len(rows.node_ids) for rows in view.nodes.values())
    return float(total)


def first_list_of(ids: Sequence[Tensor]) -> Tensor:
    """For every distinct id, the index of the first list that has it."""
    list_index = torch.repeat_interleave(torch.arange(len(ids)), torch.tensor([len(batch_ids) for batch_ids in ids]))
    distinct, inverse = torch.unique(torch.cat(list(ids)), return_inverse=True)
    return torch.full((len(distinct),), len(ids)).scatter_reduce(0, inverse, list_index, "amin")
