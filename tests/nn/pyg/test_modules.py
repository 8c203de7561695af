"""Unchanged torch_geometric modules are exact on a whole graph and on its parts: outputs, gradients, buffers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.pyg.module import PygModule
from tests.equivalence.spread import KEY, NODES, cut_graph, loss_weights, open_view, plain_graph
from tests.nn.pyg.zoo import IN, MODULES, REFUSED, build
from tests.ranks import RankPool


def outcome(module: torch.nn.Module, out: Tensor, x: Tensor, ids: Tensor) -> dict[str, Any]:
    """Run backward; everything that must be equal."""
    (out * loss_weights(out.detach().new_zeros(NODES, *out.shape[1:]))[ids]).sum().backward()
    return {
        "ids": ids,
        "out": out.detach(),
        "x": torch.zeros_like(x) if x.grad is None else x.grad,
        "parameters": {name: parameter.grad for name, parameter in module.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in module.named_buffers() if buffer.is_floating_point()},
    }


def plain(name: str) -> dict[str, Any]:
    """The module as torch_geometric runs it."""
    graph, module = plain_graph(), build(name)
    edges = graph.single_edges
    assert edges.weight is not None and edges.attr is not None and graph.single_nodes.x is not None
    inputs = {"edge_weight": edges.weight.double(), "edge_attr": edges.attr.double()}
    inputs = {
        key: value
        for key, value in inputs.items()
        if key in inspect.signature(module.forward).parameters and getattr(module, f"supports_{key}", True)
    }
    x = graph.single_nodes.x.double().requires_grad_()
    return outcome(module, module(x, edges.edge_index().long(), **inputs), x, torch.arange(NODES))


def on_view(view: Any, name: str) -> dict[str, Any]:
    module = build(name)
    features = plain_graph().single_nodes.x
    assert features is not None
    x = features.double()[view.node_ids].requires_grad_()
    return outcome(module, PygModule(module)(view, x), x, view.node_ids)


def on_rank(world: World, path: str, names: list[str]) -> dict[str, dict[str, Any]]:
    outcomes = {}
    for name in names:
        try:
            outcomes[name] = on_view(open_view(world, path, 1, 1), name)
        except ConfigError as error:
            outcomes[name] = {"refused": str(error)}
    return outcomes


def joined(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
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
    return {**rows, "parameters": parameters, "buffers": first["buffers"]}


def assert_equal(actual: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    for key, value in _tensors(expected).items():
        other = _tensors(actual)[key]
        if value is None and other is None:
            continue
        zeros = torch.zeros_like(other if value is None else value)
        message = f"{name}, {key}: {{}}".format
        other, value = (zeros if tensor is None else tensor for tensor in (other, value))
        torch.testing.assert_close(other, value, rtol=1e-10, atol=1e-10, msg=message)


def _tensors(outcome: dict[str, Any]) -> dict[str, Tensor | None]:
    return {"out": outcome["out"], "x": outcome["x"], **outcome["parameters"], **outcome["buffers"]}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_on_a_view_of_the_whole_graph_equals_torch_geometric(name: str) -> None:
    assert_equal(on_view(LocalView.of_graph(plain_graph()).with_step(key=KEY), name), plain(name), name)


@pytest.mark.parametrize(("size", "cut"), [(2, "random"), (3, "edgeless")])
def test_modules_on_parts_equal_torch_geometric(pool: RankPool, tmp_path: Path, size: int, cut: str) -> None:
    path = cut_graph(plain_graph(), size, cut, tmp_path / "parts")
    outcomes = pool.run(size, on_rank, str(path), [*MODULES])
    for name in MODULES:
        assert "refused" not in outcomes[0][name], (name, outcomes[0][name])
        assert_equal(joined([rank[name] for rank in outcomes]), plain(name), name)


def test_operations_that_depend_on_the_partition_are_refused(pool: RankPool, tmp_path: Path) -> None:
    path = cut_graph(plain_graph(), 2, "random", tmp_path / "parts")
    outcomes = pool.run(2, on_rank, str(path), [*REFUSED])
    for name in REFUSED:
        assert all("a module" in rank[name]["refused"] or "sources" in rank[name]["refused"] for rank in outcomes), name


def dropped(view: Any) -> dict[str, Any]:
    import torch_geometric.nn as pyg

    torch.manual_seed(0)
    module = torch.nn.ModuleDict({"gat": pyg.GAT(IN, 8, 2, 3, heads=2, dropout=0.4)}).double().train()["gat"]
    features = plain_graph().single_nodes.x
    assert features is not None
    x = features.double()[view.node_ids].requires_grad_()
    return outcome(module, PygModule(module)(view, x), x, view.node_ids)


def dropped_on_rank(world: World, path: str) -> dict[str, Any]:
    return dropped(open_view(world, path, 1, 1))


def test_dropout_draws_by_node_and_edge(pool: RankPool, tmp_path: Path) -> None:
    path = cut_graph(plain_graph(), 2, "random", tmp_path / "parts")
    expected = dropped(LocalView.of_graph(plain_graph()).with_step(key=KEY, layer=1))
    without = dropped(LocalView.of_graph(plain_graph()).with_step(key=KEY, training=False))
    assert not torch.allclose(expected["out"], without["out"])
    assert_equal(joined(pool.run(2, dropped_on_rank, str(path))), expected, "dropout")
