"""Edge-softmax attention over edges whose sources are on any rank, in a single pass over the blocks.

Additive scores without an edge term have their backward by source: gradients, scores and sums of destinations are
exchanged (d + 3H numbers per row), and no source is fetched again. Other scores, and heads of one or two numbers
(3H > d), are recomputed block by block from sources fetched again or cached, whose gradients are returned. No tensor of
size edges × heads outlives a block. d = H·C numbers of a value, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnfleet.comm.halo_exchange import ExchangePlan, FetchedRows, RowExchange, RowTable
from gnnfleet.ops import attend_blocks
from gnnfleet.ops.attend_blocks import AttentionBlock, AttentionInputs, AttentionSpec, AttentionState, TargetGradient
from gnnfleet.sharded.full_batch.grad_exchange import exchange_grads
from gnnfleet.sharded.full_batch.partition_blocks import EdgeBlock


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The edges attended over, and the exchange of their rows. Several tables of sources are stacked in the inputs."""

    ring: RowExchange
    spec: AttentionSpec
    blocks: tuple[EdgeBlock, ...]
    plans: tuple[ExchangePlan, ...]  # of each table of sources
    sizes: tuple[int, ...]  # rows of each table
    out_blocks: tuple[EdgeBlock, ...] = ()  # without them, backward goes by destination
    out_plan: ExchangePlan | None = None
    keep_fetched: bool = False  # cache rows that backward needs instead of fetching them again

    def dropout_ids(self, block: EdgeBlock) -> Tensor | None:
        return block.edge_ids if self.spec.dropout else None


def attend(call: AttentionCall, inputs: AttentionInputs) -> Tensor:
    """[n, H·C]; inputs are of local rows, ``edge`` of all in-edges in the order of blocks. See ``ops.attend``.

    Where src is the value itself, as in GATv2, its rows are sent once.
    """
    src = None if inputs.src is inputs.value else inputs.src
    out: Tensor = _Attend.apply(call, inputs.value, src, inputs.dst, inputs.edge, inputs.vector)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall,
        value: Tensor,
        src: Tensor | None,
        dst: Tensor,
        edge: Tensor | None,
        vector: Tensor | None,
    ) -> Tensor:
        local = _LocalInputs(call, value, src, dst, edge, vector)
        by_source = local.is_by_source
        positive = by_source and ctx.needs_input_grad[3]
        needs_sources = not by_source and any(ctx.needs_input_grad)
        ctx.fetched = FetchedRows() if call.keep_fetched and needs_sources else None
        states: list[AttentionState] = []

        def on_rows(q: int, received: list[Tensor]) -> None:
            edges = call.blocks[q]
            inputs, block = local.block_inputs(received, edges), AttentionBlock(edges.structure, edges.rows)
            if q == call.ring.local_block:  # the local block comes first and has all rows
                states.append(attend_blocks.attention_pass(call.spec, inputs, block, positive=positive, finish=False))
            elif edges.structure.num_edges:
                attend_blocks.update_attention(states[0], call.spec, inputs, block)

        call.ring.run(local.row_tables(), on_rows, fetched=ctx.fetched, op="rows of attend")
        state = attend_blocks.finish_attention(states[0], call.spec)
        ctx.call = call
        ctx.save_for_backward(value, src, dst, edge, vector, state.num, state.max, state.pos, state.mass)
        return state.num

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: AttentionCall = ctx.call
        value, src, dst, edge, vector, out, lse, pos, mass = ctx.saved_tensors
        local = _LocalInputs(call, value, src, dst, edge, vector)
        grad = grad.contiguous()
        side, d_dst = attend_blocks.destination_gradient(call.spec, AttentionState(out, lse, lse, pos, mass), grad, dst)
        needs = ctx.needs_input_grad[1:]
        if not local.is_by_source:
            return None, *_recompute(local, grad, side.lse_dee, needs=needs, fetched=ctx.fetched)
        d_value = d_src = None
        if needs[0] or needs[1]:
            d_value, d_src = _by_source(local, grad, side.packed)
        if src is None and d_value is not None and d_src is not None:
            d_value, d_src = d_value + d_src, None
        return None, _like(d_value, value), d_src, d_dst, None, None


@dataclass(frozen=True, eq=False)
class _LocalInputs:
    call: AttentionCall
    value: Tensor
    src: Tensor | None  # None: the value
    dst: Tensor
    edge: Tensor | None
    vector: Tensor | None

    @property
    def is_by_source(self) -> bool:
        """True if backward can go by source, and that sends less than sources and their gradients."""
        spec, is_reversible = self.call.spec, self.call.out_plan is not None
        return is_reversible and spec.score == "add" and self.edge is None and 3 * spec.heads <= self.value.shape[1]

    def row_tables(self) -> list[RowTable]:
        plans, sizes = self.call.plans, list(self.call.sizes)
        tensors = [self.value] if self.src is None else [self.value, self.src]
        parts = [zip(plans, torch.split(tensor.detach().contiguous(), sizes), strict=True) for tensor in tensors]
        return [RowTable(plan, rows) for part in parts for plan, rows in part]

    def block_inputs(self, received: list[Tensor], edges: EdgeBlock) -> AttentionInputs:
        """The inputs of a block of in-edges: received sources, and the local rest."""
        edge = None if self.edge is None else self.edge.detach()[edges.edges]
        return AttentionInputs(
            value=_stacked(received[: len(self.call.plans)]),
            src=_stacked(received[-len(self.call.plans) :]),
            dst=self.dst,
            edge=edge,
            vector=self.vector,
            edge_ids=self.call.dropout_ids(edges),
        )


def _by_source(local: _LocalInputs, grad: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of value, of src): destinations send [grad | dst | lse | D], sources sum over their out-edges."""
    call, heads = local.call, local.call.spec.heads
    grads: list[tuple[Tensor, Tensor]] = []
    src = local.value if local.src is None else local.src

    def on_rows(q: int, received: list[Tensor]) -> None:
        edges = call.out_blocks[q]
        dst_grad, side = received
        inputs = AttentionInputs(value=local.value, src=src, dst=side[:, :heads], edge_ids=call.dropout_ids(edges))
        block, lse_dee = AttentionBlock(edges.structure, edges.rows), side[:, heads:]
        if q == call.ring.local_block:  # the local block comes first and has all rows
            grads.append(attend_blocks.source_gradient(call.spec, inputs, block, grad=dst_grad, side=lse_dee))
        elif edges.structure.num_edges:
            attend_blocks.source_gradient(call.spec, inputs, block, grad=dst_grad, side=lse_dee, into=grads[0])

    # Of [dst | lse | D] only D is proportional to the gradient.
    assert call.out_plan is not None
    tables = [RowTable(call.out_plan, grad), RowTable(call.out_plan, packed, 2 * heads)]
    call.ring.run(tables, on_rows, op="gradients of attend")
    return grads[0]


def _recompute(
    local: _LocalInputs, grad: Tensor, side: Tensor, *, needs: tuple[bool, ...], fetched: FetchedRows | None
) -> tuple[Tensor | None, ...]:
    """Gradients of value, src, dst, edge and vector, from sources that are cached or fetched again."""
    call, (needs_value, needs_src, *needs_target) = local.call, needs
    is_shared, needs_sources = local.src is None, needs_value or needs_src
    d_edge = None if local.edge is None or not needs_target[1] else torch.empty_like(local.edge)
    d_vector = None if local.vector is None or not needs_target[2] else torch.zeros_like(local.vector)
    d_dst = torch.zeros_like(local.dst, memory_format=torch.contiguous_format)
    like_src = grad.new_empty(0, call.spec.heads * call.spec.depth)
    count = len(call.plans)
    like = [(plan, tensor) for tensor in ([grad] if is_shared else [grad, like_src]) for plan in call.plans]

    def on_rows(q: int, received: list[Tensor]) -> list[Tensor]:
        edges = call.blocks[q]
        inputs = local.block_inputs(received, edges)
        if any(needs_target) and edges.structure.num_edges:
            into = TargetGradient(d_dst, None if d_edge is None else d_edge[edges.edges], d_vector)
            block = AttentionBlock(edges.structure, edges.rows)
            attend_blocks.target_gradient(call.spec, inputs, block, grad=grad, side=side, into=into)
        if not needs_sources:
            return []
        by_source, positions = edges.transposed
        block = AttentionBlock(by_source, positions=positions)
        d_value, d_src = attend_blocks.source_gradient(call.spec, inputs, block, grad=grad, side=side)
        sizes = [len(rows) for rows in received[:count]]
        grads = [d_value.add_(d_src)] if is_shared else [d_value, d_src]
        return [part for tensor in grads for part in torch.split(tensor, sizes)]

    tables, op = local.row_tables(), "rows of attend, again"
    sums = exchange_grads(call.ring, like if needs_sources else [], tables, on_rows, fetched=fetched, op=op)
    d_value, d_src = (_stacked(part) if part else None for part in (sums[:count], sums[count:]))
    return _like(d_value, local.value), d_src, d_dst if needs_target[0] else None, d_edge, d_vector


def _stacked(tables: list[Tensor]) -> Tensor:
    return tables[0] if len(tables) == 1 else torch.cat(tables)


def _like(grad: Tensor | None, tensor: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(tensor.dtype)
