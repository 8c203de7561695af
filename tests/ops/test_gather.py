from __future__ import annotations

import pytest
import torch

from gnnfleet.ops.gather import gather
from tests.ops import reference


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_rows_are_gathered_into_a_slice_of_columns(dtype: torch.dtype, index: torch.dtype) -> None:
    """The rows equal the reference, and the columns beside the slice stay unchanged."""
    table, rows = torch.randn(20, 7).to(dtype), torch.randint(20, (50,)).to(index)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    out = torch.full((50, 12), 7.0, dtype=wide)
    gathered = gather(table, rows, wide, out=out[:, 2:9])
    assert torch.equal(gathered, reference.gather(table, rows, wide))
    assert torch.equal(out[:, 2:9], gathered)
    assert bool((out[:, :2] == 7).all()) and bool((out[:, 9:] == 7).all())


def test_a_row_out_of_range_is_refused() -> None:
    with pytest.raises(IndexError):
        gather(torch.randn(3, 2), torch.tensor([3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rows_are_gathered_to_given_positions(dtype: torch.dtype) -> None:
    table = torch.randn(20, 7).to(dtype)
    rows, at = torch.randint(0, 20, (9,)), torch.randperm(15)[:9]
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    out = torch.full((15, 11), 5.0, dtype=wide)
    gather(table, rows, wide, out=out[:, 2:9], at=at)
    expected = torch.full((15, 11), 5.0, dtype=wide)
    expected[at, 2:9] = table[rows].to(wide)
    assert torch.equal(out, expected)
    with pytest.raises(IndexError):
        gather(table, rows, wide, out=out[:, 2:9], at=at + 10)
