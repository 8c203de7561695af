"""Averages of the trainers' weights, packed into one flat row per trainer, so that an update is one message."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FlatLayout:
    """Positions of tensors in a flat row. Integer tensors, such as batch counters, are left out."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    dtype: torch.dtype  # of the row
    num_learned: int = 0  # leading numbers that are parameters; running statistics follow

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        without: Collection[str] = (),
        parameters: Collection[str] | None = None,
    ) -> FlatLayout:
        """The layout of a state, without some parameters and their optimizer state; ``parameters`` come first."""
        learned = set(tensors if parameters is None else parameters)
        packed = {
            name: t
            for name, t in sorted(tensors.items(), key=lambda item: (item[0] not in learned, item[0]))
            if t.is_floating_point() and not is_state_of(name, without)
        }
        shapes = {name: tuple(t.shape) for name, t in packed.items()}
        num_learned = sum(t.numel() for name, t in packed.items() if name in learned)
        return cls(shapes, {name: t.dtype for name, t in packed.items()}, dtype, num_learned)

    @classmethod
    def of_model(cls, model: torch.nn.Module, dtype: torch.dtype, *, without: Collection[str]) -> FlatLayout:
        """The layout of a model's state, without some embeddings."""
        # A layer that is used twice has two names in the state; both are parameters.
        parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        return cls.of(model.state_dict(), dtype, without, parameters)

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

    def unpack(self, row: Tensor) -> dict[str, Tensor]:
        """Tensors by name; views of ``row`` where dtypes agree."""
        tensors = zip(self.shapes.items(), torch.split(row, self._sizes), strict=True)
        return {name: flat.view(shape).to(self.dtypes[name]) for (name, shape), flat in tensors}


def is_state_of(key: str, parameters: Collection[str]) -> bool:
    """True for the name of one of the parameters, and for ``name/key``: a tensor of its optimizer state."""
    return key in parameters or key.rpartition("/")[0] in parameters


def weighted_mean(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean, summed in the order of ``rows``. The mean of one row is that row, bit for bit."""
    total = sum(weights)
    assert rows and total > 0
    mean = rows[0] * (weights[0] / total)
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        mean += row * (weight / total)
    return mean
