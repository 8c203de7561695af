"""Blockwise message passing: edges come in blocks, in any order, each with its own sources.

A distributed view passes blocks as they arrive, and again in backward, where messages are rebuilt; ``propagate`` passes
one block. A block is processed in chunks of edges. Sums have the message's dtype, or float32 if that has 16 bits.
R destinations, E edges, H heads, W columns.
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
    """Running results per destination, allocated when the first message shows its shape."""

    shape: torch.Size = field(default_factory=torch.Size)  # of a row
    total: Tensor | None = None  # [R, W] sums or maxima; for softmax Σ exp(score − top) value
    side: Tensor | None = None  # mean: [R] edges; max: [R, W] winners; softmax: [R, H] top
    den: Tensor | None = None  # [R, H] for softmax: Σ exp(score − top)
    like: MessageBlock | None = None  # the first block, which gives the shape if there are no edges


def update_propagate(state: PropagateState, call: MessageCall, block: MessageBlock) -> None:
    """Add the edges of a block to the state in place; ``PropagateState()`` is the initial state."""
    assert call.reduce != "max" or block.ties is not None or state.like is None, "several blocks need ties"
    state.like = block if state.like is None else state.like
    with torch.no_grad():
        for chunk in message_chunks(call, block):
            parts = build_message(call, block, chunk)[0]
            total = _init_state(state, call, parts)
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
    """(result [R, …], side values for backward); at least one block was added, perhaps without edges."""
    if state.total is None:
        assert state.like is not None
        with torch.no_grad():
            _init_state(state, call, empty_message(call, state.like))
    total, side = state.total, state.side
    assert total is not None
    if call.reduce == "mean":
        assert side is not None
        total /= side.clamp(min=1).to(total.dtype)[:, None]
    elif call.reduce == "softmax":
        assert state.den is not None and side is not None
        has_edges = state.den > 0
        _by_head(total, state.den).div_(state.den.where(has_edges, 1.0)[..., None])
        side = torch.where(has_edges, side + state.den.log(), 0.0)  # lse
    return total.view(call.num_dst, *state.shape), side


@dataclass(frozen=True, eq=False)
class UpstreamGradient:
    """Values of a destination that its edges need in backward."""

    grad: Tensor  # [R, W], for mean divided by the number of edges
    side: Tensor | None = None  # max: winners; softmax: lse
    dee: Tensor | None = None  # [R, H] for softmax: <grad, out>


def begin_backward(call: MessageCall, grad: Tensor, *, out: Tensor | None, side: Tensor | None) -> UpstreamGradient:
    """The part of backward at destinations; ``out`` (softmax only) and ``side`` come from ``finish_propagate``."""
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
    """Gradients of destinations and parameters, to which all blocks add."""

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
    """{name: [columns, …]} gradients of the block's sources named in ``src``, in their dtype.

    Other gradients are added to ``into`` in place, and rows of ``edge`` are overwritten; gradients of inputs that the
    message does not use stay unchanged. Raises ConfigError as ``build_message`` does.
    """
    edge = edge or {}
    source_grads = {name: _zeros(block.src[name]) for name in src}
    needs_grad: list[LeafKey] = [("src", name) for name in src]
    needs_grad += [("dst", name) for name in into.dst] + [("edge", name) for name in edge]
    needs_grad += [("params", i) for i in into.params]
    for chunk in message_chunks(call, block):
        for (group, name), part in _chunk_backward(call, upstream, block, chunk, needs_grad).items():
            if group == "edge":
                edge[str(name)][chunk.edges] = part
            elif group == "src":
                _add_columns(source_grads[str(name)], block.structure.col[chunk.edges], part)
            elif group == "dst":
                _add_runs(_flat(into.dst[str(name)]), chunk, part)
            else:
                into.params[int(name)].add_(part)
    return {name: total.to(block.src[name].dtype) for name, total in source_grads.items()}


def _chunk_backward(
    call: MessageCall, upstream: UpstreamGradient, block: MessageBlock, chunk: MessageChunk, needs_grad: list[LeafKey]
) -> dict[LeafKey, Tensor]:
    """Gradients of a chunk's leaves that the message depends on."""
    with torch.enable_grad():
        parts, leaves = build_message(call, block, chunk, needs_grad)
    live = [i for i, part in enumerate(parts) if part.requires_grad]
    if not live:
        return {}
    message_grads = _message_grads(call, upstream, block, chunk, tuple(part.detach() for part in parts))
    pushed = [message_grads[i].reshape(parts[i].shape).to(parts[i].dtype) for i in live]
    inputs = [leaves[key] for key in needs_grad]
    gradients = torch.autograd.grad([parts[i] for i in live], inputs, pushed, allow_unused=True)
    return {key: part for key, part in zip(needs_grad, gradients, strict=True) if part is not None}


def _message_grads(
    call: MessageCall, upstream: UpstreamGradient, block: MessageBlock, chunk: MessageChunk, parts: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Gradients of the tensors that the message returned."""
    grad = upstream.grad
    if call.reduce == "max":
        assert upstream.side is not None
        return (_from_winners(grad, upstream.side, chunk, _ties(block, chunk)),)
    upstream_rows = grad.index_select(0, chunk.dst)
    if call.reduce != "softmax":
        return (upstream_rows,)
    assert upstream.side is not None and upstream.dee is not None
    score, value = (part.to(grad.dtype) for part in parts)
    share = (score - upstream.side.index_select(0, chunk.dst)).exp_()
    upstream_rows = _by_head(upstream_rows, share)
    along = (upstream_rows * value.reshape(upstream_rows.shape)).sum(-1)
    return share * (along - upstream.dee.index_select(0, chunk.dst)), share[..., None] * upstream_rows


def _init_state(state: PropagateState, call: MessageCall, parts: tuple[Tensor, ...]) -> Tensor:
    """The total of the state, which the first message allocates."""
    value = parts[-1]
    if state.total is not None:
        assert value.shape[1:] == state.shape, "a message has the same shape in every block"
        return state.total
    dtype = _accumulate_dtype(value.dtype)
    state.shape = value.shape[1:]
    state.total = value.new_zeros(call.num_dst, state.shape.numel(), dtype=dtype)
    if call.reduce == "mean":
        state.side = value.new_zeros(call.num_dst, dtype=torch.int64)
    elif call.reduce == "max":
        state.side = torch.full_like(state.total, -1, dtype=torch.int64)
    elif call.reduce == "softmax":
        state.den = state.total.new_zeros(call.num_dst, parts[0].shape[1])
        # The lowest finite number, not −inf: its differences must not be NaN.
        state.side = torch.full_like(state.den, torch.finfo(dtype).min)
    return state.total


def _add_softmax(state: PropagateState, chunk: MessageChunk, score: Tensor, value: Tensor) -> None:
    """Add to sums of exp(score − top), rescaling earlier ones where the maximum rises."""
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
    values, rows = _flat(values), chunk.target
    if not _native_on(values):
        values = values.to(state.out.dtype)
        none = torch.iinfo(torch.int64).max
        has_edges = state.winner[rows] >= 0
        so_far = state.out[rows].where(has_edges, -torch.inf), state.winner[rows].where(has_edges, none)
        top, winner = reference.running_max(so_far, chunk.row, values, ties)
        state.out[rows], state.winner[rows] = top.where(winner < none, 0.0), winner.where(winner < none, -1)
        return
    edges, values = _edge_rows(chunk), _for_kernel(values, state.out.dtype)
    if isinstance(rows, slice):
        update_max(MaxState(state.out[rows], state.winner[rows]), edges, values, ties=ties)
    else:
        update_max(state, edges, values, ties=ties, rows=rows)


def _from_winners(grad: Tensor, winner: Tensor, chunk: MessageChunk, ties: Tensor) -> Tensor:
    """[E, W]: gradient of each edge from that of a maximum."""
    if not _native_on(grad):
        return grad.index_select(0, chunk.dst).where(winner.index_select(0, chunk.dst) == ties[:, None], 0.0)
    by_edge = CSR(torch.arange(chunk.count + 1), chunk.dst, len(grad))
    return max_backward(by_edge, grad, winner, ties=ties)


def _add_runs(total: Tensor, chunk: MessageChunk, values: Tensor) -> None:
    """Add rows of edges to those of their destinations, [R, W], in place and in order."""
    values, rows = _flat(values), chunk.target
    if not _native_on(values):
        total.index_add_(0, chunk.dst, values.to(total.dtype))
        return
    edges, values = _edge_rows(chunk), _for_kernel(values, total.dtype)
    if isinstance(rows, slice):
        sum_rows(edges, values, out=total[rows])
    else:
        sum_rows(edges, values, rows=rows, out=total)


def _add_columns(total: Tensor, col: Tensor, values: Tensor) -> None:
    """``total[col[e]] += values[e]``, summed in order; other rows are not touched."""
    if not _native_on(values):
        total.index_add_(0, col, values.to(total.dtype))
        return
    transposed, order = CSR(torch.tensor([0, len(col)]), col, len(total)).transposed
    nonempty = transposed.indptr.diff().nonzero()[:, 0]
    indptr = torch.cat([transposed.indptr[nonempty], transposed.indptr[-1:]])
    values = _for_kernel(_flat(values), total.dtype)
    sum_rows(CSR(indptr, order, len(values)), values, rows=nonempty.int(), out=_flat(total))


def _scale(total: Tensor, rows: slice | Tensor, factor: Tensor) -> None:
    if isinstance(rows, slice):
        total[rows].mul_(factor)
    else:
        total[rows] = total[rows] * factor


def _ties(block: MessageBlock, chunk: MessageChunk) -> Tensor:
    if block.ties is not None:
        return block.ties[chunk.edges]
    return torch.arange(chunk.edges.start, chunk.edges.stop, device=chunk.row.device)


def _edge_rows(chunk: MessageChunk) -> CSR:
    """A structure with destinations as rows and the chunk's edges as columns."""
    return CSR(chunk.runs, torch.arange(chunk.count, dtype=torch.int32), chunk.count)


def _native_on(values: Tensor) -> bool:
    return values.device.type == "cpu"


def _for_kernel(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to ``dtype``, except bfloat16 to float32, which kernels do themselves."""
    return values if values.dtype == torch.bfloat16 and dtype == torch.float32 else values.to(dtype)


def _flat(rows: Tensor) -> Tensor:
    """View as [n, W], also if n is 0."""
    return rows.reshape(len(rows), rows.shape[1:].numel())


def _by_head(flat: Tensor, heads: Tensor) -> Tensor:
    """[n, W] as [n, H, W / H]."""
    return flat.view(*heads.shape, flat.shape[1] // max(heads.shape[1], 1))


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _zeros(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(tensor.shape, dtype=_accumulate_dtype(tensor.dtype))
