"""Sums, means and maxima over in-edges whose sources live on any rank.

Forward: sources travel to destinations, each block is added to the running result and let go. Backward has two forms.
*By source*: gradients of destinations travel, and the owner of a source sums over its out-edges; that needs weights the
owner of the source knows: none, or the store's. *Home*: the owner of the destinations makes a block's gradient and
sends it to where the sources live; sources are fetched again, or kept, only for the gradient of weights.
Several edge types share one exchange, and a row of x travels once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnfleet.comm.halo_exchange import ExchangePlan, FetchedRows, OnRows, RowExchange, RowTable
from gnnfleet.ops.aggregate import MaxState, accumulate_dtype, edge_dot, max_backward, max_rows, sum_rows, update_max
from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.sharded.full_batch.grad_accumulator import GradAccumulator
from gnnfleet.sharded.full_batch.partition_blocks import EdgeBlock


@dataclass(frozen=True, eq=False)
class RelationInput:
    """The in-edges of one type in an exchange."""

    blocks: tuple[EdgeBlock, ...]
    table_index: int  # which x its sources are rows of
    degree: Tensor | None = None  # [n] int64: what sums are divided by, for a mean

    def scale(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.degree is None else self.degree.clamp(min=1).to(dtype).reciprocal()


@dataclass(frozen=True, eq=False)
class BackwardPlan:
    """The same edges seen from their sources, for backward by source."""

    blocks: tuple[EdgeBlock, ...]
    plan: ExchangePlan
    is_weighted: bool  # by the store's weights


@dataclass(frozen=True, eq=False)
class AggregationCall:
    """One exchange: lanes of source rows, strands of edges on them."""

    ring: RowExchange
    plans: tuple[ExchangePlan, ...]  # of each lane
    inputs: tuple[RelationInput, ...]
    reverse: BackwardPlan | None = None  # of a single strand; without it gradients go home
    keep_fetched: bool = False  # sources are kept where backward needs them, not fetched again

    @property
    def rank(self) -> int:
        return self.ring.world.rank

    def row_tables(self, xs: Sequence[Tensor]) -> list[RowTable]:
        return [RowTable(routes, x.detach().contiguous()) for routes, x in zip(self.plans, xs, strict=True)]


def aggregate_sum(call: AggregationCall, xs: Sequence[Tensor], weight: Tensor | None = None) -> tuple[Tensor, ...]:
    """[n, F] for each strand: Σ weight[e] x[source of e], or the mean; ``weight`` [E] goes with a single strand.

    ``call.reverse`` must know the weights that are given.
    """
    assert weight is None or len(call.inputs) == 1
    found: tuple[Tensor, ...] = _DistSum.apply(call, weight, *xs)  # type: ignore[no-untyped-call]
    return found


def aggregate_sum_with_self(call: AggregationCall, x: Tensor) -> tuple[Tensor, Tensor]:
    """(``aggregate_sum`` of a single strand without weights, the rows of x that are destinations): both gradients of x
    are added up in one pass."""
    assert call.reverse is not None
    near, own = _DistSumWithSelf.apply(call, x)  # type: ignore[no-untyped-call]
    return near, own


def aggregate_max(call: AggregationCall, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """[n, F] for each strand: the maximum, 0 without edges; of equals the lowest store edge id gets the gradient."""
    found: tuple[Tensor, ...] = _DistMax.apply(call, *xs)  # type: ignore[no-untyped-call]
    return found


class _DistSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AggregationCall, weight: Tensor | None, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)  # what nobody used has no gradient, and sends none
        again = weight is not None and weight.requires_grad
        ctx.save_for_backward(weight, *(xs if again else ()))
        ctx.dtypes = [x.dtype for x in xs]
        ctx.kept = FetchedRows() if again and call.keep_fetched else None
        return _forward_sum(call, weight, xs, ctx.kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: AggregationCall = ctx.call
        weight, *xs = ctx.saved_tensors
        needs_weight, *needs = ctx.needs_input_grad[1:]
        dweight = None
        dxs: list[Tensor | None] = [None] * len(ctx.dtypes)
        if not (needs_weight or any(needs)):
            return None, None, *dxs
        scaled = [_scaled(grad, strand) for grad, strand in zip(grads, call.inputs, strict=True)]
        if call.reverse is not None and not needs_weight and scaled[0] is not None:
            dxs[0] = _sum_by_source(call.ring, call.reverse, scaled[0])
        else:
            dweight, dxs = _return_sum_grads(call, weight, scaled, xs=xs, needs=needs, kept=ctx.kept)
        found = [None if dx is None else dx.to(dtype) for dx, dtype in zip(dxs, ctx.dtypes, strict=True)]
        return None, dweight, *found


class _DistSumWithSelf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AggregationCall, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.call, ctx.dtype, ctx.rows = call, x.dtype, len(x)
        ctx.set_materialize_grads(False)
        near = _forward_sum(call, None, [x], None)[0]
        return near, x[: len(near)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, own: Tensor | None) -> tuple[None, Tensor | None]:
        call: AggregationCall = ctx.call
        scaled = _scaled(grad, call.inputs[0])
        if scaled is None or not ctx.needs_input_grad[1]:
            return None, None if own is None else torch.nn.functional.pad(own, (0, 0, 0, ctx.rows - len(own)))
        return None, _sum_by_source(call.ring, call.reverse, scaled, base=own).to(ctx.dtype)


def _forward_sum(
    call: AggregationCall, weight: Tensor | None, xs: Sequence[Tensor], keep: FetchedRows | None
) -> tuple[Tensor, ...]:
    """The sum or mean of every strand."""
    outs: list[Tensor] = []
    scales = [strand.scale(accumulate_dtype(xs[strand.table_index].dtype)) for strand in call.inputs]

    def visit(q: int, rows: list[Tensor]) -> None:
        for place, strand in enumerate(call.inputs):
            cut, x = strand.blocks[q], rows[strand.table_index]
            own = None if weight is None else weight.detach()[cut.edges]
            each = scales[place]
            scale = None if each is None else cut.select_rows(each)
            if q == call.rank:  # the first to be visited, and it has all rows
                outs.append(sum_rows(cut.structure, x, weight=own, row_scale=scale))
            elif cut.structure.num_edges:
                sum_rows(cut.structure, x, weight=own, row_scale=scale, rows=cut.rows, out=outs[place])

    call.ring.run(call.row_tables(xs), visit, fetched=keep, op="rows of aggregate")
    return tuple(outs)


def _sum_by_source(
    ring: RowExchange, reverse: BackwardPlan | None, grad: Tensor, *, base: Tensor | None = None
) -> Tensor:
    """[n, F] the gradient of own sources, added to ``base``; ``grad`` [n, F] is that of own destinations."""
    assert reverse is not None
    totals: list[Tensor] = []

    def visit(q: int, rows: list[Tensor]) -> None:
        cut = reverse.blocks[q]
        weight = cut.weight if reverse.is_weighted else None
        if q == ring.world.rank:
            totals.append(sum_rows(cut.structure, rows[0], weight=weight, base=base))
        elif cut.structure.num_edges:
            sum_rows(cut.structure, rows[0], weight=weight, rows=cut.rows, out=totals[0])

    ring.run([RowTable(reverse.plan, grad)], visit, op="gradients of aggregate")
    return totals[0]


def _return_sum_grads(
    call: AggregationCall,
    weight: Tensor | None,
    grads: Sequence[Tensor | None],
    *,
    xs: Sequence[Tensor],
    needs: Sequence[bool],
    kept: FetchedRows | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(gradient of weight where xs are given, gradients of those x that need one)."""
    grad = grads[0]
    dweight = torch.empty_like(weight, dtype=grad.dtype) if weight is not None and xs and grad is not None else None

    def part(strand: RelationInput, grad: Tensor, q: int, into: Tensor | None) -> Tensor:
        cut = strand.blocks[q]
        turned, positions = cut.transposed
        turned_weight = None if weight is None else weight.detach()[cut.edges][positions]
        return sum_rows(turned, grad, weight=turned_weight, out=into)

    def again(q: int, rows: list[Tensor]) -> None:
        if dweight is not None and grad is not None:
            cut = call.inputs[0].blocks[q]
            dweight[cut.edges] = edge_dot(cut.structure, grad, rows[0].to(grad.dtype), rows=cut.rows)

    dxs = _return_grads(call, grads, needs, part=part, lanes=call.row_tables(xs) if xs else [], again=again, kept=kept)
    return None if dweight is None or weight is None else dweight.to(weight.dtype), dxs


class _DistMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AggregationCall, *xs: Tensor) -> tuple[Tensor, ...]:
        states: list[MaxState] = []

        def visit(q: int, rows: list[Tensor]) -> None:
            for place, strand in enumerate(call.inputs):
                cut, x = strand.blocks[q], rows[strand.table_index]
                if q == call.rank:
                    states.append(max_rows(cut.structure, x, ties=cut.edge_ids))
                elif cut.structure.num_edges:
                    update_max(states[place], cut.structure, x, ties=cut.edge_ids, rows=cut.rows)

        call.ring.run(call.row_tables(xs), visit, op="rows of aggregate")
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(state.winner for state in states))
        ctx.dtypes = [x.dtype for x in xs]
        return tuple(state.out for state in states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: AggregationCall = ctx.call
        winners = dict(zip(call.inputs, ctx.saved_tensors, strict=True))

        def part(strand: RelationInput, grad: Tensor, q: int, into: Tensor | None) -> Tensor:
            cut = strand.blocks[q]
            turned, positions = cut.transposed
            return max_backward(turned, grad, winners[strand], ties=cut.edge_ids, positions=positions, out=into)

        given = [None if grad is None else grad.contiguous() for grad in grads]
        dxs = _return_grads(call, given, ctx.needs_input_grad[1:], part=part)
        return None, *(None if dx is None else dx.to(dtype) for dx, dtype in zip(dxs, ctx.dtypes, strict=True))


class _SourceGrad(Protocol):
    """The gradient of the sources at q of a strand, from that of its destinations; added to ``into`` if given."""

    def __call__(self, strand: RelationInput, grad: Tensor, q: int, into: Tensor | None) -> Tensor: ...


def _return_grads(
    call: AggregationCall,
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
    *,
    part: _SourceGrad,
    lanes: Sequence[RowTable] = (),
    again: OnRows | None = None,
    kept: FetchedRows | None = None,
) -> list[Tensor | None]:
    """Gradients of the lanes that need one, made block by block where the destinations live, added up at home."""
    inside: dict[int, list[tuple[RelationInput, Tensor]]] = {lane: [] for lane, need in enumerate(needs) if need}
    for strand, grad in zip(call.inputs, grads, strict=True):
        if grad is not None and strand.table_index in inside:
            inside[strand.table_index].append((strand, grad))
    inside = {lane: strands for lane, strands in inside.items() if strands}
    home = GradAccumulator(call.rank, [(call.plans[lane], strands[0][1]) for lane, strands in inside.items()])

    def visit(q: int, rows: list[Tensor]) -> list[Tensor]:
        if again is not None:
            again(q, rows)
        found = []
        for strands in inside.values():
            total: Tensor | None = None
            for strand, grad in strands:
                total = part(strand, grad, q, total)
            assert total is not None
            found.append(total)
        return found

    if lanes or inside:
        what = "gradients of aggregate"
        call.ring.run(lanes, visit, returns=home.returns, on_returns=home.add, fetched=kept, op=what)
    totals = dict(zip(inside, home.totals, strict=True))
    return [totals.get(lane) for lane in range(len(needs))]


def _scaled(grad: Tensor | None, strand: RelationInput) -> Tensor | None:
    if grad is None:
        return None
    scale = strand.scale(grad.dtype)
    if scale is None:
        return grad.contiguous()
    return torch.mul(grad, scale[:, None], out=empty_buffer(grad.shape, grad.dtype))
