"""Sorting edges equals the reference in torch, for every index type, shape and number of threads."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.ops import csr
from gnnfleet.ops.native import single_threaded
from tests.ops import reference


def random_edges(count: int, num_src: int, num_dst: int, dtype: torch.dtype, *, skew: bool = False):
    generator = torch.Generator().manual_seed(count + num_src)
    src = torch.randint(0, num_src, (count,), generator=generator)
    dst = torch.randint(0, num_dst, (count,), generator=generator)
    return src.to(dtype), (dst * dst // num_dst if skew else dst).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("count", "num_src", "num_dst"), [(0, 5, 5), (0, 0, 0), (1, 1, 1), (50, 1, 1), (5000, 30, 700), (20000, 5000, 40)]
)
def test_sort_edges_equals_reference(count, num_src, num_dst, dtype, threads):
    for skew in (False, True):
        src, dst = random_edges(count, max(num_src, 1), max(num_dst, 1), dtype, skew=skew)
        indptr, order, sorted_src = csr.sort_into_rows(src, dst, num_src=num_src, num_dst=num_dst)
        expected_indptr, expected = reference.sort_edges(src, dst, num_src=num_src, num_dst=num_dst)
        assert torch.equal(indptr, expected_indptr) and torch.equal(order, expected)
        assert torch.equal(sorted_src, src[order]) and sorted_src.dtype == dtype
        assert torch.equal(csr.sort_edges(src, dst, num_src=num_src, num_dst=num_dst)[1], expected)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=40))
def test_distinct_edges_are_counted(pairs):
    src, dst = torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2).T
    indptr, sources, counts = csr.distinct_edges(src, dst, num_src=7, num_dst=5)
    actual = [
        (int(sources[position]), row, int(counts[position]))
        for row in range(5)
        for position in range(int(indptr[row]), int(indptr[row + 1]))
    ]
    expected = sorted(((s, d, pairs.count((s, d))) for s, d in set(pairs)), key=lambda edge: (edge[1], edge[0]))
    assert actual == expected
    all_indptr, all_sources = csr.sort_sources(src, dst, num_src=7, num_dst=5)
    expected_indptr, order = reference.sort_edges(src, dst, num_src=7, num_dst=5)
    assert torch.equal(all_indptr, expected_indptr) and torch.equal(all_sources, src[order])


def test_sorted_rows_do_not_depend_on_threads(threads):
    src, dst = random_edges(30000, 300, 200, torch.int32, skew=True)
    indptr, sources, counts = csr.distinct_edges(src, dst, num_src=300, num_dst=200)
    keys, expected = torch.unique(dst.long() * 300 + src, return_counts=True)
    row = torch.repeat_interleave(torch.arange(200), indptr.diff())
    assert torch.equal(row * 300 + sources, keys) and torch.equal(counts.long(), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("src", "dst"), [(-1, 0), (3, 0), (0, -1), (0, 2)])
def test_ends_out_of_range_are_refused(src, dst, dtype):
    ends = torch.tensor([0, 1, src], dtype=dtype), torch.tensor([0, 1, dst], dtype=dtype)
    with pytest.raises(IndexError, match="position"):
        csr.sort_edges(*ends, num_src=3, num_dst=2)
    if dtype == torch.int32:
        with pytest.raises(IndexError, match="position 2"):
            csr.distinct_edges(*ends, num_src=3, num_dst=2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counting_sort_is_stable(dtype, threads):
    keys = random_edges(10000, 70, 70, dtype)[0]
    offsets, order = csr.counting_sort(keys, 70)
    assert torch.equal(order, torch.argsort(keys, stable=True))
    assert torch.equal(offsets.diff(), torch.bincount(keys.long(), minlength=70))


def test_strided_ends_are_sorted():
    pairs = torch.tensor([[2, 0], [1, 1], [0, 0]], dtype=torch.int32)
    indptr, order = csr.sort_edges(pairs[:, 0], pairs[:, 1], num_src=3, num_dst=2)
    assert indptr.tolist() == [0, 2, 3] and order.tolist() == [2, 0, 1]


@pytest.mark.parametrize("edges", [0, 40, 300_000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_transposed_and_self_looped_structures_equal_plain_sorting(edges: int, dtype: torch.dtype) -> None:
    rows, cols = (7, 9) if edges < 100 else (3_000, 4_000)
    random = torch.Generator().manual_seed(edges)
    dst = torch.randint(rows, (edges,), generator=random).sort().values
    col = torch.randint(cols, (edges,), generator=random).to(dtype)
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(dst, minlength=rows).cumsum(0)
    structure = csr.CSR(indptr, col, cols)
    with nullcontext() if edges < 100 else single_threaded():
        transposed, order = csr.CSR(indptr, col, cols).transposed
    for by_source, positions in (structure.transposed, (transposed, order)):
        assert torch.equal(positions, torch.argsort(col, stable=True))
        assert torch.equal(by_source.col, dst[positions].to(dtype)) and by_source.num_cols == rows
        assert torch.equal(by_source.indptr.diff(), torch.bincount(col, minlength=cols))
    looped, edge = structure.with_self_loops
    looped.check()
    non_loops = (dst != col).nonzero()[:, 0]
    assert torch.equal(edge[edge >= 0], non_loops)
    assert torch.equal(edge[looped.indptr[1:] - 1], torch.full((rows,), -1))
    assert torch.equal(looped.col[looped.indptr[1:] - 1], torch.arange(rows, dtype=dtype))
    assert torch.equal(looped.col[edge >= 0], col[non_loops])
    assert torch.equal(looped.indptr.diff(), torch.bincount(dst[non_loops], minlength=rows) + 1)
    if edges:
        with pytest.raises(IndexError):
            _ = csr.CSR(indptr, col + cols, cols).transposed


@pytest.mark.parametrize("width", [None, 3])
def test_segments_are_copied_into_their_rows(width: int | None) -> None:
    """Two lists of segments with interleaved rows give the entries sorted by row."""
    counts = torch.randint(0, 4, (10,), generator=torch.Generator().manual_seed(0))
    into = torch.zeros(11, dtype=torch.int64)
    into[1:] = counts.cumsum(0)
    entries = torch.randn(int(into[-1]), *([] if width is None else [width]))
    out = torch.empty_like(entries)
    row = torch.repeat_interleave(torch.arange(10), counts)
    order = torch.randperm(10)
    for rows in (order[:4], order[4:]):
        offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
        offsets[1:] = counts[rows].cumsum(0)
        csr.put_segments(torch.cat([entries[row == r] for r in rows.tolist()]), offsets, rows, into=into, out=out)
    assert torch.equal(out, entries)
    with pytest.raises(ValueError, match="length"):
        csr.put_segments(
            torch.zeros(9), torch.tensor([0, 9]), torch.tensor([0]), into=into, out=torch.empty(len(entries))
        )
