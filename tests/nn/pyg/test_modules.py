"""Unchanged torch_geometric modules are exact on a whole graph and on its parts: outputs, gradients, buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch_geometric.nn as pyg

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


def test_operations_that_depend_on_the_partition_are_refused(pool: RankPool, tmp_path: Path) -> None:
    path = cut_graph(plain_graph(), 2, "random", tmp_path / "parts")
    outcomes = pool.run(2, on_rank, str(path), [*REFUSED])
    for name in REFUSED:
        assert all("a module" in rank[name]["refused"] or "sources" in rank[name]["refused"] for rank in outcomes), name


def test_cached_layers_forget_another_graph() -> None:
    graph = plain_graph()
    x, edge_index = graph.single_nodes.x, graph.single_edges.edge_index().long()
    assert x is not None
    for kind in (pyg.GCNConv, pyg.SGConv):
        module = kind(IN, 3, cached=True, bias=False)
        expected = module(x, edge_index, graph.single_edges.weight).clone()
        module._cached_edge_index = module._cached_x = None
        module(x[:2], edge_index[:, :0])
        for _ in range(2):
            out = PygModule(module)(LocalView.of_graph(graph), x)
            torch.testing.assert_close(out, expected)
            assert module.cached and module._cached_edge_index is None and getattr(module, "_cached_x", None) is None


def dropped(view: Any) -> dict[str, Any]:
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
