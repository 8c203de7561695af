"""Messages in pieces: any way to deal the edges into blocks gives the whole, in results and in every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.ops import message as messages
from gnnfleet.ops import propagate_blocks as pieces
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.draws import Draws, Purpose
from gnnfleet.ops.message import REDUCES, MessageBlock, MessageCall
from gnnfleet.ops.propagate import propagate
from tests.ops.blocks import deal
from tests.ops.test_aggregate import structure

DRAWS = Draws(3, Purpose.DROPOUT, layer=1)


def hidden(src: dict[str, Tensor], dst: dict[str, Tensor], edge: dict[str, Tensor], weight: Tensor) -> Tensor:
    """Rounded, so that there are ties, and dropped by edge id."""
    kept = (DRAWS.uniforms_at(edge["id"], 6) > 0.3).to(weight.dtype)
    both = (src["x"] * edge["e"] - dst["y"]) @ weight + src["z"][:, None]
    return (both + (both.round(decimals=1) - both).detach()) * kept


def value_of(reduce: str):
    def scored(src, dst, edge, weight, unused):
        built = hidden(src, dst, edge, weight).view(-1, 2, 3)
        return built.sum(-1), built * src["z"][:, None, None]

    return scored if reduce == "softmax" else lambda src, dst, edge, weight, unused: hidden(src, dst, edge, weight)


def inputs(cut: CSR, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"x": (cut.num_cols, 4), "z": (cut.num_cols,), "y": (cut.num_rows, 4), "e": (cut.num_edges, 1)}
    shapes |= {"weight": (4, 6), "unused": (2,)}
    drawn = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in drawn.items()}


def upstream_of(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)


def whole(cut: CSR, t: dict[str, Tensor], reduce: str, ids: Tensor) -> dict[str, Tensor]:
    out = propagate(
        cut,
        value_of(reduce),
        src={"x": t["x"], "z": t["z"]},
        dst={"y": t["y"]},
        edge={"e": t["e"]},
        params=(t["weight"], t["unused"]),
        reduce=reduce,
        edge_ids=ids,
        ties=ids,
    )
    found = torch.autograd.grad(out, list(t.values()), upstream_of(out))
    return {"out": out.detach(), **dict(zip(t, found, strict=True))}


def in_blocks(cut: CSR, t: dict[str, Tensor], reduce: str, ids: Tensor, *, parts: int, seed: int):
    dealt = deal(cut, parts, seed=seed)
    params = (t["weight"], t["unused"])
    call = MessageCall(message=value_of(reduce), reduce=reduce, num_dst=cut.num_rows, dst={"y": t["y"]}, params=params)

    def block_of(part):
        return MessageBlock(
            structure=part.structure,
            edge_ids=ids[part.edges],
            src={name: t[name][part.cols] for name in ("x", "z")},
            edge={"e": t["e"][part.edges]},
            rows=part.rows,
            ties=ids[part.edges],
        )

    state = pieces.PropagateState()
    for part in dealt:
        pieces.update_propagate(state, call, block_of(part))
    out, side = pieces.finish_propagate(state, call)
    upstream = pieces.begin_backward(call, upstream_of(out), out=out, side=side)
    into = pieces.open_gradients(call, dst=["y"], params=[0, 1])
    found = {"out": out, **{name: torch.zeros_like(t[name]) for name in ("x", "z", "e")}}
    for part in reversed(dealt):
        edge = torch.zeros(len(part.edges), 1, dtype=t["e"].dtype)
        of_sources = pieces.block_backward(call, upstream, block_of(part), into=into, src=["x", "z"], edge={"e": edge})
        found["e"] = found["e"].index_copy(0, part.edges, edge)
        for name, grad in of_sources.items():
            found[name] = found[name].index_add(0, part.cols, grad)
    return found | {"y": into.dst["y"], "weight": into.params[0], "unused": into.params[1]}


@settings(max_examples=60, deadline=None)
@given(
    reduce=st.sampled_from(REDUCES),
    size=st.sampled_from([(9, 7, 60), (7, 7, 0), (0, 4, 0), (1, 1, 20), (12, 30, 15)]),
    parts=st.integers(1, 6),
    at_once=st.sampled_from([1, 3, 1000]),
    index=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 10**6),
)
def test_any_split_into_blocks_equals_one_block(reduce, size, parts, at_once, index, seed):
    cut = structure(*size, seed=seed, index=index)
    ids = torch.randperm(cut.num_edges, generator=torch.Generator().manual_seed(seed)) + 2**40
    t = inputs(cut, seed=seed)
    expected = whole(cut, t, reduce, ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "EDGES_AT_ONCE", at_once)
        found = in_blocks(cut, t, reduce, ids, parts=parts, seed=seed)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce", REDUCES)
def test_messages_of_16_bits_give_float32(reduce, dtype):
    """Sums of 16-bit messages are float32, however the edges are dealt; gradients are of their inputs' dtype."""
    cut = structure(9, 7, 60)
    ids, t = torch.arange(60), inputs(cut, dtype)
    expected, found = whole(cut, t, reduce, ids), in_blocks(cut, t, reduce, ids, parts=3, seed=1)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    for name, tensor in expected.items():
        assert tensor.dtype == (torch.float32 if name == "out" else dtype)
        torch.testing.assert_close(found[name].to(tensor.dtype), tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduce", REDUCES)
def test_the_path_without_kernels_gives_equal_results(reduce, monkeypatch):
    """The path of other devices."""
    cut = structure(9, 7, 60)
    ids, t = torch.arange(60).flip(0), inputs(cut)
    expected = whole(cut, t, reduce, ids)
    monkeypatch.setattr(pieces, "_native_on", lambda values: False)
    for found in (whole(cut, t, reduce, ids), in_blocks(cut, t, reduce, ids, parts=3, seed=1)):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


def test_of_equal_maxima_the_lowest_tie_number_wins_in_any_order():
    cut = CSR(torch.tensor([0, 4, 4]), torch.tensor([0, 1, 2, 3], dtype=torch.int32), 4)
    ties = torch.tensor([7, 3, 5, 4])
    x = torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.0, 2.0], [1.0, 2.0]], requires_grad=True)
    out = propagate(cut, lambda src, dst, edge: src["x"], src={"x": x}, reduce="max", ties=ties)
    out.sum().backward()
    assert out.tolist() == [[1, 2], [0, 0]]
    assert x.grad is not None and x.grad.tolist() == [[0, 0], [1, 0], [0, 0], [0, 1]]


def test_blocks_without_edges_give_the_shape():
    cut = structure(5, 3, 0)
    call = MessageCall(
        message=lambda src, dst, edge: (src["x"][:, :2], src["x"].view(-1, 2, 4) * dst["y"].sum()),
        reduce="softmax",
        num_dst=5,
        dst={"y": torch.ones(5, 4)},
    )
    state = pieces.PropagateState()
    block = MessageBlock(structure=cut, edge_ids=torch.empty(0, dtype=torch.int64), src={"x": torch.ones(3, 8)})
    pieces.update_propagate(state, call, block)
    out, side = pieces.finish_propagate(state, call)
    assert out.shape == (5, 2, 4) and not out.any() and side is not None and side.isfinite().all()
    upstream = pieces.begin_backward(call, torch.ones_like(out), out=out, side=side)
    into = pieces.open_gradients(call, dst=["y"], params=[])
    assert not pieces.block_backward(call, upstream, block, into=into, src=["x"])["x"].any() and not into.dst["y"].any()


def test_wrong_messages_are_refused():
    cut, x = structure(5, 3, 0), torch.ones(3, 8)
    with pytest.raises(ConfigError, match="write sizes instead of −1"):
        propagate(cut, lambda src, dst, edge: src["x"].view(len(src["x"]), 2, -1), src={"x": x})
    with pytest.raises(ConfigError, match="a row for each of 4 edges"):
        propagate(structure(5, 3, 4), lambda src, dst, edge: src["x"].sum(0), src={"x": x})
    with pytest.raises(ConfigError, match=r"score \[E, H\]"):
        propagate(structure(5, 3, 4), lambda src, dst, edge: src["x"], src={"x": x}, reduce="softmax")
    with pytest.raises(ConfigError, match="is one tensor"):
        propagate(structure(5, 3, 4), lambda src, dst, edge: (src["x"], src["x"]), src={"x": x})


def test_scores_of_minus_infinity_weigh_nothing():
    cut = CSR(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1], dtype=torch.int32), 2)
    x = torch.tensor([[1.0], [2.0]], requires_grad=True)

    def message(src, dst, edge):
        return torch.where(src["x"] > 1.5, -torch.inf, 0.0), src["x"]

    out = propagate(cut, message, src={"x": x}, reduce="softmax")
    out.sum().backward()
    assert out.tolist() == [[1.0], [0.0]] and x.grad is not None and x.grad.tolist() == [[1.0], [0.0]]


def test_backward_computes_in_the_precision_of_forward():
    """Autocast is off when backward runs; the rebuilt message must be the one that forward saw."""
    cut, seen = structure(9, 7, 60), []
    x, weight = torch.randn(7, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def message(src, dst, edge, weight):
        built = src["x"] @ weight
        seen.append(built.dtype)
        return built

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = propagate(cut, message, src={"x": x}, params=(weight,))
    out.sum().backward()
    assert set(seen) == {torch.bfloat16} and out.dtype == torch.float32
