"""Products in chunks equal plain ones, gradients included; buffers come back and are used again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.ops import buffers, linear
from gnnfleet.ops.native import _native

DTYPES = [torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_CHUNK", 64 * 9)


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw, dtype=dtype).requires_grad_() for shape in shapes]


def assert_same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], inputs: list[Tensor]) -> None:
    tolerance = 1e-4 if found[0].dtype == torch.float32 else 1e-10
    seeds = [torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape) for out in wanted]
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    ours, theirs = (torch.autograd.grad(outs, inputs, seeds) for outs in (found, wanted))
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 150, 200])
def test_sum_linear_equals_torch(dtype: torch.dtype, relu: bool, rows: int) -> None:
    a, b, v, w, bias = inputs = leaves((rows, 4), (200, 3), (9, 4), (9, 3), (9,), dtype=dtype)
    found = linear.sum_linear([(a, v), (b, w)], bias, relu=relu, rows=rows)
    wanted = functional.linear(a, v, bias) + functional.linear(b[:rows], w)
    assert_same((found,), (torch.relu(wanted) if relu else wanted,), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(200, 200), (200, 70), (70, 200), (3, 0), (130, 128)])
def test_multi_linear_equals_torch(dtype: torch.dtype, rows: tuple[int, int]) -> None:
    x, v, w = inputs = leaves((200, 9), (5, 9), (2, 9), dtype=dtype)
    found = linear.multi_linear(x, [v, w], rows=rows)
    assert_same(found, (x[: rows[0]] @ v.t(), x[: rows[1]] @ w.t()), inputs)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_bias_relu_equals_torch(relu: bool, fresh: bool) -> None:
    x, bias = inputs = leaves((200, 9), (9,), dtype=torch.float64)
    found = linear.bias_relu(x * 2, bias, relu=relu, fresh=fresh)
    wanted = x * 2 + bias
    assert_same((found,), (torch.relu(wanted) if relu else wanted,), inputs)
    assert linear.bias_relu(x, None) is x


@pytest.mark.parametrize("hardware", [False, True])
def test_bfloat16_rounds_results(hardware: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_bf16", lambda: hardware)
    a, v, w, bias = leaves((200, 9), (5, 9), (2, 9), (5,), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = linear.sum_linear([(a, v)], bias)
        forked = linear.multi_linear(a, [v, w])
    assert mixed.dtype == forked[0].dtype == forked[1].dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), functional.linear(a, v, bias), rtol=3e-2, atol=0.1)
    torch.testing.assert_close(forked[1].float(), a @ w.t(), rtol=3e-2, atol=0.1)
    found = torch.autograd.grad(mixed.float().sum() + forked[1].float().sum(), [a, v, w, bias])
    wanted = torch.autograd.grad(functional.linear(a, v, bias).sum() + (a @ w.t()).sum(), [a, v, w, bias])
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=5e-2, atol=0.2)


@pytest.mark.parametrize("isa", _native.isas().split())
@pytest.mark.parametrize("width", [1, 7, 47, 300])
def test_bfloat16_ends_as_torch_does(isa: str, width: int) -> None:
    """Bias and ReLU in float32, rounded once; gradients stopped where nothing came out, their columns summed."""
    rows, bias, grad = (t.detach() for t in leaves((50, width), (width,), (50, width), dtype=torch.float32))
    rows, grad = rows.bfloat16(), grad.bfloat16()
    wanted = torch.relu(rows.float() + bias).bfloat16()
    try:
        assert _native.select_isa(isa)
        linear._end(rows, bias, relu=True)
        sums = torch.ones(width)
        part = linear._end_back(grad, rows, sums)
    finally:
        _native.select_isa(_native.isas().split()[0])
    assert torch.equal(rows, wanted)
    kept = torch.where(wanted > 0, grad, torch.zeros_like(grad))
    assert torch.equal(part, kept)
    torch.testing.assert_close(sums, 1 + kept.float().sum(0))


def test_gradients_by_finite_differences() -> None:
    x, v, w = leaves((20, 3), (4, 3), (2, 3), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, v: linear.sum_linear([(x, v)]), (x, v))
    assert torch.autograd.gradcheck(lambda x, v, w: linear.multi_linear(x, [v, w], rows=[20, 7]), (x, v, w))


@pytest.fixture
def clean_pool() -> Iterator[None]:
    gc.collect()
    _native.pool_release()
    yield
    _native.pool_release()


def test_buffers_return_to_the_pool(clean_pool: None) -> None:
    used = _native.pool_state()[0]
    a = buffers.empty_buffer((1000, 1000), torch.float32)
    place = a.data_ptr()
    row = a[5]
    del a
    assert _native.pool_state()[0] > used, "a view keeps the buffer"
    del row
    assert _native.pool_state()[0] == used
    b = buffers.empty_buffer((990, 1000), torch.float32)
    assert b.data_ptr() == place, "a slightly smaller request takes the kept buffer"
    assert b.shape == (990, 1000) and b.is_contiguous()


def test_free_buffers_are_bounded(clean_pool: None) -> None:
    for size in (8, 16, 32, 64, 128):
        buffers.empty_buffer((size << 18,), torch.float32)
        used, highest, kept = _native.pool_state()
        assert used + kept <= highest * 5 // 4 + (1 << 21)
    _native.pool_release()
    assert _native.pool_state()[2] == 0


def test_buffers_without_the_pool_are_ordinary_tensors(clean_pool: None) -> None:
    before = _native.pool_state()
    with buffers.unpooled():
        assert buffers.empty_buffer((1000, 1000), torch.float32).shape == (1000, 1000)
    assert _native.pool_state() == before
    assert buffers.empty_buffer((0, 5), torch.float64).shape == (0, 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 63, 64, 65, 300])
def test_nan_is_not_hidden_by_relu(dtype: torch.dtype, width: int) -> None:
    x = torch.full((3, width), torch.nan, dtype=dtype)
    x[0] = -1
    out = linear.bias_relu(x, torch.zeros(width, dtype=dtype), relu=True)
    assert not out[0].any() and out[1:].isnan().all()


@pytest.mark.parametrize("gap", [0, 2])
def test_neighbouring_columns_are_one_product(gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms that lie side by side give what they give apart, with one product; a gap between them keeps them apart."""
    both = torch.randn(40, 7 + gap + 5, dtype=torch.float64)
    left, right = both[:, :7], both[:, 7 + gap :]
    weights = leaves((6, 7), (6, 5), dtype=torch.float64)
    made: list[int] = []
    join = linear._join
    monkeypatch.setattr(linear, "_join", lambda terms: made.append(len(found := join(terms))) or found)
    found = linear.sum_linear(list(zip((left, right), weights, strict=True)), relu=True, rows=33)
    apart = linear.sum_linear(list(zip((left.clone(), right.clone()), weights, strict=True)), relu=True, rows=33)
    assert made == [1 if not gap else 2, 2]
    assert_same((found,), (apart,), weights)


def test_adjacent_columns_with_gradients_are_not_merged() -> None:
    both = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    weights = leaves((6, 4), (6, 4), dtype=torch.float64)
    terms = list(zip((both[:, :4], both[:, 4:]), weights, strict=True))
    wanted = sum(functional.linear(x, w) for x, w in terms)
    assert_same((linear.sum_linear(terms),), (wanted,), [both, *weights])
