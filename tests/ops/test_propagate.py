from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gnnfleet.errors import ConfigError
from gnnfleet.ops import message as module
from gnnfleet.ops.aggregate import aggregate
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.message import REDUCES
from gnnfleet.ops.propagate import propagate
from tests.ops.test_aggregate import random_csr


def edge_network(src: dict[str, Tensor], dst: dict[str, Tensor], edge: dict[str, Tensor], weight: Tensor) -> Tensor:
    return torch.tanh((src["x"] - dst["y"]) @ weight) * edge["e"]


def scored_message(
    src: dict[str, Tensor], dst: dict[str, Tensor], edge: dict[str, Tensor], weight: Tensor
) -> tuple[Tensor, Tensor]:
    hidden = ((src["x"] - dst["y"]) @ weight).view(-1, 2, 3)
    return hidden.sum(-1) * edge["e"], hidden


def inputs(csr: CSR, seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = [(csr.num_cols, 4), (csr.num_rows, 4), (csr.num_edges, 1), (4, 6)]
    return [torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True) for shape in shapes]


def run_propagate(csr: CSR, tensors: list[Tensor], reduce: str) -> Tensor:
    x, y, e, w = tensors
    message = scored_message if reduce == "softmax" else edge_network
    return propagate(csr, message, src={"x": x}, dst={"y": y}, edge={"e": e}, params=(w,), reduce=reduce)


def reference(csr: CSR, tensors: list[Tensor], reduce: str) -> Tensor:
    """Compute the result row by row, from the definition."""
    x, y, e, w = tensors
    out = []
    for i in range(csr.num_rows):
        in_edges = slice(int(csr.indptr[i]), int(csr.indptr[i + 1]))
        src, dst = {"x": x[csr.col[in_edges].long()]}, {"y": y[i].expand(in_edges.stop - in_edges.start, -1)}
        if in_edges.stop == in_edges.start:
            out.append(torch.zeros((2, 3) if reduce == "softmax" else (6,), dtype=x.dtype))
        elif reduce == "softmax":
            score, value = scored_message(src, dst, {"e": e[in_edges]}, w)
            out.append((score.softmax(0)[..., None] * value).sum(0))
        else:
            messages = edge_network(src, dst, {"e": e[in_edges]}, w)
            out.append(
                messages.amax(0) if reduce == "max" else messages.mean(0) if reduce == "mean" else messages.sum(0)
            )
    return torch.stack(out)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_propagate_equals_the_definition(reduce: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are equal for any number of edges at a time."""
    monkeypatch.setattr(module, "EDGES_AT_ONCE", at_once)
    csr = random_csr(9, 7, 30)
    tensors, reference_tensors = inputs(csr), inputs(csr)
    actual, expected = run_propagate(csr, tensors, reduce), reference(csr, reference_tensors, reduce)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1), dtype=actual.dtype)
    actual.backward(grad)
    expected.backward(grad)
    for a, b in zip(tensors, reference_tensors, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("reduce", REDUCES)
def test_gradients_equal_finite_differences(reduce: str) -> None:
    csr = random_csr(4, 5, 12)
    assert torch.autograd.gradcheck(lambda *tensors: run_propagate(csr, list(tensors), reduce), inputs(csr))


def test_a_message_that_copies_the_source_is_aggregate() -> None:
    csr = random_csr(6, 8, 40)
    x = torch.randn(8, 3)
    for reduce in ("sum", "mean", "max"):
        actual = propagate(csr, lambda src, dst, edge: src["x"], src={"x": x}, reduce=reduce)
        torch.testing.assert_close(actual, aggregate(csr, x, reduce=reduce))


def test_a_captured_parameter_is_refused() -> None:
    layer = nn.Linear(3, 3)
    csr = random_csr(6, 8, 40)
    for requires_grad in (True, False):
        x = torch.randn(8, 3, requires_grad=requires_grad)
        with pytest.raises(ConfigError, match="was not passed in"):
            propagate(csr, lambda src, dst, edge: layer(src["x"]), src={"x": x})
        with torch.no_grad():
            propagate(csr, lambda src, dst, edge: layer(src["x"]), src={"x": x})


def test_an_unused_parameter_gets_zero() -> None:
    csr, x = random_csr(6, 8, 40), torch.randn(8, 3, requires_grad=True)
    unused = torch.randn(2, requires_grad=True)
    propagate(csr, lambda src, dst, edge, p: src["x"], src={"x": x}, params=(unused,)).sum().backward()
    assert unused.grad is not None and not unused.grad.any()


def test_graphs_without_edges_or_rows_give_zeros() -> None:
    for rows, cols in ((3, 4), (0, 4), (0, 0)):
        csr = random_csr(rows, cols, 0)
        x = torch.randn(cols, 3, requires_grad=True)
        out = propagate(csr, lambda src, dst, edge: src["x"], src={"x": x})
        assert out.shape == (rows, 3) and not out.any()
        out.sum().backward()


def test_wrong_lengths_are_refused() -> None:
    csr = random_csr(3, 4, 5)
    with pytest.raises(ConfigError, match=r"src\['x'\] has 3 rows, expected 4"):
        propagate(csr, lambda src, dst, edge: src["x"], src={"x": torch.zeros(3, 1)})
    with pytest.raises(ConfigError, match="cannot reduce"):
        propagate(csr, lambda src, dst, edge: src["x"], src={"x": torch.zeros(4, 1)}, reduce="median")
