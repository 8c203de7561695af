"""A GRU cell in products and one pass over its gates (``csrc/gates.cpp``), forward and back.

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
"""Multiply-adds that a number costs in the gates."""


def gru(known: Sequence[Tensor], memory: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """[n, D] of a GRU cell that reads ``known`` [n, …] side by side and holds ``memory`` [n, D].

    ``weights`` are those of torch.nn.GRUCell: weight_ih, weight_hh, bias_ih, bias_hh.
    """
    if memory.device.type != "cpu":
        made: Tensor = torch.gru_cell(torch.cat(list(known), 1), memory, *weights)
        return made
    out: Tensor = _Gru.apply(rounds_operands(*known, memory, *weights), memory, *weights, *known)  # type: ignore[no-untyped-call]
    return out


class _Gru(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rounded: bool, memory: Tensor, *tensors: Tensor) -> Tensor:
        (by_known, by_memory, known_bias, memory_bias), known = tensors[:4], [x.contiguous() for x in tensors[4:]]
        memory = memory.contiguous()
        given, kept = (empty_buffer((len(memory), len(weight)), memory.dtype) for weight in (by_known, by_memory))
        pieces = by_known.split_with_sizes([x.shape[1] for x in known], 1)
        for number, (x, weight) in enumerate(zip(known, pieces, strict=True)):
            rounded_matmul(given, x, weight.t(), rounded=rounded, add=number > 0, bias=None if number else known_bias)
        rounded_matmul(kept, memory, by_memory.t(), rounded=rounded, bias=memory_bias)
        out = torch.empty_like(memory)
        _native.gates(given, kept, memory, out, num_threads(given.numel() * _GATE))
        ctx.rounded = rounded
        ctx.save_for_backward(memory, by_known, by_memory, given, kept, *known)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        memory, by_known, by_memory, given, kept, *known = ctx.saved_tensors
        rounded, grad = ctx.rounded, grad.contiguous()
        dgiven, dkept = (empty_buffer(each.shape, each.dtype) for each in (given, kept))
        _native.gates_back(given, kept, memory, grad, dgiven, dkept, num_threads(given.numel() * _GATE))
        widths = [x.shape[1] for x in known]
        dby_known, dby_memory = torch.empty_like(by_known), torch.empty_like(by_memory)
        for x, part in zip(known, dby_known.split_with_sizes(widths, 1), strict=True):
            rounded_matmul(part, dgiven.t(), x, rounded=rounded)
        rounded_matmul(dby_memory, dkept.t(), memory, rounded=rounded)
        dmemory = None
        if ctx.needs_input_grad[1]:
            width = memory.shape[1]
            dmemory = grad * given[:, width : 2 * width]  # the gate that keeps
            rounded_matmul(dmemory, dkept, by_memory, rounded=rounded, add=True)
        dknown = [
            rounded_matmul(torch.empty_like(x), dgiven, part, rounded=rounded) if want else None
            for x, part, want in zip(known, by_known.split_with_sizes(widths, 1), ctx.needs_input_grad[6:], strict=True)
        ]
        return None, dmemory, dby_known, dby_memory, dgiven.sum(0), dkept.sum(0), *dknown
