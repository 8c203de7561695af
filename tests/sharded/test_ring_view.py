"""RingView equals LocalView: outputs and the gradient of every input, for every verb and partition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.views.local import LocalView
from tests.equivalence.spread import (
    CUTS,
    KEY,
    cut_graph,
    join_ranks,
    open_view,
    plain_graph,
    related_graph,
    run_case,
    run_on_whole_graph,
    typed_graph,
)
from tests.equivalence.verbs import VERBS
from tests.ranks import RankPool, with_shm_transport

SIZES = (1, 2, 3, 4)
# (ranks, partition, group, prefetch): every partition as SAR, some in one group, groups in between, other depths.
LAYOUTS = [(size, method, 1, 1) for size in SIZES for method in (CUTS if size > 1 else CUTS[:1])]
LAYOUTS += [(size, method, size, 1) for size, method in ((2, "random"), (3, "edgeless"), (4, "mincut"), (4, "empty"))]
LAYOUTS += [(2, "random", 1, 0), (2, "random", 2, 2), (3, "random", 2, 0), (3, "random", 1, 2)]
LAYOUTS += [(4, "random", 1, 0), (4, "random", 2, 1), (4, "random", 4, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return plain_graph()


@pytest.fixture(scope="module")
def expected(graph: Graph) -> dict[str, dict[str, Tensor]]:
    return {name: run_on_whole_graph(graph, *case) for name, case in VERBS.items()}


def parts_of(graph: Graph, folder: Path, name: str, size: int, method: str) -> str:
    path = folder / f"{name}-{size}-{method}"
    if not path.exists():
        cut_graph(graph, size, method, path)
    return str(path)


def every_verb(world: World, path: str, group: int, depth: int, keep: bool = False) -> dict[str, Any]:
    view = replace(open_view(with_shm_transport(world) if keep else world, path, group, depth), keep_fetched=keep)
    ids = {"node_ids": view.node_ids.clone(), "edge_ids": view.edge_ids.clone()}
    return {name: {"values": run_case(view, *case), **ids} for name, case in VERBS.items()}


@pytest.mark.parametrize(("size", "method", "group", "depth"), LAYOUTS)
def test_every_verb_equals_local(
    pool: RankPool,
    graph: Graph,
    expected: dict[str, Any],
    folder: Path,
    size: int,
    method: str,
    group: int,
    depth: int,
) -> None:
    path = parts_of(graph, folder, "plain", size, method)
    check_verbs(graph, expected, pool.run(size, every_verb, path, group, depth))


@pytest.mark.parametrize(("size", "method", "group"), [(2, "mincut", 1), (4, "random", 2), (3, "empty", 3)])
def test_every_verb_equals_local_with_fetched_rows_cached(
    pool: RankPool, graph: Graph, expected: dict[str, Any], folder: Path, size: int, method: str, group: int
) -> None:
    path = parts_of(graph, folder, "plain", size, method)
    check_verbs(graph, expected, pool.run(size, every_verb, path, group, 1, True))


def check_verbs(graph: Graph, expected: dict[str, Any], ranks: list[Any]) -> None:
    for name, (_, inputs) in VERBS.items():
        joined_values = join_ranks(graph, inputs, [verbs[name] for verbs in ranks])
        assert joined_values.keys() == expected[name].keys()
        for tensor, values in joined_values.items():
            torch.testing.assert_close(
                values, expected[name][tensor], rtol=1e-10, atol=1e-12, msg=lambda m, at=(name, tensor): f"{at}: {m}"
            )


def related(view: Any, x: dict[str, Tensor], coefficient: Tensor, combine: bool) -> dict[str, Tensor]:
    """Outputs and gradients of all relations, for every reduce."""
    values = {}
    for reduce in ("sum", "mean", "max"):
        leaves = {
            kind: view.for_type(kind) and x[kind][view.nodes[kind].node_ids].requires_grad_() for kind in view.nodes
        }
        outs = view.aggregate_relations(leaves, reduce=reduce)
        assert list(outs) == list(view.edge_types)
        sum((out * out.detach().sin()).sum() for out in outs.values()).backward()
        values |= {f"{reduce} {kind}": out.detach() for kind, out in outs.items()}
        values |= {f"{reduce} d{kind}": leaf.grad for kind, leaf in leaves.items() if leaf.grad is not None}
        if combine and reduce != "max":
            rows = x["node"][view.node_ids].requires_grad_()
            scale = coefficient.clone().requires_grad_()
            out = view.combine_relations(rows, scale, reduce=reduce)
            (out * out.detach().sin()).sum().backward()
            values |= {
                f"{reduce} combined": out.detach(),
                f"{reduce} dnode2": rows.grad,
                f"{reduce} params": scale.grad,
            }
    for score, joint in (("add", False), ("v2", False), ("dot", True)):
        values |= attended_relations(view, x, score, joint)
    return values


def attended_relations(view: Any, x: dict[str, Tensor], score: str, joint: bool) -> dict[str, Tensor]:
    """Attention over all relations, with dropout; a softmax for each, or one for all into a node."""
    leaves = {kind: x[kind][rows.node_ids].requires_grad_() for kind, rows in view.nodes.items()}
    vector = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True) if score == "v2" else None
    value = {kind: leaves[kind.src] * (1 + number) for number, kind in enumerate(view.edge_types)}
    src = value if score == "v2" else {kind: rows.sin() for kind, rows in value.items()}
    ends = {kind.dst: None for kind in view.edge_types} if joint else view.edge_types
    dst = {end: (leaves[end] if joint else leaves[end.dst] + number).cos() for number, end in enumerate(ends)}
    outs = view.attend_relations(value, src=src, dst=dst, heads=3, score=score, vector=vector, dropout=0.3)
    assert list(outs) == list(ends)
    sum((out * out.detach().sin()).sum() for out in outs.values()).backward()
    values = {f"{score} {'d' * joint}{end}": out.detach() for end, out in outs.items()}
    values |= {f"{score}' d{kind}": leaf.grad for kind, leaf in leaves.items() if leaf.grad is not None}
    return values if vector is None else values | {f"{score} params": vector.grad}


def related_on_rank(world: World, path: str, group: int, x: dict[str, Tensor], coefficient: Tensor) -> Any:
    view = open_view(world, path, group, 1)
    before = world.traffic.rounds
    view.aggregate_relations({kind: x[kind][view.nodes[kind].node_ids] for kind in x})
    rounds = world.traffic.rounds - before
    values = related(view, x, coefficient, combine=len(x) == 1)
    return values, {kind: rows.node_ids.clone() for kind, rows in view.nodes.items()}, rounds


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", CUTS)
@pytest.mark.parametrize("make", [typed_graph, related_graph])
def test_all_relations_in_one_exchange_equal_local(
    pool: RankPool, folder: Path, make: Any, method: str, size: int
) -> None:
    graph = make()
    random = torch.Generator().manual_seed(4)
    x = {
        kind: torch.randn(nodes.count, 3, generator=random, dtype=torch.float64).round()
        for kind, nodes in graph.nodes.items()
    }
    coefficient = torch.randn(len(graph.edges), generator=random, dtype=torch.float64)
    expected = related(LocalView.of_graph(graph).with_step(key=KEY, layer=1), x, coefficient, combine=len(x) == 1)
    path = parts_of(graph, folder, make.__name__, size, method)
    for group in [1 + CUTS.index(method) % size]:
        ranks = pool.run(size, related_on_rank, path, group, x, coefficient)
        assert all(rounds == (0 if size == 1 else -(-size // group)) for _, _, rounds in ranks), "one exchange for all"
        for name, values in expected.items():
            if name.endswith("params"):
                total = torch.stack([of_rank[name] for of_rank, _, _ in ranks]).sum(0)
            else:
                total = torch.full_like(values, torch.nan)
                for of_rank, ids, _ in ranks:
                    total[ids[_rows_of(name, graph)]] = of_rank[name]
            torch.testing.assert_close(total, values, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def _rows_of(name: str, graph: Graph) -> str:
    """The node type whose rows a tensor of ``related`` has."""
    kind = name.split(" ", 1)[1]
    by_edge_type = (edge_type.dst for edge_type in graph.edges if str(edge_type) == kind)
    return str(next(by_edge_type, kind[1:] if len(graph.nodes) > 1 else "node"))


def look_up(world: World, path: str, x: Tensor, ids: list[Tensor], group: int) -> Any:
    view = open_view(world, path, group, 1)
    local = x[view.node_ids].requires_grad_()
    rows = view.gather_rows(local, ids[world.rank])
    (rows * rows.detach().cos()).sum().backward()
    integers = view.gather_rows(x.round().int()[view.node_ids], ids[world.rank][:3])
    return rows.detach(), local.grad, view.node_ids.clone(), integers


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", CUTS)
def test_rows_and_gradients_of_a_row_lookup_equal_local(
    pool: RankPool, graph: Graph, folder: Path, method: str, size: int
) -> None:
    random = torch.Generator().manual_seed(size)
    x = torch.randn(60, 2, 3, generator=random, dtype=torch.float64)
    ids = [torch.randint(0, 60, (12 * (rank != 1),), generator=random) for rank in range(size)]
    leaf = x.clone().requires_grad_()
    rows = LocalView.of_graph(graph).gather_rows(leaf, torch.cat(ids))
    (rows * rows.detach().cos()).sum().backward()
    ranks = pool.run(size, look_up, parts_of(graph, folder, "plain", size, method), x, ids, 1 + size // 2)
    assert torch.equal(torch.cat([rank_rows for rank_rows, *_ in ranks]), rows.detach())
    grad = torch.full_like(x, torch.nan)
    for _, local_grad, node_ids, _ in ranks:
        grad[node_ids] = local_grad
    assert leaf.grad is not None
    torch.testing.assert_close(grad, leaf.grad, rtol=1e-12, atol=1e-14)
    expected = torch.cat([x.round().int()[rank_ids[:3]] for rank_ids in ids])
    assert torch.equal(torch.cat([integers for *_, integers in ranks]), expected), "dtypes without gradients too"
