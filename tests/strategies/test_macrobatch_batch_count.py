"""How many batches share a relay: what a foretaste says, and what it allows."""

from __future__ import annotations

import pytest
import torch

from gnnfleet.strategies.macrobatch.batch_count import WarmupSample, choose_batches_per_fetch, first_list_of

TASTE = WarmupSample(rows=(100.0, 150.0, 180.0), batch_rows=100.0, blocks=10.0)


def test_rows_beyond_the_foretaste_are_never_underestimated() -> None:
    """Each batch adds at most as many rows as the one before, so a straight line from the last lies above."""
    assert [TASTE.rows_per_fetch(m) for m in (1, 2, 3, 4, 6)] == [100, 150, 180, 210, 270]
    assert TASTE.duplication(1) == 1 and TASTE.duplication(3) == pytest.approx(300 / 180)
    random = torch.Generator().manual_seed(0)
    chance = torch.rand(500, generator=random) ** 4
    batches = [(torch.rand(500, generator=random) < chance).nonzero()[:, 0] for _ in range(200)]
    first = first_list_of(batches)
    sizes = [float((first <= m).sum()) for m in range(200)]
    taste = WarmupSample(tuple(sizes[:8]), sum(map(len, batches)) / 200, 0.0)
    assert all(taste.rows_per_fetch(m + 1) >= sizes[m] - 20 for m in range(200)), "up to the noise of the last batch"
    assert sizes[-1] == len(torch.unique(torch.cat(batches)))


def test_as_many_as_fit() -> None:
    assert choose_batches_per_fetch(TASTE, 109, 20, prefetch=0, lookahead=0) == 1, "one is always taken"
    assert choose_batches_per_fetch(TASTE, 170, 20, prefetch=0, lookahead=0) == 2
    assert choose_batches_per_fetch(TASTE, 1e9, 20, prefetch=0, lookahead=0) == 20, "an epoch has no more"
    assert choose_batches_per_fetch(TASTE, 400, 20, prefetch=0, lookahead=0) > choose_batches_per_fetch(
        TASTE, 400, 20, prefetch=1, lookahead=2
    )
    held = TASTE.bytes(3, prefetch=1, lookahead=2)
    assert held == 2 * 180 + 4 * 3 * 10
