"""Mapped tables: the same rows as any gather gives, and what may be let go is told from what may not."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gnnfleet.ops.paging import (
    drop_pages,
    gather_by_window,
    is_mapped,
    is_paged,
    prefetch_pages,
    read_rows,
    spill_to_disk,
)


@pytest.fixture
def table(tmp_path: Path) -> Tensor:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((5000, 37)).astype(np.float32))
    return torch.from_numpy(np.asarray(np.load(tmp_path / "x.npy", mmap_mode="c")))


def test_rows_are_unchanged_after_their_pages_are_dropped(table: Tensor) -> None:
    whole, rows = table.clone(), torch.tensor([0, 1, 2, 700, 701, 4999])
    for _ in range(2):
        assert torch.equal(read_rows(table, rows), whole[rows])
        drop_pages(table)
    assert torch.equal(table, whole)


def test_neighbouring_pages_are_one_request(table: Tensor) -> None:
    assert prefetch_pages(table, torch.arange(5000)) == 1
    assert prefetch_pages(table, torch.tensor([0, 10, 4000])) == 2, "four pages apart, and far away"
    assert prefetch_pages(table, torch.empty(0, dtype=torch.int64)) == 0
    with pytest.raises(IndexError):
        prefetch_pages(table, torch.tensor([5000]))


def test_spilled_rows_are_mapped_from_a_file(table: Tensor, tmp_path: Path) -> None:
    half = table.to(torch.bfloat16)
    found = spill_to_disk(half, torch.float32, tmp_path)
    assert torch.equal(found, half.float()) and is_mapped(found)
    drop_pages(found)
    assert torch.equal(found, half.float()) and [path.name for path in tmp_path.iterdir()] == ["x.npy"]
    assert spill_to_disk(half[:0], torch.float32, tmp_path).shape == (0, 37)


def test_tensors_in_memory_are_not_mapped(table: Tensor) -> None:
    assert is_mapped(table) and is_mapped(table[10:20])
    assert not is_mapped(table.clone()) and not is_mapped(torch.empty(0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_by_window_equals_gather(table: Tensor, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnfleet.ops.paging.WINDOW_BYTES", 100_000)  # 8 windows of float32, the last one not full
    whole = table.to(dtype)
    mapped = spill_to_disk(table, dtype, Path(tempfile.gettempdir()))
    rows = torch.randint(5000, (3000,), generator=torch.Generator().manual_seed(0))
    wide = torch.zeros(3000, 50)
    for picked in (rows, rows.int(), rows[:0], torch.tensor([4999, 0, 4999])):
        assert torch.equal(gather_by_window(mapped, picked), whole[picked.long()])
        assert torch.equal(gather_by_window(mapped, picked, torch.float32), whole[picked.long()].float())
        gather_by_window(mapped, picked, torch.float32, out=wide[: len(picked), 5:42])
        assert torch.equal(wide[: len(picked), 5:42], whole[picked.long()].float()) and not wide[:, 42:].any()
    with pytest.raises(IndexError):
        gather_by_window(mapped, torch.tensor([5000]))
    assert torch.equal(mapped, whole)


def test_a_table_that_was_written_to_is_not_mapped(table: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnfleet.ops.paging.WINDOW_BYTES", 100_000)
    assert is_paged(table) and not is_paged(table[:10])
    table[17] *= 2.0
    assert not is_mapped(table) and not is_paged(table), "letting it go would undo the change"
