"""One case for every way to call a verb, each a function of a view and tensors; float64, dropout on."""

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


def aggregate(view: Any, x: Tensor, weight: Tensor | None = None, **words: Any) -> Tensor:
    out: Tensor = view.aggregate(x, weight=weight, **words)
    return out


def aggregate_by_store(view: Any, x: Tensor, **words: Any) -> Tensor:
    out: Tensor = view.aggregate(x, weight=view.weight, **words)
    return out


def with_own(view: Any, x: Tensor, reduce: str) -> Tensor:
    return torch.cat(view.aggregate_with_self(x, reduce=reduce), 1)


def attend(view: Any, value: Tensor, src: Tensor, dst: Tensor, **words: Any) -> Tensor:
    out: Tensor = view.attend(value, src=src, dst=dst, heads=HEADS, **words)
    return out


def attend_to_itself(view: Any, value: Tensor, dst: Tensor, **words: Any) -> Tensor:
    """As GATv2: scores read what is summed."""
    out: Tensor = view.attend(value, src=value, dst=dst, heads=HEADS, score="v2", **words)
    return out


def drop(x: Tensor, ids: Tensor) -> Tensor:
    """Randomness inside a message: by edge id."""
    keep = DrawKey(seed=9).draws(Purpose.DROPOUT).uniforms_at(ids, x.shape[1]) > 0.4
    return x * keep / 0.6


def message(src: Any, dst: Any, edge: Any, matrix: Tensor, unused: Tensor) -> Tensor:
    return torch.tanh(src["x"] @ matrix + dst["u"] * edge["w"]) * drop(src["z"], edge["id"])


def scored(src: Any, dst: Any, edge: Any, matrix: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
    value = drop(src["z"] * edge["w"], edge["id"])
    return torch.tanh(src["x"] @ matrix + dst["u"])[:, :HEADS], value.view(len(value), HEADS, CHANNELS)


def rounded(src: Any, dst: Any, edge: Any, matrix: Tensor, unused: Tensor) -> Tensor:
    """Few different values: ties."""
    return (src["z"].round() + dst["u"].round()) * 1.0 + (src["x"] @ matrix) * 0.0


def propagate(
    view: Any, made: Callable[..., Any], reduce: str, x: Tensor, z: Tensor, u: Tensor, w: Tensor, **more: Tensor
) -> Tensor:
    out: Tensor = view.propagate(
        made, src={"x": x, "z": z}, dst={"u": u}, edge={"w": w}, params=tuple(more.values()), reduce=reduce
    )
    return out.flatten(1)


def copied(view: Any, z: Tensor) -> Tensor:
    """A message of sources alone."""
    out: Tensor = view.propagate(_copy, src={"z": z}, reduce="sum")
    return out


def _copy(src: Any, dst: Any, edge: Any) -> Tensor:
    found: Tensor = src["z"] * 2
    return found


def normalised(view: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Batch norm over all nodes; the running statistics are outputs too."""
    norm = BatchNorm(x.shape[1]).double()
    del norm.module.weight, norm.module.bias
    norm.module.weight, norm.module.bias = weight, bias  # type: ignore[assignment]
    out = norm(view, x)
    running = torch.stack([norm.module.running_mean, norm.module.running_var]).flatten()  # type: ignore[list-item]
    return torch.cat([out, running.expand(len(out), -1)], 1)


def dropped(view: Any, x: Tensor) -> Tensor:
    out: Tensor = view.dropout(x, 0.4, mask_id=3)
    return out


def degrees(view: Any, x: Tensor) -> Tensor:
    rows = [view.in_degree, view.graph_degree(), view.graph_degree(weighted=True)]
    return torch.stack([row.double() for row in rows], 1) + 0 * x[:, :3]


def edge_data(view: Any, x: Tensor) -> Tensor:
    """Whether the edges' own data is in the order of their ids."""
    graph = plain_graph().single_edges
    assert graph.weight is not None and graph.attr is not None
    assert torch.equal(view.weight, graph.weight[view.edge_ids]) and torch.equal(view.attr, graph.attr[view.edge_ids])
    assert view.weight is view.with_step(layer=2).weight, "layers know the store's weights by being the same"
    return x


def _sums() -> Iterator[tuple[str, Case, Inputs]]:
    edges = plain_graph().num_edges
    x, weight = draw(1, 60, WIDTH), draw(2, edges)
    ties = draw(3, 60, WIDTH).round().relu()
    for loops in (False, True):
        end = "-loops" if loops else ""
        for reduce in ("sum", "mean"):
            words = {"reduce": reduce, "self_loops": loops}
            yield f"{reduce}{end}", partial(aggregate, **words), Inputs({"x": x})
            yield f"{reduce}-store{end}", partial(aggregate_by_store, **words), Inputs({"x": x})
            both = Inputs({"x": x}, {"weight": weight})
            yield f"{reduce}-learnt{end}", partial(aggregate, **words), both
            fixed = Inputs({"x": x}, {"weight": weight}, frozen=["weight"])
            yield f"{reduce}-fixed{end}", partial(aggregate, **words), fixed
        yield f"max{end}", partial(aggregate, reduce="max", self_loops=loops), Inputs({"x": ties})
    only_weights = Inputs({"x": x}, {"weight": weight}, frozen=["x"])
    yield "sum-learnt-alone", partial(aggregate, reduce="sum"), only_weights
    yield "sum-nothing", partial(aggregate, reduce="sum"), Inputs({"x": x}, frozen=["x"])
    yield "sum-wide", partial(aggregate, reduce="sum"), Inputs({"x": draw(1, 60, 2, 3)})
    for reduce in ("mean", "max"):
        yield f"own-{reduce}", partial(with_own, reduce=reduce), Inputs({"x": ties})


def _attention() -> Iterator[tuple[str, Case, Inputs]]:
    edges, inner = plain_graph().num_edges, HEADS * CHANNELS
    value, low, high = draw(4, 60, inner), draw(5, 60, HEADS), draw(6, 60, HEADS)
    left, right = draw(7, 60, 2 * HEADS), draw(8, 60, 2 * HEADS)
    for loops in (False, True):
        end, words = "-loops" if loops else "", {"self_loops": loops, "dropout": 0.3}
        ends = {"value": value, "src": low, "dst": high}
        yield f"add{end}", partial(attend, **words), Inputs(ends)
        term = {"edge": draw(9, edges, HEADS)}
        yield f"add-edge{end}", partial(attend, **words), Inputs(ends, term)
        ends = {"value": value, "src": left, "dst": right}
        vector = {"vector": draw(10, HEADS, 2)}
        yield f"v2{end}", partial(attend, score="v2", **words), Inputs(ends, params=vector)
        term = {"edge": draw(11, edges, 2 * HEADS)}
        yield f"v2-edge{end}", partial(attend, score="v2", **words), Inputs(ends, term, vector)
        yield f"dot{end}", partial(attend, score="dot", **words), Inputs(ends)
        ends = {"value": value, "dst": draw(12, 60, inner)}
        vector = {"vector": draw(13, HEADS, CHANNELS)}
        yield f"v2-itself{end}", partial(attend_to_itself, **words), Inputs(ends, params=vector)
    fixed = Inputs({"value": value, "src": low, "dst": high}, frozen=["value", "src"])
    yield "add-dst-alone", attend, fixed
    three = {"value": value.view(60, HEADS, CHANNELS), "src": low, "dst": high}
    yield "add-three", attend, Inputs(three)


def _messages() -> Iterator[tuple[str, Case, Inputs]]:
    nodes = {"x": draw(14, 60, 4), "z": draw(15, 60, WIDTH), "u": draw(16, 60, WIDTH)}
    more = {"matrix": draw(18, 4, WIDTH), "unused": draw(19, 2)}
    inputs = Inputs(nodes, {"w": draw(17, plain_graph().num_edges, WIDTH)}, more)
    for reduce in ("sum", "mean", "max"):
        yield f"message-{reduce}", partial(propagate, made=message, reduce=reduce), inputs
    yield "message-softmax", partial(propagate, made=scored, reduce="softmax"), inputs
    yield "message-ties", partial(propagate, made=rounded, reduce="max"), inputs
    yield "message-copy", copied, Inputs({"z": nodes["z"]})


def _rest() -> Iterator[tuple[str, Case, Inputs]]:
    x = draw(20, 60, WIDTH)
    yield "batch-norm", normalised, Inputs({"x": x + 5}, params={"weight": draw(21, WIDTH), "bias": draw(22, WIDTH)})
    yield "dropout", dropped, Inputs({"x": x})
    yield "degrees", degrees, Inputs({"x": x})
    yield "edge-data", edge_data, Inputs({"x": x})


VERBS: dict[str, tuple[Case, Inputs]] = {
    name: (case, inputs) for part in (_sums, _attention, _messages, _rest) for name, case, inputs in part()
}
