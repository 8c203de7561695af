"""Dropout whose mask depends on store id, column and key only: equal on all ranks, rebuilt in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.ops.draws import Draws
from gnnfleet.ops.native import _native, num_threads


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
