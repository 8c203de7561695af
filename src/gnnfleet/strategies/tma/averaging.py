"""Weights of several trainers made into one: as one flat row each, so that a round is one message either way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FlatLayout:
    """Where each tensor lies in a flat row. Numbers that are not floating point, as counters of batches, stay."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    dtype: torch.dtype  # of the row
    num_learned: int = 0  # numbers at the beginning that are parameters; running statistics follow

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        without: Collection[str] = (),
        parameters: Collection[str] | None = None,
    ) -> FlatLayout:
        """The layout of a state, without some parameters and their optimizer state; ``parameters`` come first."""
        known = set(tensors if parameters is None else parameters)
        kept = {
            name: t
            for name, t in sorted(tensors.items(), key=lambda item: (item[0] not in known, item[0]))
            if t.is_floating_point() and not is_state_of(name, without)
        }
        learnt = sum(t.numel() for name, t in kept.items() if name in known)
        shapes, dtypes = {name: tuple(t.shape) for name, t in kept.items()}, {n: t.dtype for n, t in kept.items()}
        return cls(shapes, dtypes, dtype, learnt)

    @property
    def nbytes(self) -> int:
        return sum(self._sizes) * self.dtype.itemsize

    @property
    def _sizes(self) -> list[int]:
        return [torch.Size(shape).numel() for shape in self.shapes.values()]

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """[size], a copy."""
        flat = [tensors[name].detach().reshape(-1).to(self.dtype) for name in self.shapes]
        return torch.cat(flat) if flat else torch.empty(0, dtype=self.dtype)

    def unpack(self, flat: Tensor) -> dict[str, Tensor]:
        """By name, parts of ``flat``."""
        pieces = torch.split(flat, self._sizes)
        return {
            name: piece.view(self.shapes[name]).to(self.dtypes[name])
            for name, piece in zip(self.shapes, pieces, strict=True)
        }


def is_state_of(key: str, parameters: Collection[str]) -> bool:
    """True for the name of one of the parameters, and for "name/word": what the optimizer holds of one."""
    return key in parameters or key.rpartition("/")[0] in parameters


def weighted_mean(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean, summed in the order given; of one row that row, to the bit."""
    total = sum(weights)
    assert rows and total > 0
    mean = rows[0] * (weights[0] / total)
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        mean += row * (weight / total)
    return mean


def medoid_weights(rows: Sequence[Tensor], weights: Sequence[float], temperature: float) -> list[float]:
    """Less for rows that are far from the others: exp(−Σ_j |row − row_j| / T), T in units of the mean of these sums."""
    far = [float(sum(torch.linalg.vector_norm((row - other).double()) for other in rows)) for row in rows]
    mean = sum(far) / len(far)
    if not mean:
        return list(weights)
    near = torch.softmax(-torch.tensor(far, dtype=torch.float64) / (temperature * mean), 0)
    return [weight * float(share) for weight, share in zip(weights, near, strict=True)]


@dataclass
class OuterOptimizer:
    """What becomes of the average: taken over as it is, or with a momentum from round to round."""

    momentum: float
    velocity: Tensor | None = None

    def step(self, before: Tensor, mean: Tensor, learnt: int) -> Tensor:
        """The next weights, the first ``learnt`` of which have a momentum; ``velocity`` is replaced, not written to."""
        if not self.momentum:
            return mean
        moved = mean[:learnt] - before[:learnt]
        self.velocity = moved if self.velocity is None else self.momentum * self.velocity + moved
        return torch.cat([before[:learnt] + self.velocity, mean[learnt:]])
