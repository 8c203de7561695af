"""The batches of an epoch contain every item once, in an order that depends on seed and epoch alone."""

from __future__ import annotations

import torch

from gnnfleet.graph.sampling.batches import count_batches, epoch_batches


def test_an_epoch_contains_every_item_once() -> None:
    items = torch.arange(0, 1000, 7)
    for size in (0, 1, 10, 142, 143, 5000):
        numbers, batches = zip(*epoch_batches(items, size, seed=3, epoch=1), strict=True)
        assert numbers == tuple(range(len(numbers)))
        rest = list(epoch_batches(items, size, seed=3, epoch=1, first=2))
        assert [number for number, _ in rest] == list(numbers[2:])
        assert all(torch.equal(batch, batches[number]) for number, batch in rest)
        assert len(batches) == count_batches(len(items), size)
        assert torch.equal(torch.cat(batches).sort().values, items)
        assert all(torch.equal(batch, batch.sort().values) for batch in batches)
        assert all(len(batch) == size for batch in batches[:-1])


def test_the_order_depends_on_epoch_and_seed() -> None:
    items = torch.arange(100)
    first, again, other, seed = (
        [batch for _, batch in epoch_batches(items, 30, seed=seed, epoch=epoch)]
        for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], seed[0])
