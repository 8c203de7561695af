"""Keyed random draws: Philox4x32-10 of a key, purpose, layer, relation and id.

There is no generator state: the same arguments give the same numbers for any number of threads and order of calls.
Dropout masks depend on store id, column and key only: they are equal on all ranks and rebuilt in backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.ops.native import _native, num_threads

# Generator calls whose counters are in memory at a time.
_AT_ONCE = 1 << 18


class Purpose(IntEnum):
    """Purpose of a draw; the values affect results, so they never change."""

    GENERATE = 1
    ATTENTION = 2
    DROPOUT = 3
    PARAMETERS = 4
    ORDER = 5  # of items in the batches of an epoch
    SAMPLE = 6  # neighbours
    NEGATIVE = 7  # ends of negative edges
    HOLD_OUT = 8  # edges kept from message passing
    DEAL = 9  # nodes to workers
    REMOTE = 10  # nodes that all workers get


@dataclass(frozen=True)
class Draws:
    """A family of draws. Id i of a family always gives the same number; ``first`` shifts the ids."""

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
    def kernel_args(self) -> tuple[int, int]:
        """(key, stream) as the kernels take them; the stream packs purpose, layer and relation."""
        key = _native.draw_key(self.seed % 2**64, self.epoch, self.step)
        return key, _native.draw_place(int(self.purpose), self.layer, self.relation)

    def uniforms(self, count: int, *, first: int = 0) -> Tensor:
        """[count] float64 in [0, 1)."""
        out = torch.empty(count, dtype=torch.float64)
        _native.draw_uniforms(*self.kernel_args, first, out, num_threads())
        return out

    def exponentials(self, count: int) -> Tensor:
        """[count] float64 of mean 1."""
        out = torch.empty(count, dtype=torch.float64)
        _native.draw_exponentials(*self.kernel_args, 0, out, num_threads())
        return out

    def uniforms_at(self, ids: Tensor, columns: int = 1) -> Tensor:
        """[n, columns] float64 in [0, 1) for int64 ids in any order; column 0 equals ``uniforms``."""
        size = max(1, 2 * _AT_ONCE // (columns + columns % 2))
        if ids.shape[0] > size:
            starts = range(0, ids.shape[0], size)
            return torch.cat([self.uniforms_at(ids[low : low + size], columns) for low in starts])
        low, high = self.integers_at(ids, 2 * columns).view(len(ids), columns, 2).unbind(2)
        return (high << 21 | low >> 11).double() * 2.0**-53

    def integers_at(self, ids: Tensor, columns: int) -> Tensor:
        """[n, columns] int64 from 0 to 2^32 − 1 for int64 ids in any order."""
        calls = -(-columns // 4)
        key, stream = self.kernel_args
        counters = torch.empty(ids.shape[0], calls, 4, dtype=torch.int64)
        counters[..., 0] = (ids & 0xFFFFFFFF)[:, None]
        counters[..., 1] = (ids >> 32)[:, None]
        counters[..., 2] = torch.arange(calls)
        counters[..., 3] = stream
        integers = philox(counters.view(-1, 4).to(torch.uint32), key).to(torch.int64)
        return integers.view(ids.shape[0], 4 * calls)[:, :columns]

    def normals_at(self, ids: Tensor, columns: int) -> Tensor:
        """[n, columns] float64 of mean 0 and variance 1, from pairs of uniforms (Box and Muller)."""
        first, second = self.uniforms_at(ids, columns + columns % 2).view(len(ids), -1, 2).unbind(2)
        length, angle = (-2 * (1 - first).log()).sqrt(), 2 * torch.pi * second
        return torch.stack([length * angle.cos(), length * angle.sin()], 2).view(len(ids), -1)[:, :columns]

    def permutation(self, count: int) -> Tensor:
        """[count] int32: the position of each of 0 … count − 1."""
        out = torch.empty(count, dtype=torch.int32)
        _native.draw_permutation(*self.kernel_args, out, num_threads())
        return out


@dataclass(frozen=True)
class DrawKey:
    """The key of all draws of a training step."""

    seed: int = 0
    epoch: int = 0
    step: int = 0

    def draws(self, purpose: Purpose, layer: int = 0, relation: int = 0) -> Draws:
        return Draws(self.seed, purpose, layer=layer, relation=relation, epoch=self.epoch, step=self.step)


def philox(counters: Tensor, key: int) -> Tensor:
    """[n, 4] uint32: the generator on [n, 4] uint32 counters."""
    out = torch.empty_like(counters)
    _native.philox(key, counters.contiguous(), out)
    return out


def dropout(x: Tensor, p: float, *, ids: Tensor, draws: Draws) -> Tensor:
    """``x`` [n, …] with elements zeroed with probability ``p`` and the others scaled by 1 / (1 − p); ids [n] int64."""
    if not 0 <= p < 1:
        raise ConfigError(f"dropout must be at least 0 and below 1, found {p}")
    if p == 0:
        return x
    if x.device.type != "cpu":
        return x * dropout_mask(x.shape, p, ids=ids, draws=draws).to(x)
    out: Tensor = _Dropout.apply(x, p, ids, draws)  # type: ignore[no-untyped-call]
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, ids: Tensor, draws: Draws) -> Tensor:
        ctx.rule = p, ids, draws
        ctx.set_materialize_grads(False)  # None stays None: optimizers treat it differently from zeros
        return _drop(x, *ctx.rule)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        return None if grad is None else _drop(grad, *ctx.rule), None, None, None


def _drop(x: Tensor, p: float, ids: Tensor, draws: Draws) -> Tensor:
    kind = torch.float32 if x.dtype == torch.float16 else x.dtype
    rows = x.to(kind).flatten(1).contiguous()
    out = empty_buffer(rows.shape, kind)
    key, stream = draws.kernel_args
    _native.dropout_rows(rows, ids, key, stream, drop_threshold(p), 1 / (1 - p), out, num_threads(rows.numel()))
    return out.view(x.shape).to(x.dtype)


def drop_threshold(p: float) -> int:
    """The bound of 32-bit draws below which elements are dropped."""
    return min(round(p * 2**32), 2**32 - 1)


def dropout_mask(shape: torch.Size, p: float, *, ids: Tensor, draws: Draws) -> Tensor:
    """The factors in plain torch: reference of the kernel, and the path on other devices."""
    integers = draws.integers_at(ids.cpu(), shape[1:].numel())
    return ((integers >= drop_threshold(p)).double() / (1 - p)).view(shape)
