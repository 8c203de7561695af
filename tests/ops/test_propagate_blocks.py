"""Blockwise messages: any split of the edges into blocks gives the same results and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.ops import message as messages
from gnnfleet.ops import propagate_blocks
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.draws import Draws, Purpose
from gnnfleet.ops.message import REDUCES, MessageBlock, MessageCall
from gnnfleet.ops.propagate import propagate
from tests.ops.blocks import split_edges
from tests.ops.test_aggregate import random_csr

DRAWS = Draws(3, Purpose.DROPOUT, layer=1)


def hidden(src: dict[str, Tensor], dst: dict[str, Tensor], edge: dict[str, Tensor], weight: Tensor) -> Tensor:
    """Messages that are rounded, so that there are ties, and dropped by edge id."""
    mask = (DRAWS.uniforms_at(edge["id"], 6) > 0.3).to(weight.dtype)
    linear = (src["x"] * edge["e"] - dst["y"]) @ weight + src["z"][:, None]
    return (linear + (linear.round(decimals=1) - linear).detach()) * mask


def message_for(reduce: str):
    def scored(src, dst, edge, weight, unused):
        messages_of_edges = hidden(src, dst, edge, weight).view(-1, 2, 3)
        return messages_of_edges.sum(-1), messages_of_edges * src["z"][:, None, None]

    return scored if reduce == "softmax" else lambda src, dst, edge, weight, unused: hidden(src, dst, edge, weight)


def inputs(csr: CSR, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"x": (csr.num_cols, 4), "z": (csr.num_cols,), "y": (csr.num_rows, 4), "e": (csr.num_edges, 1)}
    shapes |= {"weight": (4, 6), "unused": (2,)}
    drawn = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in drawn.items()}


def upstream_of(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)


def run_at_once(csr: CSR, t: dict[str, Tensor], reduce: str, ids: Tensor) -> dict[str, Tensor]:
    out = propagate(
        csr,
        message_for(reduce),
        src={"x": t["x"], "z": t["z"]},
        dst={"y": t["y"]},
        edge={"e": t["e"]},
        params=(t["weight"], t["unused"]),
        reduce=reduce,
        edge_ids=ids,
        ties=ids,
    )
    grads = torch.autograd.grad(out, list(t.values()), upstream_of(out))
    return {"out": out.detach(), **dict(zip(t, grads, strict=True))}


def run_in_blocks(csr: CSR, t: dict[str, Tensor], reduce: str, ids: Tensor, *, parts: int, seed: int):
    blocks = split_edges(csr, parts, seed=seed)
    params = (t["weight"], t["unused"])
    call = MessageCall(
        message=message_for(reduce), reduce=reduce, num_dst=csr.num_rows, dst={"y": t["y"]}, params=params
    )

    def block_of(block):
        return MessageBlock(
            structure=block.structure,
            edge_ids=ids[block.edges],
            src={name: t[name][block.cols] for name in ("x", "z")},
            edge={"e": t["e"][block.edges]},
            rows=block.rows,
            ties=ids[block.edges],
        )

    state = propagate_blocks.PropagateState()
    for block in blocks:
        propagate_blocks.update_propagate(state, call, block_of(block))
    out, side = propagate_blocks.finish_propagate(state, call)
    upstream = propagate_blocks.begin_backward(call, upstream_of(out), out=out, side=side)
    into = propagate_blocks.open_gradients(call, dst=["y"], params=[0, 1])
    outcome = {"out": out, **{name: torch.zeros_like(t[name]) for name in ("x", "z", "e")}}
    for block in reversed(blocks):
        edge = torch.zeros(len(block.edges), 1, dtype=t["e"].dtype)
        of_sources = propagate_blocks.block_backward(
            call, upstream, block_of(block), into=into, src=["x", "z"], edge={"e": edge}
        )
        outcome["e"] = outcome["e"].index_copy(0, block.edges, edge)
        for name, grad in of_sources.items():
            outcome[name] = outcome[name].index_add(0, block.cols, grad)
    return outcome | {"y": into.dst["y"], "weight": into.params[0], "unused": into.params[1]}


@settings(max_examples=60, deadline=None)
@given(
    reduce=st.sampled_from(REDUCES),
    size=st.sampled_from([(9, 7, 60), (7, 7, 0), (0, 4, 0), (1, 1, 20), (12, 30, 15)]),
    parts=st.integers(1, 6),
    at_once=st.sampled_from([1, 3, 1000]),
    index=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 10**6),
)
def test_any_split_of_the_edges_gives_the_same_result(reduce, size, parts, at_once, index, seed):
    csr = random_csr(*size, seed=seed, index=index)
    ids = torch.randperm(csr.num_edges, generator=torch.Generator().manual_seed(seed)) + 2**40
    t = inputs(csr, seed=seed)
    expected = run_at_once(csr, t, reduce, ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "EDGES_AT_ONCE", at_once)
        actual = run_in_blocks(csr, t, reduce, ids, parts=parts, seed=seed)
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce", REDUCES)
def test_sums_of_16_bit_messages_are_float32(reduce, dtype):
    """Sums are float32 for any split of the edges; gradients have the dtype of their inputs."""
    csr = random_csr(9, 7, 60)
    ids, t = torch.arange(60), inputs(csr, dtype)
    expected, actual = run_at_once(csr, t, reduce, ids), run_in_blocks(csr, t, reduce, ids, parts=3, seed=1)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    for name, tensor in expected.items():
        assert tensor.dtype == (torch.float32 if name == "out" else dtype)
        torch.testing.assert_close(actual[name].to(tensor.dtype), tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduce", REDUCES)
def test_the_torch_path_equals_the_kernels(reduce, monkeypatch):
    """Other devices take this path."""
    csr = random_csr(9, 7, 60)
    ids, t = torch.arange(60).flip(0), inputs(csr)
    expected = run_at_once(csr, t, reduce, ids)
    monkeypatch.setattr(propagate_blocks, "_native_on", lambda values: False)
    for actual in (run_at_once(csr, t, reduce, ids), run_in_blocks(csr, t, reduce, ids, parts=3, seed=1)):
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, rtol=1e-12, atol=1e-12)


def test_of_equal_maxima_the_lowest_edge_number_wins():
    csr = CSR(torch.tensor([0, 4, 4]), torch.tensor([0, 1, 2, 3], dtype=torch.int32), 4)
    ties = torch.tensor([7, 3, 5, 4])
    x = torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.0, 2.0], [1.0, 2.0]], requires_grad=True)
    out = propagate(csr, lambda src, dst, edge: src["x"], src={"x": x}, reduce="max", ties=ties)
    out.sum().backward()
    assert out.tolist() == [[1, 2], [0, 0]]
    assert x.grad is not None and x.grad.tolist() == [[0, 0], [1, 0], [0, 0], [0, 1]]


def test_a_graph_without_edges_has_the_output_shape_of_the_message():
    csr = random_csr(5, 3, 0)
    call = MessageCall(
        message=lambda src, dst, edge: (src["x"][:, :2], src["x"].view(-1, 2, 4) * dst["y"].sum()),
        reduce="softmax",
        num_dst=5,
        dst={"y": torch.ones(5, 4)},
    )
    state = propagate_blocks.PropagateState()
    block = MessageBlock(structure=csr, edge_ids=torch.empty(0, dtype=torch.int64), src={"x": torch.ones(3, 8)})
    propagate_blocks.update_propagate(state, call, block)
    out, side = propagate_blocks.finish_propagate(state, call)
    assert out.shape == (5, 2, 4) and not out.any() and side is not None and side.isfinite().all()
    upstream = propagate_blocks.begin_backward(call, torch.ones_like(out), out=out, side=side)
    into = propagate_blocks.open_gradients(call, dst=["y"], params=[])
    assert (
        not propagate_blocks.block_backward(call, upstream, block, into=into, src=["x"])["x"].any()
        and not into.dst["y"].any()
    )


def test_messages_of_the_wrong_shape_are_refused():
    csr, x = random_csr(5, 3, 0), torch.ones(3, 8)
    with pytest.raises(ConfigError, match="write sizes instead of −1"):
        propagate(csr, lambda src, dst, edge: src["x"].view(len(src["x"]), 2, -1), src={"x": x})
    with pytest.raises(ConfigError, match="a row for each of 4 edges"):
        propagate(random_csr(5, 3, 4), lambda src, dst, edge: src["x"].sum(0), src={"x": x})
    with pytest.raises(ConfigError, match=r"score \[E, H\]"):
        propagate(random_csr(5, 3, 4), lambda src, dst, edge: src["x"], src={"x": x}, reduce="softmax")
    with pytest.raises(ConfigError, match="is one tensor"):
        propagate(random_csr(5, 3, 4), lambda src, dst, edge: (src["x"], src["x"]), src={"x": x})


def test_scores_of_minus_infinity_mask_edges():
    csr = CSR(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1], dtype=torch.int32), 2)
    x = torch.tensor([[1.0], [2.0]], requires_grad=True)

    def message(src, dst, edge):
        return torch.where(src["x"] > 1.5, -torch.inf, 0.0), src["x"]

    out = propagate(csr, message, src={"x": x}, reduce="softmax")
    out.sum().backward()
    assert out.tolist() == [[1.0], [0.0]] and x.grad is not None and x.grad.tolist() == [[1.0], [0.0]]


def test_backward_computes_in_the_precision_of_forward():
    """Autocast is off in backward; the rebuilt message must be that of forward."""
    csr, dtypes = random_csr(9, 7, 60), []
    x, weight = torch.randn(7, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def message(src, dst, edge, weight):
        product = src["x"] @ weight
        dtypes.append(product.dtype)
        return product

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = propagate(csr, message, src={"x": x}, params=(weight,))
    out.sum().backward()
    assert set(dtypes) == {torch.bfloat16} and out.dtype == torch.float32
