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

from gnnfleet.comm.halo_exchange import ExchangePlan, FetchedRows, RowExchange, RowTable
from gnnfleet.ops import propagate_blocks as pieces
from gnnfleet.ops.message import Message, MessageBlock, MessageCall, check_no_captured
from gnnfleet.sharded.full_batch.grad_accumulator import GradAccumulator
from gnnfleet.sharded.full_batch.partition_blocks import EdgeBlock


@dataclass(frozen=True, eq=False)
class PropagateCall:
    """Everything about a call that is not a tensor with a gradient; tensors travel beside it in one flat list."""

    ring: RowExchange
    blocks: tuple[EdgeBlock, ...]
    plan: ExchangePlan
    num_dst: int
    message: Message
    reduce: str
    precision: torch.dtype | None
    keep_fetched: bool = False  # sources are kept for backward, not fetched again
    names: tuple[tuple[str, str], ...] = ()  # ("src" | "dst" | "edge", name) of the first tensors; parameters follow

    @property
    def rank(self) -> int:
        return self.ring.world.rank

    def named(self, group: str, values: Sequence[Any]) -> dict[str, Any]:
        """Those of the flat list that belong to a group."""
        return {name: value for (kind, name), value in zip(self.names, values, strict=False) if kind == group}

    def call(self, tensors: Sequence[Tensor]) -> MessageCall:
        return MessageCall(
            message=self.message,
            reduce=self.reduce,
            precision=self.precision,
            num_dst=self.num_dst,
            dst=self.named("dst", tensors),
            params=tensors[len(self.names) :],
        )

    def row_tables(self, tensors: Sequence[Tensor]) -> list[RowTable]:
        return [RowTable(self.plan, _flat(tensor.detach())) for tensor in self.named("src", tensors).values()]

    def block(self, q: int, rows: Sequence[Tensor], tensors: Sequence[Tensor]) -> MessageBlock:
        """The edges from q with sources as they came."""
        cut, src = self.blocks[q], self.named("src", tensors)
        came = {name: part.view(len(part), *src[name].shape[1:]) for name, part in zip(src, rows, strict=True)}
        edge = {name: tensor.detach()[cut.edges] for name, tensor in self.named("edge", tensors).items()}
        ids = cut.edge_ids
        return MessageBlock(structure=cut.structure, edge_ids=ids, src=came, edge=edge, rows=cut.rows, ties=ids)


def propagate(plan: PropagateCall, groups: Mapping[str, Mapping[str, Tensor]], params: Sequence[Tensor]) -> Tensor:
    """[n, …]; ``groups`` has the tensors of src and dst (a row for each own row) and edge. See ``ops.propagate``."""
    assert plan.names == tuple((group, name) for group, tensors in groups.items() for name in tensors)
    flat = [tensor for tensors in groups.values() for tensor in tensors.values()]
    if torch.is_grad_enabled():
        own = [lane.rows for lane in plan.row_tables(flat)]
        check_no_captured(plan.call([*flat, *params]), plan.block(plan.rank, own, flat))
    out: Tensor = _Propagate.apply(plan, *flat, *params)  # type: ignore[no-untyped-call]
    return out


class _Propagate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: PropagateCall, *tensors: Tensor) -> Tensor:
        call, state = plan.call(tensors), pieces.PropagateState()
        ctx.kept = FetchedRows() if plan.keep_fetched and any(ctx.needs_input_grad) else None

        def visit(q: int, rows: list[Tensor]) -> None:
            if q == plan.rank or plan.blocks[q].structure.num_edges:
                pieces.update_propagate(state, call, plan.block(q, rows, tensors))

        plan.ring.run(plan.row_tables(tensors), visit, fetched=ctx.kept, op="rows of propagate")
        out, side = pieces.finish_propagate(state, call)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, out if plan.reduce == "softmax" else None, side)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: PropagateCall = ctx.plan
        *tensors, out, side = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if not any(needs):
            return (None,) * (1 + len(tensors))
        found = _rebuild(plan, tensors, _NeededGrads.of(plan, needs), grad, out=out, side=side, kept=ctx.kept)
        given = zip(found, tensors, strict=True)
        return None, *(None if total is None else total.view_as(tensor).to(tensor.dtype) for total, tensor in given)


@dataclass(frozen=True)
class _NeededGrads:
    """The inputs that need a gradient."""

    src: list[str]
    dst: list[str]
    edge: list[str]
    params: list[int]

    @classmethod
    def of(cls, plan: PropagateCall, needs: Sequence[bool]) -> _NeededGrads:
        src, dst, edge = (
            [name for name, need in plan.named(group, needs).items() if need] for group in ("src", "dst", "edge")
        )
        return cls(src, dst, edge, [i for i, need in enumerate(needs[len(plan.names) :]) if need])


def _rebuild(
    plan: PropagateCall,
    tensors: Sequence[Tensor],
    wanted: _NeededGrads,
    grad: Tensor,
    *,
    out: Tensor | None,
    side: Tensor | None,
    kept: FetchedRows | None,
) -> list[Tensor | None]:
    """The gradient of each tensor, None where none is wanted."""
    call, src, edge = plan.call(tensors), plan.named("src", tensors), plan.named("edge", tensors)
    into = pieces.open_gradients(call, dst=wanted.dst, params=wanted.params)
    of_edges = {name: torch.zeros_like(edge[name]) for name in wanted.edge}
    upstream = pieces.begin_backward(call, grad, out=out, side=side)
    home = GradAccumulator(plan.rank, [(plan.plan, _flat(src[name].detach())) for name in wanted.src])

    def visit(q: int, rows: list[Tensor]) -> list[Tensor]:
        here = {name: tensor[plan.blocks[q].edges] for name, tensor in of_edges.items()}
        block = plan.block(q, rows, tensors)
        made = pieces.block_backward(call, upstream, block, into=into, src=wanted.src, edge=here)
        return [_flat(made[name]) for name in wanted.src]

    what = "rows of propagate, again"
    plan.ring.run(plan.row_tables(tensors), visit, returns=home.returns, on_returns=home.add, fetched=kept, op=what)
    of_sources = dict(zip(wanted.src, home.totals, strict=True))
    found: dict[str, Mapping[str, Tensor]] = {"src": of_sources, "dst": into.dst, "edge": of_edges}
    totals = [found[group].get(name) for group, name in plan.names]
    return totals + [into.params.get(i) for i in range(len(call.params))]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), tensor.shape[1:].numel()).contiguous()
