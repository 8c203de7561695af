"""Products with float32 results: under autocast to bfloat16 only their operands are rounded.

The product rounds while it packs its operands (``csrc/product.cpp``), so no tensor is converted. If the CPU does not
multiply bfloat16, operands are rounded and multiplied in float32. n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.ops.linear import sum_linear
from gnnfleet.ops.native import _native, num_threads


def rounds_operands(*operands: Tensor) -> bool:
    """True if products round these operands."""
    return torch.is_autocast_enabled("cpu") and all(
        x.dtype == torch.float32 and x.device.type == "cpu" for x in operands
    )


def rounded_matmul(
    out: Tensor, a: Tensor, b: Tensor, *, rounded: bool, add: bool = False, bias: Tensor | None = None
) -> Tensor:
    """``out = a b (+ bias)``, or ``out += a b``; operands have contiguous rows or columns."""
    if rounded and _native.has_product():
        _native.product(a, b, out, bias, add, num_threads(out.numel() * a.shape[1]))
        return out
    if rounded:
        a, b = a.bfloat16().float(), b.bfloat16().float()
    if add:
        return out.addmm_(a, b)
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def sum_linear_float32(terms: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None = None) -> Tensor:
    """``Σ x Wᵀ + bias`` over terms (x [n, in], W [out, in]), in float32 even under autocast; float64 stays float64."""
    operands = [operand for term in terms for operand in term]
    if not rounds_operands(*operands):
        plain = sum_linear(terms, bias)
        return plain.float() if plain.dtype == torch.bfloat16 else plain
    out: Tensor = _RoundedSumLinear.apply(bias, *(x for x, _ in terms), *(w for _, w in terms))  # type: ignore[no-untyped-call]
    return out


def linear_float32(lin: torch.nn.Linear, x: Tensor) -> Tensor:
    """A ``torch.nn.Linear`` on rows x."""
    return sum_linear_float32([(x, lin.weight)], lin.bias)


class _RoundedSumLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor | None, *pairs: Tensor) -> Tensor:
        xs, weights = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        xs = tuple(x.contiguous() for x in xs)
        out = empty_buffer((xs[0].shape[0], weights[0].shape[0]), xs[0].dtype)
        for number, (x, weight) in enumerate(zip(xs, weights, strict=True)):
            rounded_matmul(out, x, weight.t(), rounded=True, add=number > 0, bias=bias if number == 0 else None)
        ctx.save_for_backward(*xs, *weights)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, grad = ctx.saved_tensors, grad.contiguous()
        xs, weights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        wants_bias, *wants = ctx.needs_input_grad
        dxs = [
            rounded_matmul(empty_buffer(x.shape, x.dtype), grad, weight, rounded=True) if want else None
            for x, weight, want in zip(xs, weights, wants, strict=False)
        ]
        dweights = [
            rounded_matmul(torch.empty(weight.shape), grad.t(), x, rounded=True) if want else None
            for x, weight, want in zip(xs, weights, wants[len(xs) :], strict=True)
        ]
        return grad.sum(0) if wants_bias else None, *dxs, *dweights
