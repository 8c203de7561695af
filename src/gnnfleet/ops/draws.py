"""Random draws as a function of what they are for: Philox4x32-10 under a key, a purpose, a layer, a relation and an id.

Nothing is advanced by drawing: the same words give the same numbers, whatever the thread count and the order of calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from gnnfleet.ops.native import _native, num_threads

# Calls of the generator whose counters are in memory at a time.
_AT_ONCE = 1 << 18


class Purpose(IntEnum):
    """What a draw is for; numbers are part of what makes runs repeatable, so they stay."""

    GENERATE = 1
    ATTENTION = 2
    DROPOUT = 3
    PARAMETERS = 4
    ORDER = 5  # of items in the batches of an epoch
    SAMPLE = 6  # neighbours
    NEGATIVE = 7  # ends of negative edges
    HOLD_OUT = 8  # edges kept from message passing
    DEAL = 9  # nodes to workers
    REMOTE = 10  # nodes that all workers hear of


@dataclass(frozen=True)
class Draws:
    """A family of draws. ``id`` i of a family always gives the same number; ``first`` shifts the ids."""

    seed: int
    purpose: Purpose
    layer: int = 0
    relation: int = 0
    epoch: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.purpose < 255 and 0 <= self.layer < 256 and 0 <= self.relation < 65536

    def at(self, layer: int, relation: int = 0) -> Draws:
        """The family of another layer and relation."""
        return replace(self, layer=layer, relation=relation)

    @property
    def words(self) -> tuple[int, int]:
        """(key, place) as the kernels take them."""
        key = _native.draw_key(self.seed % 2**64, self.epoch, self.step)
        return key, _native.draw_place(int(self.purpose), self.layer, self.relation)

    def uniforms(self, count: int, *, first: int = 0) -> Tensor:
        """[count] float64 in [0, 1)."""
        out = torch.empty(count, dtype=torch.float64)
        _native.draw_uniforms(*self.words, first, out, num_threads())
        return out

    def exponentials(self, count: int, *, first: int = 0) -> Tensor:
        """[count] float64 of mean 1."""
        out = torch.empty(count, dtype=torch.float64)
        _native.draw_exponentials(*self.words, first, out, num_threads())
        return out

    def uniforms_at(self, ids: Tensor, columns: int = 1) -> Tensor:
        """[n, columns] float64 in [0, 1) for int64 ids in any order; column 0 is what ``uniforms`` gives them."""
        turns = -(-columns // 2)  # four words of 32 bits are two numbers
        size = max(1, _AT_ONCE // turns)
        if ids.shape[0] > size:
            starts = range(0, ids.shape[0], size)
            return torch.cat([self.uniforms_at(ids[low : low + size], columns) for low in starts])
        key, place = self.words
        counters = torch.empty(ids.shape[0], turns, 4, dtype=torch.int64)
        counters[..., 0] = (ids & 0xFFFFFFFF)[:, None]
        counters[..., 1] = (ids >> 32)[:, None]
        counters[..., 2] = torch.arange(turns)
        counters[..., 3] = place
        words = philox(counters.view(-1, 4).to(torch.uint32), key).to(torch.int64).view(-1, 2, 2)
        high = words[..., 1] << 21 | words[..., 0] >> 11
        return (high.double() * 2.0**-53).view(ids.shape[0], 2 * turns)[:, :columns]

    def normals_at(self, ids: Tensor, columns: int) -> Tensor:
        """[n, columns] float64 of mean 0 and variance 1, from pairs of uniforms (Box and Muller)."""
        first, second = self.uniforms_at(ids, columns + columns % 2).view(len(ids), -1, 2).unbind(2)
        length, angle = (-2 * (1 - first).log()).sqrt(), 2 * torch.pi * second
        return torch.stack([length * angle.cos(), length * angle.sin()], 2).view(len(ids), -1)[:, :columns]

    def permutation(self, count: int) -> Tensor:
        """[count] int32: where each of 0 … count − 1 goes."""
        out = torch.empty(count, dtype=torch.int32)
        _native.draw_permutation(*self.words, out, num_threads())
        return out


@dataclass(frozen=True)
class DrawKey:
    """What all draws of one training step share."""

    seed: int = 0
    epoch: int = 0
    step: int = 0

    def draws(self, purpose: Purpose, layer: int = 0, relation: int = 0) -> Draws:
        return Draws(self.seed, purpose, layer=layer, relation=relation, epoch=self.epoch, step=self.step)


def philox(counters: Tensor, key: int) -> Tensor:
    """[n, 4] uint32: the bare generator on [n, 4] uint32 counters."""
    out = torch.empty_like(counters)
    _native.philox(key, counters.contiguous(), out)
    return out
