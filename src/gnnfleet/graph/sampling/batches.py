"""The batches of an epoch: slices of one permutation of the items, keyed by seed and epoch.

Items are named by ascending numbers (store ids of nodes, numbers of target edges), so what is in a batch depends
neither on ranks nor on threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gnnfleet.ops.draws import DrawKey, Purpose


def count_batches(items: int, size: int) -> int:
    """How many batches an epoch has; ``size`` 0 takes all items at once."""
    return -(-items // size) if size else 1


def epoch_batches(items: Tensor, size: int, *, seed: int, epoch: int, first: int = 0) -> Iterator[tuple[int, Tensor]]:
    """(number, items) of batches of ``size`` items (the last may be smaller), from number ``first`` on.

    ``items`` [n] int64 are ascending, and so are those of each batch.
    """
    if not size or size >= len(items):
        if not first:
            yield 0, items
        return
    place = DrawKey(seed, epoch).draws(Purpose.ORDER).permutation(len(items)).long()
    dealt = torch.empty_like(items)
    dealt[place] = items
    for number in range(first, count_batches(len(items), size)):
        yield number, dealt[number * size : (number + 1) * size].sort().values
