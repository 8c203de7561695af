"""Aggregation over the in-edges of every row: sum, mean and max, differentiable in features and weights.

Backward is the forward kernel on the transposed structure: every row collects its own inputs, so there are no atomics,
and sums have the same order for any number of threads.
R rows, C columns, E edges, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnfleet.errors import ConfigError
from gnnfleet.ops import reference
from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.native import _native, has_bf16, num_threads

REDUCES = ("sum", "mean", "max")


def aggregate(
    structure: CSR, x: Tensor, *, reduce: str = "sum", weight: Tensor | None = None, ties: Tensor | None = None
) -> Tensor:
    """[R, F]: for each row the sum, mean or maximum of ``weight[e] * x[col[e]]``; 0 for rows without edges.

    bfloat16 rows are summed in float32 and give float32. ``mean`` divides by the number of edges, weighted or not. Max
    takes no weight; of equal values the edge with the lowest of ``ties`` ([E] int64, 0 or more, distinct within
    a row; by default the positions) gets the gradient. NaN counts as the largest value.
    """
    if reduce not in REDUCES:
        raise ConfigError(f"cannot reduce by {reduce!r}: choose one of {', '.join(REDUCES)}")
    if x.shape[0] != structure.num_cols:
        raise ConfigError(f"expected {structure.num_cols} rows of features, found {x.shape[0]}")
    if reduce == "max" and weight is not None:
        raise ConfigError("max takes no edge weights: multiply the features, or use propagate")
    if x.device.type != "cpu":
        return reference.aggregate(structure, x, reduce=reduce, weight=weight, ties=ties)
    shape = x.shape[1:]
    x = x.flatten(1)
    out: Tensor
    if reduce == "max":
        out = _Max.apply(structure, x, ties)  # type: ignore[no-untyped-call]
    else:
        out = _Sum.apply(structure, x, weight, reduce == "mean")  # type: ignore[no-untyped-call]
    return out.reshape(structure.num_rows, *shape)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, structure: CSR, x: Tensor, weight: Tensor | None, mean: bool) -> Tensor:
        scale = inverse_degree(structure, accumulate_dtype(x.dtype)) if mean else None
        ctx.structure, ctx.mean, ctx.dtype = structure, mean, x.dtype
        # Features are needed again for the gradient of weights only.
        ctx.save_for_backward(x if weight is not None and weight.requires_grad else None, weight)
        return sum_rows(structure, x, weight=weight, row_scale=scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        structure: CSR = ctx.structure
        x, weight = ctx.saved_tensors
        scale = inverse_degree(structure, grad.dtype) if ctx.mean else None
        grad = grad.contiguous()
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            transposed, order = structure.transposed
            transposed_weight = None if weight is None else weight[order]
            dx = sum_rows(transposed, grad, weight=transposed_weight, col_scale=scale, dtype=ctx.dtype)
        if ctx.needs_input_grad[2]:
            dweight = edge_dot(structure, grad, x.to(grad.dtype), row_scale=scale).to(weight.dtype).view_as(weight)
        return None, dx, dweight, None


def aggregate_with_self(structure: CSR, x: Tensor, *, mean: bool) -> tuple[Tensor, Tensor]:
    """(sum or mean [R, F], the first R rows of x) as one function, so that both gradients are added in one tensor.

    Separately, the second would cost a pass over rows that are mostly zeros. Both feed products, so where the CPU
    multiplies bfloat16 the sums of bfloat16 rows are rounded at once.
    """
    assert x.device.type == "cpu" and x.dim() == 2 and structure.num_rows <= structure.num_cols == x.shape[0]
    both: tuple[Tensor, Tensor] = _SumWithSelf.apply(structure, x, mean)  # type: ignore[no-untyped-call]
    return both


class _SumWithSelf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, structure: CSR, x: Tensor, mean: bool) -> tuple[Tensor, Tensor]:
        ctx.structure, ctx.mean, ctx.dtype = structure, mean, x.dtype
        ctx.set_materialize_grads(False)
        scale = inverse_degree(structure, accumulate_dtype(x.dtype)) if mean else None
        dtype = x.dtype if has_bf16() else accumulate_dtype(x.dtype)
        return sum_rows(structure, x, row_scale=scale, dtype=dtype), x[: structure.num_rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_self: Tensor | None) -> tuple[Any, ...]:
        structure: CSR = ctx.structure
        if grad is None:
            assert grad_self is not None
            return None, torch.nn.functional.pad(grad_self, (0, 0, 0, structure.num_cols - structure.num_rows)), None
        transposed, _ = structure.transposed
        scale = inverse_degree(structure, accumulate_dtype(grad.dtype)) if ctx.mean else None
        return None, sum_rows(transposed, grad, col_scale=scale, base=grad_self, dtype=ctx.dtype), None


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, structure: CSR, x: Tensor, ties: Tensor | None) -> Tensor:
        state = max_rows(structure, x, ties=ties)
        ctx.structure, ctx.dtype = structure, x.dtype
        ctx.save_for_backward(state.winner, ties)
        return state.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        winner, ties = ctx.saved_tensors
        transposed, positions = ctx.structure.transposed
        return None, max_backward(transposed, grad, winner, ties=ties, positions=positions).to(ctx.dtype), None


def sum_rows(
    structure: CSR,
    x: Tensor,
    *,
    weight: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    base: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``out[rows[i]] += row_scale[i] Σ_e weight[e] col_scale[col[e]] x[col[e]]``; a new output if none is given.

    ``base`` initializes the first rows of a new output, the others are zero. ``dtype`` is that of the new output: the
    dtype of the sums, or bfloat16 for sums in float32.
    """
    x = x.contiguous()
    kind = accumulate_dtype(x.dtype)
    weight = None if weight is None else weight.to(kind).contiguous()
    work = structure.num_edges * x.shape[1]
    if out is None:
        assert rows is None, "compact rows need an output to add to"
        out = empty_buffer((structure.num_rows, x.shape[1]), dtype or kind)
        base = None if base is None else base.to(out.dtype).contiguous()
    else:
        assert base is None
        base = out
    _native.aggregate_sum(
        structure.indptr, structure.col, rows, x, weight, row_scale, col_scale, out, base, num_threads(work)
    )
    return out


@dataclass(frozen=True, eq=False)
class MaxState:
    """A running maximum; valid at any time."""

    out: Tensor  # [R, F] float32 or float64, 0 without edges
    winner: Tensor  # [R, F] int64: ``ties`` of the edge, −1 without edges


def max_rows(structure: CSR, x: Tensor, *, ties: Tensor | None = None) -> MaxState:
    """The maxima of the edges of a structure; without edges the initial state for ``update_max``."""
    shape = (structure.num_rows, x.shape[1])
    state = MaxState(empty_buffer(shape, accumulate_dtype(x.dtype)), empty_buffer(shape, torch.int64))
    update_max(state, structure, x, ties=ties, merge=False)
    return state


def update_max(
    state: MaxState,
    structure: CSR,
    x: Tensor,
    *,
    ties: Tensor | None = None,
    rows: Tensor | None = None,
    merge: bool = True,
) -> None:
    """Add edges in place: row i of the structure is row ``rows[i]`` of the state ([R] int32, distinct).

    Blocks may come in any order if ``ties`` numbers the edges of all blocks; by default it numbers those of one.
    Without ``merge`` the state is overwritten.
    """
    _native.aggregate_max(
        structure.indptr,
        structure.col,
        rows,
        None if ties is None else ties.contiguous(),
        x.contiguous(),
        state.out,
        state.winner,
        merge,
        num_threads(structure.num_edges * x.shape[1]),
    )


def max_backward(
    transposed: CSR,
    grad: Tensor,
    winner: Tensor,
    *,
    ties: Tensor | None = None,
    positions: Tensor | None = None,
    rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``out[rows[j]] += Σ_e grad[col[e]]`` where the winner is e; a new output if none is given.

    ``transposed`` has a row per source and columns that are rows of ``grad`` and ``winner``. The number of edge e is
    ``ties[positions[e]]``, as in forward; without ties the position, without positions its index in transposed.
    """
    add = out is not None
    if out is None:
        assert rows is None, "compact rows need an output to add to"
        out = empty_buffer((transposed.num_rows, grad.shape[1]), grad.dtype)
    numbers = None if ties is None else ties.contiguous()
    work = num_threads(transposed.num_edges * grad.shape[1])
    _native.aggregate_max_back(
        transposed.indptr, transposed.col, rows, numbers, positions, grad.contiguous(), winner, out, add, work
    )
    return out


def edge_dot(
    structure: CSR, a: Tensor, b: Tensor, *, row_scale: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """[E]: ``row_scale[i] <a[i], b[col[e]]>`` for every edge e of row i; a[rows[i]] where rows are given."""
    out = empty_buffer((structure.num_edges,), accumulate_dtype(a.dtype))
    _native.edge_dot(
        structure.indptr,
        structure.col,
        rows,
        a.contiguous(),
        b.contiguous(),
        row_scale,
        out,
        num_threads(structure.num_edges * a.shape[1]),
    )
    return out


def inverse_degree(structure: CSR, dtype: torch.dtype) -> Tensor:
    """[R]: one over the number of edges of a row; 1 for rows without."""
    return structure.indptr.diff().clamp(min=1).to(dtype).reciprocal()


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype == torch.bfloat16:
        return torch.float32
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"aggregation takes float32, float64 and bfloat16, found {dtype}")
    return dtype
