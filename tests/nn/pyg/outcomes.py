"""Outputs, gradients and buffers of a module, run by torch_geometric, on a view, and on parts."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import jinja2
import pytest
import torch
from torch import Tensor

from gnnfleet.graph.sampling.sampler import NeighborSampler
from gnnfleet.nn.pyg.module import PygModule
from gnnfleet.sharded.module_check import check_layers
from tests.equivalence.spread import KEY, NODES, loss_weights, plain_graph

TOLERANCE = 1e-10
Outcome = dict[str, Any]


@cache
def _built(make: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """The module and its first weights; torch_geometric takes ten times as long to build it as to run it."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.FileSystemLoader, "load", _load_template)
        module = make().double().train()
    return module, {name: tensor.clone() for name, tensor in module.state_dict().items()}


@cache
def _template(name: str, folder: str) -> jinja2.Template:
    loader = jinja2.FileSystemLoader(folder)
    return _LOAD(loader, jinja2.Environment(loader=loader), name)


def _load_template(loader: jinja2.FileSystemLoader, environment: object, name: str, *args: object) -> jinja2.Template:
    """Load a template that no other module had torch_geometric parse before."""
    return _template(name, loader.searchpath[0])


_LOAD = jinja2.FileSystemLoader.load


def build(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    module, state = _built(make)
    module.load_state_dict(state)
    module.zero_grad()
    torch.manual_seed(0)  # of draws in its forward pass
    random.seed(0)
    return module.train()


def outcome(module: torch.nn.Module, out: Tensor, x: Tensor, ids: Tensor) -> Outcome:
    """Run backward; everything that must be equal."""
    (out * loss_weights(out.detach().new_zeros(NODES, *out.shape[1:]))[ids]).sum().backward()
    return {
        "ids": ids,
        "out": out.detach(),
        "x": torch.zeros_like(x) if x.grad is None else x.grad,
        "parameters": {name: parameter.grad for name, parameter in module.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in module.named_buffers() if buffer.is_floating_point()},
    }


def run_plain(make: Callable[[], torch.nn.Module], evaluated: Tensor | None = None) -> Outcome:
    """The module as torch_geometric runs it; with ``evaluated`` in evaluation, of which those rows count."""
    graph, module = plain_graph(), build(make)
    edges = graph.single_edges
    assert edges.weight is not None and edges.attr is not None and graph.single_nodes.x is not None
    inputs = {"edge_weight": edges.weight.double(), "edge_attr": edges.attr.double()}
    inputs = {
        key: value
        for key, value in inputs.items()
        if key in inspect.signature(module.forward).parameters and getattr(module, f"supports_{key}", True)
    }
    x = graph.single_nodes.x.double().requires_grad_()
    out = module.train(evaluated is None)(x, edges.edge_index().long(), **inputs)
    rows = torch.arange(NODES) if evaluated is None else evaluated
    return outcome(module, out[rows], x, rows)


def run_on_view(view: Any, make: Callable[[], torch.nn.Module]) -> Outcome:
    module = build(make)
    features = plain_graph().single_nodes.x
    assert features is not None
    x = features.double()[view.node_ids].requires_grad_()
    return outcome(module, PygModule(module)(view, x), x, view.node_ids)


def split_module(make: Callable[[], torch.nn.Module]) -> PygModule:
    """A module that runs layer by layer, built anew: a trace would keep what earlier passes left in it."""
    model = PygModule(_built.__wrapped__(make)[0])
    model.split(plain_graph())
    return model


def run_on_blocks(make: Callable[[], torch.nn.Module], seeds: Tensor) -> Outcome:
    """Evaluate layer by layer on blocks with all neighbours; {"whole": reason} of a module that a run leaves whole."""
    graph, model = plain_graph(), split_module(make)
    reason = model.reason_whole or check_layers(model, graph)
    if reason:
        return {"whole": reason}
    blocks = NeighborSampler(graph, [-1] * model.num_layers).blocks({"node": seeds}, KEY)
    views = [view.with_step(training=False) for view in blocks]
    assert graph.single_nodes.x is not None
    x = graph.single_nodes.x.double().requires_grad_()
    return outcome(model.module, model.eval()(views, x[views[0].node_ids]), x, seeds)  # type: ignore[union-attr]


def joined(outcomes: list[Outcome]) -> Outcome:
    """Put rows in store order and sum the gradients of parameters."""
    first = outcomes[0]
    rows = {name: torch.empty(NODES, *first[name].shape[1:], dtype=torch.float64) for name in ("out", "x")}
    for one in outcomes:
        for name, table in rows.items():
            table[one["ids"]] = one[name]
    parameters = {}
    for name in first["parameters"]:
        grads = [one["parameters"][name] for one in outcomes if one["parameters"][name] is not None]
        parameters[name] = torch.stack(grads).sum(0) if grads else None
    return {**rows, "parameters": parameters, "buffers": common_buffers(outcomes)}


def common_buffers(outcomes: list[Outcome]) -> dict[str, Tensor]:
    buffers: dict[str, Tensor] = outcomes[0]["buffers"]
    for name, buffer in buffers.items():
        for one in outcomes[1:]:
            torch.testing.assert_close(one["buffers"][name], buffer, msg=f"{name} is not the same on all ranks")
    return buffers


def largest_error(actual: Outcome, expected: Outcome) -> float:
    """The largest difference of any tensor; infinity where only one of them is a number."""
    return max(float((one - other).abs().nan_to_num(torch.inf).max()) for _, one, other in pairs(actual, expected))


def assert_equal(actual: Outcome, expected: Outcome, name: str) -> None:
    for key, one, other in pairs(actual, expected):
        message = f"{name}, {key}: {{}}".format
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, msg=message)


def pairs(actual: Outcome, expected: Outcome) -> list[tuple[str, Tensor, Tensor]]:
    """(name, tensor, expected tensor), with zeros for a gradient that one of them lacks."""
    tensors = []
    for key, value in _tensors(expected).items():
        other = _tensors(actual)[key]
        if value is not None or other is not None:
            zeros = torch.zeros_like(value if value is not None else other)  # type: ignore[arg-type]
            tensors.append((key, *(zeros if tensor is None else tensor for tensor in (other, value))))
    return tensors


def _tensors(outcome: Outcome) -> dict[str, Tensor | None]:
    return {"out": outcome["out"], "x": outcome["x"], **outcome["parameters"], **outcome["buffers"]}
