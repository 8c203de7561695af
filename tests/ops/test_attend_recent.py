"""Attention over latest events against its twin in torch, in both precisions and every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnfleet.ops.attend_recent import AttentionDropout, RecentEvents, attend_recent, attend_recent_reference
from gnnfleet.ops.draws import DrawKey, Purpose
from gnnfleet.ops.native import _native

QUERIES, PLACES, HEADS, ROWS, EVENTS = 37, 5, 3, 11, 6


def inputs(dtype: torch.dtype, widths: tuple[int, int, int]) -> tuple[Tensor, Tensor, RecentEvents]:
    draw = torch.Generator().manual_seed(0)
    row, feature, time = widths
    near = torch.randint(-2, ROWS, (QUERIES, PLACES), generator=draw).clamp(min=-1)
    near[0] = -1
    made = [
        torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)
        for shape in ((QUERIES, HEADS, sum(widths)), (QUERIES, HEADS), (ROWS, row), (EVENTS, feature), (time,), (time,))
    ]
    query, offset, rows, features, weight, bias = made
    since = (torch.rand(QUERIES, PLACES, generator=draw, dtype=torch.float64) * 9).to(dtype)
    for tensor in (query, offset, rows, weight, bias):
        tensor.requires_grad_()
    edge = torch.randint(EVENTS, (QUERIES, PLACES), generator=draw)
    return query, offset, RecentEvents(rows, near, features if feature else None, edge, since, weight, bias)


@pytest.mark.parametrize("isa", _native.isas().split())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("widths", [(8, 3, 20), (17, 0, 5)])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_results_and_gradients_equal_the_reference(
    isa: str, dtype: torch.dtype, widths: tuple[int, int, int], p: float
) -> None:
    query, offset, recent = inputs(dtype, widths)
    drop = AttentionDropout(p, torch.arange(QUERIES) * 5, DrawKey(1, 2, 3).draws(Purpose.ATTENTION, 1)) if p else None
    leaves = [query, offset, recent.rows, recent.weight, recent.bias]
    before = _native.isa()
    _native.select_isa(isa)
    try:
        found = [each(query, offset, recent, slope=0.2, drop=drop) for each in (attend_recent, attend_recent_reference)]
        grads = []
        for out, weight in found:
            draw = torch.Generator().manual_seed(1)
            total = (out * torch.rand(out.shape, generator=draw)).sum() + (weight.square()).sum()
            grads.append(torch.autograd.grad(total, leaves))
    finally:
        _native.select_isa(before)
    tolerance = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    for ours, twin in zip(found[0], found[1], strict=True):
        torch.testing.assert_close(ours, twin, **tolerance)
    assert not found[0][0][0].any(), "a query without events gathers nothing"
    for ours, twin in zip(*grads, strict=True):
        torch.testing.assert_close(ours, twin, **tolerance)


def test_long_times_keep_their_phase() -> None:
    """A week in seconds at frequency 1: the argument is made in double, as float32 could not tell 0.03 from 0."""
    week = 604_800.0
    recent = RecentEvents(
        torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64), None, torch.zeros(1, 1, dtype=torch.int64),
        torch.tensor([[week]]), torch.tensor([1.0, 0.01, 1e-6]), torch.tensor([0.03, 0.0, 0.0]),
    )  # fmt: skip
    out, _ = attend_recent(torch.zeros(1, 1, 4), torch.zeros(1, 1), recent, slope=0.2, drop=None)
    arguments = week * recent.weight.double() + recent.bias.double()
    torch.testing.assert_close(out[0, 0, 1:], torch.cos(arguments).float(), rtol=1e-5, atol=1e-6)
