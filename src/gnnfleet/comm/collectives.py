"""Collective operations: gradient sums, differentiable sums, gathered rows and numbers, broadcasts from rank 0.

Every rank calls with the same shapes in the same order. In a World of one rank they return their argument. Traffic is
counted as the bytes handed over; a ring all-reduce over N ranks sends up to twice as many.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions

from gnnfleet.comm.p2p import receive, require_group, send, wait_work, wrap_errors
from gnnfleet.comm.world import World
from gnnfleet.report.phase_timer import EXCHANGE

_ALL_GATHER_TAG = 3


def sum_gradients(world: World, parameters: Iterable[torch.nn.Parameter], *, extra: Tensor | None = None) -> None:
    """Collective. Replace every gradient by its sum over ranks, in one message per dtype.

    A gradient missing on this rank counts as zeros. One missing on all ranks stays None: optimizers skip it. ``extra``
    is summed in place, in the message of its dtype.
    """
    if world.size == 1:
        return
    carriers = [] if extra is None else [torch.nn.Parameter(extra)]
    by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for carrier in carriers:
        carrier.grad = extra
    for parameter in [*parameters, *carriers]:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for dtype, same_dtype in by_dtype.items():
        _sum_flat(world, same_dtype, dtype)
    for carrier in carriers:
        assert carrier.grad is not None
        carrier.data.copy_(carrier.grad)


def _sum_flat(world: World, parameters: list[torch.nn.Parameter], dtype: torch.dtype) -> None:
    total = sum(parameter.numel() for parameter in parameters)
    # The tail counts, per parameter, the ranks that have a gradient.
    flat = torch.zeros(total + len(parameters), dtype=dtype)
    views = torch.split(flat[:total], [parameter.numel() for parameter in parameters])
    for index, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
        if parameter.grad is not None:
            view.copy_(parameter.grad.reshape(-1))
            flat[total + index] = 1
    _all_reduce(world, flat, op="sum of gradients")
    has_grad = (flat[total:] > 0).tolist()
    for parameter, view, present in zip(parameters, views, has_grad, strict=True):
        parameter.grad = view.view_as(parameter) if present else None


def clip_gradients(
    world: World, replicated: Sequence[torch.nn.Parameter], sharded: Sequence[torch.nn.Parameter], *, max_norm: float
) -> None:
    """Collective. Scale all gradients so that their joint norm is at most ``max_norm``; each rank has its own
    ``sharded`` parameters."""
    grads = [parameter.grad for parameter in replicated if parameter.grad is not None]
    sharded_grads = [parameter.grad for parameter in sharded if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if sharded:
        squared = torch.nn.utils.get_total_norm(sharded_grads).to(norm.dtype) ** 2
        norm = (norm**2 + sum_over_ranks(world, squared)).sqrt()
    torch.nn.utils.clip_grads_with_norm_([*replicated, *sharded], max_norm, norm)


def sum_over_ranks(world: World, t: Tensor) -> Tensor:
    """Collective. Sum of t over ranks; differentiable, and its backward is a sum over ranks too."""
    if world.size == 1:
        return t
    out: Tensor = _AllReduceSum.apply(t, world)  # type: ignore[no-untyped-call]
    return out


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, world: World) -> Tensor:
        ctx.world = world
        ctx.set_materialize_grads(False)
        return _all_reduce(world, t.detach().clone(memory_format=torch.contiguous_format), op="sum over ranks")

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        total = grad.detach().clone(memory_format=torch.contiguous_format)
        return _all_reduce(ctx.world, total, op="sum over ranks, backward"), None


def barrier(world: World) -> None:
    """Collective. Return once all ranks have called it."""
    sum_over_ranks(world, torch.ones(1))


def all_gather_rows(world: World, t: Tensor) -> list[Tensor]:
    """Collective. t of every rank, by rank; first dimensions may differ, the others and the dtype may not."""
    if world.size == 1:
        return [t]
    with world.clock.phase(EXCHANGE, "gathered rows"):
        return _all_gather(world, t.detach().contiguous())


def _all_gather(world: World, t: Tensor) -> list[Tensor]:
    counts = all_gather_counts(world, len(t))
    peers = [rank for rank in range(world.size) if rank != world.rank]
    gathered = [t if rank == world.rank else t.new_empty(count, *t.shape[1:]) for rank, count in enumerate(counts)]
    transfers = [
        receive(world, gathered[rank], rank, tag=_ALL_GATHER_TAG, op="gathered rows, receive")
        for rank in peers
        if gathered[rank].numel()
    ]
    if t.numel():
        transfers += [send(world, t, rank, tag=_ALL_GATHER_TAG, op="gathered rows, send") for rank in peers]
    world.traffic.add_round()
    for transfer in transfers:
        transfer.wait()
    return gathered


def all_gather_counts(world: World, count: int) -> list[int]:
    """Collective. The count of every rank, by rank."""
    if world.size == 1:
        return [count]
    counts = torch.zeros(world.size, dtype=torch.int64)
    counts[world.rank] = count
    return [int(count) for count in _all_reduce(world, counts, op="counts of rows").tolist()]


def all_gather_numbers(world: World, values: Sequence[float]) -> list[list[float]]:
    """Collective. The values of every rank, by rank, as many on each; in float64, so integers must be below 2^53."""
    row = torch.tensor([list(values)], dtype=torch.float64)
    rows: list[list[float]] = torch.cat(all_gather_rows(world, row)).tolist()
    return rows


def max_over_ranks(world: World, value: float) -> float:
    """Collective. The largest value of all ranks."""
    return max(row[0] for row in all_gather_numbers(world, [value]))


def min_over_ranks(world: World, value: float) -> float:
    """Collective. The smallest value of all ranks."""
    return -max_over_ranks(world, -value)


def all_gather_bytes(world: World, content: bytes) -> list[bytes]:
    """Collective. The content of every rank, by rank."""
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return [bytes(gathered.numpy().tobytes()) for gathered in all_gather_rows(world, own)]


def all_gather_json(world: World, message: Any) -> list[Any]:
    """Collective. The message of every rank, by rank, each after a round trip through JSON."""
    return [json.loads(text) for text in all_gather_bytes(world, json.dumps(message).encode())]


def broadcast_json(world: World, message: dict[str, Any]) -> dict[str, Any]:
    """Collective. The message of rank 0; those of other ranks are ignored."""
    if world.size == 1:
        return message
    text = json.dumps(message).encode() if world.is_first else None
    received: dict[str, Any] = json.loads(broadcast_bytes(world, text))
    return received


def broadcast_bytes(world: World, content: bytes | None) -> bytes:
    """Collective. The content of rank 0; other ranks pass None."""
    assert (content is not None) == world.is_first
    if world.size == 1:
        assert content is not None
        return content
    size = torch.tensor([len(content or b"")])
    _broadcast(world, size)
    flat = torch.empty(int(size), dtype=torch.uint8)
    if content:
        flat.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    if len(flat):
        _broadcast(world, flat)
    return bytes(flat.cpu().numpy().tobytes())


def _all_reduce(world: World, t: Tensor, *, op: str) -> Tensor:
    wrap_errors(world, None, op, lambda: wait_work(world, require_group(world).allreduce([t]), op))
    world.traffic.add_bytes(t.nbytes)
    world.traffic.add_round()
    return t


def _broadcast(world: World, t: Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    op = "broadcast from rank 0"
    wrap_errors(world, None, op, lambda: wait_work(world, require_group(world).broadcast([t], options), op))
    if world.is_first:
        world.traffic.add_bytes(t.nbytes)
    world.traffic.add_round()
