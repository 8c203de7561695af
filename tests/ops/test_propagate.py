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
from tests.ops.test_aggregate import structure


def edge_network(src: dict[str, Tensor], dst: dict[str, Tensor], edge: dict[str, Tensor], weight: Tensor) -> Tensor:
    return torch.tanh((src["x"] - dst["y"]) @ weight) * edge["e"]


def scored(
    src: dict[str, Tensor], dst: dict[str, Tensor], edge: dict[str, Tensor], weight: Tensor
) -> tuple[Tensor, Tensor]:
    hidden = ((src["x"] - dst["y"]) @ weight).view(-1, 2, 3)
    return hidden.sum(-1) * edge["e"], hidden


def inputs(cut: CSR, seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = [(cut.num_cols, 4), (cut.num_rows, 4), (cut.num_edges, 1), (4, 6)]
    return [torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True) for shape in shapes]


def ours(cut: CSR, tensors: list[Tensor], reduce: str) -> Tensor:
    x, y, e, w = tensors
    message = scored if reduce == "softmax" else edge_network
    return propagate(cut, message, src={"x": x}, dst={"y": y}, edge={"e": e}, params=(w,), reduce=reduce)


def plain(cut: CSR, tensors: list[Tensor], reduce: str) -> Tensor:
    """Row by row, from the definition."""
    x, y, e, w = tensors
    out = []
    for i in range(cut.num_rows):
        here = slice(int(cut.indptr[i]), int(cut.indptr[i + 1]))
        src, dst = {"x": x[cut.col[here].long()]}, {"y": y[i].expand(here.stop - here.start, -1)}
        if here.stop == here.start:
            out.append(torch.zeros((2, 3) if reduce == "softmax" else (6,), dtype=x.dtype))
        elif reduce == "softmax":
            score, value = scored(src, dst, {"e": e[here]}, w)
            out.append((score.softmax(0)[..., None] * value).sum(0))
        else:
            built = edge_network(src, dst, {"e": e[here]}, w)
            out.append(built.amax(0) if reduce == "max" else built.mean(0) if reduce == "mean" else built.sum(0))
    return torch.stack(out)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_equals_the_definition(reduce: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and every gradient, however small the pieces."""
    monkeypatch.setattr(module, "EDGES_AT_ONCE", at_once)
    cut = structure(9, 7, 30)
    one, other = inputs(cut), inputs(cut)
    found, expected = ours(cut, one, reduce), plain(cut, other, reduce)
    torch.testing.assert_close(found, expected)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    found.backward(grad)
    expected.backward(grad)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("reduce", REDUCES)
def test_gradients_by_finite_differences(reduce: str) -> None:
    cut = structure(4, 5, 12)
    assert torch.autograd.gradcheck(lambda *tensors: ours(cut, list(tensors), reduce), inputs(cut))


def test_copying_the_source_is_aggregate() -> None:
    cut = structure(6, 8, 40)
    x = torch.randn(8, 3)
    for reduce in ("sum", "mean", "max"):
        found = propagate(cut, lambda src, dst, edge: src["x"], src={"x": x}, reduce=reduce)
        torch.testing.assert_close(found, aggregate(cut, x, reduce=reduce))


def test_a_captured_parameter_is_refused() -> None:
    layer = nn.Linear(3, 3)
    cut = structure(6, 8, 40)
    for needed in (True, False):
        x = torch.randn(8, 3, requires_grad=needed)
        with pytest.raises(ConfigError, match="was not passed in"):
            propagate(cut, lambda src, dst, edge: layer(src["x"]), src={"x": x})
        with torch.no_grad():
            propagate(cut, lambda src, dst, edge: layer(src["x"]), src={"x": x})


def test_an_unused_parameter_gets_zero() -> None:
    cut, x = structure(6, 8, 40), torch.randn(8, 3, requires_grad=True)
    unused = torch.randn(2, requires_grad=True)
    propagate(cut, lambda src, dst, edge, p: src["x"], src={"x": x}, params=(unused,)).sum().backward()
    assert unused.grad is not None and not unused.grad.any()


def test_graphs_without_edges_or_rows() -> None:
    for rows, cols in ((3, 4), (0, 4), (0, 0)):
        cut = structure(rows, cols, 0)
        x = torch.randn(cols, 3, requires_grad=True)
        out = propagate(cut, lambda src, dst, edge: src["x"], src={"x": x})
        assert out.shape == (rows, 3) and not out.any()
        out.sum().backward()


def test_wrong_lengths_are_refused() -> None:
    cut = structure(3, 4, 5)
    with pytest.raises(ConfigError, match=r"src\['x'\] has 3 rows, expected 4"):
        propagate(cut, lambda src, dst, edge: src["x"], src={"x": torch.zeros(3, 1)})
    with pytest.raises(ConfigError, match="cannot reduce"):
        propagate(cut, lambda src, dst, edge: src["x"], src={"x": torch.zeros(4, 1)}, reduce="median")
