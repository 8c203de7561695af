"""Unchanged torch_geometric modules are exact on a whole graph and on its parts: outputs, gradients, buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.pyg.module import PygModule
from tests.equivalence.spread import KEY, cut_graph, open_view, plain_graph
from tests.nn.pyg.outcomes import Outcome, assert_equal, joined, outcome, run_on_view, run_plain
from tests.nn.pyg.zoo import IN, MODULES, REFUSED
from tests.ranks import RankPool


def plain(name: str) -> Outcome:
    return run_plain((MODULES | REFUSED)[name])


def on_view(view: Any, name: str) -> Outcome:
    return run_on_view(view, (MODULES | REFUSED)[name])


def on_rank(world: World, path: str, names: list[str]) -> dict[str, dict[str, Any]]:
    outcomes = {}
    for name in names:
        try:
            outcomes[name] = on_view(open_view(world, path, 1, 1), name)
        except ConfigError as error:
            outcomes[name] = {"refused": str(error)}
    return outcomes


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
