"""Sums and gathers over ranks equal the same thing done on all rows in one place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.comm.collectives import all_gather_rows, broadcast_bytes, sum_gradients, sum_over_ranks
from gnnfleet.comm.world import World
from tests.ranks import Crew

SIZES = (1, 2, 3)


def gradients(world: World) -> list[Tensor | None]:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (1, 1), (5,))]
    parameters.append(torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    for place, parameter in enumerate(parameters):
        if place == 3 or (place == 1 and world.rank == 0):
            continue
        parameter.grad = torch.full_like(parameter, 10.0 * place + world.rank)
    before = world.traffic.rounds
    sum_gradients(world, parameters)
    assert world.traffic.rounds - before == (0 if world.size == 1 else 2), "one message for each dtype"
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("size", SIZES[1:])
def test_gradients_are_summed_and_missing_ones_are_zeros(crew: Crew, size: int) -> None:
    for found in crew.run(size, gradients):
        for place, grad in enumerate(found):
            if place == 3:
                assert grad is None, "missing everywhere"
                continue
            ranks = range(1, size) if place == 1 else range(size)
            assert grad is not None
            assert torch.equal(grad, torch.full_like(grad, sum(10.0 * place + r for r in ranks)))


def differentiable(world: World) -> tuple[Tensor, Tensor]:
    x = torch.arange(3.0, dtype=torch.float64).add(world.rank).requires_grad_()
    total = sum_over_ranks(world, x * x)
    (total.sin() * (world.rank + 1)).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return total.detach(), x.grad


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_and_its_gradient(crew: Crew, size: int) -> None:
    xs = [torch.arange(3.0, dtype=torch.float64).add(r).requires_grad_() for r in range(size)]
    total = torch.stack([x * x for x in xs]).sum(0)
    sum((total.sin() * (r + 1)).sum() for r in range(size)).backward()  # type: ignore[union-attr]
    for rank, (found, grad) in enumerate(crew.run(size, differentiable)):
        torch.testing.assert_close(found, total.detach())
        torch.testing.assert_close(grad, xs[rank].grad)


def gathering(world: World) -> list[Any]:
    rows = torch.arange(2 * world.rank * 3).view(-1, 3) + 100 * world.rank
    said = broadcast_bytes(world, b"word " * 3 if world.is_first else None)
    assert broadcast_bytes(world, b"" if world.is_first else None) == b""
    return [all_gather_rows(world, rows), all_gather_rows(world, torch.empty(0, 2)), said]


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_all_ranks_and_a_word_from_the_first(crew: Crew, size: int) -> None:
    for rows, none, said in crew.run(size, gathering):
        for rank, found in enumerate(rows):
            assert torch.equal(found, torch.arange(2 * rank * 3).view(-1, 3) + 100 * rank)
        assert [list(t.shape) for t in none] == [[0, 2]] * size
        assert said == b"word word word "
