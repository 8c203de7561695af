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

from gnnfleet.comm.halo_exchange import Kept, Lane, Routes, Visit, Visits
from gnnfleet.ops.aggregate import MaxState, edge_dot, extend_max, max_back, max_rows, sum_rows, wide
from gnnfleet.ops.buffers import empty
from gnnfleet.sharded.full_batch.grad_accumulator import Homecoming
from gnnfleet.sharded.full_batch.partition_blocks import Cut


@dataclass(frozen=True, eq=False)
class Strand:
    """The in-edges of one type in an exchange."""

    cuts: tuple[Cut, ...]
    lane: int  # which x its sources are rows of
    degree: Tensor | None = None  # [n] int64: what sums are divided by, for a mean

    def scale(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.degree is None else self.degree.clamp(min=1).to(dtype).reciprocal()


@dataclass(frozen=True, eq=False)
class Reverse:
    """The same edges seen from their sources, for backward by source."""

    cuts: tuple[Cut, ...]
    routes: Routes
    weighted: bool  # by the store's weights


@dataclass(frozen=True, eq=False)
class Aggregation:
    """One exchange: lanes of source rows, strands of edges on them."""

    ring: Visits
    routes: tuple[Routes, ...]  # of each lane
    strands: tuple[Strand, ...]
    reverse: Reverse | None = None  # of a single strand; without it gradients go home
    keep: bool = False  # sources are kept where backward needs them, not fetched again

    @property
    def rank(self) -> int:
        return self.ring.world.rank

    def lanes(self, xs: Sequence[Tensor]) -> list[Lane]:
        return [Lane(routes, x.detach().contiguous()) for routes, x in zip(self.routes, xs, strict=True)]


def sum_strands(call: Aggregation, xs: Sequence[Tensor], weight: Tensor | None = None) -> tuple[Tensor, ...]:
    """[n, F] for each strand: Σ weight[e] x[source of e], or the mean; ``weight`` [E] goes with a single strand.

    ``call.reverse`` must know the weights that are given.
    """
    assert weight is None or len(call.strands) == 1
    found: tuple[Tensor, ...] = _Sum.apply(call, weight, *xs)  # type: ignore[no-untyped-call]
    return found


def sum_with_own(call: Aggregation, x: Tensor) -> tuple[Tensor, Tensor]:
    """(``sum_strands`` of a single strand without weights, the rows of x that are destinations): both gradients of x
    are added up in one pass."""
    assert call.reverse is not None
    near, own = _SumWithOwn.apply(call, x)  # type: ignore[no-untyped-call]
    return near, own


def max_strands(call: Aggregation, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """[n, F] for each strand: the maximum, 0 without edges; of equals the lowest store edge id gets the gradient."""
    found: tuple[Tensor, ...] = _Max.apply(call, *xs)  # type: ignore[no-untyped-call]
    return found


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Aggregation, weight: Tensor | None, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)  # what nobody used has no gradient, and sends none
        again = weight is not None and weight.requires_grad
        ctx.save_for_backward(weight, *(xs if again else ()))
        ctx.dtypes = [x.dtype for x in xs]
        ctx.kept = Kept() if again and call.keep else None
        return _gather(call, weight, xs, ctx.kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: Aggregation = ctx.call
        weight, *xs = ctx.saved_tensors
        needs_weight, *needs = ctx.needs_input_grad[1:]
        dweight = None
        dxs: list[Tensor | None] = [None] * len(ctx.dtypes)
        if not (needs_weight or any(needs)):
            return None, None, *dxs
        scaled = [_scaled(grad, strand) for grad, strand in zip(grads, call.strands, strict=True)]
        if call.reverse is not None and not needs_weight and scaled[0] is not None:
            dxs[0] = _sum_by_source(call.ring, call.reverse, scaled[0])
        else:
            dweight, dxs = _sum_home(call, weight, scaled, xs=xs, needs=needs, kept=ctx.kept)
        found = [None if dx is None else dx.to(dtype) for dx, dtype in zip(dxs, ctx.dtypes, strict=True)]
        return None, dweight, *found


class _SumWithOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Aggregation, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.call, ctx.dtype, ctx.rows = call, x.dtype, len(x)
        ctx.set_materialize_grads(False)
        near = _gather(call, None, [x], None)[0]
        return near, x[: len(near)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, own: Tensor | None) -> tuple[None, Tensor | None]:
        call: Aggregation = ctx.call
        scaled = _scaled(grad, call.strands[0])
        if scaled is None or not ctx.needs_input_grad[1]:
            return None, None if own is None else torch.nn.functional.pad(own, (0, 0, 0, ctx.rows - len(own)))
        return None, _sum_by_source(call.ring, call.reverse, scaled, base=own).to(ctx.dtype)


def _gather(call: Aggregation, weight: Tensor | None, xs: Sequence[Tensor], keep: Kept | None) -> tuple[Tensor, ...]:
    """The sum or mean of every strand."""
    outs: list[Tensor] = []
    scales = [strand.scale(wide(xs[strand.lane].dtype)) for strand in call.strands]

    def visit(q: int, rows: list[Tensor]) -> None:
        for place, strand in enumerate(call.strands):
            cut, x = strand.cuts[q], rows[strand.lane]
            own = None if weight is None else weight.detach()[cut.edges]
            each = scales[place]
            scale = None if each is None else cut.of_rows(each)
            if q == call.rank:  # the first to be visited, and it has all rows
                outs.append(sum_rows(cut.structure, x, weight=own, row_scale=scale))
            elif cut.structure.num_edges:
                sum_rows(cut.structure, x, weight=own, row_scale=scale, rows=cut.rows, out=outs[place])

    call.ring.visit(call.lanes(xs), visit, keep=keep, what="rows of aggregate")
    return tuple(outs)


def _sum_by_source(ring: Visits, reverse: Reverse | None, grad: Tensor, *, base: Tensor | None = None) -> Tensor:
    """[n, F] the gradient of own sources, added to ``base``; ``grad`` [n, F] is that of own destinations."""
    assert reverse is not None
    totals: list[Tensor] = []

    def visit(q: int, rows: list[Tensor]) -> None:
        cut = reverse.cuts[q]
        weight = cut.weight if reverse.weighted else None
        if q == ring.world.rank:
            totals.append(sum_rows(cut.structure, rows[0], weight=weight, base=base))
        elif cut.structure.num_edges:
            sum_rows(cut.structure, rows[0], weight=weight, rows=cut.rows, out=totals[0])

    ring.visit([Lane(reverse.routes, grad)], visit, what="gradients of aggregate")
    return totals[0]


def _sum_home(
    call: Aggregation,
    weight: Tensor | None,
    grads: Sequence[Tensor | None],
    *,
    xs: Sequence[Tensor],
    needs: Sequence[bool],
    kept: Kept | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(gradient of weight where xs are given, gradients of those x that need one)."""
    grad = grads[0]
    dweight = torch.empty_like(weight, dtype=grad.dtype) if weight is not None and xs and grad is not None else None

    def part(strand: Strand, grad: Tensor, q: int, into: Tensor | None) -> Tensor:
        cut = strand.cuts[q]
        turned, positions = cut.turned
        turned_weight = None if weight is None else weight.detach()[cut.edges][positions]
        return sum_rows(turned, grad, weight=turned_weight, out=into)

    def again(q: int, rows: list[Tensor]) -> None:
        if dweight is not None and grad is not None:
            cut = call.strands[0].cuts[q]
            dweight[cut.edges] = edge_dot(cut.structure, grad, rows[0].to(grad.dtype), rows=cut.rows)

    dxs = _home(call, grads, needs, part=part, lanes=call.lanes(xs) if xs else [], again=again, kept=kept)
    return None if dweight is None or weight is None else dweight.to(weight.dtype), dxs


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Aggregation, *xs: Tensor) -> tuple[Tensor, ...]:
        states: list[MaxState] = []

        def visit(q: int, rows: list[Tensor]) -> None:
            for place, strand in enumerate(call.strands):
                cut, x = strand.cuts[q], rows[strand.lane]
                if q == call.rank:
                    states.append(max_rows(cut.structure, x, ties=cut.edge_ids))
                elif cut.structure.num_edges:
                    extend_max(states[place], cut.structure, x, ties=cut.edge_ids, rows=cut.rows)

        call.ring.visit(call.lanes(xs), visit, what="rows of aggregate")
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(state.winner for state in states))
        ctx.dtypes = [x.dtype for x in xs]
        return tuple(state.out for state in states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: Aggregation = ctx.call
        winners = dict(zip(call.strands, ctx.saved_tensors, strict=True))

        def part(strand: Strand, grad: Tensor, q: int, into: Tensor | None) -> Tensor:
            cut = strand.cuts[q]
            turned, positions = cut.turned
            return max_back(turned, grad, winners[strand], ties=cut.edge_ids, positions=positions, out=into)

        given = [None if grad is None else grad.contiguous() for grad in grads]
        dxs = _home(call, given, ctx.needs_input_grad[1:], part=part)
        return None, *(None if dx is None else dx.to(dtype) for dx, dtype in zip(dxs, ctx.dtypes, strict=True))


class _Part(Protocol):
    """The gradient of the sources at q of a strand, from that of its destinations; added to ``into`` if given."""

    def __call__(self, strand: Strand, grad: Tensor, q: int, into: Tensor | None) -> Tensor: ...


def _home(
    call: Aggregation,
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
    *,
    part: _Part,
    lanes: Sequence[Lane] = (),
    again: Visit | None = None,
    kept: Kept | None = None,
) -> list[Tensor | None]:
    """Gradients of the lanes that need one, made block by block where the destinations live, added up at home."""
    inside: dict[int, list[tuple[Strand, Tensor]]] = {lane: [] for lane, need in enumerate(needs) if need}
    for strand, grad in zip(call.strands, grads, strict=True):
        if grad is not None and strand.lane in inside:
            inside[strand.lane].append((strand, grad))
    inside = {lane: strands for lane, strands in inside.items() if strands}
    home = Homecoming(call.rank, [(call.routes[lane], strands[0][1]) for lane, strands in inside.items()])

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
        call.ring.visit(lanes, visit, home=home.ways, collect=home.take, keep=kept, what=what)
    totals = dict(zip(inside, home.totals, strict=True))
    return [totals.get(lane) for lane in range(len(needs))]


def _scaled(grad: Tensor | None, strand: Strand) -> Tensor | None:
    if grad is None:
        return None
    scale = strand.scale(grad.dtype)
    if scale is None:
        return grad.contiguous()
    return torch.mul(grad, scale[:, None], out=empty(grad.shape, grad.dtype))
