"""Rows rounded on the wire: within the stated bounds, and with int8 nothing is lost over steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.halo_exchange import ExchangePlan, ReturnPath, RingExchange, RowTable
from gnnfleet.comm.world import World
from tests.ranks import Crew


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_is_the_tensor_itself(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 3, dtype=dtype)
    code = WireCodec()
    assert code.encode(rows, 1, 0)[0] is rows and code.decode([rows], dtype) is rows


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds(wire: Any, dtype: torch.dtype) -> None:
    rows = torch.randn(200, 17, dtype=dtype) * torch.logspace(-6, 6, 200, dtype=dtype)[:, None]
    rows[3] = 0
    code = WireCodec(wire)
    written = code.encode(rows, 1, 0)
    assert [(tensor.shape[1], tensor.dtype) for tensor in written] == code.encoded_shapes(17, dtype)
    found = code.decode(written, dtype)
    assert found.dtype == dtype and not found[3].any()
    # bfloat16 has 8 bits: half a unit of the last of them. int8: half a step of the row's scale.
    bound = rows.abs() * 2.0**-8 if wire == "bf16" else rows.abs().amax(1, keepdim=True) / 127 * 0.5 * (1 + 1e-5)
    assert bool(((found - rows).abs() <= bound).all())


def test_whole_numbers_and_bytes_are_left_alone() -> None:
    for dtype in (torch.int64, torch.uint8, torch.bfloat16, torch.bool):
        assert WireCodec("int8").encoded_shapes(4, dtype) == [(4, dtype)]


def test_what_is_lost_comes_with_the_next_step() -> None:
    code, rows = WireCodec("int8"), torch.randn(50, 9, dtype=torch.float64)
    sent, meant = torch.zeros_like(rows), torch.zeros_like(rows)
    for step in range(40):
        code.begin_step()
        now = rows + 0.01 * step
        number = code.next_exchange()
        sent += code.decode(code.encode(now, number, 0), torch.float64)
        meant += now
        kept = code._residuals[number, 0]
        torch.testing.assert_close(sent + kept, meant, rtol=1e-12, atol=1e-9)
    # The mean over steps is far nearer than one message could be.
    assert float((sent - meant).abs().max()) / 40 < float(rows.abs().max()) / 127 / 20
    assert code.residual_bytes() == rows.nbytes


def test_messages_and_lanes_do_not_mix() -> None:
    code = WireCodec("int8")
    one, two = torch.rand(4, 3), torch.rand(6, 3)
    for _ in range(3):
        code.begin_step()
        for rows in (one, two):
            number = code.next_exchange()
            for lane in range(2):
                code.encode(rows, number, lane)
    assert sorted(code._residuals) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert code._residuals[2, 0].shape == two.shape
    code.begin_step()
    code.encode(two, code.next_exchange(), 0)  # of another shape than before: nothing to add
    assert code._residuals[1, 0].shape == two.shape


def coded(world: World, wire: Any) -> dict[str, Any]:
    count, width = 40, 5
    every = torch.arange(count)
    lists = tuple(every[:0] if q == world.rank else every for q in range(world.size))
    routes = ExchangePlan(lists, tuple(map(len, lists)))
    rows = torch.full((count, width), 1.0 + world.rank) + torch.arange(width) / 77
    worst = 0.0
    ids = torch.arange(count)[:, None].contiguous()

    def visit(q: int, found: list[Tensor]) -> list[Tensor]:
        nonlocal worst
        right = torch.full((count, width), 1.0 + q) + torch.arange(width) / 77
        worst = max(worst, float((found[0] - right).abs().max()))
        assert torch.equal(found[1], ids), "whole numbers are exact"
        assert q != world.rank or found[0] is rows, "own rows are exact"
        return [found[0].clone()]

    def collect(q: int, back: list[Tensor]) -> None:
        nonlocal worst
        worst = max(worst, float((back[0] - rows).abs().max()))

    before = world.traffic.bytes_sent
    ring = RingExchange(world, codec=WireCodec(wire))
    ring.run(
        [RowTable(routes, rows), RowTable(routes, ids)],
        visit,
        returns=[ReturnPath(routes, width, torch.float32)],
        on_returns=collect,
    )
    return {"worst": worst, "bytes": world.traffic.bytes_sent - before}


@pytest.mark.parametrize(("wire", "each", "worst"), [("exact", 20, 0.0), ("bf16", 10, 0.02), ("int8", 9, 0.03)])
def test_on_the_ring(crew: Crew, wire: str, each: int, worst: float) -> None:
    for found in crew.run(3, coded, wire):
        assert found["worst"] <= worst and (wire == "exact") == (found["worst"] == 0)
        assert found["bytes"] == 2 * 40 * (each + 8 + each)
