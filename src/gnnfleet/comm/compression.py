"""Wire compression of rows: exact, rounded to bfloat16, or int8 with a scale per row.

int8 uses error feedback: the rounding error of a row is added to the same row of the same message in the next step.
Messages of a step are identified by their number, which is the same in every step and on every rank. Only float32 and
float64 rows are rounded. F columns.
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
    """Encodes rows and keeps the rounding errors of int8. ``begin_step`` restarts the numbering of messages."""

    format: WireFormat = "exact"
    _number: int = 0
    _residuals: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def begin_step(self) -> None:
        self._number = 0

    def next_exchange(self) -> int:
        self._number += 1
        return self._number

    def encoded_shapes(self, width: int, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
        """(columns, dtype) of the tensors that rows are encoded as."""
        if self.format == "exact" or not dtype.is_floating_point or dtype.itemsize < 4:
            return [(width, dtype)]
        return [(width, torch.bfloat16)] if self.format == "bf16" else [(width, torch.int8), (1, torch.float32)]

    def row_bytes(self, rows: Tensor) -> int:
        """Bytes of a row of [n, F] on the wire."""
        return sum(width * dtype.itemsize for width, dtype in self.encoded_shapes(int(rows.shape[1]), rows.dtype))

    def encode(self, rows: Tensor, number: int, table: int) -> list[Tensor]:
        """Encode [n, F] as table ``table`` of exchange ``number``."""
        shapes = self.encoded_shapes(int(rows.shape[1]), rows.dtype)
        if len(shapes) == 1:
            return [rows.to(shapes[0][1])]
        residual = self._residuals.get((number, table))
        target = rows if residual is None or residual.shape != rows.shape else rows + residual
        largest = target.abs().amax(1, keepdim=True) if target.numel() else target.new_zeros(len(target), 1)
        scale = largest.float().div_(_INT8_MAX)
        quantized = (target / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        self._residuals[number, table] = target - self.decode([quantized, scale], rows.dtype)
        return [quantized, scale]

    def decode(self, encoded: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Rows from what ``encode`` returned, up to rounding."""
        rows = encoded[0] if encoded[0].dtype == dtype else encoded[0].to(dtype)
        return rows if len(encoded) == 1 else rows.mul_(encoded[1].to(dtype))
