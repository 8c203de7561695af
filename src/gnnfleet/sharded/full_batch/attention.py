"""Edge-softmax attention over edges whose sources live on any rank, in a single pass over the blocks.

Additive scores without an edge term have their backward by source: gradients, scores and sums of destinations travel
(d + 3H numbers a row), and nothing is fetched again. Other scores, and heads of one or two numbers (3H > d), are
rebuilt block by block from sources fetched again or kept, whose gradients go home. Nothing of size edges × heads
outlives a block. d = H·C numbers of a value, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnfleet.comm.halo_exchange import ExchangePlan, FetchedRows, RowExchange, RowTable
from gnnfleet.ops import attend_blocks as pieces
from gnnfleet.ops.attend_blocks import AttentionBlock, AttentionInputs, AttentionSpec, AttentionState, TargetGradient
from gnnfleet.sharded.full_batch.grad_accumulator import GradAccumulator
from gnnfleet.sharded.full_batch.partition_blocks import EdgeBlock


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What is attended to, and by which ways rows travel."""

    ring: RowExchange
    spec: AttentionSpec
    blocks: tuple[EdgeBlock, ...]
    plans: ExchangePlan
    out_blocks: tuple[EdgeBlock, ...]
    out_plans: ExchangePlan
    keep_fetched: bool = False  # rows that backward needs again are kept, not fetched again

    @property
    def rank(self) -> int:
        return self.ring.world.rank

    def ids(self, cut: EdgeBlock) -> Tensor | None:
        return cut.edge_ids if self.spec.dropout else None


def attend(call: AttentionCall, inputs: AttentionInputs) -> Tensor:
    """[n, H·C]; inputs are of own rows, ``edge`` of all in-edges in the order of blocks. See ``ops.attend``.

    Where src is the value itself, as in GATv2, its rows travel once.
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
        own = _OwnInputs(call, value, src, dst, edge, vector)
        by_source = own.is_by_source
        positive = by_source and ctx.needs_input_grad[3]
        again = not by_source and any(ctx.needs_input_grad)
        ctx.kept = FetchedRows() if call.keep_fetched and again else None
        states: list[AttentionState] = []

        def visit(q: int, rows: list[Tensor]) -> None:
            cut = call.blocks[q]
            block, piece = own.remote_inputs(rows, cut), AttentionBlock(cut.structure, cut.rows)
            if q == call.rank:  # the first to be visited, and it has all rows
                states.append(pieces.attention_pass(call.spec, block, piece, positive=positive, finish=False))
            elif cut.structure.num_edges:
                pieces.update_attention(states[0], call.spec, block, piece)

        call.ring.run(own.row_tables(), visit, fetched=ctx.kept, op="rows of attend")
        state = pieces.finish_attention(states[0], call.spec)
        ctx.call = call
        ctx.save_for_backward(value, src, dst, edge, vector, state.num, state.max, state.pos, state.mass)
        return state.num

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: AttentionCall = ctx.call
        value, src, dst, edge, vector, out, lse, pos, mass = ctx.saved_tensors
        own = _OwnInputs(call, value, src, dst, edge, vector)
        grad = grad.contiguous()
        side, d_dst = pieces.destination_gradient(call.spec, AttentionState(out, lse, lse, pos, mass), grad, dst)
        needs = ctx.needs_input_grad[1:]
        if not own.is_by_source:
            return None, *_rebuild(own, grad, side.lse_dee, needs=needs, kept=ctx.kept)
        d_value = d_src = None
        if needs[0] or needs[1]:
            d_value, d_src = _by_source(own, grad, side.packed)
        if src is None and d_value is not None and d_src is not None:
            d_value, d_src = d_value + d_src, None
        return None, _like(d_value, value), d_src, d_dst, None, None


@dataclass(frozen=True, eq=False)
class _OwnInputs:
    """The inputs of own rows."""

    call: AttentionCall
    value: Tensor
    src: Tensor | None  # None: the value
    dst: Tensor
    edge: Tensor | None
    vector: Tensor | None

    @property
    def is_by_source(self) -> bool:
        """Whether backward can do with what destinations send, and that is less than sources and their gradients."""
        form = self.call.spec
        return form.score == "add" and self.edge is None and 3 * form.heads <= self.value.shape[1]

    def row_tables(self) -> list[RowTable]:
        tensors = [self.value] if self.src is None else [self.value, self.src]
        return [RowTable(self.call.plans, tensor.detach().contiguous()) for tensor in tensors]

    def remote_inputs(self, rows: list[Tensor], cut: EdgeBlock) -> AttentionInputs:
        """The inputs of a block of in-edges: sources as they came, the rest from here."""
        edge = None if self.edge is None else self.edge.detach()[cut.edges]
        ids = self.call.ids(cut)
        return AttentionInputs(value=rows[0], src=rows[-1], dst=self.dst, edge=edge, vector=self.vector, edge_ids=ids)


def _by_source(own: _OwnInputs, grad: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of value, of src): destinations travel as [grad | dst | lse | D], sources sum over their out-edges."""
    call, heads = own.call, own.call.spec.heads
    found: list[tuple[Tensor, Tensor]] = []
    src = own.value if own.src is None else own.src

    def visit(q: int, rows: list[Tensor]) -> None:
        cut = call.out_blocks[q]
        there, side = rows
        block = AttentionInputs(value=own.value, src=src, dst=side[:, :heads], edge_ids=call.ids(cut))
        piece, lse_dee = AttentionBlock(cut.structure, cut.rows), side[:, heads:]
        if q == call.rank:
            found.append(pieces.source_gradient(call.spec, block, piece, grad=there, side=lse_dee))
        elif cut.structure.num_edges:
            pieces.source_gradient(call.spec, block, piece, grad=there, side=lse_dee, into=found[0])

    # Of [dst | lse | D] only D grows with the gradient.
    lanes = [RowTable(call.out_plans, grad), RowTable(call.out_plans, packed, 2 * heads)]
    call.ring.run(lanes, visit, op="gradients of attend")
    return found[0]


def _rebuild(
    own: _OwnInputs, grad: Tensor, side: Tensor, *, needs: tuple[bool, ...], kept: FetchedRows | None
) -> tuple[Tensor | None, ...]:
    """Gradients of value, src, dst, edge and vector, from sources that were kept or are fetched again."""
    call, (for_value, for_src, *for_target) = own.call, needs
    shared, sources = own.src is None, for_value or for_src
    d_edge = None if own.edge is None or not for_target[1] else torch.empty_like(own.edge)
    d_vector = None if own.vector is None or not for_target[2] else torch.zeros_like(own.vector)
    d_dst = torch.zeros_like(own.dst, memory_format=torch.contiguous_format)
    narrow = grad.new_empty(0, call.spec.heads * call.spec.depth)
    forms = [(call.plans, grad)] if shared else [(call.plans, grad), (call.plans, narrow)]
    home = GradAccumulator(call.rank, forms if sources else [])

    def visit(q: int, rows: list[Tensor]) -> list[Tensor]:
        cut = call.blocks[q]
        block = own.remote_inputs(rows, cut)
        if any(for_target) and cut.structure.num_edges:
            into = TargetGradient(d_dst, None if d_edge is None else d_edge[cut.edges], d_vector)
            pieces.target_gradient(
                call.spec, block, AttentionBlock(cut.structure, cut.rows), grad=grad, side=side, into=into
            )
        if not sources:
            return []
        turned, positions = cut.transposed
        piece = AttentionBlock(turned, positions=positions)
        d_value, d_src = pieces.source_gradient(call.spec, block, piece, grad=grad, side=side)
        return [d_value.add_(d_src)] if shared else [d_value, d_src]

    call.ring.run(
        own.row_tables(), visit, returns=home.returns, on_returns=home.add, fetched=kept, op="rows of attend, again"
    )
    d_value, d_src = (*home.totals, None, None)[:2]
    return _like(d_value, own.value), d_src, d_dst if for_target[0] else None, d_edge, d_vector


def _like(grad: Tensor | None, tensor: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(tensor.dtype)
