"""Rows rounded on the wire: errors are within the stated bounds, and int8 carries them to the next step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.halo_exchange import ExchangePlan, ReturnPath, RingExchange, RowTable
from gnnfleet.comm.world import World
from tests.ranks import RankPool


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_rows_are_sent_without_a_copy(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 3, dtype=dtype)
    codec = WireCodec()
    assert codec.encode(rows, 1, 0)[0] is rows and codec.decode([rows], dtype) is rows


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_errors_are_within_their_bounds(wire: Any, dtype: torch.dtype) -> None:
    rows = torch.randn(200, 17, dtype=dtype) * torch.logspace(-6, 6, 200, dtype=dtype)[:, None]
    rows[3] = 0
    codec = WireCodec(wire)
    encoded = codec.encode(rows, 1, 0)
    assert [(tensor.shape[1], tensor.dtype) for tensor in encoded] == codec.encoded_shapes(17, dtype)
    decoded = codec.decode(encoded, dtype)
    assert decoded.dtype == dtype and not decoded[3].any()
    # bfloat16 has 8 bits: half a unit of the last bit. int8: half a step of the row's scale.
    bound = rows.abs() * 2.0**-8 if wire == "bf16" else rows.abs().amax(1, keepdim=True) / 127 * 0.5 * (1 + 1e-5)
    assert bool(((decoded - rows).abs() <= bound).all())


def test_integers_and_half_precision_are_sent_unchanged() -> None:
    for dtype in (torch.int64, torch.uint8, torch.bfloat16, torch.bool):
        assert WireCodec("int8").encoded_shapes(4, dtype) == [(4, dtype)]


def test_int8_errors_are_added_to_the_next_step() -> None:
    codec, rows = WireCodec("int8"), torch.randn(50, 9, dtype=torch.float64)
    sent, expected = torch.zeros_like(rows), torch.zeros_like(rows)
    for step in range(40):
        codec.begin_step()
        step_rows = rows + 0.01 * step
        number = codec.next_exchange()
        sent += codec.decode(codec.encode(step_rows, number, 0), torch.float64)
        expected += step_rows
        residual = codec._residuals[number, 0]
        torch.testing.assert_close(sent + residual, expected, rtol=1e-12, atol=1e-9)
    # The mean over steps is much more exact than a single message.
    assert float((sent - expected).abs().max()) / 40 < float(rows.abs().max()) / 127 / 20
    assert sum(residual.nbytes for residual in codec._residuals.values()) == rows.nbytes


def test_residuals_are_separate_by_exchange_and_table() -> None:
    codec = WireCodec("int8")
    small, large = torch.rand(4, 3), torch.rand(6, 3)
    for _ in range(3):
        codec.begin_step()
        for rows in (small, large):
            number = codec.next_exchange()
            for table in range(2):
                codec.encode(rows, number, table)
    assert sorted(codec._residuals) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert codec._residuals[2, 0].shape == large.shape
    codec.begin_step()
    codec.encode(large, codec.next_exchange(), 0)  # the former residual has another shape and is dropped
    assert codec._residuals[1, 0].shape == large.shape


def exchange_compressed(world: World, wire: Any) -> dict[str, Any]:
    count, width = 40, 5
    all_rows = torch.arange(count)
    send_rows = tuple(all_rows[:0] if q == world.rank else all_rows for q in range(world.size))
    plan = ExchangePlan(send_rows, tuple(map(len, send_rows)))
    rows = torch.full((count, width), 1.0 + world.rank) + torch.arange(width) / 77
    largest_error = 0.0
    ids = torch.arange(count)[:, None].contiguous()

    def use_rows(q: int, tables: list[Tensor]) -> list[Tensor]:
        nonlocal largest_error
        expected = torch.full((count, width), 1.0 + q) + torch.arange(width) / 77
        largest_error = max(largest_error, float((tables[0] - expected).abs().max()))
        assert torch.equal(tables[1], ids), "integers are exact"
        assert q != world.rank or tables[0] is rows, "the rank's own rows are exact"
        return [tables[0].clone()]

    def collect(q: int, returned: list[Tensor]) -> None:
        nonlocal largest_error
        largest_error = max(largest_error, float((returned[0] - rows).abs().max()))

    before = world.traffic.bytes_sent
    ring = RingExchange(world, codec=WireCodec(wire))
    ring.run(
        [RowTable(plan, rows), RowTable(plan, ids)],
        use_rows,
        returns=[ReturnPath(plan, width, torch.float32)],
        on_returns=collect,
    )
    return {"error": largest_error, "bytes": world.traffic.bytes_sent - before}


@pytest.mark.parametrize(
    ("wire", "row_bytes", "max_error"), [("exact", 20, 0.0), ("bf16", 10, 0.02), ("int8", 9, 0.03)]
)
def test_a_ring_exchange_sends_compressed_rows_within_the_bounds(
    pool: RankPool, wire: str, row_bytes: int, max_error: float
) -> None:
    for report in pool.run(3, exchange_compressed, wire):
        assert report["error"] <= max_error and (wire == "exact") == (report["error"] == 0)
        assert report["bytes"] == 2 * 40 * (row_bytes + 8 + row_bytes)
