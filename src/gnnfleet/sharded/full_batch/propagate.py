"""Any differentiable message over edges whose sources are on any rank.

Messages are never stored: backward recomputes each block from sources that are cached or fetched again, and returns
their gradients to the owners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnfleet.comm.halo_exchange import ExchangePlan, FetchedRows, RowExchange, RowTable
from gnnfleet.ops import propagate_blocks
from gnnfleet.ops.message import Message, MessageBlock, MessageCall, check_no_captured
from gnnfleet.sharded.full_batch.grad_exchange import exchange_grads
from gnnfleet.sharded.full_batch.partition_blocks import EdgeBlock


@dataclass(frozen=True, eq=False)
class PropagateCall:
    """All arguments of a call except tensors with gradients, which are passed beside it in one flat list."""

    ring: RowExchange
    blocks: tuple[EdgeBlock, ...]
    plan: ExchangePlan
    num_dst: int
    message: Message
    reduce: str
    precision: torch.dtype | None
    keep_fetched: bool = False  # cache sources for backward instead of fetching them again
    names: tuple[tuple[str, str], ...] = ()  # ("src" | "dst" | "edge", name) of the first tensors; parameters follow

    def named(self, group: str, values: Sequence[Any]) -> dict[str, Any]:
        """The values of the flat list that belong to a group."""
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

    def block(self, q: int, received: Sequence[Tensor], tensors: Sequence[Tensor]) -> MessageBlock:
        """The edges from q with their received sources."""
        edges, src = self.blocks[q], self.named("src", tensors)
        return MessageBlock(
            structure=edges.structure,
            edge_ids=edges.edge_ids,
            src={name: rows.view(len(rows), *src[name].shape[1:]) for name, rows in zip(src, received, strict=True)},
            edge={name: tensor.detach()[edges.edges] for name, tensor in self.named("edge", tensors).items()},
            rows=edges.rows,
            ties=edges.edge_ids,
        )


def propagate(plan: PropagateCall, groups: Mapping[str, Mapping[str, Tensor]], params: Sequence[Tensor]) -> Tensor:
    """[n, …]; ``groups`` has the tensors of src and dst (of local rows) and edge. See ``ops.propagate``."""
    assert plan.names == tuple((group, name) for group, tensors in groups.items() for name in tensors)
    flat = [tensor for tensors in groups.values() for tensor in tensors.values()]
    if torch.is_grad_enabled():
        local_rows = [table.rows for table in plan.row_tables(flat)]
        check_no_captured(plan.call([*flat, *params]), plan.block(plan.ring.local_block, local_rows, flat))
    out: Tensor = _Propagate.apply(plan, *flat, *params)  # type: ignore[no-untyped-call]
    return out


class _Propagate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: PropagateCall, *tensors: Tensor) -> Tensor:
        call, state = plan.call(tensors), propagate_blocks.PropagateState()
        ctx.fetched = FetchedRows() if plan.keep_fetched and any(ctx.needs_input_grad) else None

        def on_rows(q: int, received: list[Tensor]) -> None:
            if q == plan.ring.local_block or plan.blocks[q].structure.num_edges:
                propagate_blocks.update_propagate(state, call, plan.block(q, received, tensors))

        plan.ring.run(plan.row_tables(tensors), on_rows, fetched=ctx.fetched, op="rows of propagate")
        out, side = propagate_blocks.finish_propagate(state, call)
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
        grads = _recompute(plan, tensors, needs, grad, out=out, side=side, fetched=ctx.fetched)
        pairs = zip(grads, tensors, strict=True)
        return None, *(None if total is None else total.view_as(tensor).to(tensor.dtype) for total, tensor in pairs)


def _recompute(
    plan: PropagateCall,
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
    grad: Tensor,
    *,
    out: Tensor | None,
    side: Tensor | None,
    fetched: FetchedRows | None,
) -> list[Tensor | None]:
    """The gradient of each tensor, None where none is needed."""
    call, src, edge = plan.call(tensors), plan.named("src", tensors), plan.named("edge", tensors)
    src_names, dst_names, edge_names = (
        [name for name, need in plan.named(group, needs).items() if need] for group in ("src", "dst", "edge")
    )
    params = [i for i, need in enumerate(needs[len(plan.names) :]) if need]
    into = propagate_blocks.open_gradients(call, dst=dst_names, params=params)
    edge_grads = {name: torch.zeros_like(edge[name]) for name in edge_names}
    upstream = propagate_blocks.begin_backward(call, grad, out=out, side=side)
    like = [(plan.plan, _flat(src[name].detach())) for name in src_names]

    def on_rows(q: int, received: list[Tensor]) -> list[Tensor]:
        block_edges = {name: tensor[plan.blocks[q].edges] for name, tensor in edge_grads.items()}
        block = plan.block(q, received, tensors)
        grads = propagate_blocks.block_backward(call, upstream, block, into=into, src=src_names, edge=block_edges)
        return [_flat(grads[name]) for name in src_names]

    tables, op = plan.row_tables(tensors), "rows of propagate, again"
    sums = exchange_grads(plan.ring, like, tables, on_rows, fetched=fetched, op=op)
    src_grads = dict(zip(src_names, sums, strict=True))
    grads: dict[str, Mapping[str, Tensor]] = {"src": src_grads, "dst": into.dst, "edge": edge_grads}
    return [grads[group].get(name) for group, name in plan.names] + [
        into.params.get(i) for i in range(len(call.params))
    ]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), tensor.shape[1:].numel()).contiguous()
