"""Cases for every verb and its options, each a function of a view and tensors; float64, dropout on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnfleet.nn.norm import BatchNorm
from gnnfleet.ops.draws import DrawKey, Purpose
from tests.equivalence.spread import Case, Inputs, plain_graph

WIDTH, HEADS, CHANNELS = 6, 2, 3


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def aggregate(view: Any, x: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
    out: Tensor = view.aggregate(x, weight=weight, **options)
    return out


def aggregate_by_store(view: Any, x: Tensor, **options: Any) -> Tensor:
    out: Tensor = view.aggregate(x, weight=view.weight, **options)
    return out


def aggregate_with_self(view: Any, x: Tensor, reduce: str) -> Tensor:
    return torch.cat(view.aggregate_with_self(x, reduce=reduce), 1)


def attend(view: Any, value: Tensor, src: Tensor, dst: Tensor, **options: Any) -> Tensor:
    out: Tensor = view.attend(value, src=src, dst=dst, heads=HEADS, **options)
    return out


def attend_to_value(view: Any, value: Tensor, dst: Tensor, **options: Any) -> Tensor:
    """As in GATv2, scores are computed from the summed values."""
    out: Tensor = view.attend(value, src=value, dst=dst, heads=HEADS, score="v2", **options)
    return out


def drop(x: Tensor, ids: Tensor) -> Tensor:
    """Dropout inside a message, drawn by edge id."""
    mask = DrawKey(seed=9).draws(Purpose.DROPOUT).uniforms_at(ids, x.shape[1]) > 0.4
    return x * mask / 0.6


def message(src: Any, dst: Any, edge: Any, matrix: Tensor, unused: Tensor) -> Tensor:
    return torch.tanh(src["x"] @ matrix + dst["u"] * edge["w"]) * drop(src["z"], edge["id"])


def scored_message(src: Any, dst: Any, edge: Any, matrix: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
    value = drop(src["z"] * edge["w"], edge["id"])
    return torch.tanh(src["x"] @ matrix + dst["u"])[:, :HEADS], value.view(len(value), HEADS, CHANNELS)


def tied_message(src: Any, dst: Any, edge: Any, matrix: Tensor, unused: Tensor) -> Tensor:
    """Messages with few different values, and so with ties."""
    return (src["z"].round() + dst["u"].round()) * 1.0 + (src["x"] @ matrix) * 0.0


def propagate(
    view: Any, message: Callable[..., Any], reduce: str, x: Tensor, z: Tensor, u: Tensor, w: Tensor, **params: Tensor
) -> Tensor:
    out: Tensor = view.propagate(
        message, src={"x": x, "z": z}, dst={"u": u}, edge={"w": w}, params=tuple(params.values()), reduce=reduce
    )
    return out.flatten(1)


def propagate_copy(view: Any, z: Tensor) -> Tensor:
    """A message that reads sources only."""
    out: Tensor = view.propagate(_copy, src={"z": z}, reduce="sum")
    return out


def _copy(src: Any, dst: Any, edge: Any) -> Tensor:
    doubled: Tensor = src["z"] * 2
    return doubled


def batch_norm(view: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Batch norm over all nodes; the running statistics are outputs too."""
    norm = BatchNorm(x.shape[1]).double()
    del norm.module.weight, norm.module.bias
    norm.module.weight, norm.module.bias = weight, bias  # type: ignore[assignment]
    out = norm(view, x)
    running = torch.stack([norm.module.running_mean, norm.module.running_var]).flatten()  # type: ignore[list-item]
    return torch.cat([out, running.expand(len(out), -1)], 1)


def dropout(view: Any, x: Tensor) -> Tensor:
    out: Tensor = view.dropout(x, 0.4, mask_id=3)
    return out


def degrees(view: Any, x: Tensor) -> Tensor:
    rows = [view.in_degree, view.graph_degree(), view.graph_degree(weighted=True)]
    return torch.stack([row.double() for row in rows], 1) + 0 * x[:, :3]


def check_edge_order(view: Any, x: Tensor) -> Tensor:
    """Check that weights and features of edges are in the order of their ids."""
    graph = plain_graph().single_edges
    assert graph.weight is not None and graph.attr is not None
    assert torch.equal(view.weight, graph.weight[view.edge_ids]) and torch.equal(view.attr, graph.attr[view.edge_ids])
    assert view.weight is view.with_step(layer=2).weight, "all layers share one tensor of weights"
    return x


def _sums() -> Iterator[tuple[str, Case, Inputs]]:
    edges = plain_graph().num_edges
    x, weight = draw(1, 60, WIDTH), draw(2, edges)
    ties = draw(3, 60, WIDTH).round().relu()
    for loops in (False, True):
        suffix = "-loops" if loops else ""
        for reduce in ("sum", "mean"):
            options = {"reduce": reduce, "self_loops": loops}
            yield f"{reduce}{suffix}", partial(aggregate, **options), Inputs({"x": x})
            yield f"{reduce}-store{suffix}", partial(aggregate_by_store, **options), Inputs({"x": x})
            learnt = Inputs({"x": x}, {"weight": weight})
            yield f"{reduce}-learnt{suffix}", partial(aggregate, **options), learnt
            fixed = Inputs({"x": x}, {"weight": weight}, frozen=["weight"])
            yield f"{reduce}-fixed{suffix}", partial(aggregate, **options), fixed
        yield f"max{suffix}", partial(aggregate, reduce="max", self_loops=loops), Inputs({"x": ties})
    only_weights = Inputs({"x": x}, {"weight": weight}, frozen=["x"])
    yield "sum-learnt-alone", partial(aggregate, reduce="sum"), only_weights
    yield "sum-nothing", partial(aggregate, reduce="sum"), Inputs({"x": x}, frozen=["x"])
    yield "sum-wide", partial(aggregate, reduce="sum"), Inputs({"x": draw(1, 60, 2, 3)})
    for reduce in ("mean", "max"):
        yield f"own-{reduce}", partial(aggregate_with_self, reduce=reduce), Inputs({"x": ties})


def _attention() -> Iterator[tuple[str, Case, Inputs]]:
    edges, inner = plain_graph().num_edges, HEADS * CHANNELS
    value, low, high = draw(4, 60, inner), draw(5, 60, HEADS), draw(6, 60, HEADS)
    src, dst = draw(7, 60, 2 * HEADS), draw(8, 60, 2 * HEADS)
    for loops in (False, True):
        suffix, options = "-loops" if loops else "", {"self_loops": loops, "dropout": 0.3}
        ends = {"value": value, "src": low, "dst": high}
        yield f"add{suffix}", partial(attend, **options), Inputs(ends)
        term = {"edge": draw(9, edges, HEADS)}
        yield f"add-edge{suffix}", partial(attend, **options), Inputs(ends, term)
        ends = {"value": value, "src": src, "dst": dst}
        vector = {"vector": draw(10, HEADS, 2)}
        yield f"v2{suffix}", partial(attend, score="v2", **options), Inputs(ends, params=vector)
        term = {"edge": draw(11, edges, 2 * HEADS)}
        yield f"v2-edge{suffix}", partial(attend, score="v2", **options), Inputs(ends, term, vector)
        yield f"dot{suffix}", partial(attend, score="dot", **options), Inputs(ends)
        ends = {"value": value, "dst": draw(12, 60, inner)}
        vector = {"vector": draw(13, HEADS, CHANNELS)}
        yield f"v2-itself{suffix}", partial(attend_to_value, **options), Inputs(ends, params=vector)
    fixed = Inputs({"value": value, "src": low, "dst": high}, frozen=["value", "src"])
    yield "add-dst-alone", attend, fixed
    heads = {"value": value.view(60, HEADS, CHANNELS), "src": low, "dst": high}
    yield "add-three", attend, Inputs(heads)


def _messages() -> Iterator[tuple[str, Case, Inputs]]:
    nodes = {"x": draw(14, 60, 4), "z": draw(15, 60, WIDTH), "u": draw(16, 60, WIDTH)}
    params = {"matrix": draw(18, 4, WIDTH), "unused": draw(19, 2)}
    inputs = Inputs(nodes, {"w": draw(17, plain_graph().num_edges, WIDTH)}, params)
    for reduce in ("sum", "mean", "max"):
        yield f"message-{reduce}", partial(propagate, message=message, reduce=reduce), inputs
    yield "message-softmax", partial(propagate, message=scored_message, reduce="softmax"), inputs
    yield "message-ties", partial(propagate, message=tied_message, reduce="max"), inputs
    yield "message-copy", propagate_copy, Inputs({"z": nodes["z"]})


def _rest() -> Iterator[tuple[str, Case, Inputs]]:
    x = draw(20, 60, WIDTH)
    yield "batch-norm", batch_norm, Inputs({"x": x + 5}, params={"weight": draw(21, WIDTH), "bias": draw(22, WIDTH)})
    yield "dropout", dropout, Inputs({"x": x})
    yield "degrees", degrees, Inputs({"x": x})
    yield "edge-data", check_edge_order, Inputs({"x": x})


VERBS: dict[str, tuple[Case, Inputs]] = {
    name: (case, inputs) for group in (_sums, _attention, _messages, _rest) for name, case, inputs in group()
}
