"""How numbers are written on the wire: as they are, rounded to bfloat16, or as int8 with a scale for each row.

int8 rounds off much, so what was lost of a row is added to the same row of the same message in the next step (error
feedback): over steps everything arrives. Messages of a step are told apart by their number, which is the same in every
step and on every rank. Only float32 and float64 rows are rounded. F columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

WireFormat = Literal["exact", "bf16", "int8"]

_INT8_MAX = 127.0


@dataclass(eq=False)
class WireCodec:
    """One way to write rows; it remembers what int8 has lost. ``begin_step`` starts the numbers of a step anew."""

    format: WireFormat = "exact"
    _number: int = 0
    _residuals: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def begin_step(self) -> None:
        self._number = 0

    def next_exchange(self) -> int:
        """The number of the next exchange."""
        self._number += 1
        return self._number

    def encoded_shapes(self, width: int, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
        """(columns, dtype) of the tensors that rows are written as."""
        if self.format == "exact" or not dtype.is_floating_point or dtype.itemsize < 4:
            return [(width, dtype)]
        return [(width, torch.bfloat16)] if self.format == "bf16" else [(width, torch.int8), (1, torch.float32)]

    def row_bytes(self, rows: Tensor) -> int:
        """What a row of [n, F] takes on the wire."""
        return sum(width * dtype.itemsize for width, dtype in self.encoded_shapes(int(rows.shape[1]), rows.dtype))

    def encode(self, rows: Tensor, number: int, lane: int) -> list[Tensor]:
        """[n, F] as it travels; ``lane`` tells several tables of one exchange apart."""
        forms = self.encoded_shapes(int(rows.shape[1]), rows.dtype)
        if len(forms) == 1:
            return [rows.to(forms[0][1])]
        lost = self._residuals.get((number, lane))
        meant = rows if lost is None or lost.shape != rows.shape else rows + lost
        highest = meant.abs().amax(1, keepdim=True) if meant.numel() else meant.new_zeros(len(meant), 1)
        scale = highest.float().div_(_INT8_MAX)
        written = (meant / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        self._residuals[number, lane] = meant - self.decode([written, scale], rows.dtype)
        return [written, scale]

    def decode(self, written: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """What ``encode`` was given, as far as it arrived."""
        rows = written[0] if written[0].dtype == dtype else written[0].to(dtype)
        return rows if len(written) == 1 else rows.mul_(written[1].to(dtype))

    def residual_bytes(self) -> int:
        """Bytes that are kept of what was rounded off."""
        return sum(tensor.nbytes for tensor in self._residuals.values())
