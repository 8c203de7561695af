"""Distributions of generated datasets: heavy tails, weighted choices, Gaussian rows, R-MAT edges.

Every output depends on the draws and its index only; see ``draws``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.ops.csr import offsets_of
from gnnfleet.ops.draws import Draws
from gnnfleet.ops.native import _native, num_threads

# Rows generated at a time if they are converted afterwards.
_ROWS = 1 << 16


def pareto(draws: Draws, count: int, *, shape: float, limit: float) -> Tensor:
    """[count] float64 between 1 and ``limit`` whose density falls as x^−(shape + 1)."""
    out = torch.empty(count, dtype=torch.float64)
    _native.draw_paretos(*draws.kernel_args, 0, shape, limit, out, num_threads())
    return out


@dataclass(frozen=True)
class WeightedChoice:
    """Choice of items by weight: slot s is item ``table[s]``; group g has slots ``starts[g]:starts[g + 1]``.

    An item has as many slots as its integer weight, so a choice is one random number and one look-up.
    """

    table: Tensor  # [S] int32
    starts: Tensor  # [G + 1] int64

    @classmethod
    def of(cls, weights: Tensor, groups: Tensor | None = None, num_groups: int = 1) -> WeightedChoice:
        """Slots for items 0 … n − 1 by int64 ``weights``, in one group or in int32 ``groups``."""
        if groups is None:
            table = torch.repeat_interleave(torch.arange(weights.shape[0], dtype=torch.int32), weights)
            return cls(table, torch.tensor([0, table.shape[0]]))
        order = torch.argsort(groups, stable=True)
        table = torch.repeat_interleave(order.to(torch.int32), weights[order])
        # Integers only: a scatter-add of floats would depend on the order.
        sums = torch.zeros(num_groups, dtype=torch.int64).index_add_(0, groups.long(), weights)
        return cls(table, offsets_of(sums))

    def draw(self, draws: Draws, groups: Tensor, *, first: int = 0) -> Tensor:
        """[n] int32: an item for each of n int32 groups, −1 for an empty group."""
        out = torch.empty(groups.shape[0], dtype=torch.int32)
        _native.draw_slots(*draws.kernel_args, first, self.table, self.starts, groups.contiguous(), out, num_threads())
        return out

    def draw_any(self, draws: Draws, count: int, *, first: int = 0) -> Tensor:
        """[count] int32 from all groups."""
        whole = WeightedChoice(self.table, torch.tensor([0, self.table.shape[0]]))
        return whole.draw(draws, torch.zeros(count, dtype=torch.int32), first=first)


def integer_weights(draws: Draws, weights: Tensor, *, scale: float) -> Tensor:
    """Weights times ``scale`` as int64, rounded up or down at random, at least 1."""
    # No normalising by the sum: a floating-point sum depends on the number of threads.
    return (weights * scale + draws.uniforms(weights.shape[0])).floor().long().clamp_(min=1)


def normal_rows(draws: Draws, count: int, width: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """[count, width] standard normal."""
    return _in_blocks(
        count, width, dtype, lambda first, out: _native.draw_rows(*draws.kernel_args, first, out, num_threads())
    )


def normal_rows_around(
    draws: Draws, centres: Tensor, groups: Tensor, *, scale: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[n, width]: scale · centres[groups] plus standard normal noise; int32 groups, float32 centres."""
    assert not groups.numel() or (int(groups.min()) >= 0 and int(groups.max()) < centres.shape[0])

    def fill(first: int, out: Tensor) -> None:
        part = groups[first : first + out.shape[0]]
        _native.draw_rows_around(*draws.kernel_args, first, centres, part, scale, out, num_threads())

    return _in_blocks(groups.shape[0], centres.shape[1], dtype, fill)


def rmat(
    draws: Draws, count: int, *, nodes: int, quadrants: tuple[float, float, float, float], first: int = 0
) -> tuple[Tensor, Tensor]:
    """([count], [count]) int32 ends of R-MAT edges over ``nodes`` nodes."""
    src = torch.empty(count, dtype=torch.int32)
    dst = torch.empty(count, dtype=torch.int32)
    shares = torch.tensor(quadrants, dtype=torch.float64)
    _native.draw_rmat(*draws.kernel_args, first, max(nodes - 1, 0).bit_length(), nodes, shares, src, dst, num_threads())
    return src, dst


def pair_hash(draws: Draws, a: Tensor, b: Tensor) -> Tensor:
    """[n] int64, different for different pairs of int32 nodes, the same in both directions."""
    out = torch.empty(a.shape[0], dtype=torch.int64)
    _native.draw_pairs(*draws.kernel_args, a.contiguous(), b.contiguous(), out, num_threads())
    return out


def _in_blocks(count: int, width: int, dtype: torch.dtype, fill: Callable[[int, Tensor], None]) -> Tensor:
    """Rows generated in float32, in blocks if they are converted to another dtype."""
    out = torch.empty((count, width), dtype=dtype)
    if dtype == torch.float32:
        fill(0, out)
        return out
    for first in range(0, count, _ROWS):
        block = torch.empty((min(_ROWS, count - first), width))
        fill(first, block)
        out[first : first + _ROWS] = block.to(dtype)
    return out
