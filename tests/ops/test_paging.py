"""Mapped tables: rows equal those of a plain gather, and only unchanged pages of files are dropped."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gnnfleet.ops.gather import (
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


def test_dropped_pages_are_read_again(table: Tensor) -> None:
    expected, rows = table.clone(), torch.tensor([0, 1, 2, 700, 701, 4999])
    for _ in range(2):
        assert torch.equal(read_rows(table, rows), expected[rows])
        drop_pages(table)
    assert torch.equal(table, expected)


def test_neighbouring_pages_are_one_request(table: Tensor) -> None:
    assert prefetch_pages(table, torch.arange(5000)) == 1
    assert prefetch_pages(table, torch.tensor([0, 10, 4000])) == 2, "four pages apart, and far away"
    assert prefetch_pages(table, torch.empty(0, dtype=torch.int64)) == 0
    with pytest.raises(IndexError):
        prefetch_pages(table, torch.tensor([5000]))


def test_spilled_rows_are_in_a_file(table: Tensor, tmp_path: Path) -> None:
    half = table.to(torch.bfloat16)
    spilled = spill_to_disk(half, torch.float32, tmp_path)
    assert torch.equal(spilled, half.float()) and is_mapped(spilled)
    drop_pages(spilled)
    assert torch.equal(spilled, half.float()) and [path.name for path in tmp_path.iterdir()] == ["x.npy"]
    assert spill_to_disk(half[:0], torch.float32, tmp_path).shape == (0, 37)


def test_only_tensors_of_files_are_mapped(table: Tensor) -> None:
    assert is_mapped(table) and is_mapped(table[10:20])
    assert not is_mapped(table.clone()) and not is_mapped(torch.empty(0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathering_by_window_changes_no_row(table: Tensor, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnfleet.ops.gather.WINDOW_BYTES", 100_000)  # 8 windows of float32, the last one not full
    expected = table.to(dtype)
    mapped = spill_to_disk(table, dtype, Path(tempfile.gettempdir()))
    rows = torch.randint(5000, (3000,), generator=torch.Generator().manual_seed(0))
    wide = torch.zeros(3000, 50)
    for picked in (rows, rows.int(), rows[:0], torch.tensor([4999, 0, 4999])):
        assert torch.equal(gather_by_window(mapped, picked), expected[picked.long()])
        assert torch.equal(gather_by_window(mapped, picked, torch.float32), expected[picked.long()].float())
        gather_by_window(mapped, picked, torch.float32, out=wide[: len(picked), 5:42])
        assert torch.equal(wide[: len(picked), 5:42], expected[picked.long()].float()) and not wide[:, 42:].any()
    with pytest.raises(IndexError):
        gather_by_window(mapped, torch.tensor([5000]))
    assert torch.equal(mapped, expected)


def test_a_changed_table_is_not_paged(table: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnfleet.ops.gather.WINDOW_BYTES", 100_000)
    assert is_paged(table) and not is_paged(table[:10])
    table[17] *= 2.0
    assert not is_mapped(table) and not is_paged(table), "dropping its pages would undo the change"
