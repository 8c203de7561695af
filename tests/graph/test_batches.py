"""The batches of an epoch hold every item once, in an order that goes by seed and epoch alone."""

from __future__ import annotations

import torch

from gnnfleet.graph.sampling.batches import count_batches, epoch_batches


def test_every_item_once() -> None:
    items = torch.arange(0, 1000, 7)
    for size in (0, 1, 10, 142, 143, 5000):
        numbers, dealt = zip(*epoch_batches(items, size, seed=3, epoch=1), strict=True)
        assert numbers == tuple(range(len(numbers)))
        rest = list(epoch_batches(items, size, seed=3, epoch=1, first=2))
        assert [number for number, _ in rest] == list(numbers[2:])
        assert all(torch.equal(batch, dealt[number]) for number, batch in rest)
        assert len(dealt) == count_batches(len(items), size)
        assert torch.equal(torch.cat(dealt).sort().values, items)
        assert all(torch.equal(batch, batch.sort().values) for batch in dealt)
        assert all(len(batch) == size for batch in dealt[:-1])


def test_another_epoch_is_another_order() -> None:
    items = torch.arange(100)
    first, again, other, seed = (
        [batch for _, batch in epoch_batches(items, 30, seed=seed, epoch=epoch)]
        for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], seed[0])
