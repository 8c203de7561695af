"""Message passing with any differentiable message, in one process: messages are rebuilt in backward, not stored.

``message`` defines messages, ``propagate_blocks`` has the operations on blocks of edges. E edges, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnfleet.errors import ConfigError
from gnnfleet.ops import propagate_blocks as blocks
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.message import REDUCES, Message, MessageBlock, MessageCall, autocast_dtype, check_no_captured


def propagate(
    structure: CSR,
    message: Message,
    *,
    src: Mapping[str, Tensor] | None = None,
    dst: Mapping[str, Tensor] | None = None,
    edge: Mapping[str, Tensor] | None = None,
    params: Sequence[Tensor] = (),
    reduce: str = "sum",
    edge_ids: Tensor | None = None,
    ties: Tensor | None = None,
) -> Tensor:
    """[R, …]: messages of the edges of each row, summed, averaged, maximised, or weighted by a softmax.

    For ``softmax`` the message returns (score [E, H], value [E, H, …]). Rows without edges give 0; messages of 16 bits
    give float32. Of equal maxima the edge with the lowest of ``ties`` gets the gradient, as in ``aggregate``. Raises
    ConfigError, also if the message depends on a tensor with a gradient that was not passed in.
    """
    if reduce not in REDUCES:
        raise ConfigError(f"cannot reduce by {reduce!r}: choose one of {', '.join(REDUCES)}")
    groups = {"src": src or {}, "dst": dst or {}, "edge": edge or {}}
    expected = {"src": structure.num_cols, "dst": structure.num_rows, "edge": structure.num_edges}
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            if tensor.shape[0] != expected[group]:
                raise ConfigError(f"{group}[{name!r}] has {tensor.shape[0]} rows, expected {expected[group]}")
    names = tuple((group, name) for group, tensors in groups.items() for name in tensors)
    ids = torch.arange(structure.num_edges, device=structure.col.device) if edge_ids is None else edge_ids
    plan = _PropagatePlan(structure, message, reduce, names, ids, ties, autocast_dtype())
    flat = [tensor for tensors in groups.values() for tensor in tensors.values()]
    if torch.is_grad_enabled():
        check_no_captured(*plan.as_call([*flat, *params]))
    out: Tensor = _Propagate.apply(plan, *flat, *params)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, eq=False)
class _PropagatePlan:
    """The arguments of a call without the differentiable tensors, which are passed as one flat list."""

    structure: CSR
    message: Message
    reduce: str
    names: tuple[tuple[str, str], ...]  # ("src" | "dst" | "edge", name) of the first tensors; parameters follow
    edge_ids: Tensor
    ties: Tensor | None
    precision: torch.dtype | None

    def named(self, group: str, values: Sequence[Any]) -> dict[str, Any]:
        """The entries of the flat list that belong to a group."""
        return {name: value for (kind, name), value in zip(self.names, values, strict=False) if kind == group}

    def as_call(self, tensors: Sequence[Tensor]) -> tuple[MessageCall, MessageBlock]:
        src, dst, edge = (self.named(group, tensors) for group in ("src", "dst", "edge"))
        call = MessageCall(
            message=self.message,
            reduce=self.reduce,
            num_dst=self.structure.num_rows,
            dst=dst,
            params=tensors[len(self.names) :],
            precision=self.precision,
        )
        return call, MessageBlock(structure=self.structure, edge_ids=self.edge_ids, src=src, edge=edge, ties=self.ties)


class _Propagate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _PropagatePlan, *tensors: Tensor) -> Tensor:
        call, block = plan.as_call(tensors)
        state = blocks.PropagateState()
        blocks.update_propagate(state, call, block)
        out, side = blocks.finish_propagate(state, call)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, out if plan.reduce == "softmax" else None, side)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: _PropagatePlan = ctx.plan
        *tensors, out, side = ctx.saved_tensors
        call, block = plan.as_call(tensors)
        needs = ctx.needs_input_grad[1:]
        src, dst, edge = (
            [name for name, need in plan.named(group, needs).items() if need] for group in ("src", "dst", "edge")
        )
        params = [i for i, need in enumerate(needs[len(plan.names) :]) if need]
        into = blocks.open_gradients(call, dst=dst, params=params)
        of_edges = {name: torch.zeros_like(block.edge[name]) for name in edge}
        upstream = blocks.begin_backward(call, grad, out=out, side=side)
        of_sources = blocks.block_backward(call, upstream, block, into=into, src=src, edge=of_edges)
        gradients = {"src": of_sources, "dst": into.dst, "edge": of_edges}
        totals = [gradients[group].get(name) for group, name in plan.names]
        totals += [into.params.get(i) for i in range(len(call.params))]
        pairs = zip(totals, tensors, strict=True)
        return None, *(None if total is None else total.to(tensor.dtype) for total, tensor in pairs)
