"""Collectives over ranks equal the same operation on the inputs of all ranks in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.comm.collectives import (
    all_gather_json,
    all_gather_numbers,
    all_gather_rows,
    barrier,
    broadcast_bytes,
    broadcast_json,
    max_over_ranks,
    min_over_ranks,
    sum_gradients,
    sum_over_ranks,
)
from gnnfleet.comm.world import World
from tests.ranks import RankPool

SIZES = (1, 2, 3)


def gradients(world: World) -> list[Tensor | None]:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (1, 1), (5,))]
    parameters.append(torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    for index, parameter in enumerate(parameters):
        if index == 3 or (index == 1 and world.rank == 0):
            continue
        parameter.grad = torch.full_like(parameter, 10.0 * index + world.rank)
    before = world.traffic.rounds
    sum_gradients(world, parameters)
    assert world.traffic.rounds - before == (0 if world.size == 1 else 2), "one message for each dtype"
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("size", SIZES[1:])
def test_gradients_are_summed_and_missing_ones_are_zeros(pool: RankPool, size: int) -> None:
    for grads in pool.run(size, gradients):
        for index, grad in enumerate(grads):
            if index == 3:
                assert grad is None, "missing everywhere"
                continue
            ranks = range(1, size) if index == 1 else range(size)
            assert grad is not None
            assert torch.equal(grad, torch.full_like(grad, sum(10.0 * index + r for r in ranks)))


def sum_with_gradient(world: World) -> tuple[Tensor, Tensor]:
    x = torch.arange(3.0, dtype=torch.float64).add(world.rank).requires_grad_()
    total = sum_over_ranks(world, x * x)
    (total.sin() * (world.rank + 1)).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return total.detach(), x.grad


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_over_ranks_and_its_gradient_equal_one_process(pool: RankPool, size: int) -> None:
    xs = [torch.arange(3.0, dtype=torch.float64).add(r).requires_grad_() for r in range(size)]
    total = torch.stack([x * x for x in xs]).sum(0)
    sum((total.sin() * (r + 1)).sum() for r in range(size)).backward()  # type: ignore[union-attr]
    for rank, (summed, grad) in enumerate(pool.run(size, sum_with_gradient)):
        torch.testing.assert_close(summed, total.detach())
        torch.testing.assert_close(grad, xs[rank].grad)


def gather_and_broadcast(world: World) -> list[Any]:
    rows = torch.arange(2 * world.rank * 3).view(-1, 3) + 100 * world.rank
    text = broadcast_bytes(world, b"text " * 3 if world.is_first else None)
    assert broadcast_bytes(world, b"" if world.is_first else None) == b""
    return [all_gather_rows(world, rows), all_gather_rows(world, torch.empty(0, 2)), text]


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_gathered_by_rank_and_bytes_are_broadcast(pool: RankPool, size: int) -> None:
    for rows, empty, text in pool.run(size, gather_and_broadcast):
        for rank, gathered in enumerate(rows):
            assert torch.equal(gathered, torch.arange(2 * rank * 3).view(-1, 3) + 100 * rank)
        assert [list(t.shape) for t in empty] == [[0, 2]] * size
        assert text == b"text text text "


def numbers_and_json(world: World) -> list[Any]:
    barrier(world)
    uncounted = world.uncounted()
    before = world.traffic.bytes_sent
    gathered: list[Any] = [
        all_gather_numbers(uncounted, [world.rank, 0.5]),
        max_over_ranks(uncounted, 10 * world.rank),
        min_over_ranks(uncounted, world.rank - 3),
        all_gather_json(uncounted, {"rank": world.rank, "pair": [1, None]}),
        broadcast_json(uncounted, {"from": world.rank}),
    ]
    assert world.traffic.bytes_sent == before == (0 if world.size == 1 else 4), "only the barrier is counted"
    return gathered


@pytest.mark.parametrize("size", SIZES)
def test_numbers_and_json_are_gathered_by_rank(pool: RankPool, size: int) -> None:
    for numbers, largest, smallest, messages, broadcast in pool.run(size, numbers_and_json):
        assert numbers == [[rank, 0.5] for rank in range(size)]
        assert largest == 10 * (size - 1) and smallest == -3
        assert messages == [{"rank": rank, "pair": [1, None]} for rank in range(size)]
        assert broadcast == {"from": 0}
