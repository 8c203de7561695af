"""Any differentiable message over edges whose sources live on any rank.

Messages are never kept: backward rebuilds each block from sources that it fetches again, or that were kept, and sends
their gradients home.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnfleet.comm.halo_exchange import Kept, Lane, Routes, Visits
from gnnfleet.ops import propagate_blocks as pieces
from gnnfleet.ops.message import Block, Call, Message, refuse_captured
from gnnfleet.sharded.full_batch.grad_accumulator import Homecoming
from gnnfleet.sharded.full_batch.partition_blocks import Cut


@dataclass(frozen=True, eq=False)
class Propagation:
    """Everything about a call that is not a tensor with a gradient; tensors travel beside it in one flat list."""

    ring: Visits
    cuts: tuple[Cut, ...]
    routes: Routes
    num_dst: int
    message: Message
    reduce: str
    precision: torch.dtype | None
    keep: bool = False  # sources are kept for backward, not fetched again
    names: tuple[tuple[str, str], ...] = ()  # ("src" | "dst" | "edge", name) of the first tensors; parameters follow

    @property
    def rank(self) -> int:
        return self.ring.world.rank

    def named(self, group: str, values: Sequence[Any]) -> dict[str, Any]:
        """Those of the flat list that belong to a group."""
        return {name: value for (kind, name), value in zip(self.names, values, strict=False) if kind == group}

    def call(self, tensors: Sequence[Tensor]) -> Call:
        return Call(
            message=self.message,
            reduce=self.reduce,
            precision=self.precision,
            num_dst=self.num_dst,
            dst=self.named("dst", tensors),
            params=tensors[len(self.names) :],
        )

    def lanes(self, tensors: Sequence[Tensor]) -> list[Lane]:
        return [Lane(self.routes, _flat(tensor.detach())) for tensor in self.named("src", tensors).values()]

    def block(self, q: int, rows: Sequence[Tensor], tensors: Sequence[Tensor]) -> Block:
        """The edges from q with sources as they came."""
        cut, src = self.cuts[q], self.named("src", tensors)
        came = {name: part.view(len(part), *src[name].shape[1:]) for name, part in zip(src, rows, strict=True)}
        edge = {name: tensor.detach()[cut.edges] for name, tensor in self.named("edge", tensors).items()}
        ids = cut.edge_ids
        return Block(structure=cut.structure, edge_ids=ids, src=came, edge=edge, rows=cut.rows, ties=ids)


def propagate_ring(plan: Propagation, groups: Mapping[str, Mapping[str, Tensor]], params: Sequence[Tensor]) -> Tensor:
    """[n, …]; ``groups`` has the tensors of src and dst (a row for each own row) and edge. See ``ops.propagate``."""
    assert plan.names == tuple((group, name) for group, tensors in groups.items() for name in tensors)
    flat = [tensor for tensors in groups.values() for tensor in tensors.values()]
    if torch.is_grad_enabled():
        own = [lane.rows for lane in plan.lanes(flat)]
        refuse_captured(plan.call([*flat, *params]), plan.block(plan.rank, own, flat))
    out: Tensor = _Propagate.apply(plan, *flat, *params)  # type: ignore[no-untyped-call]
    return out


class _Propagate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Propagation, *tensors: Tensor) -> Tensor:
        call, state = plan.call(tensors), pieces.State()
        ctx.kept = Kept() if plan.keep and any(ctx.needs_input_grad) else None

        def visit(q: int, rows: list[Tensor]) -> None:
            if q == plan.rank or plan.cuts[q].structure.num_edges:
                pieces.extend(state, call, plan.block(q, rows, tensors))

        plan.ring.visit(plan.lanes(tensors), visit, keep=ctx.kept, what="rows of propagate")
        out, side = pieces.finish(state, call)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, out if plan.reduce == "softmax" else None, side)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: Propagation = ctx.plan
        *tensors, out, side = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if not any(needs):
            return (None,) * (1 + len(tensors))
        found = _rebuild(plan, tensors, _Wanted.of(plan, needs), grad, out=out, side=side, kept=ctx.kept)
        given = zip(found, tensors, strict=True)
        return None, *(None if total is None else total.view_as(tensor).to(tensor.dtype) for total, tensor in given)


@dataclass(frozen=True)
class _Wanted:
    """The inputs that need a gradient."""

    src: list[str]
    dst: list[str]
    edge: list[str]
    params: list[int]

    @classmethod
    def of(cls, plan: Propagation, needs: Sequence[bool]) -> _Wanted:
        src, dst, edge = (
            [name for name, need in plan.named(group, needs).items() if need] for group in ("src", "dst", "edge")
        )
        return cls(src, dst, edge, [i for i, need in enumerate(needs[len(plan.names) :]) if need])


def _rebuild(
    plan: Propagation,
    tensors: Sequence[Tensor],
    wanted: _Wanted,
    grad: Tensor,
    *,
    out: Tensor | None,
    side: Tensor | None,
    kept: Kept | None,
) -> list[Tensor | None]:
    """The gradient of each tensor, None where none is wanted."""
    call, src, edge = plan.call(tensors), plan.named("src", tensors), plan.named("edge", tensors)
    into = pieces.open_gradients(call, dst=wanted.dst, params=wanted.params)
    of_edges = {name: torch.zeros_like(edge[name]) for name in wanted.edge}
    upstream = pieces.begin_back(call, grad, out=out, side=side)
    home = Homecoming(plan.rank, [(plan.routes, _flat(src[name].detach())) for name in wanted.src])

    def visit(q: int, rows: list[Tensor]) -> list[Tensor]:
        here = {name: tensor[plan.cuts[q].edges] for name, tensor in of_edges.items()}
        block = plan.block(q, rows, tensors)
        made = pieces.back(call, upstream, block, into=into, src=wanted.src, edge=here)
        return [_flat(made[name]) for name in wanted.src]

    what = "rows of propagate, again"
    plan.ring.visit(plan.lanes(tensors), visit, home=home.ways, collect=home.take, keep=kept, what=what)
    of_sources = dict(zip(wanted.src, home.totals, strict=True))
    found: dict[str, Mapping[str, Tensor]] = {"src": of_sources, "dst": into.dst, "edge": of_edges}
    totals = [found[group].get(name) for group, name in plan.names]
    return totals + [into.params.get(i) for i in range(len(call.params))]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), tensor.shape[1:].numel()).contiguous()
