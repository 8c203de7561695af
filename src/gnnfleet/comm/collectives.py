"""Numbers combine over ranks: gradients in one flat sum, differentiable sums, rows of all, bytes from the first.

Every rank calls with the same shapes in the same order. In a World of one these return what they were given. Bytes are
counted as handed over; what the network makes of a sum over N ranks is up to twice that.
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

_ROWS = 3  # the tag of rows that go to everyone


def sum_gradients(world: World, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace every gradient by its sum over ranks, in one message per dtype.

    A gradient missing here counts as zeros. One that is missing everywhere stays missing: optimizers pass over those.
    """
    if world.size == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for dtype, several in by_dtype.items():
        _sum_flat(world, several, dtype)


def _sum_flat(world: World, parameters: list[torch.nn.Parameter], dtype: torch.dtype) -> None:
    total = sum(parameter.numel() for parameter in parameters)
    # After the gradients, for each parameter, how many ranks have one.
    flat = torch.zeros(total + len(parameters), dtype=dtype, device=world.device)
    pieces = torch.split(flat[:total], [parameter.numel() for parameter in parameters])
    for place, (parameter, piece) in enumerate(zip(parameters, pieces, strict=True)):
        if parameter.grad is not None:
            piece.copy_(parameter.grad.reshape(-1))
            flat[total + place] = 1
    _all_reduce(world, flat, doing="sum of gradients")
    there = (flat[total:] > 0).tolist()
    for parameter, piece, found in zip(parameters, pieces, there, strict=True):
        parameter.grad = piece.view_as(parameter) if found else None


def clip_gradients(
    world: World, replicated: Sequence[torch.nn.Parameter], sharded: Sequence[torch.nn.Parameter], *, max_norm: float
) -> None:
    """Shrink all gradients together to a norm of at most ``highest``; those of ``own`` differ from rank to rank."""
    grads = [parameter.grad for parameter in replicated if parameter.grad is not None]
    rows = [parameter.grad for parameter in sharded if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if sharded:
        there = torch.nn.utils.get_total_norm(rows).to(norm.dtype) ** 2
        norm = (norm**2 + sum_over_ranks(world, there)).sqrt()
    torch.nn.utils.clip_grads_with_norm_([*replicated, *sharded], max_norm, norm)


def sum_over_ranks(world: World, t: Tensor) -> Tensor:
    """The sum of t over ranks; differentiable, and its backward is a sum over ranks too."""
    if world.size == 1:
        return t
    out: Tensor = _AllReduceSum.apply(t, world)  # type: ignore[no-untyped-call]
    return out


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, world: World) -> Tensor:
        ctx.world = world
        ctx.set_materialize_grads(False)
        return _all_reduce(world, t.detach().clone(memory_format=torch.contiguous_format), doing="sum over ranks")

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        found = grad.detach().clone(memory_format=torch.contiguous_format)
        return _all_reduce(ctx.world, found, doing="sum over ranks, backward"), None


def all_gather_rows(world: World, t: Tensor) -> list[Tensor]:
    """t of every rank, by rank; the first dimension may differ, the others and the dtype may not."""
    if world.size == 1:
        return [t]
    with world.clock.phase(EXCHANGE, "gathered rows"):
        return _gather(world, t.detach().contiguous())


def _gather(world: World, t: Tensor) -> list[Tensor]:
    counts = all_gather_counts(world, len(t))
    others = [rank for rank in range(world.size) if rank != world.rank]
    found = [t if rank == world.rank else t.new_empty(count, *t.shape[1:]) for rank, count in enumerate(counts)]
    posted = [
        receive(world, found[rank], rank, tag=_ROWS, op="gathered rows, coming")
        for rank in others
        if found[rank].numel()
    ]
    if t.numel():
        posted += [send(world, t, rank, tag=_ROWS, op="gathered rows, going") for rank in others]
    world.traffic.add_round()
    for message in posted:
        message.wait()
    return found


def all_gather_counts(world: World, count: int) -> list[int]:
    """The count of every rank, by rank."""
    if world.size == 1:
        return [count]
    each = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    each[world.rank] = count
    return [int(found) for found in _all_reduce(world, each, doing="counts of rows").tolist()]


def broadcast_bytes(world: World, data: bytes | None) -> bytes:
    """What the first rank gives; the others give None."""
    assert (data is not None) == world.is_first
    if world.size == 1:
        assert data is not None
        return data
    size = torch.tensor([len(data or b"")], device=world.device)
    _broadcast(world, size)
    flat = torch.empty(int(size), dtype=torch.uint8, device=world.device)
    if data:
        flat.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if len(flat):
        _broadcast(world, flat)
    return bytes(flat.cpu().numpy().tobytes())


def _all_reduce(world: World, t: Tensor, *, doing: str) -> Tensor:
    wrap_errors(world, None, doing, lambda: wait_work(world, require_group(world).allreduce([t]), doing))
    world.traffic.add_bytes(t.nbytes)
    world.traffic.add_round()
    return t


def _broadcast(world: World, t: Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    doing = "word from rank 0"
    wrap_errors(world, None, doing, lambda: wait_work(world, require_group(world).broadcast([t], options), doing))
    if world.is_first:
        world.traffic.add_bytes(t.nbytes)
    world.traffic.add_round()


def broadcast_from_first(world: World, word: dict[str, Any]) -> dict[str, Any]:
    """The word of the first rank."""
    if world.size == 1:
        return word
    heard: dict[str, Any] = json.loads(broadcast_bytes(world, json.dumps(word).encode() if world.is_first else None))
    return heard
