"""Chunked linear layers equal plain ones, gradients included; buffers are released and reused."""

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


def assert_same_with_gradients(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], inputs: list[Tensor]) -> None:
    tolerance = 1e-4 if actual[0].dtype == torch.float32 else 1e-10
    factors = [torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape) for out in expected]
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor, expected_tensor, rtol=tolerance, atol=tolerance)
    grads, expected_grads = (torch.autograd.grad(outs, inputs, factors) for outs in (actual, expected))
    for tensor, expected_tensor in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(tensor, expected_tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 150, 200])
def test_sum_linear_equals_a_sum_of_linear_layers(dtype: torch.dtype, relu: bool, rows: int) -> None:
    a, b, v, w, bias = inputs = leaves((rows, 4), (200, 3), (9, 4), (9, 3), (9,), dtype=dtype)
    actual = linear.sum_linear([(a, v), (b, w)], bias, relu=relu, rows=rows)
    expected = functional.linear(a, v, bias) + functional.linear(b[:rows], w)
    assert_same_with_gradients((actual,), (torch.relu(expected) if relu else expected,), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(200, 200), (200, 70), (70, 200), (3, 0), (130, 128)])
def test_multi_linear_equals_separate_products(dtype: torch.dtype, rows: tuple[int, int]) -> None:
    x, v, w = inputs = leaves((200, 9), (5, 9), (2, 9), dtype=dtype)
    actual = linear.multi_linear(x, [v, w], rows=rows)
    assert_same_with_gradients(actual, (x[: rows[0]] @ v.t(), x[: rows[1]] @ w.t()), inputs)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_bias_relu_adds_the_bias(relu: bool, fresh: bool) -> None:
    x, bias = inputs = leaves((200, 9), (9,), dtype=torch.float64)
    actual = linear.bias_relu(x * 2, bias, relu=relu, fresh=fresh)
    expected = x * 2 + bias
    assert_same_with_gradients((actual,), (torch.relu(expected) if relu else expected,), inputs)
    assert linear.bias_relu(x, None) is x


@pytest.mark.parametrize("hardware", [False, True])
def test_bfloat16_rounds_results(hardware: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_bf16", lambda: hardware)
    a, v, w, bias = leaves((200, 9), (5, 9), (2, 9), (5,), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        summed = linear.sum_linear([(a, v)], bias)
        products = linear.multi_linear(a, [v, w])
    assert summed.dtype == products[0].dtype == products[1].dtype == torch.bfloat16
    torch.testing.assert_close(summed.float(), functional.linear(a, v, bias), rtol=3e-2, atol=0.1)
    torch.testing.assert_close(products[1].float(), a @ w.t(), rtol=3e-2, atol=0.1)
    grads = torch.autograd.grad(summed.float().sum() + products[1].float().sum(), [a, v, w, bias])
    expected_grads = torch.autograd.grad(functional.linear(a, v, bias).sum() + (a @ w.t()).sum(), [a, v, w, bias])
    for grad, expected in zip(grads, expected_grads, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, expected, rtol=5e-2, atol=0.2)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("width", [1, 7, 47, 300])
def test_bfloat16_bias_and_relu_are_rounded_once(width: int) -> None:
    """Bias and ReLU are computed in float32; backward masks gradients of zeros and adds up their columns."""
    rows, bias, grad = (t.detach() for t in leaves((50, width), (width,), (50, width), dtype=torch.float32))
    rows, grad = rows.bfloat16(), grad.bfloat16()
    expected = torch.relu(rows.float() + bias).bfloat16()
    linear._end(rows, bias, relu=True)
    sums = torch.ones(width)
    masked = linear._end_back(grad, rows, sums)
    assert torch.equal(rows, expected)
    expected_grad = torch.where(expected > 0, grad, torch.zeros_like(grad))
    assert torch.equal(masked, expected_grad)
    torch.testing.assert_close(sums, 1 + expected_grad.float().sum(0))


def test_gradients_equal_finite_differences() -> None:
    x, v, w = leaves((20, 3), (4, 3), (2, 3), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, v: linear.sum_linear([(x, v)]), (x, v))
    assert torch.autograd.gradcheck(lambda x, v, w: linear.multi_linear(x, [v, w], rows=[20, 7]), (x, v, w))


@pytest.fixture
def clean_pool() -> Iterator[None]:
    gc.collect()
    _native.pool_release()
    yield
    _native.pool_release()


def test_released_buffers_are_reused(clean_pool: None) -> None:
    used = _native.pool_state()[0]
    a = buffers.empty_buffer((1000, 1000), torch.float32)
    address = a.data_ptr()
    row = a[5]
    del a
    assert _native.pool_state()[0] > used, "a view keeps the buffer"
    del row
    assert _native.pool_state()[0] == used
    b = buffers.empty_buffer((990, 1000), torch.float32)
    assert b.data_ptr() == address, "a slightly smaller request reuses the buffer"
    assert b.shape == (990, 1000) and b.is_contiguous()


def test_memory_of_unused_buffers_is_bounded(clean_pool: None) -> None:
    for size in (8, 16, 32, 64, 128):
        buffers.empty_buffer((size << 18,), torch.float32)
        used, highest, unused = _native.pool_state()
        assert used + unused <= highest * 5 // 4 + (1 << 21)
    _native.pool_release()
    assert _native.pool_state()[2] == 0


def test_unpooled_buffers_do_not_enter_the_pool(clean_pool: None) -> None:
    before = _native.pool_state()
    with buffers.unpooled():
        assert buffers.empty_buffer((1000, 1000), torch.float32).shape == (1000, 1000)
    assert _native.pool_state() == before
    assert buffers.empty_buffer((0, 5), torch.float64).shape == (0, 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 63, 64, 65, 300])
def test_relu_keeps_nan(dtype: torch.dtype, width: int) -> None:
    x = torch.full((3, width), torch.nan, dtype=dtype)
    x[0] = -1
    out = linear.bias_relu(x, torch.zeros(width, dtype=dtype), relu=True)
    assert not out[0].any() and out[1:].isnan().all()


@pytest.mark.parametrize("gap", [0, 2])
def test_adjacent_columns_are_one_product(gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adjacent terms need one product and equal separate ones; terms with a gap between them need two."""
    both = torch.randn(40, 7 + gap + 5, dtype=torch.float64)
    left, right = both[:, :7], both[:, 7 + gap :]
    weights = leaves((6, 7), (6, 5), dtype=torch.float64)
    products: list[int] = []
    join = linear._join
    monkeypatch.setattr(linear, "_join", lambda terms: products.append(len(joined := join(terms))) or joined)
    actual = linear.sum_linear(list(zip((left, right), weights, strict=True)), relu=True, rows=33)
    expected = linear.sum_linear(list(zip((left.clone(), right.clone()), weights, strict=True)), relu=True, rows=33)
    assert products == [1 if not gap else 2, 2]
    assert_same_with_gradients((actual,), (expected,), weights)


def test_columns_that_need_gradients_are_not_joined() -> None:
    both = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    weights = leaves((6, 4), (6, 4), dtype=torch.float64)
    terms = list(zip((both[:, :4], both[:, 4:]), weights, strict=True))
    expected = sum(functional.linear(x, w) for x, w in terms)
    assert_same_with_gradients((linear.sum_linear(terms),), (expected,), [both, *weights])
