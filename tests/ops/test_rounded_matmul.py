"""Products that round their operands, the GRU built of them and its time features equal torch, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnfleet.ops import rounded_matmul as rounded_matmul_module
from gnnfleet.ops.gru import gru, time_features
from gnnfleet.ops.native import _native
from gnnfleet.ops.rounded_matmul import rounded_matmul, sum_linear_float32


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


@pytest.fixture(params=[True, False], ids=["native", "plain"])
def product_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with the bfloat16 instructions of the CPU and without them."""
    if not request.param:
        monkeypatch.setattr(rounded_matmul_module._native, "has_product", lambda: False)
    elif not _native.has_product():
        pytest.skip("this CPU does not multiply bfloat16")


@pytest.mark.usefixtures("product_path")
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (13, 33, 5), (40, 100, 31), (25, 64, 1100), (3, 0, 4), (0, 5, 2), (2, 3, 0)]
)
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_a_product_rounds_its_operands_and_nothing_else(
    sizes: tuple[int, int, int], transposed: tuple[bool, bool]
) -> None:
    m, n, k = sizes
    a = random(k, m).t() if transposed[0] else random(m, k)
    b = random(n, k, seed=1).t() if transposed[1] else random(k, n, seed=1)
    bias, initial = random(n, seed=2), random(m, n + 3, seed=3)
    expected = rounded(a) @ rounded(b)
    tolerance = {"rtol": 1e-5, "atol": 1e-5 * max(k, 1) ** 0.5}
    actual = rounded_matmul(torch.empty(m, n), a, b, rounded=True, bias=bias)
    torch.testing.assert_close(actual.double(), expected + bias.double(), **tolerance)
    out = initial.clone()
    rounded_matmul(out[:, :n], a, b, rounded=True, add=True)  # rows with a gap between them
    torch.testing.assert_close(out[:, :n].double(), initial[:, :n].double() + expected, **tolerance)
    assert torch.equal(out[:, n:], initial[:, n:])
    if rounded_matmul_module._native.has_product():
        again = torch.empty(m, n)
        _native.product(a, b, again, bias, False, 3)
        assert torch.equal(again, actual), "threads change no bit"


def test_shapes_that_do_not_fit_are_refused() -> None:
    if not _native.has_product():
        pytest.skip("this CPU does not multiply bfloat16")
    with pytest.raises(ValueError, match="do not fit"):
        _native.product(random(2, 3), random(4, 2), torch.empty(2, 2), None, False, 1)
    with pytest.raises(ValueError, match="contiguous"):
        _native.product(random(4, 6)[::2, ::2], random(3, 2), torch.empty(2, 2), None, False, 1)


@pytest.mark.usefixtures("product_path")
def test_gradients_of_sum_linear_are_those_of_rounded_products() -> None:
    x, y, v, w, bias = leaves = [
        random(*shape, seed=seed).requires_grad_()
        for seed, shape in enumerate([(37, 20), (37, 6), (11, 20), (11, 6), (11,)])
    ]
    with torch.autocast("cpu", torch.bfloat16):
        out = sum_linear_float32([(x, v), (y, w)], bias)
    assert out.dtype == torch.float32
    expected_out = rounded(x) @ rounded(v).t() + rounded(y) @ rounded(w).t() + bias.double()
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=1e-5)
    grad = random(37, 11, seed=9)
    grads = torch.autograd.grad(out, leaves, grad)
    g = rounded(grad)
    expected = [g @ rounded(v), g @ rounded(w), g.t() @ rounded(x), g.t() @ rounded(y), grad.double().sum(0)]
    for grad_of_leaf, expected_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad_of_leaf.double(), expected_grad, rtol=1e-5, atol=1e-5)


def gru_cell(dtype: torch.dtype, width: int) -> tuple[torch.nn.GRUCell, list[Tensor], Tensor]:
    torch.manual_seed(0)
    module = torch.nn.GRUCell(9 + 5, width, dtype=dtype)
    inputs = [random(31, columns, seed=columns, dtype=dtype).mul_(3).requires_grad_() for columns in (9, 5)]
    return module, inputs, random(31, width, seed=4, dtype=dtype).requires_grad_()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [7, 40])
def test_the_gru_equals_that_of_torch(dtype: torch.dtype, width: int) -> None:
    module, inputs, memory = gru_cell(dtype, width)
    weights = [module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh]
    out, expected = gru(inputs, memory, weights), module(torch.cat(inputs, 1), memory)
    upstream, leaves = random(31, width, seed=8, dtype=dtype), [*inputs, memory, *weights]
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(out, expected, **tolerance)
    grads, expected_grads = (torch.autograd.grad(output, leaves, upstream) for output in (out, expected))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, **tolerance)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_time_features_equal_those_of_torch(dtype: torch.dtype) -> None:
    time_delta = (random(23, seed=1, dtype=torch.float64).abs() * 1e5).round().to(dtype)
    weight, bias = leaves = [random(11, seed=seed, dtype=dtype).requires_grad_() for seed in (2, 3)]
    out = time_features(time_delta, weight, bias)
    upstream = random(23, 11, seed=4, dtype=dtype)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = torch.cos(time_delta.double()[:, None] * wide[0] + wide[1])
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    grads = torch.autograd.grad(out, leaves, upstream)
    for grad, exact in zip(grads, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        atol = 1e-6 * float(exact.abs().max())
        torch.testing.assert_close(grad.double(), exact, rtol=tolerance["rtol"], atol=atol)


def test_gates_are_finite_for_any_finite_number() -> None:
    wide = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30]]).repeat(1, 3)
    out = torch.empty(1, 5)
    _native.gates(wide.clone(), torch.zeros(1, 15), torch.full((1, 5), 0.5), out, 1)
    expected = torch.tensor([[-1.0, -1.0, 0.25, 0.5, 0.5]])
    torch.testing.assert_close(out, expected)
    _native.gates(torch.full((1, 15), torch.nan), torch.zeros(1, 15), torch.zeros(1, 5), out, 1)
    assert out.isnan().all()


@pytest.mark.usefixtures("product_path")
def test_a_rounded_gru_is_close_to_the_exact_one() -> None:
    module, inputs, memory = gru_cell(torch.float32, 24)
    weights = [module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh]
    leaves, grad = [*inputs, memory, *weights], random(31, 24, seed=8)
    exact = gru(inputs, memory, weights)
    with torch.autocast("cpu", torch.bfloat16):
        rounded_out = gru(inputs, memory, weights)
    assert rounded_out.dtype == torch.float32 and not torch.equal(rounded_out, exact)
    torch.testing.assert_close(rounded_out, exact, rtol=0.02, atol=0.02)
    for rounded_grad, exact_grad in zip(
        *(torch.autograd.grad(out, leaves, grad) for out in (rounded_out, exact)), strict=True
    ):
        torch.testing.assert_close(rounded_grad, exact_grad, rtol=0.05, atol=0.05 * float(exact_grad.abs().max()))
