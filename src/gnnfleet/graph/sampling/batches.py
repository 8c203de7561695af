"""The batches of an epoch: slices of one permutation of the items, keyed by seed and epoch.

Items are ascending numbers (store ids of nodes, numbers of target edges), so batches depend neither on ranks nor on
threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gnnfleet.ops.draws import DrawKey, Purpose


def count_batches(items: int, size: int) -> int:
    """Number of batches of an epoch; ``size`` 0 puts all items in one."""
    return -(-items // size) if size else 1


def epoch_batches(items: Tensor, size: int, *, seed: int, epoch: int, first: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Yield (number, items) of batches of ``size`` items (the last may be smaller), from number ``first`` on.

    ``items`` [n] int64 are ascending, as are those of each batch.
    """
    if not size or size >= len(items):
        if not first:
            yield 0, items
        return
    permuted = torch.empty_like(items)
    permuted[DrawKey(seed, epoch).draws(Purpose.ORDER).permutation(len(items)).long()] = items
    for number in range(first, count_batches(len(items), size)):
        yield number, permuted[number * size : (number + 1) * size].sort().values
