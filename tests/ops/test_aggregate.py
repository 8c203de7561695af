from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.errors import ConfigError
from gnnfleet.ops.aggregate import (
    REDUCES,
    aggregate,
    aggregate_with_self,
    max_backward,
    max_rows,
    sum_rows,
    update_max,
)
from gnnfleet.ops.csr import CSR, sort_into_rows
from gnnfleet.ops.native import _native
from tests.ops import reference
from tests.ops.blocks import deal


def structure(rows: int, cols: int, edges: int, *, seed: int = 0, index: torch.dtype = torch.int32) -> CSR:
    random = torch.Generator().manual_seed(seed)
    edges = edges if rows and cols else 0
    src, dst = (torch.randint(0, max(n, 1), (edges,), generator=random, dtype=index) for n in (cols, rows))
    indptr, _, col = sort_into_rows(src, dst, num_src=cols, num_dst=rows)
    return CSR(indptr, col, cols)


def shuffled(edges: CSR, seed: int) -> torch.Tensor:
    """Numbers of edges in no order, larger than 32 bits; for odd seeds also further apart than those can tell."""
    order = torch.randperm(edges.num_edges, generator=torch.Generator().manual_seed(seed))
    return order * (2**31 - 1 if seed % 2 else 3) + 2**40


def check_all(
    edges: CSR,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    reduce: str,
    tolerance: float,
    ties: torch.Tensor | None = None,
) -> None:
    """Output and every gradient against the twin in plain torch."""
    inputs = [x, weight] if weight is not None else [x]
    ours, twins = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    out, twin = (
        function(edges, given[0], reduce=reduce, weight=given[1] if weight is not None else None, ties=ties)
        for function, given in ((aggregate, ours), (reference.aggregate, twins))
    )
    torch.testing.assert_close(out, twin, rtol=tolerance, atol=tolerance)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    out.backward(grad)
    twin.backward(grad)
    for a, b in zip(ours, twins, strict=True):
        loose = max(tolerance, 2e-2) if a.dtype == torch.bfloat16 else tolerance
        torch.testing.assert_close(a.grad, b.grad, rtol=loose, atol=loose)


@given(
    rows=st.integers(0, 20),
    cols=st.integers(0, 20),
    edges=st.integers(0, 80),
    width=st.integers(1, 70),
    reduce=st.sampled_from(REDUCES),
    weighted=st.booleans(),
    double=st.booleans(),
    index=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=120, deadline=None)
def test_results_and_gradients_equal_the_reference(
    rows: int,
    cols: int,
    edges: int,
    width: int,
    reduce: str,
    weighted: bool,
    double: bool,
    index: torch.dtype,
    seed: int,
) -> None:
    kind = torch.float64 if double else torch.float32
    cut = structure(rows, cols, edges, seed=seed, index=index)
    # Small whole numbers make ties, which max must break in one way.
    x = torch.randint(-3, 4, (cols, width), generator=torch.Generator().manual_seed(seed)).to(kind) / 2
    weight = torch.rand(cut.num_edges, dtype=kind) if weighted and reduce != "max" else None
    check_all(cut, x, weight, reduce, 1e-12 if double else 1e-5, shuffled(cut, seed) if weighted else None)


@pytest.mark.parametrize("isa", _native.isas().split())
@pytest.mark.parametrize("width", [1, 3, 7, 16, 31, 47, 100, 128, 256, 300])
def test_all_instruction_sets_and_widths_equal_the_reference(isa: str, width: int) -> None:
    cut = structure(50, 60, 400)
    try:
        assert _native.select_isa(isa)
        for kind in (torch.float32, torch.float64, torch.bfloat16):
            x = torch.randn(60, width, generator=torch.Generator().manual_seed(1)).to(kind)
            wide = torch.float64 if kind == torch.float64 else torch.float32
            check_all(cut, x, torch.rand(400, dtype=wide), "sum", 1e-12 if kind == torch.float64 else 1e-4)
            check_all(cut, x, None, "max", 1e-12 if kind == torch.float64 else 1e-5)
            for seed in (0, 1):
                check_all(cut, x.round(), None, "max", 1e-12 if kind == torch.float64 else 1e-5, shuffled(cut, seed))
    finally:
        _native.select_isa(_native.isas().split()[0])


@pytest.mark.parametrize("isa", _native.isas().split())
@pytest.mark.parametrize("width", [1, 7, 47, 300])
def test_sums_are_rounded_as_torch_rounds(isa: str, width: int) -> None:
    cut = structure(50, 60, 400)
    draw = torch.Generator().manual_seed(1)
    base = torch.randn(20, width, generator=draw).bfloat16()
    try:
        assert _native.select_isa(isa)
        for kind in (torch.float32, torch.bfloat16):
            x = torch.randn(60, width, generator=draw).to(kind)
            x[3, 0], x[4, 0] = torch.nan, torch.inf
            begun = torch.cat([base.float(), torch.zeros(30, width)])
            wanted = sum_rows(cut, x, base=begun).bfloat16()
            found = sum_rows(cut, x, base=base, dtype=torch.bfloat16)
            assert torch.equal(found.isnan(), wanted.isnan()) and found.isnan().any()
            assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    finally:
        _native.select_isa(_native.isas().split()[0])


@pytest.mark.parametrize("reduce", REDUCES)
def test_gradients_by_finite_differences(reduce: str) -> None:
    cut = structure(6, 5, 15)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    ties = shuffled(cut, 0)
    assert torch.autograd.gradcheck(lambda x: aggregate(cut, x, reduce=reduce, ties=ties), (x,))
    if reduce != "max":
        weight = torch.rand(15, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x, w: aggregate(cut, x, reduce=reduce, weight=w), (x, weight))


def test_results_are_bit_equal_for_any_number_of_threads() -> None:
    cut = structure(3000, 3000, 40_000)
    x = torch.randn(3000, 33, requires_grad=True)
    before = torch.get_num_threads()
    seen = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            x.grad = None
            out = aggregate(cut, x, reduce="mean")
            out.square().sum().backward()
            assert x.grad is not None
            seen.append((out.detach().clone(), x.grad.clone()))
    finally:
        torch.set_num_threads(before)
    for out, grad in seen[1:]:
        assert torch.equal(out, seen[0][0]) and torch.equal(grad, seen[0][1])


def test_sums_of_blocks_equal_the_sum() -> None:
    """Compact blocks added one after another give the whole: what a graph spread over ranks does."""
    cut = structure(12, 9, 60)
    x = torch.randn(9, 5, dtype=torch.float64)
    out = torch.zeros(12, 5, dtype=torch.float64)
    rows, cols = cut.row.long(), cut.col.long()
    for part in range(3):
        mine = cols % 3 == part
        busy = rows[mine].unique()
        place = torch.searchsorted(busy, rows[mine])
        indptr = torch.zeros(len(busy) + 1, dtype=torch.int64)
        indptr[1:] = torch.bincount(place, minlength=len(busy)).cumsum(0)
        sum_rows(CSR(indptr, cols[mine], 9), x, rows=busy.int(), out=out)
    torch.testing.assert_close(out, aggregate(cut, x))


@given(
    size=st.sampled_from([(12, 9, 90), (1, 3, 40), (5, 5, 0), (0, 3, 0), (40, 40, 30)]),
    parts=st.integers(1, 6),
    kind=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    index=st.sampled_from([torch.int32, torch.int64]),
    width=st.sampled_from([1, 5, 33]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_maxima_of_blocks_merge_in_any_order(
    size: tuple[int, int, int], parts: int, kind: torch.dtype, index: torch.dtype, width: int, seed: int
) -> None:
    """Bit for bit: output, winners and, from compact blocks turned round, gradients."""
    cut = structure(*size, seed=seed, index=index)
    ties = shuffled(cut, seed)
    x = torch.randint(-2, 3, (cut.num_cols, width), generator=torch.Generator().manual_seed(seed)).to(kind)
    dealt = deal(cut, parts, seed=seed)
    no_edges = CSR(torch.zeros_like(cut.indptr), cut.col[:0], cut.num_cols)
    state = max_rows(no_edges, x)
    for part in dealt:
        update_max(state, part.structure, x[part.cols], ties=ties[part.edges], rows=part.rows)
    whole = max_rows(cut, x, ties=ties)
    assert torch.equal(state.out, whole.out) and torch.equal(state.winner, whole.winner)
    # Whole numbers, so that sums are exact in any order.
    grad = torch.randint(-9, 9, whole.out.shape, generator=torch.Generator().manual_seed(seed)).to(whole.out.dtype)
    turned, positions = cut.transposed
    expected = max_backward(turned, grad, whole.winner, ties=ties, positions=positions)
    found, added = torch.zeros_like(expected), torch.zeros_like(expected)
    for part in dealt:
        turned, positions = part.turned(cut.num_rows)
        numbers = ties[part.edges]
        home = max_backward(turned, grad, state.winner, ties=numbers, positions=positions)
        found.index_add_(0, part.cols, home)
        max_backward(turned, grad, state.winner, ties=numbers, positions=positions, rows=part.cols.int(), out=added)
    assert torch.equal(found, expected) and torch.equal(added, expected)


def test_one_edge_gets_the_gradient_of_a_maximum() -> None:
    cut = CSR(torch.tensor([0, 3, 3, 5]), torch.tensor([0, 0, 1, 1, 0], dtype=torch.int32), 2)
    for ties, expected in ((None, [[1], [1]]), (torch.tensor([4, 3, 2, 7, 9]), [[0], [2]])):
        x = torch.ones(2, 1, requires_grad=True)
        out = aggregate(cut, x, reduce="max", ties=ties)
        out.sum().backward()
        assert out.tolist() == [[1], [0], [1]] and x.grad is not None and x.grad.tolist() == expected


def test_nan_is_the_maximum_at_any_position() -> None:
    cut = CSR(torch.tensor([0, 3]), torch.tensor([0, 1, 2], dtype=torch.int32), 3)
    for place in range(3):
        x = torch.tensor([[1.0], [5.0], [2.0]])
        x[place] = torch.nan
        for ties in (None, torch.tensor([2, 0, 1])):
            assert aggregate(cut, x, reduce="max", ties=ties).isnan().all()
            assert reference.aggregate(cut, x, reduce="max", ties=ties).isnan().all()


def test_wrong_reduces_and_shapes_are_refused() -> None:
    cut = structure(4, 4, 8)
    with pytest.raises(ConfigError, match="cannot reduce by"):
        aggregate(cut, torch.zeros(4, 2), reduce="median")
    with pytest.raises(ConfigError, match="expected 4 rows"):
        aggregate(cut, torch.zeros(5, 2))
    with pytest.raises(ConfigError, match="max takes no edge weights"):
        aggregate(cut, torch.zeros(4, 2), reduce="max", weight=torch.ones(8))
    with pytest.raises(ConfigError, match="found torch"):
        aggregate(cut, torch.zeros(4, 2).half())
    with pytest.raises(ValueError, match="one weight per edge"):
        aggregate(cut, torch.zeros(4, 2), weight=torch.ones(7))
    with pytest.raises(ValueError, match="one number per edge"):
        aggregate(cut, torch.zeros(4, 2), reduce="max", ties=torch.arange(7))


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("used", ["both", "near", "own"])
def test_aggregate_with_self_equals_two_separate_functions(mean: bool, used: str) -> None:
    """The same outputs and gradients as aggregate and a slice, whichever of the two are used."""
    edges = structure(13, 30, 90)
    x = torch.randn(30, 21, dtype=torch.float64)
    weights = torch.randn(2, 13, 21, dtype=torch.float64)

    def run(together: bool) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        if together:
            near, own = aggregate_with_self(edges, leaf, mean=mean)
        else:
            near, own = aggregate(edges, leaf, reduce="mean" if mean else "sum"), leaf[:13]
        terms = {"near": near * weights[0], "own": own * weights[1]}
        total = sum(term.sum() for name, term in terms.items() if used in ("both", name))
        (grad,) = torch.autograd.grad(total, leaf)
        return total, grad

    for found, wanted in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("width", [1, 5, 16, 100, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_base_initializes_the_first_rows_of_a_sum(width: int, dtype: torch.dtype) -> None:
    edges = structure(13, 30, 90)
    x, base = torch.randn(30, width, dtype=dtype), torch.randn(6, width, dtype=dtype)
    wanted = sum_rows(edges, x)
    wanted[:6] += base
    torch.testing.assert_close(sum_rows(edges, x, base=base), wanted)
