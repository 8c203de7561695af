"""Kernels of temporal models: a GRU cell with one fused pass over its gates (``csrc/gates.cpp``), cosines of times.

n rows, D columns of a memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.ops.native import _native, num_threads
from gnnfleet.ops.rounded_matmul import rounded_matmul, rounds_operands

_GATE = 16
"""Multiply-adds that an element costs in the gates."""


def gru(inputs: Sequence[Tensor], memory: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """[n, D] output of a GRU cell with concatenated ``inputs`` [n, …] and hidden state ``memory`` [n, D].

    ``weights`` are those of torch.nn.GRUCell: weight_ih, weight_hh, bias_ih, bias_hh.
    """
    if memory.device.type != "cpu":
        return torch.gru_cell(torch.cat(list(inputs), 1), memory, *weights)
    out: Tensor = _Gru.apply(rounds_operands(*inputs, memory, *weights), memory, *weights, *inputs)  # type: ignore[no-untyped-call]
    return out


class _Gru(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rounded: bool, memory: Tensor, *tensors: Tensor) -> Tensor:
        (weight_ih, weight_hh, bias_ih, bias_hh), inputs = tensors[:4], [x.contiguous() for x in tensors[4:]]
        memory = memory.contiguous()
        gates_ih, gates_hh = (
            empty_buffer((len(memory), len(weight)), memory.dtype) for weight in (weight_ih, weight_hh)
        )
        columns = weight_ih.split_with_sizes([x.shape[1] for x in inputs], 1)
        for number, (x, weight) in enumerate(zip(inputs, columns, strict=True)):
            rounded_matmul(gates_ih, x, weight.t(), rounded=rounded, add=number > 0, bias=None if number else bias_ih)
        rounded_matmul(gates_hh, memory, weight_hh.t(), rounded=rounded, bias=bias_hh)
        out = torch.empty_like(memory)
        _native.gates(gates_ih, gates_hh, memory, out, num_threads(gates_ih.numel() * _GATE))
        ctx.rounded = rounded
        ctx.save_for_backward(memory, weight_ih, weight_hh, gates_ih, gates_hh, *inputs)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        memory, weight_ih, weight_hh, gates_ih, gates_hh, *inputs = ctx.saved_tensors
        rounded, grad = ctx.rounded, grad.contiguous()
        dgates_ih, dgates_hh = (empty_buffer(gates.shape, gates.dtype) for gates in (gates_ih, gates_hh))
        _native.gates_back(
            gates_ih, gates_hh, memory, grad, dgates_ih, dgates_hh, num_threads(gates_ih.numel() * _GATE)
        )
        widths = [x.shape[1] for x in inputs]
        dweight_ih, dweight_hh = torch.empty_like(weight_ih), torch.empty_like(weight_hh)
        for x, part in zip(inputs, dweight_ih.split_with_sizes(widths, 1), strict=True):
            rounded_matmul(part, dgates_ih.t(), x, rounded=rounded)
        rounded_matmul(dweight_hh, dgates_hh.t(), memory, rounded=rounded)
        dmemory = None
        if ctx.needs_input_grad[1]:
            width = memory.shape[1]
            dmemory = grad * gates_ih[:, width : 2 * width]  # the update gate
            rounded_matmul(dmemory, dgates_hh, weight_hh, rounded=rounded, add=True)
        dinputs = [
            rounded_matmul(torch.empty_like(x), dgates_ih, part, rounded=rounded) if want else None
            for x, part, want in zip(
                inputs, weight_ih.split_with_sizes(widths, 1), ctx.needs_input_grad[6:], strict=True
            )
        ]
        return None, dmemory, dweight_ih, dweight_hh, dgates_ih.sum(0), dgates_hh.sum(0), *dinputs


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
