"""Cosine features of times; the sines for backward are computed in the same pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnfleet.ops.native import _native, num_threads

_WORK = 16
"""Cost of a cosine in multiply-adds."""


def time_features(since: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[n, T] cos(since · weight + bias) of times [n], with the argument in float64; times have no gradient."""
    if since.device.type != "cpu":
        return torch.cos(since[:, None] * weight + bias)
    out: Tensor = _TimeFeatures.apply(since, weight, bias)  # type: ignore[no-untyped-call]
    return out


class _TimeFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, since: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        cosine, sine = (since.new_empty(len(since), len(weight)) for _ in range(2))
        _native.cosines(since, weight, bias, cosine, sine, num_threads(cosine.numel() * _WORK))
        ctx.save_for_backward(since, sine)
        return cosine

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        since, sine = ctx.saved_tensors
        change = sine * grad
        return None, -(since @ change), -change.sum(0)
