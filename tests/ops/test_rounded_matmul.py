"""Products that round their operands, the GRU made of them and its clock against torch: results and all gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnfleet.ops import rounded_matmul as rounded_matmul_module
from gnnfleet.ops.gru import gru
from gnnfleet.ops.native import _native
from gnnfleet.ops.rounded_matmul import rounded_matmul, sum_linear_float32
from gnnfleet.ops.time_features import time_features


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


@pytest.fixture(params=[True, False], ids=["native", "plain"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a CPU that multiplies bfloat16."""
    if not request.param:
        monkeypatch.setattr(rounded_matmul_module._native, "has_product", lambda: False)
    elif not _native.has_product():
        pytest.skip("this CPU does not multiply bfloat16")


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (13, 33, 5), (40, 100, 31), (25, 64, 1100), (3, 0, 4), (0, 5, 2), (2, 3, 0)]
)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_a_product_rounds_its_operands_and_nothing_else(sizes: tuple[int, int, int], turned: tuple[bool, bool]) -> None:
    m, n, k = sizes
    a = random(k, m).t() if turned[0] else random(m, k)
    b = random(n, k, seed=1).t() if turned[1] else random(k, n, seed=1)
    bias, before = random(n, seed=2), random(m, n + 3, seed=3)
    expected = rounded(a) @ rounded(b)
    near = {"rtol": 1e-5, "atol": 1e-5 * max(k, 1) ** 0.5}
    found = rounded_matmul(torch.empty(m, n), a, b, rounded=True, bias=bias)
    torch.testing.assert_close(found.double(), expected + bias.double(), **near)
    wide = before.clone()
    rounded_matmul(wide[:, :n], a, b, rounded=True, add=True)  # rows that lie apart
    torch.testing.assert_close(wide[:, :n].double(), before[:, :n].double() + expected, **near)
    assert torch.equal(wide[:, n:], before[:, n:])
    if rounded_matmul_module._native.has_product():
        again = torch.empty(m, n)
        _native.product(a, b, again, bias, False, 3)
        assert torch.equal(again, found), "threads change no bit"


def test_shapes_that_do_not_fit_are_refused() -> None:
    if not _native.has_product():
        pytest.skip("this CPU does not multiply bfloat16")
    with pytest.raises(ValueError, match="do not fit"):
        _native.product(random(2, 3), random(4, 2), torch.empty(2, 2), None, False, 1)
    with pytest.raises(ValueError, match="contiguous"):
        _native.product(random(4, 6)[::2, ::2], random(3, 2), torch.empty(2, 2), None, False, 1)


@pytest.mark.usefixtures("either")
def test_gradients_of_sum_linear_are_rounded_products() -> None:
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
    found = torch.autograd.grad(out, leaves, grad)
    g = rounded(grad)
    expected = [g @ rounded(v), g @ rounded(w), g.t() @ rounded(x), g.t() @ rounded(y), grad.double().sum(0)]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def cell(dtype: torch.dtype, width: int) -> tuple[torch.nn.GRUCell, list[Tensor], Tensor]:
    torch.manual_seed(0)
    made = torch.nn.GRUCell(9 + 5, width, dtype=dtype)
    known = [random(31, columns, seed=columns, dtype=dtype).mul_(3).requires_grad_() for columns in (9, 5)]
    return made, known, random(31, width, seed=4, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("isa", _native.isas().split())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [7, 40])
def test_the_gru_equals_torch(isa: str, dtype: torch.dtype, width: int) -> None:
    made, known, memory = cell(dtype, width)
    weights = [made.weight_ih, made.weight_hh, made.bias_ih, made.bias_hh]
    before = _native.isa()
    _native.select_isa(isa)
    try:
        out = gru(known, memory, weights)
        grad, leaves = random(31, width, seed=8, dtype=dtype), [*known, memory, *weights]
        found = torch.autograd.grad(out, leaves, grad)
    finally:
        _native.select_isa(before)
    twin = made(torch.cat(known, 1), memory)
    near = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(out, twin, **near)
    for mine, theirs in zip(found, torch.autograd.grad(twin, leaves, grad), strict=True):
        torch.testing.assert_close(mine, theirs, **near)


@pytest.mark.parametrize("isa", _native.isas().split())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_time_features_equal_torch(isa: str, dtype: torch.dtype) -> None:
    since = (random(23, seed=1, dtype=torch.float64).abs() * 1e5).round().to(dtype)
    weight, bias = (random(11, seed=seed, dtype=dtype).requires_grad_() for seed in (2, 3))
    before = _native.isa()
    _native.select_isa(isa)
    try:
        out = time_features(since, weight, bias)
    finally:
        _native.select_isa(before)
    grad = random(23, 11, seed=4, dtype=dtype)
    found = torch.autograd.grad(out, [weight, bias], grad)
    wide = [each.detach().double().requires_grad_() for each in (weight, bias)]
    twin = torch.cos(since.double()[:, None] * wide[0] + wide[1])
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(out.double(), twin, **near)
    for mine, theirs in zip(found, torch.autograd.grad(twin, wide, grad.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=near["rtol"], atol=1e-6 * float(theirs.abs().max()))


def test_gates_accept_any_number() -> None:
    wide = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30]]).repeat(1, 3)
    out = torch.empty(1, 5)
    _native.gates(wide.clone(), torch.zeros(1, 15), torch.full((1, 5), 0.5), out, 1)
    expected = torch.tensor([[-1.0, -1.0, 0.25, 0.5, 0.5]])
    torch.testing.assert_close(out, expected)
    _native.gates(torch.full((1, 15), torch.nan), torch.zeros(1, 15), torch.zeros(1, 5), out, 1)
    assert out.isnan().all()


@pytest.mark.usefixtures("either")
def test_a_rounded_gru_is_close_to_the_exact_one() -> None:
    made, known, memory = cell(torch.float32, 24)
    weights = [made.weight_ih, made.weight_hh, made.bias_ih, made.bias_hh]
    leaves, grad = [*known, memory, *weights], random(31, 24, seed=8)
    exact = gru(known, memory, weights)
    with torch.autocast("cpu", torch.bfloat16):
        near = gru(known, memory, weights)
    assert near.dtype == torch.float32 and not torch.equal(near, exact)
    torch.testing.assert_close(near, exact, rtol=0.02, atol=0.02)
    for mine, theirs in zip(*(torch.autograd.grad(out, leaves, grad) for out in (near, exact)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05 * float(theirs.abs().max()))
