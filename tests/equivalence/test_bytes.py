"""Bytes sent by each rank equal the formulas of the cost model, computed from the edges and the assignment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.partitioned_graph import Partition
from tests.equivalence.spread import CUTS, cut_graph, open_view, plain_graph
from tests.equivalence.verbs import CHANNELS, HEADS, WIDTH, draw, propagate_copy
from tests.ranks import RankPool

D, H = WIDTH, HEADS
assert D == HEADS * CHANNELS


def boundary(graph: Graph, part: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """[p, q] distinct sources in p that q needs, and distinct destinations in p with sources in q."""
    src, dst = graph.single_edges.edge_index().tolist()
    sources = {(int(part[s]), int(part[d]), s) for s, d in zip(src, dst, strict=True)}
    targets = {(int(part[d]), int(part[s]), d) for s, d in zip(src, dst, strict=True)}
    counts = []
    for pairs in (sources, targets):
        table = torch.zeros(parts, parts, dtype=torch.int64)
        for p, q, _ in pairs:
            table[p, q] += int(p != q)
        counts.append(table)
    return counts[0], counts[1]


def _rows(view: Any, seed: int, width: int, *, grad: bool = True) -> Tensor:
    return draw(seed, 60, width)[view.node_ids].requires_grad_(grad)


def attend(view: Any, score: str, inner: int, *, edge: bool = False, grad: bool = True) -> Tensor:
    term = draw(3, plain_graph().num_edges, inner)[view.edge_ids].requires_grad_() if edge else None
    vector = draw(4, inner).requires_grad_() if score == "v2" else None
    src, dst = _rows(view, 1, inner, grad=grad), _rows(view, 2, inner)
    options = {"edge": term, "vector": vector, "heads": H, "score": score}
    return view.attend(_rows(view, 0, D, grad=grad), src=src, dst=dst, self_loops=True, **options)


def attend_to_value(view: Any) -> Tensor:
    value, vector = _rows(view, 0, D), draw(4, D).requires_grad_()
    return view.attend(value, src=value, dst=_rows(view, 2, D), heads=H, score="v2", vector=vector)


def weighted_sum(view: Any, *, learnt: bool, grad: bool = True) -> Tensor:
    weight = draw(5, plain_graph().num_edges)[view.edge_ids].requires_grad_(learnt)
    return view.aggregate(_rows(view, 0, D, grad=grad), weight=weight)


# name → (computation, numbers sent per row of: sources, destinations, returned gradients)
FORMULAS: dict[str, tuple[Callable[[Any], Tensor], int, int, int]] = {
    "sum": (lambda view: view.aggregate(_rows(view, 0, D)), D, D, 0),
    "mean with loops": (lambda view: view.aggregate(_rows(view, 0, D), reduce="mean", self_loops=True), D, D, 0),
    "sum by the store's weights": (lambda view: view.aggregate(_rows(view, 0, D), weight=view.weight), D, D, 0),
    "sum, no gradient": (lambda view: view.aggregate(_rows(view, 0, D, grad=False)), D, 0, 0),
    "sum by other weights": (lambda view: weighted_sum(view, learnt=False), D, 0, D),
    "sum by learnt weights": (lambda view: weighted_sum(view, learnt=True), 2 * D, 0, D),
    "learnt weights alone": (lambda view: weighted_sum(view, learnt=True, grad=False), 2 * D, 0, 0),
    "max": (lambda view: view.aggregate(_rows(view, 0, D), reduce="max"), D, 0, D),
    "additive attention": (lambda view: attend(view, "add", H), D + H, D + 3 * H, 0),
    "additive attention, dst alone": (lambda view: attend(view, "add", H, grad=False), D + H, 0, 0),
    "additive attention, edges": (lambda view: attend(view, "add", H, edge=True), 2 * (D + H), 0, D + H),
    "v2": (lambda view: attend(view, "v2", 2 * H), 2 * (D + 2 * H), 0, D + 2 * H),
    "v2 of the value": (attend_to_value, 2 * D, 0, D),
    "dot": (lambda view: attend(view, "dot", 2 * H), 2 * (D + 2 * H), 0, D + 2 * H),
    "message": (lambda view: propagate_copy(view, _rows(view, 0, D)), 2 * D, 0, D),
}


def count_traffic(world: World, path: str, group: int, keep: bool = False) -> list[tuple[int, int]]:
    view = replace(open_view(world, path, group, 1), keep_fetched=keep)
    traffic = []
    for case, *_ in FORMULAS.values():
        before = world.traffic.bytes_sent, world.traffic.rounds
        out = case(view)
        if out.requires_grad:
            out.sum().backward()  # type: ignore[no-untyped-call]
        traffic.append((world.traffic.bytes_sent - before[0], world.traffic.rounds - before[1]))
    return traffic


def test_cached_rows_are_sent_once(pool: RankPool, tmp_path: Path) -> None:
    graph = plain_graph()
    path = cut_graph(graph, 3, "random", tmp_path / "parts")
    sources, targets = boundary(graph, Partition.open(path).assignment(), 3)
    traffic = pool.run(3, count_traffic, str(path), 1, True)
    for index, (name, (_, by_source, by_target, by_returned)) in enumerate(FORMULAS.items()):
        once = by_source // 2 if by_source not in (D, D + H) else by_source
        for rank, of_rank in enumerate(traffic):
            numbers = once * int(sources[rank].sum()) + by_target * int(targets[rank].sum())
            numbers += by_returned * int(sources[:, rank].sum())
            assert of_rank[index][0] == 8 * numbers, (name, rank)


@pytest.mark.parametrize("method", CUTS)
@pytest.mark.parametrize(("size", "group"), [(1, 1), (2, 1), (3, 2), (4, 1)])
def test_bytes_and_rounds_equal_the_formulas(
    pool: RankPool, tmp_path: Path, method: str, size: int, group: int
) -> None:
    graph = plain_graph()
    path = cut_graph(graph, size, method, tmp_path / "parts")
    sources, targets = boundary(graph, Partition.open(path).assignment(), size)
    traffic = pool.run(size, count_traffic, str(path), group)
    for index, (name, (_, by_source, by_target, by_returned)) in enumerate(FORMULAS.items()):
        for rank, of_rank in enumerate(traffic):
            numbers = by_source * int(sources[rank].sum()) + by_target * int(targets[rank].sum())
            numbers += by_returned * int(sources[:, rank].sum())
            assert of_rank[index][0] == 8 * numbers, (name, rank)
            exchanges = 1 if not (by_target or by_returned or by_source not in (D, D + H)) else 2
            assert of_rank[index][1] == (0 if size == 1 else exchanges * -(-size // group)), (name, rank)
    forward = list(FORMULAS).index("sum, no gradient")
    rows = sum(of_rank[forward][0] for of_rank in traffic) // (8 * D)
    assert rows == int(sources.sum()) == Partition.open(path).summary["volume"], "Σ(λ − 1)"
