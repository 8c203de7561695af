"""The pieces ``propagate`` is made of: edges come in blocks, in any order, each with sources of its own.

A view whose graph is spread over ranks gives blocks as they arrive, and in backward once more, since messages are
rebuilt there; ``propagate`` is the case of one block. A block is worked through some edges at a time. Sums are of the
message's dtype, or of float32 where that has 16 bits. R destinations, E edges, H heads; W numbers a row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnfleet.ops import reference
from gnnfleet.ops.aggregate import MaxState, max_backward, sum_rows, update_max
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.message import (
    LeafKey,
    MessageBlock,
    MessageCall,
    MessageChunk,
    build_message,
    empty_message,
    message_chunks,
)


@dataclass(eq=False)
class PropagateState:
    """Running results of every destination; made when the first message shows its shape."""

    shape: torch.Size = field(default_factory=torch.Size)  # of a row
    total: Tensor | None = None  # [R, W] sums or maxima; for softmax Σ exp(score − top) value
    side: Tensor | None = None  # mean: [R] edges; max: [R, W] winners; softmax: [R, H] top
    den: Tensor | None = None  # [R, H] for softmax: Σ exp(score − top)
    like: MessageBlock | None = None  # the first block: what rows look like, should there be no edges at all


def update_propagate(state: PropagateState, call: MessageCall, block: MessageBlock) -> None:
    """Add the edges of a block to the state, in place; a new ``PropagateState()`` has none."""
    assert call.reduce != "max" or block.ties is not None or state.like is None, "several blocks need ties"
    state.like = block if state.like is None else state.like
    with torch.no_grad():
        for chunk in message_chunks(block):
            parts = build_message(call, block, chunk)[0]
            total = _opened(state, call, parts)
            if call.reduce == "softmax":
                _add_softmax(state, chunk, *parts)
            elif call.reduce == "max":
                assert state.side is not None
                _add_max(MaxState(total, state.side), chunk, parts[0], _ties(block, chunk))
            else:
                _add_runs(total, chunk, parts[0])
                if state.side is not None:
                    state.side[chunk.target] += chunk.runs.diff()


def finish_propagate(state: PropagateState, call: MessageCall) -> tuple[Tensor, Tensor | None]:
    """(result [R, …], what backward needs besides); at least one block was given, maybe without edges."""
    if state.total is None:
        assert state.like is not None
        with torch.no_grad():
            _opened(state, call, empty_message(call, state.like))
    total, side = state.total, state.side
    assert total is not None
    if call.reduce == "mean":
        assert side is not None
        total /= side.clamp(min=1).to(total.dtype)[:, None]
    elif call.reduce == "softmax":
        assert state.den is not None and side is not None
        some = state.den > 0
        _by_head(total, state.den).div_(state.den.where(some, 1.0)[..., None])
        side = torch.where(some, side + state.den.log(), 0.0)  # lse
    return total.view(call.num_dst, *state.shape), side


@dataclass(frozen=True, eq=False)
class UpstreamGradient:
    """What edges need to know of a destination in backward."""

    grad: Tensor  # [R, W], for mean divided by the number of edges
    side: Tensor | None = None  # max: winners; softmax: lse
    dee: Tensor | None = None  # [R, H] for softmax: <grad, out>


def begin_backward(call: MessageCall, grad: Tensor, *, out: Tensor | None, side: Tensor | None) -> UpstreamGradient:
    """All a destination can do alone; ``out`` (for softmax only) and ``side`` are what ``finish_propagate`` gave."""
    flat = grad.reshape(call.num_dst, grad.shape[1:].numel()).contiguous()
    if call.reduce == "mean":
        assert side is not None
        return UpstreamGradient(flat / side.clamp(min=1).to(flat.dtype)[:, None])
    if call.reduce != "softmax":
        return UpstreamGradient(flat, side)
    assert side is not None and out is not None
    return UpstreamGradient(flat, side, _by_head(flat * out.reshape(flat.shape), side).sum(-1))


@dataclass(frozen=True, eq=False)
class PropagateGradients:
    """What all blocks add to: gradients of the destinations and parameters that are wanted."""

    dst: Mapping[str, Tensor]
    params: Mapping[int, Tensor]


def open_gradients(call: MessageCall, *, dst: Collection[str], params: Collection[int]) -> PropagateGradients:
    """Zeros; float32 for tensors of 16 bits."""
    return PropagateGradients(
        {name: _zeros(call.dst[name]) for name in dst}, {i: _zeros(call.params[i]) for i in params}
    )


def block_backward(
    call: MessageCall,
    upstream: UpstreamGradient,
    block: MessageBlock,
    *,
    into: PropagateGradients,
    src: Collection[str] = (),
    edge: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """{name: [columns, …]} gradients of those of the block's sources that ``src`` names, in their dtype.

    ``into`` is added to, in place. ``edge`` has tensors like the block's, in which the rows of its edges are written;
    those of inputs that the message makes no use of stay as they are. Raises ConfigError as ``build_message`` does.
    """
    edge = edge or {}
    found = {name: _zeros(block.src[name]) for name in src}
    wanted: list[LeafKey] = [("src", name) for name in src]
    wanted += [("dst", name) for name in into.dst] + [("edge", name) for name in edge]
    wanted += [("params", i) for i in into.params]
    for chunk in message_chunks(block):
        for (group, name), part in _pull(call, upstream, block, chunk, wanted).items():
            if group == "edge":
                edge[str(name)][chunk.edges] = part
            elif group == "src":
                _add_columns(found[str(name)], block.structure.col[chunk.edges], part)
            elif group == "dst":
                _add_runs(_flat(into.dst[str(name)]), chunk, part)
            else:
                into.params[int(name)].add_(part)
    return {name: total.to(block.src[name].dtype) for name, total in found.items()}


def _pull(
    call: MessageCall, upstream: UpstreamGradient, block: MessageBlock, chunk: MessageChunk, wanted: list[LeafKey]
) -> dict[LeafKey, Tensor]:
    """Gradients of a chunk's leaves, of those that get any."""
    with torch.enable_grad():
        parts, leaves = build_message(call, block, chunk, wanted)
    live = [i for i, part in enumerate(parts) if part.requires_grad]
    if not live:
        return {}
    arriving = _arriving(call, upstream, block, chunk, tuple(part.detach() for part in parts))
    pushed = [arriving[i].reshape(parts[i].shape).to(parts[i].dtype) for i in live]
    asked = [leaves[key] for key in wanted]
    pulled = torch.autograd.grad([parts[i] for i in live], asked, pushed, allow_unused=True)
    return {key: part for key, part in zip(wanted, pulled, strict=True) if part is not None}


def _arriving(
    call: MessageCall, upstream: UpstreamGradient, block: MessageBlock, chunk: MessageChunk, parts: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Gradients of what the message returned."""
    grad = upstream.grad
    if call.reduce == "max":
        assert upstream.side is not None
        return (_from_winners(grad, upstream.side, chunk, _ties(block, chunk)),)
    arrived = grad.index_select(0, chunk.dst)
    if call.reduce != "softmax":
        return (arrived,)
    assert upstream.side is not None and upstream.dee is not None
    score, value = (part.to(grad.dtype) for part in parts)
    share = (score - upstream.side.index_select(0, chunk.dst)).exp_()
    arrived = _by_head(arrived, share)
    along = (arrived * value.reshape(arrived.shape)).sum(-1)
    return share * (along - upstream.dee.index_select(0, chunk.dst)), share[..., None] * arrived


def _opened(state: PropagateState, call: MessageCall, parts: tuple[Tensor, ...]) -> Tensor:
    """The state's total, made for messages like these if there is none."""
    value = parts[-1]
    if state.total is not None:
        assert value.shape[1:] == state.shape, "a message has the same shape in every block"
        return state.total
    dtype = _wide(value.dtype)
    state.shape = value.shape[1:]
    state.total = value.new_zeros(call.num_dst, state.shape.numel(), dtype=dtype)
    if call.reduce == "mean":
        state.side = value.new_zeros(call.num_dst, dtype=torch.int64)
    elif call.reduce == "max":
        state.side = torch.full_like(state.total, -1, dtype=torch.int64)
    elif call.reduce == "softmax":
        state.den = state.total.new_zeros(call.num_dst, parts[0].shape[1])
        # The lowest number, not −inf: differences of it must not be NaN.
        state.side = torch.full_like(state.den, torch.finfo(dtype).min)
    return state.total


def _add_softmax(state: PropagateState, chunk: MessageChunk, score: Tensor, value: Tensor) -> None:
    """Sums over exp(score − top): those so far shrink where the top rises."""
    total, top, den, rows = state.total, state.side, state.den, chunk.target
    assert total is not None and top is not None and den is not None
    score, value = score.to(total.dtype), value.to(total.dtype)
    before = top[rows]
    after = before.scatter_reduce(0, chunk.row[:, None].expand_as(score), score, "amax")
    shrink = (before - after).exp_()
    _scale(den, rows, shrink)
    _scale(_by_head(total, den), rows, shrink[..., None])
    top[rows] = after
    weight = (score - after.index_select(0, chunk.row)).exp_()
    _add_runs(den, chunk, weight)
    _add_runs(total, chunk, weight[..., None] * _by_head(_flat(value), weight))


def _add_max(state: MaxState, chunk: MessageChunk, values: Tensor, ties: Tensor) -> None:
    """A running maximum over more edges."""
    values, rows = _flat(values), chunk.target
    if not _native_on(values):
        values = values.to(state.out.dtype)
        none = torch.iinfo(torch.int64).max
        some = state.winner[rows] >= 0
        so_far = state.out[rows].where(some, -torch.inf), state.winner[rows].where(some, none)
        top, winner = reference.running_max(so_far, chunk.row, values, ties)
        state.out[rows], state.winner[rows] = top.where(winner < none, 0.0), winner.where(winner < none, -1)
        return
    edges, values = _one_each(chunk), _for_kernel(values, state.out.dtype)
    if isinstance(rows, slice):
        update_max(MaxState(state.out[rows], state.winner[rows]), edges, values, ties=ties)
    else:
        update_max(state, edges, values, ties=ties, rows=rows)


def _from_winners(grad: Tensor, winner: Tensor, chunk: MessageChunk, ties: Tensor) -> Tensor:
    """[E, W]: each edge's share of the gradient of a maximum."""
    if not _native_on(grad):
        return grad.index_select(0, chunk.dst).where(winner.index_select(0, chunk.dst) == ties[:, None], 0.0)
    by_edge = CSR(torch.arange(chunk.count + 1), chunk.dst, len(grad))
    return max_backward(by_edge, grad, winner, ties=ties)


def _add_runs(total: Tensor, chunk: MessageChunk, values: Tensor) -> None:
    """Add the rows of edges to those of their destinations, [R, W], in place and in order."""
    values, rows = _flat(values), chunk.target
    if not _native_on(values):
        total.index_add_(0, chunk.dst, values.to(total.dtype))
        return
    edges, values = _one_each(chunk), _for_kernel(values, total.dtype)
    if isinstance(rows, slice):
        sum_rows(edges, values, out=total[rows])
    else:
        sum_rows(edges, values, rows=rows, out=total)


def _add_columns(total: Tensor, col: Tensor, values: Tensor) -> None:
    """``total[col[e]] += values[e]``, each row summed in order, only those that get something touched."""
    if not _native_on(values):
        total.index_add_(0, col, values.to(total.dtype))
        return
    turned, order = CSR(torch.tensor([0, len(col)]), col, len(total)).transposed
    busy = turned.indptr.diff().nonzero()[:, 0]
    indptr = torch.cat([turned.indptr[busy], turned.indptr[-1:]])
    values = _for_kernel(_flat(values), total.dtype)
    sum_rows(CSR(indptr, order, len(values)), values, rows=busy.int(), out=_flat(total))


def _scale(total: Tensor, rows: slice | Tensor, factor: Tensor) -> None:
    if isinstance(rows, slice):
        total[rows].mul_(factor)
    else:
        total[rows] = total[rows] * factor


def _ties(block: MessageBlock, chunk: MessageChunk) -> Tensor:
    if block.ties is not None:
        return block.ties[chunk.edges]
    return torch.arange(chunk.edges.start, chunk.edges.stop, device=chunk.row.device)


def _one_each(chunk: MessageChunk) -> CSR:
    """Destinations by rows, the chunk's edges as columns."""
    return CSR(chunk.runs, torch.arange(chunk.count, dtype=torch.int32), chunk.count)


def _native_on(values: Tensor) -> bool:
    return values.device.type == "cpu"


def _for_kernel(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Kernels widen bfloat16 by themselves."""
    return values if values.dtype == torch.bfloat16 and dtype == torch.float32 else values.to(dtype)


def _flat(rows: Tensor) -> Tensor:
    """[n, W]; also where n is 0."""
    return rows.reshape(len(rows), rows.shape[1:].numel())


def _by_head(flat: Tensor, heads: Tensor) -> Tensor:
    """[n, W] as [n, H, W / H]."""
    return flat.view(*heads.shape, flat.shape[1] // max(heads.shape[1], 1))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _zeros(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(tensor.shape, dtype=_wide(tensor.dtype))
