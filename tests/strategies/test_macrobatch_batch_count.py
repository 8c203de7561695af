"""Batches per fetch: estimates from a warmup sample, and the number that fits the buffer."""

from __future__ import annotations

import pytest
import torch

from gnnfleet.strategies.macrobatch.fetch import WarmupSample, choose_batches_per_fetch, first_list_of

SAMPLE = WarmupSample(rows=(100.0, 150.0, 180.0), batch_rows=100.0, blocks=10.0)


def test_rows_beyond_the_sample_are_never_underestimated() -> None:
    """Each batch adds at most as many rows as the former one, so a line from the last one is an upper bound."""
    assert [SAMPLE.rows_per_fetch(m) for m in (1, 2, 3, 4, 6)] == [100, 150, 180, 210, 270]
    assert SAMPLE.duplication(1) == 1 and SAMPLE.duplication(3) == pytest.approx(300 / 180)
    random = torch.Generator().manual_seed(0)
    probability = torch.rand(500, generator=random) ** 4
    batches = [(torch.rand(500, generator=random) < probability).nonzero()[:, 0] for _ in range(200)]
    first_batches = first_list_of(batches)
    sizes = [float((first_batches <= m).sum()) for m in range(200)]
    sample = WarmupSample(tuple(sizes[:8]), sum(map(len, batches)) / 200, 0.0)
    assert all(sample.rows_per_fetch(m + 1) >= sizes[m] - 20 for m in range(200)), "up to the noise of the last batch"
    assert sizes[-1] == len(torch.unique(torch.cat(batches)))


def test_the_largest_number_of_batches_that_fits_is_chosen() -> None:
    assert choose_batches_per_fetch(SAMPLE, 109, 20, prefetch=0, lookahead=0) == 1, "one batch is always fetched"
    assert choose_batches_per_fetch(SAMPLE, 170, 20, prefetch=0, lookahead=0) == 2
    assert choose_batches_per_fetch(SAMPLE, 1e9, 20, prefetch=0, lookahead=0) == 20, "an epoch has no more"
    assert choose_batches_per_fetch(SAMPLE, 400, 20, prefetch=0, lookahead=0) > choose_batches_per_fetch(
        SAMPLE, 400, 20, prefetch=1, lookahead=2
    )
    buffer_bytes = SAMPLE.bytes(3, prefetch=1, lookahead=2)
    assert buffer_bytes == 2 * 180 + 4 * 3 * 10
