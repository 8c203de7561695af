"""Attention over recent events equals its reference in torch, in both precisions and every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnfleet.ops.attend_recent import AttentionDropout, RecentEvents, attend_recent, attend_recent_reference
from gnnfleet.ops.draws import DrawKey, Purpose

QUERIES, SLOTS, HEADS, ROWS, EVENTS = 37, 5, 3, 11, 6


def inputs(dtype: torch.dtype, widths: tuple[int, int, int]) -> tuple[Tensor, Tensor, RecentEvents]:
    draw = torch.Generator().manual_seed(0)
    row, feature, time = widths
    neighbors = torch.randint(-2, ROWS, (QUERIES, SLOTS), generator=draw).clamp(min=-1)
    neighbors[0] = -1
    tensors = [
        torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)
        for shape in ((QUERIES, HEADS, sum(widths)), (QUERIES, HEADS), (ROWS, row), (EVENTS, feature), (time,), (time,))
    ]
    query, offset, rows, features, weight, bias = tensors
    time_delta = (torch.rand(QUERIES, SLOTS, generator=draw, dtype=torch.float64) * 9).to(dtype)
    for tensor in (query, offset, rows, weight, bias):
        tensor.requires_grad_()
    edge = torch.randint(EVENTS, (QUERIES, SLOTS), generator=draw)
    return query, offset, RecentEvents(rows, neighbors, features if feature else None, edge, time_delta, weight, bias)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("widths", [(8, 3, 20), (17, 0, 5)])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_attention_equals_the_reference(dtype: torch.dtype, widths: tuple[int, int, int], p: float) -> None:
    query, offset, recent = inputs(dtype, widths)
    drop = AttentionDropout(p, torch.arange(QUERIES) * 5, DrawKey(1, 2, 3).draws(Purpose.ATTENTION, 1)) if p else None
    leaves = [query, offset, recent.rows, recent.weight, recent.bias]
    outputs, grads = [], []
    for function in (attend_recent, attend_recent_reference):
        out, weight = function(query, offset, recent, slope=0.2, drop=drop)
        factors = torch.rand(out.shape, generator=torch.Generator().manual_seed(1))
        outputs.append((out, weight))
        grads.append(torch.autograd.grad((out * factors).sum() + weight.square().sum(), leaves))
    tolerance = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    for actual, expected in (*zip(*outputs, strict=True), *zip(*grads, strict=True)):
        torch.testing.assert_close(actual, expected, **tolerance)
    assert not outputs[0][0][0].any(), "a query without events gathers nothing"


def test_long_times_keep_their_phase() -> None:
    """A week in seconds at frequency 1: the angle is computed in double, as float32 would lose the bias of 0.03."""
    week = 604_800.0
    recent = RecentEvents(
        torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64), None, torch.zeros(1, 1, dtype=torch.int64),
        torch.tensor([[week]]), torch.tensor([1.0, 0.01, 1e-6]), torch.tensor([0.03, 0.0, 0.0]),
    )  # fmt: skip
    out, _ = attend_recent(torch.zeros(1, 1, 4), torch.zeros(1, 1), recent, slope=0.2, drop=None)
    arguments = week * recent.weight.double() + recent.bias.double()
    torch.testing.assert_close(out[0, 0, 1:], torch.cos(arguments).float(), rtol=1e-5, atol=1e-6)
