"""Attention equals its plain version in torch, gradients included, for every score, width, thread count and
instruction set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.errors import ConfigError
from gnnfleet.ops import draws as draws_module
from gnnfleet.ops.attend import attend
from gnnfleet.ops.csr import CSR
from tests.ops import reference
from tests.ops.attend_cases import DRAWS, SCORES, WIDTHS, Case, assert_close, compress, make_case


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize(("score", "with_edge"), SCORES)
def test_attention_equals_the_reference(score, with_edge, widths, dropout, isa):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        case = make_case(score, with_edge, widths, dtype=dtype, dropout=dropout)
        wide = {name: x.detach().double().requires_grad_() for name, x in case.inputs.items()}
        exact = Case(case.structure, wide.pop("value"), case.options | wide)
        assert_close(case.results(attend), exact.results(reference.attend), tolerance)


@pytest.mark.parametrize(("score", "with_edge"), SCORES)
def test_the_index_type_changes_no_bit(score, with_edge):
    narrow, wide = (make_case(score, with_edge, dropout=0.3, index=index) for index in (torch.int32, torch.int64))
    for name, tensor in narrow.results(attend).items():
        assert torch.equal(wide.results(attend)[name], tensor)


@pytest.mark.parametrize(("score", "with_edge"), SCORES)
def test_bfloat16_values_equal_the_reference(score, with_edge, isa):
    for widths in ((4, 32, 8), (3, 5, 7)):
        case = make_case(score, with_edge, widths, dtype=torch.float32, dropout=0.3)
        half = replace(case, value=case.value.detach().bfloat16().requires_grad_())
        actual = half.results(attend)
        assert actual["out"].dtype == torch.float32 and actual["value"].dtype == torch.bfloat16
        expected = replace(case, value=half.value.detach().float().requires_grad_()).results(reference.attend)
        assert_close({"value": actual.pop("value")}, {"value": expected.pop("value")}, 2**-8)
        assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("widths", [(2, 3, 2), (1, 8, 9)])
@pytest.mark.parametrize(("score", "with_edge"), SCORES)
def test_gradients_equal_finite_differences(score, with_edge, widths, dropout):
    case = make_case(score, with_edge, widths, dropout=dropout, edges=20)
    names, tensors = zip(*case.inputs.items(), strict=True)

    def function(*arguments):
        named = dict(zip(names, arguments, strict=True))
        return attend(case.structure, named.pop("value"), **(case.options | named))

    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize(("score", "with_edge"), SCORES)
def test_threads_change_no_bit(score, with_edge, set_threads):
    case = make_case(score, with_edge, (4, 16, 8), dtype=torch.float32, dropout=0.3, edges=4000)
    set_threads(1)
    expected = case.results(attend)
    for count in (2, 4):
        set_threads(count)
        for name, tensor in case.results(attend).items():
            assert torch.equal(tensor, expected[name]), name


def test_each_gradient_is_the_same_if_computed_alone():
    for score, with_edge in SCORES:
        case = make_case(score, with_edge)
        full = case.results(attend)
        for name in case.inputs:
            frozen = {k: x.detach().requires_grad_(k == name) for k, x in case.inputs.items()}
            out = attend(
                case.structure, frozen["value"], **(case.options | {k: x for k, x in frozen.items() if k != "value"})
            )
            weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            out.backward(weight)
            assert_close({name: frozen[name].grad}, {name: full[name]}, 1e-13)


# ---- numerical limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 30.0, 80.0])
def test_rounding_in_additive_backward_is_bounded(size):
    """Large scores of both signs and one dominating neighbour make gradients of scores small differences.

    The float32 error is at most two roundings of the subtracted terms, times the effect of rounding a score of that
    size on its weight.
    """
    case = make_case("add", False, (4, 32, 1), dtype=torch.float32, edges=2000)
    with torch.no_grad():
        case.options["src"].mul_(size / 3)
        case.options["src"][::7] = size
        case.options["dst"].mul_(size / 3)
        case.value.mul_(10).add_(100)
    wide = {name: x.detach().double().requires_grad_() for name, x in case.inputs.items()}
    exact = Case(case.structure, wide.pop("value"), case.options | wide)
    expected, actual, float32_reference = (
        exact.results(reference.attend),
        case.results(attend),
        case.results(reference.attend),
    )
    row, col = case.structure.row.long(), case.structure.col.long()
    score = torch.nn.functional.leaky_relu(exact.options["src"][col] + exact.options["dst"][row], 0.2).detach()
    lse = torch.zeros(30, 4, dtype=torch.float64).index_add(0, row, score.exp()).log()
    grad = torch.randn(30, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float64).abs()
    terms = (score - lse[row]).exp() * ((grad[row] * exact.value.detach().abs()[col]).view(-1, 4, 32).sum(-1) * 2)
    rounding = 2 * 2**-24 * (1 + float(score.abs().max()))
    for name, end, count in (("src", col, 40), ("dst", row, 30)):
        bound = rounding * torch.zeros(count, 4, dtype=torch.float64).index_add(0, end, terms)
        error = (actual[name].double() - expected[name]).abs()
        assert bool((error <= bound + 1e-30).all()), (
            f"{name}: {float((error / bound).nan_to_num(0).max())} of the bound"
        )
        limit = 4 * float((float32_reference[name].double() - expected[name]).abs().max()) + float(bound.max()) / 2
        assert float(error.max()) <= limit


def test_scores_of_minus_infinity_mask_edges():
    case = make_case("add", True)
    masked = case.structure.row % 2 == 0  # every in-edge of even rows
    masked[::5] = True
    with torch.no_grad():
        case.options["edge"][masked] = -torch.inf
    actual = case.results(attend)
    assert all(bool(x.isfinite().all()) for x in actual.values())
    assert not actual["out"][::2].any() and not actual["edge"][masked].any()
    assert_close(actual, case.results(reference.attend), 1e-12)


@pytest.mark.parametrize(("score", "with_edge"), SCORES)
@pytest.mark.parametrize(("num_src", "num_dst"), [(0, 0), (3, 0), (0, 3), (3, 4)])
def test_graphs_without_edges_give_zeros(score, with_edge, num_src, num_dst):
    case = make_case(score, with_edge, (2, 3, 2))
    inner = case.options["src"].shape[1]
    empty = CSR(torch.zeros(num_dst + 1, dtype=torch.int64), torch.empty(0, dtype=torch.int32), num_src)
    options = case.options | {"src": torch.randn(num_src, inner), "dst": torch.randn(num_dst, inner), "dropout": 0.5}
    options |= {"edge": torch.empty(0, inner) if with_edge else None, "edge_ids": torch.empty(0, dtype=torch.int64)}
    options["vector"] = torch.randn(inner) if score == "v2" else None
    case_without_edges = Case(empty, torch.randn(num_src, 6), options)
    for tensor in case_without_edges.inputs.values():
        tensor.requires_grad_()
    for name, tensor in case_without_edges.results(attend).items():
        assert not tensor.any(), name


def test_isolated_nodes_get_zeros():
    for score, with_edge in SCORES:
        actual = make_case(score, with_edge).results(attend)
        assert not actual["out"][-2:].any() and not actual["dst"][-2:].any()
        assert not actual["value"][-3:].any() and not actual["src"][-3:].any()


# ---- dropout --------------------------------------------------------------------------------------------------------


def star(count: int) -> CSR:
    return CSR(torch.tensor([0, count]), torch.arange(count), count)


def mask_of(ids: torch.Tensor, heads: int, dropout: float) -> torch.Tensor:
    """[E, heads] factors, computed as attention weights of a star with equal scores."""
    count = ids.shape[0]
    eye = torch.eye(count, dtype=torch.float64)[:, None, :].expand(count, heads, count)
    zeros = torch.zeros(count, heads, dtype=torch.float64)
    out = attend(star(count), eye, src=zeros, dst=zeros[:1], score="add", dropout=dropout, draws=DRAWS, edge_ids=ids)
    return out[0].T * count


@pytest.mark.parametrize("heads", [1, 3, 4, 6])
def test_mask_is_a_function_of_the_edge_id(heads):
    ids = torch.arange(150) * 977 + 2**34
    mask = mask_of(ids, heads, 0.3)
    torch.testing.assert_close(mask, reference.keep_factors(DRAWS, ids, heads=heads, dropout=0.3))
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mask_of(ids[order], heads, 0.3), mask[order])


def test_dropout_rate_and_mean():
    ids = torch.arange(100_000)
    for dropout in (0.1, 0.5, 0.9):
        mask = reference.keep_factors(DRAWS, ids, heads=5, dropout=dropout)
        assert (mask == 0).double().mean(0).sub(dropout).abs().max() < 0.006
        assert mask.mean(0).sub(1).abs().max() < 0.03
        assert torch.corrcoef(mask.T).sub(torch.eye(5)).abs().max() < 0.02


def test_the_reference_philox_equals_the_native_one():
    counters = torch.randint(0, 2**32, (50, 4), generator=torch.Generator().manual_seed(0))
    key = 0xA4093822299F31D0
    expected = draws_module.philox(counters.to(torch.uint32), key)
    assert torch.equal(torch.stack(reference.philox(list(counters.T), key), 1), expected.long())


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("score", "with_edge"), SCORES)
def test_heads_may_have_a_dimension_of_their_own(score, with_edge):
    case = make_case(score, with_edge, (4, 32, 8))
    flat = attend(case.structure, case.value, **case.options)
    options = dict(case.options)
    for name in ("src", "dst", "edge"):
        options[name] = None if options[name] is None else options[name].unflatten(1, (4, -1))
    options["heads"] = None
    out = attend(case.structure, case.value.unflatten(1, (4, -1)), **options)
    assert out.shape == (30, 4, 32) and torch.equal(out.flatten(1), flat)
    if score == "v2":
        options = case.options | {"heads": None, "vector": case.options["vector"].unflatten(0, (4, -1))}
        assert torch.equal(attend(case.structure, case.value, **options), flat)


def test_strided_inputs_give_the_same_output():
    case = make_case("add", False)
    wide = {k: torch.cat([x.detach(), x.detach()], 1)[:, : x.shape[1]] for k, x in case.inputs.items()}
    out = attend(case.structure, wide.pop("value"), **(case.options | wide))
    assert torch.equal(out, attend(case.structure, case.value, **case.options))
    column_major = case.value.detach().T.contiguous().T
    assert torch.equal(attend(case.structure, column_major, **case.options), out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "cosine"}, "one of add, v2, dot"),
        ({"value": torch.zeros(40, 8, dtype=torch.int64)}, "float32, float64 or bfloat16"),
        ({"value": torch.zeros(40, 8, dtype=torch.float16)}, "float32, float64 or bfloat16"),
        ({"src": torch.zeros(40, 4, dtype=torch.float64)}, "src must be torch.float32"),
        ({"src": torch.zeros(40)}, "row per source"),
        ({"src": torch.zeros(39, 4)}, r"src must be \[40, 4\]"),
        ({"dst": torch.zeros(30, 3)}, r"dst must be \[30, 4\]"),
        ({"value": torch.zeros(40, 10)}, "multiple of 4"),
        ({"src": torch.zeros(40, 8), "heads": 4}, "one number per head"),
        ({"edge": torch.zeros(3, 4)}, r"edge must be \[500, 4\]"),
        ({"vector": torch.zeros(4)}, "vector goes with"),
        ({"score": "v2"}, "vector goes with"),
        ({"score": "dot"}, "number of heads is ambiguous"),
        ({"score": "v2", "vector": torch.zeros(3), "heads": 4}, "vector must have 4"),
        ({"score": "dot", "edge": torch.zeros(500, 4), "heads": 4}, "no edge term"),
        ({"dropout": 1.0}, "below 1"),
        ({"dropout": 0.5, "draws": None}, "needs draws"),
        ({"edge_ids": torch.zeros(500, dtype=torch.int32)}, "edge_ids must be int64"),
        ({"value": torch.zeros(40, 2, 4)}, "per head"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    structure = make_case("add", False).structure
    options = {
        "value": torch.zeros(40, 8),
        "src": torch.zeros(40, 4),
        "dst": torch.zeros(30, 4),
        "score": "add",
    } | change
    with pytest.raises(ConfigError, match=message):
        attend(structure, options.pop("value"), **options)


@pytest.mark.parametrize(
    ("indptr", "col", "num_cols", "message"),
    [
        (torch.tensor([0, 2]), torch.tensor([0, 3]), 3, r"0\.\.2"),
        (torch.tensor([0, 2]), torch.tensor([0, -1]), 3, r"0\.\.2"),
        (torch.tensor([0, 1]), torch.tensor([0, 1]), 3, "number of edges"),
        (torch.tensor([0, 2, 1, 2]), torch.tensor([0, 1]), 3, "must rise"),
        (torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 1]), 3, "int64"),
        (torch.tensor([0, 2]), torch.tensor([0.0, 1.0]), 3, "int32 or int64"),
    ],
)
def test_wrong_structures_are_refused(indptr, col, num_cols, message):
    with pytest.raises(ConfigError, match=message):
        CSR(indptr, col, num_cols).check()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=30))
def test_transpose_has_the_same_edges(pairs):
    dst, src = torch.tensor(sorted(pairs), dtype=torch.int32).reshape(-1, 2).T
    structure = compress(src, dst, 7, 5)
    transposed, positions = structure.transposed
    assert (transposed.num_rows, transposed.num_cols) == (7, 5)
    assert torch.equal(transposed.row, src[positions]) and torch.equal(transposed.col, dst[positions])
    assert torch.equal(structure.row, dst)
