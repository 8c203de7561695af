from __future__ import annotations

from collections.abc import Callable

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
from tests.ops import reference
from tests.ops.blocks import split_edges


def random_csr(rows: int, cols: int, edges: int, *, seed: int = 0, index: torch.dtype = torch.int32) -> CSR:
    random = torch.Generator().manual_seed(seed)
    edges = edges if rows and cols else 0
    src, dst = (torch.randint(0, max(n, 1), (edges,), generator=random, dtype=index) for n in (cols, rows))
    indptr, _, col = sort_into_rows(src, dst, num_src=cols, num_dst=rows)
    return CSR(indptr, col, cols)


def edge_numbers(edges: CSR, seed: int) -> torch.Tensor:
    """Random numbers of edges above 32 bits; for odd seeds their differences exceed 32 bits too."""
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
    """Compare output and gradients with the reference in plain torch."""
    inputs = [x, weight] if weight is not None else [x]
    inputs_of_kernel, inputs_of_reference = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    out, expected = (
        function(edges, tensors[0], reduce=reduce, weight=tensors[1] if weight is not None else None, ties=ties)
        for function, tensors in ((aggregate, inputs_of_kernel), (reference.aggregate, inputs_of_reference))
    )
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    out.backward(grad)
    expected.backward(grad)
    for a, b in zip(inputs_of_kernel, inputs_of_reference, strict=True):
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
def test_aggregation_equals_the_reference(
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
    dtype = torch.float64 if double else torch.float32
    csr = random_csr(rows, cols, edges, seed=seed, index=index)
    # Small integers make ties, which max must break in one way.
    x = torch.randint(-3, 4, (cols, width), generator=torch.Generator().manual_seed(seed)).to(dtype) / 2
    weight = torch.rand(csr.num_edges, dtype=dtype) if weighted and reduce != "max" else None
    check_all(csr, x, weight, reduce, 1e-12 if double else 1e-5, edge_numbers(csr, seed) if weighted else None)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("width", [1, 3, 7, 16, 31, 47, 100, 128, 256, 300])
def test_aggregation_equals_the_reference_for_every_instruction_set_and_width(width: int) -> None:
    csr = random_csr(50, 60, 400)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.randn(60, width, generator=torch.Generator().manual_seed(1)).to(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        check_all(csr, x, torch.rand(400, dtype=wide), "sum", 1e-12 if dtype == torch.float64 else 1e-4)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        check_all(csr, x, None, "max", tolerance)
        for seed in (0, 1):
            check_all(csr, x.round(), None, "max", tolerance, edge_numbers(csr, seed))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("width", [1, 7, 47, 300])
def test_sums_are_rounded_as_torch_rounds(width: int) -> None:
    csr = random_csr(50, 60, 400)
    draw = torch.Generator().manual_seed(1)
    base = torch.randn(20, width, generator=draw).bfloat16()
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(60, width, generator=draw).to(dtype)
        x[3, 0], x[4, 0] = torch.nan, torch.inf
        full_base = torch.cat([base.float(), torch.zeros(30, width)])
        expected = sum_rows(csr, x, base=full_base).bfloat16()
        actual = sum_rows(csr, x, base=base, dtype=torch.bfloat16)
        assert torch.equal(actual.isnan(), expected.isnan()) and actual.isnan().any()
        assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("reduce", REDUCES)
def test_gradients_equal_finite_differences(reduce: str) -> None:
    csr = random_csr(6, 5, 15)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    ties = edge_numbers(csr, 0)
    assert torch.autograd.gradcheck(lambda x: aggregate(csr, x, reduce=reduce, ties=ties), (x,))
    if reduce != "max":
        weight = torch.rand(15, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x, w: aggregate(csr, x, reduce=reduce, weight=w), (x, weight))


def test_threads_do_not_change_a_bit(set_threads: Callable[[int], None]) -> None:
    csr = random_csr(3000, 3000, 40_000)
    x = torch.randn(3000, 33, requires_grad=True)
    outcomes = []
    for count in (1, 2, 4):
        set_threads(count)
        out = aggregate(csr, x, reduce="mean")
        outcomes.append((out.detach(), *torch.autograd.grad(out.square().sum(), x)))
    for out, grad in outcomes[1:]:
        assert torch.equal(out, outcomes[0][0]) and torch.equal(grad, outcomes[0][1])


def test_sums_of_compact_blocks_add_up() -> None:
    """Sums over a partition of the edges into compact blocks equal the sum over all edges."""
    csr = random_csr(12, 9, 60)
    x = torch.randn(9, 5, dtype=torch.float64)
    out = torch.zeros(12, 5, dtype=torch.float64)
    rows, cols = csr.row.long(), csr.col.long()
    for part in range(3):
        in_part = cols % 3 == part
        used_rows = rows[in_part].unique()
        compact_row = torch.searchsorted(used_rows, rows[in_part])
        indptr = torch.zeros(len(used_rows) + 1, dtype=torch.int64)
        indptr[1:] = torch.bincount(compact_row, minlength=len(used_rows)).cumsum(0)
        sum_rows(CSR(indptr, cols[in_part], 9), x, rows=used_rows.int(), out=out)
    torch.testing.assert_close(out, aggregate(csr, x))


@given(
    size=st.sampled_from([(12, 9, 90), (1, 3, 40), (5, 5, 0), (0, 3, 0), (40, 40, 30)]),
    parts=st.integers(1, 6),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    index=st.sampled_from([torch.int32, torch.int64]),
    width=st.sampled_from([1, 5, 33]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_maxima_of_blocks_merge_in_any_order(
    size: tuple[int, int, int], parts: int, dtype: torch.dtype, index: torch.dtype, width: int, seed: int
) -> None:
    """Output, winners and, from transposed compact blocks, gradients are equal bit for bit."""
    csr = random_csr(*size, seed=seed, index=index)
    ties = edge_numbers(csr, seed)
    x = torch.randint(-2, 3, (csr.num_cols, width), generator=torch.Generator().manual_seed(seed)).to(dtype)
    blocks = split_edges(csr, parts, seed=seed)
    no_edges = CSR(torch.zeros_like(csr.indptr), csr.col[:0], csr.num_cols)
    state = max_rows(no_edges, x)
    for block in blocks:
        update_max(state, block.structure, x[block.cols], ties=ties[block.edges], rows=block.rows)
    expected_state = max_rows(csr, x, ties=ties)
    assert torch.equal(state.out, expected_state.out) and torch.equal(state.winner, expected_state.winner)
    # Integers, so that sums are exact in any order.
    grad = torch.randint(-9, 9, expected_state.out.shape, generator=torch.Generator().manual_seed(seed)).to(
        expected_state.out.dtype
    )
    transposed, positions = csr.transposed
    expected = max_backward(transposed, grad, expected_state.winner, ties=ties, positions=positions)
    grads, added = torch.zeros_like(expected), torch.zeros_like(expected)
    for block in blocks:
        transposed, positions = block.transposed(csr.num_rows)
        numbers = ties[block.edges]
        block_grad = max_backward(transposed, grad, state.winner, ties=numbers, positions=positions)
        grads.index_add_(0, block.cols, block_grad)
        max_backward(
            transposed, grad, state.winner, ties=numbers, positions=positions, rows=block.cols.int(), out=added
        )
    assert torch.equal(grads, expected) and torch.equal(added, expected)


def test_the_gradient_of_a_maximum_goes_to_one_edge() -> None:
    csr = CSR(torch.tensor([0, 3, 3, 5]), torch.tensor([0, 0, 1, 1, 0], dtype=torch.int32), 2)
    for ties, expected in ((None, [[1], [1]]), (torch.tensor([4, 3, 2, 7, 9]), [[0], [2]])):
        x = torch.ones(2, 1, requires_grad=True)
        out = aggregate(csr, x, reduce="max", ties=ties)
        out.sum().backward()
        assert out.tolist() == [[1], [0], [1]] and x.grad is not None and x.grad.tolist() == expected


def test_nan_is_the_maximum_at_any_position() -> None:
    csr = CSR(torch.tensor([0, 3]), torch.tensor([0, 1, 2], dtype=torch.int32), 3)
    for position in range(3):
        x = torch.tensor([[1.0], [5.0], [2.0]])
        x[position] = torch.nan
        for ties in (None, torch.tensor([2, 0, 1])):
            assert aggregate(csr, x, reduce="max", ties=ties).isnan().all()
            assert reference.aggregate(csr, x, reduce="max", ties=ties).isnan().all()


def test_wrong_options_and_shapes_are_refused() -> None:
    csr = random_csr(4, 4, 8)
    with pytest.raises(ConfigError, match="cannot reduce by"):
        aggregate(csr, torch.zeros(4, 2), reduce="median")
    with pytest.raises(ConfigError, match="expected 4 rows"):
        aggregate(csr, torch.zeros(5, 2))
    with pytest.raises(ConfigError, match="max takes no edge weights"):
        aggregate(csr, torch.zeros(4, 2), reduce="max", weight=torch.ones(8))
    with pytest.raises(ConfigError, match="found torch"):
        aggregate(csr, torch.zeros(4, 2).half())
    with pytest.raises(ValueError, match="one weight per edge"):
        aggregate(csr, torch.zeros(4, 2), weight=torch.ones(7))
    with pytest.raises(ValueError, match="one number per edge"):
        aggregate(csr, torch.zeros(4, 2), reduce="max", ties=torch.arange(7))


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("used", ["both", "aggregate", "self"])
def test_aggregate_with_self_equals_aggregate_and_slice(mean: bool, used: str) -> None:
    """Outputs and gradients are those of aggregate and a slice, if one or both of them are used."""
    edges = random_csr(13, 30, 90)
    x = torch.randn(30, 21, dtype=torch.float64)
    weights = torch.randn(2, 13, 21, dtype=torch.float64)

    def run(fused: bool) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        if fused:
            aggregated, own_rows = aggregate_with_self(edges, leaf, mean=mean)
        else:
            aggregated, own_rows = aggregate(edges, leaf, reduce="mean" if mean else "sum"), leaf[:13]
        terms = {"aggregate": aggregated * weights[0], "self": own_rows * weights[1]}
        total = sum(term.sum() for name, term in terms.items() if used in ("both", name))
        (grad,) = torch.autograd.grad(total, leaf)
        return total, grad

    for actual, expected in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("width", [1, 5, 16, 100, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_starts_from_its_base_rows(width: int, dtype: torch.dtype) -> None:
    edges = random_csr(13, 30, 90)
    x, base = torch.randn(30, width, dtype=dtype), torch.randn(6, width, dtype=dtype)
    expected = sum_rows(edges, x)
    expected[:6] += base
    torch.testing.assert_close(sum_rows(edges, x, base=base), expected)
