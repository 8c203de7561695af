"""Fused linear layers: products, bias and ReLU of a chunk of rows that stays in the cache.

``sum_linear`` sums products of several inputs, ``multi_linear`` computes several products of one input.
Justified by benchmarks/full_batch.py (docs/log.md, "Full batch"): this module, pooled buffers and column-major weights
took an epoch of SAGE-256 on 5 M edges from 2.09 to 1.67 s; PyG on CSR takes 5.02 s. Under autocast to bfloat16 results
are bfloat16; operands are rounded only if the CPU multiplies bfloat16, since torch's emulation is slower (4.7 s).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.ops.native import _native, has_bf16, num_threads

# Elements in a chunk of rows.
_CHUNK = 1 << 19


def sum_linear(
    terms: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None = None, *, relu: bool = False, rows: int | None = None
) -> Tensor:
    """``Σ x Wᵀ + bias`` over terms (x [n, in], W [out, in]), then ReLU if ``relu``; of the first ``rows`` rows.

    Terms whose x are adjacent columns of one tensor become one product, unless a gradient of them is needed.
    """
    (first, weight), *_ = terms
    count = first.shape[0] if rows is None else rows
    if first.device.type != "cpu":
        return _sum_linear_reference(terms, bias, relu=relu, rows=count)
    terms = _join(terms)
    rule = _LinearSpec(_kind(first, weight), relu=relu, rows=(count,))
    out: Tensor = _SumLinear.apply(rule, bias, *(x for x, _ in terms), *(w for _, w in terms))  # type: ignore[no-untyped-call]
    return out


def multi_linear(x: Tensor, weights: Sequence[Tensor], *, rows: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """``x Wᵀ`` for every W [out, in], each for as many first rows of x as ``rows`` says."""
    counts = [x.shape[0]] * len(weights) if rows is None else list(rows)
    if x.device.type != "cpu":
        return tuple(functional.linear(x[:count], weight) for weight, count in zip(weights, counts, strict=True))
    rule = _LinearSpec(_kind(x, weights[0]), rows=tuple(counts))
    outs: tuple[Tensor, ...] = _MultiLinear.apply(rule, x, *weights)  # type: ignore[no-untyped-call]
    return outs


def bias_relu(x: Tensor, bias: Tensor | None, *, relu: bool = False, fresh: bool = False) -> Tensor:
    """``x + bias``, then ReLU if ``relu``; in place if x is ``fresh``, that is, used nowhere else."""
    if bias is None:
        return x if not relu else torch.relu_(x) if fresh else torch.relu(x)
    if x.device.type != "cpu" or x.dtype != bias.dtype:
        return torch.relu(x + bias) if relu else x + bias
    out: Tensor = _BiasRelu.apply(x, bias, relu, fresh)  # type: ignore[no-untyped-call]
    return out


def _kind(x: Tensor, weight: Tensor) -> torch.dtype:
    return torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.promote_types(x.dtype, weight.dtype)


def _sum_linear_reference(
    terms: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None, *, relu: bool, rows: int
) -> Tensor:
    total = functional.linear(terms[0][0][:rows], terms[0][1], bias)
    for x, weight in terms[1:]:
        total = total + functional.linear(x[:rows], weight)
    return torch.relu(total) if relu else total


def _join(terms: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Merge terms with adjacent columns: a product over twice the columns runs closer to peak speed."""
    joined = [terms[0]]
    for x, weight in terms[1:]:
        left, before = joined[-1]
        if _adjoin(left, x) and before.dtype == weight.dtype:
            size = (left.shape[0], left.shape[1] + x.shape[1])
            joined[-1] = left.as_strided(size, left.stride()), torch.cat([before, weight], 1)
        else:
            joined.append((x, weight))
    return joined


def _adjoin(left: Tensor, right: Tensor) -> bool:
    """True if the columns of ``right`` follow those of ``left`` in the same tensor."""
    return (
        not left.requires_grad
        and not right.requires_grad
        and left.dtype == right.dtype
        and left.shape[0] == right.shape[0] > 1
        and left.stride() == right.stride()
        and left.stride(1) == 1
        and left.stride(0) >= left.shape[1] + right.shape[1]
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and right.storage_offset() == left.storage_offset() + left.shape[1]
    )


@dataclass(frozen=True)
class _LinearSpec:
    """``kind`` is the dtype of results; ``rows`` is the number of rows of each result."""

    kind: torch.dtype
    rows: tuple[int, ...]
    relu: bool = False

    @property
    def work(self) -> torch.dtype:
        """The dtype of products."""
        return self.kind if self.kind != torch.bfloat16 or has_bf16() else torch.float32

    @property
    def sums(self) -> torch.dtype:
        """The dtype of biases, and of gradients of weights while they are summed over chunks."""
        return torch.promote_types(self.work, torch.float32)


def _chunks(rows: int, width: int) -> Iterator[slice]:
    step = max(64, _CHUNK // max(width, 1))
    return (slice(low, min(low + step, rows)) for low in range(0, rows, step))


class _SumLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: _LinearSpec, bias: Tensor | None, *pairs: Tensor) -> Tensor:
        xs, weights = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        transposed = [weight.to(rule.work).t() for weight in weights]
        offset = None if bias is None else bias.to(rule.sums)
        out = empty_buffer((rule.rows[0], weights[0].shape[0]), rule.kind)
        for chunk in _chunks(*out.shape):
            part = out[chunk] if rule.kind == rule.work else torch.empty(out[chunk].shape, dtype=rule.work)
            for number, (x, weight) in enumerate(zip(xs, transposed, strict=True)):
                _multiply(part, x[chunk].to(rule.work), weight, add=number > 0)
            _end(part, offset, relu=rule.relu)
            if rule.kind != rule.work:
                out[chunk] = part
        ctx.rule, ctx.bias = rule, None if bias is None else bias.dtype
        ctx.save_for_backward(*pairs, *([out] if rule.relu else []))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rule: _LinearSpec = ctx.rule
        saved = list(ctx.saved_tensors)
        out = saved.pop() if rule.relu else None
        xs, weights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        _, wants_bias, *wants = ctx.needs_input_grad
        dbias = torch.zeros(grad.shape[1], dtype=rule.sums) if wants_bias else None
        dxs = [empty_buffer(x.shape, x.dtype) if want else None for x, want in zip(xs, wants, strict=False)]
        dweights = _zeros(weights, wants[len(xs) :], rule)
        factors = [_by_column(weight.to(rule.work)) for weight in weights]
        for chunk in _chunks(*grad.shape):
            part = _end_back(grad[chunk].to(rule.work), None if out is None else out[chunk].to(rule.work), dbias)
            for x, work, dx, dweight in zip(xs, factors, dxs, dweights, strict=True):
                if dweight is not None:
                    _add_product(dweight, part.t(), x[chunk].to(rule.work))
                if dx is not None:
                    _multiply(dx[chunk], part, work)
        for dx in dxs:
            if dx is not None:
                dx[rule.rows[0] :].zero_()
        return None, None if dbias is None else dbias.to(ctx.bias), *dxs, *_as(dweights, weights)


class _MultiLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: _LinearSpec, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        transposed = [weight.to(rule.work).t() for weight in weights]
        outs = [
            empty_buffer((rows, weight.shape[0]), rule.kind) for rows, weight in zip(rule.rows, weights, strict=True)
        ]
        for chunk in _chunks(*x.shape):
            part = x[chunk].to(rule.work)
            for out, weight in zip(outs, transposed, strict=True):
                target = out[chunk]  # shorter than the chunk, or empty, if x has more rows
                _multiply(target, part[: len(target)], weight)
        ctx.rule = rule
        ctx.save_for_backward(x, *weights)
        return tuple(outs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rule: _LinearSpec = ctx.rule
        x, *weights = ctx.saved_tensors
        _, wants_x, *wants = ctx.needs_input_grad
        dx = empty_buffer(x.shape, x.dtype) if wants_x else None
        dweights = _zeros(weights, wants, rule)
        factors = [_by_column(weight.to(rule.work)) for weight in weights]
        for chunk in _chunks(*x.shape):
            rows = x[chunk].to(rule.work)
            total = None if dx is None else dx[chunk] if dx.dtype == rule.work else rows.new_empty(rows.shape)
            parts = [grad[chunk].to(rule.work) for grad in grads]
            done = 0  # rows of ``total`` that are set
            for part, work, dweight in zip(parts, factors, dweights, strict=True):
                if dweight is not None:
                    _add_product(dweight, part.t(), rows[: len(part)])
                if total is not None:
                    if done:
                        total[done : len(part)].zero_()
                    _multiply(total[: len(part)], part, work, add=done > 0)
                    done = max(done, len(part))
            if total is not None and dx is not None:
                total[done:].zero_()
                if dx.dtype != rule.work:
                    dx[chunk] = total
        return None, dx, *_as(dweights, weights)


class _BiasRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, relu: bool, fresh: bool) -> Tensor:
        out = x if fresh else empty_buffer(x.shape, x.dtype)
        if fresh:
            ctx.mark_dirty(x)
        for chunk in _chunks(*x.shape):
            if not fresh:
                out[chunk] = x[chunk]
            _end(out[chunk], bias, relu=relu)
        ctx.save_for_backward(*([out] if relu else []))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        dbias = torch.zeros(grad.shape[1], dtype=grad.dtype)
        dx = _end_back(grad, ctx.saved_tensors[0] if ctx.saved_tensors else None, dbias)
        return dx, dbias, None, None


def _zeros(weights: Sequence[Tensor], wants: Sequence[bool], rule: _LinearSpec) -> list[Tensor | None]:
    return [torch.zeros(w.shape, dtype=rule.sums) if want else None for w, want in zip(weights, wants, strict=True)]


def _as(sums: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
    return [None if total is None else total.to(tensor.dtype) for total, tensor in zip(sums, like, strict=True)]


def _end(rows: Tensor, bias: Tensor | None, *, relu: bool) -> None:
    """``rows += bias``, then ReLU, in one pass."""
    if bias is None and not relu:
        return
    _native.epilogue(rows, bias, relu, num_threads(rows.numel()))


def _end_back(grad: Tensor, out: Tensor | None, sums: Tensor | None) -> Tensor:
    """``grad`` masked to positive elements of ``out``, if given; its column sums are added to ``sums``."""
    grad = grad.contiguous()
    part = grad if out is None else empty_buffer(grad.shape, grad.dtype)
    if out is not None or sums is not None:
        _native.epilogue_back(grad, out, None if out is None else part, sums, num_threads(grad.numel()))
    return part


def _by_column(matrix: Tensor) -> Tensor:
    """The same matrix in column-major order: as right factor of tall products 245 instead of 193 GFLOP/s."""
    return matrix.t().contiguous().t()


def _multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """``out = a b``, or ``out += a b``."""
    if out.dtype != a.dtype:
        out.copy_(a @ b)
    elif add:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:  # products in bfloat16 are summed in float32, inside a chunk and over chunks
        total += a @ b
