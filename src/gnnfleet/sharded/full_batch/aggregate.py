"""Sums, means and maxima over in-edges whose sources are on any rank.

Forward: source rows are sent to the ranks of their destinations; each block is added to the running result and freed.
Backward *by source*: gradients of destinations are exchanged, and the owner of a source sums over its out-edges. It
must know the weights: none, or the store's. Backward *by destination*: the owner of the destinations computes a block's
gradient and returns it to the owner of the sources. Source rows are fetched again, or cached, only for the gradient of
weights. Several edge types share one exchange, which sends a row of x once for all of them.

The local block comes first in every exchange and has all rows, so results begin with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnfleet.comm.halo_exchange import ExchangePlan, FetchedRows, OnRows, RowExchange, RowTable
from gnnfleet.ops.aggregate import MaxState, accumulate_dtype, edge_dot, max_backward, max_rows, sum_rows, update_max
from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.sharded.full_batch.grad_exchange import exchange_grads
from gnnfleet.sharded.full_batch.partition_blocks import EdgeBlock


@dataclass(frozen=True, eq=False)
class RelationInput:
    """The in-edges of one type, as input of an exchange."""

    blocks: tuple[EdgeBlock, ...]
    table_index: int  # index of the x that has its source rows
    degree: Tensor | None = None  # [n] int64: divisors of sums, for a mean
    weight: Tensor | None = None  # [E] without gradient

    def block_weight(self, q: int, weight: Tensor | None) -> Tensor | None:
        """Weights of the edges of a block, by default ``self.weight``."""
        weight = self.weight if weight is None else weight.detach()
        return None if weight is None else weight[self.blocks[q].edges]

    def scale(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.degree is None else self.degree.clamp(min=1).to(dtype).reciprocal()


@dataclass(frozen=True, eq=False)
class BackwardPlan:
    """The same edges by source, for backward by source."""

    blocks: tuple[EdgeBlock, ...]
    plan: ExchangePlan
    is_weighted: bool  # with the store's weights


@dataclass(frozen=True, eq=False)
class AggregationCall:
    """One exchange: tables of source rows, and the edge types that read them."""

    ring: RowExchange
    plans: tuple[ExchangePlan, ...]  # of each table
    inputs: tuple[RelationInput, ...]
    reverse: BackwardPlan | None = None  # for a single edge type; without it, backward goes by destination
    keep_fetched: bool = False  # cache source rows that backward needs instead of fetching them again

    def row_tables(self, xs: Sequence[Tensor]) -> list[RowTable]:
        return [RowTable(plan, x.detach().contiguous()) for plan, x in zip(self.plans, xs, strict=True)]


def aggregate_sum(call: AggregationCall, xs: Sequence[Tensor], weight: Tensor | None = None) -> tuple[Tensor, ...]:
    """[n, F] for each edge type: Σ weight[e] x[source of e], or the mean; ``weight`` [E] needs a single edge type.

    ``call.reverse`` must be None unless the owners of sources know the weights.
    """
    assert weight is None or len(call.inputs) == 1
    sums: tuple[Tensor, ...] = _DistSum.apply(call, weight, *xs)  # type: ignore[no-untyped-call]
    return sums


def aggregate_sum_with_self(call: AggregationCall, x: Tensor) -> tuple[Tensor, Tensor]:
    """(``aggregate_sum`` of a single edge type without weights, the rows of x that are destinations). Backward adds
    both gradients of x in one pass."""
    assert call.reverse is not None
    sums, dst_rows = _DistSumWithSelf.apply(call, x)  # type: ignore[no-untyped-call]
    return sums, dst_rows


def aggregate_max(call: AggregationCall, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """[n, F] for each edge type: the maximum, 0 without edges. Of equals the lowest store edge id gets the gradient."""
    maxima: tuple[Tensor, ...] = _DistMax.apply(call, *xs)  # type: ignore[no-untyped-call]
    return maxima


class _DistSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AggregationCall, weight: Tensor | None, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)  # unused outputs have no gradient, and none is sent
        needs_sources = weight is not None and weight.requires_grad
        ctx.save_for_backward(weight, *(xs if needs_sources else ()))
        ctx.dtypes = [x.dtype for x in xs]
        ctx.fetched = FetchedRows() if needs_sources and call.keep_fetched else None
        return _forward_sum(call, weight, xs, ctx.fetched)

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
        scaled = [_scaled(grad, relation) for grad, relation in zip(grads, call.inputs, strict=True)]
        if call.reverse is not None and not needs_weight and scaled[0] is not None:
            dxs[0] = _sum_by_source(call.ring, call.reverse, scaled[0])
        else:
            dweight, dxs = _sum_by_destination(call, weight, scaled, xs=xs, needs=needs, fetched=ctx.fetched)
        return None, dweight, *_cast(dxs, ctx.dtypes)


class _DistSumWithSelf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AggregationCall, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.call, ctx.dtype, ctx.rows = call, x.dtype, len(x)
        ctx.set_materialize_grads(False)
        sums = _forward_sum(call, None, [x], None)[0]
        return sums, x[: len(sums)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, dst_grad: Tensor | None) -> tuple[None, Tensor | None]:
        call: AggregationCall = ctx.call
        scaled = _scaled(grad, call.inputs[0])
        if scaled is None or not ctx.needs_input_grad[1]:
            if dst_grad is None:
                return None, None
            return None, torch.nn.functional.pad(dst_grad, (0, 0, 0, ctx.rows - len(dst_grad)))
        return None, _sum_by_source(call.ring, call.reverse, scaled, base=dst_grad).to(ctx.dtype)


def _forward_sum(
    call: AggregationCall, weight: Tensor | None, xs: Sequence[Tensor], fetched: FetchedRows | None
) -> tuple[Tensor, ...]:
    """The sum or mean of every edge type."""
    sums: list[Tensor] = []
    scales = [relation.scale(accumulate_dtype(xs[relation.table_index].dtype)) for relation in call.inputs]

    def on_rows(q: int, received: list[Tensor]) -> None:
        for index, relation in enumerate(call.inputs):
            block, x = relation.blocks[q], received[relation.table_index]
            block_weight = relation.block_weight(q, weight)
            row_scale = scales[index]
            scale = None if row_scale is None else block.select_rows(row_scale)
            if q == call.ring.local_block:
                sums.append(sum_rows(block.structure, x, weight=block_weight, row_scale=scale))
            elif block.structure.num_edges:
                sum_rows(block.structure, x, weight=block_weight, row_scale=scale, rows=block.rows, out=sums[index])

    call.ring.run(call.row_tables(xs), on_rows, fetched=fetched, op="rows of aggregate")
    return tuple(sums)


def _sum_by_source(
    ring: RowExchange, reverse: BackwardPlan | None, grad: Tensor, *, base: Tensor | None = None
) -> Tensor:
    """[n, F] the gradient of local sources, added to ``base``; ``grad`` [n, F] is that of local destinations."""
    assert reverse is not None
    totals: list[Tensor] = []

    def on_rows(q: int, received: list[Tensor]) -> None:
        block = reverse.blocks[q]
        weight = block.weight if reverse.is_weighted else None
        if q == ring.local_block:
            totals.append(sum_rows(block.structure, received[0], weight=weight, base=base))
        elif block.structure.num_edges:
            sum_rows(block.structure, received[0], weight=weight, rows=block.rows, out=totals[0])

    ring.run([RowTable(reverse.plan, grad)], on_rows, op="gradients of aggregate")
    return totals[0]


def _sum_by_destination(
    call: AggregationCall,
    weight: Tensor | None,
    grads: Sequence[Tensor | None],
    *,
    xs: Sequence[Tensor],
    needs: Sequence[bool],
    fetched: FetchedRows | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(gradient of weight where xs are given, gradients of those x that need one)."""
    grad = grads[0]
    dweight = torch.empty_like(weight, dtype=grad.dtype) if weight is not None and xs and grad is not None else None

    def source_grad(relation: RelationInput, grad: Tensor, q: int, out: Tensor | None) -> Tensor:
        by_source, positions = relation.blocks[q].transposed
        block_weight = relation.block_weight(q, weight)
        return sum_rows(by_source, grad, weight=None if block_weight is None else block_weight[positions], out=out)

    def on_sources(q: int, received: list[Tensor]) -> None:
        if dweight is not None and grad is not None:
            block = call.inputs[0].blocks[q]
            dweight[block.edges] = edge_dot(block.structure, grad, received[0].to(grad.dtype), rows=block.rows)

    tables = call.row_tables(xs) if xs else []
    dxs = _return_grads(call, grads, needs, source_grad, tables=tables, on_sources=on_sources, fetched=fetched)
    return None if dweight is None or weight is None else dweight.to(weight.dtype), dxs


class _DistMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AggregationCall, *xs: Tensor) -> tuple[Tensor, ...]:
        states: list[MaxState] = []

        def on_rows(q: int, received: list[Tensor]) -> None:
            for index, relation in enumerate(call.inputs):
                block, x = relation.blocks[q], received[relation.table_index]
                if q == call.ring.local_block:
                    states.append(max_rows(block.structure, x, ties=block.edge_ids))
                elif block.structure.num_edges:
                    update_max(states[index], block.structure, x, ties=block.edge_ids, rows=block.rows)

        call.ring.run(call.row_tables(xs), on_rows, op="rows of aggregate")
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

        def source_grad(relation: RelationInput, grad: Tensor, q: int, out: Tensor | None) -> Tensor:
            block = relation.blocks[q]
            by_source, positions = block.transposed
            return max_backward(by_source, grad, winners[relation], ties=block.edge_ids, positions=positions, out=out)

        contiguous = [None if grad is None else grad.contiguous() for grad in grads]
        dxs = _return_grads(call, contiguous, ctx.needs_input_grad[1:], source_grad)
        return None, *_cast(dxs, ctx.dtypes)


_SourceGrad = Callable[[RelationInput, Tensor, int, Tensor | None], Tensor]
"""(edge type, gradient of its destinations, rank q, out) → gradient of its sources on q, added to ``out`` if given."""


def _return_grads(
    call: AggregationCall,
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
    source_grad: _SourceGrad,
    *,
    tables: Sequence[RowTable] = (),
    on_sources: OnRows | None = None,
    fetched: FetchedRows | None = None,
) -> list[Tensor | None]:
    """Gradients of the x that need one, computed block by block by the destinations' owners and summed by the sources'
    owners. ``tables`` are exchanged again, for ``on_sources``."""
    by_table: dict[int, list[tuple[RelationInput, Tensor]]] = {}
    for index in [index for index, need in enumerate(needs) if need]:
        pairs = zip(call.inputs, grads, strict=True)
        users = [(relation, grad) for relation, grad in pairs if relation.table_index == index and grad is not None]
        if users:
            by_table[index] = users
    like = [(call.plans[index], users[0][1]) for index, users in by_table.items()]

    def on_rows(q: int, received: list[Tensor]) -> list[Tensor]:
        if on_sources is not None:
            on_sources(q, received)
        totals = []
        for users in by_table.values():
            total: Tensor | None = None
            for relation, grad in users:
                total = source_grad(relation, grad, q, total)
            assert total is not None
            totals.append(total)
        return totals

    if not tables and not by_table:
        return [None] * len(needs)
    sums = exchange_grads(call.ring, like, tables, on_rows, fetched=fetched, op="gradients of aggregate")
    totals = dict(zip(by_table, sums, strict=True))
    return [totals.get(index) for index in range(len(needs))]


def _cast(grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> list[Tensor | None]:
    return [None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)]


def _scaled(grad: Tensor | None, relation: RelationInput) -> Tensor | None:
    if grad is None:
        return None
    scale = relation.scale(grad.dtype)
    if scale is None:
        return grad.contiguous()
    return torch.mul(grad, scale[:, None], out=empty_buffer(grad.shape, grad.dtype))
