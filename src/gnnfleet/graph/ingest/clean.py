"""Parallel edges, self-loops and missing directions of a graph in memory: counted, and changed when asked.

The steps run in this order: self-loops, reverse edges, parallel edges. So a graph that lists a pair in both directions
and is made undirected has parallel edges afterwards, which ``duplicates="drop"`` removes. Held-out links stay as they
are. Edges are parallel when they have the same ends and, in a graph with times, the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import Edges, EdgeType, Graph
from gnnfleet.ops import csr

Duplicates = Literal["keep", "drop", "sum", "error"]
SelfLoops = Literal["keep", "drop", "error"]
REVERSE_PREFIX = "rev_"


def clean_edges(
    graph: Graph, *, undirected: bool = False, duplicates: Duplicates = "keep", self_loops: SelfLoops = "keep"
) -> tuple[Graph, dict[str, int]]:
    """The cleaned graph and what was found: self_loops, parallel, self_loops_dropped, parallel_dropped, reverse_added.

    ``undirected`` adds the reverse of every edge: in the same edge type between nodes of one type, else as a new edge
    type (dst, rev_relation, src), unless that exists. ``drop`` keeps the first parallel edge in store order, reverse
    edges behind given ones; ``sum`` adds the weights, each 1 without one. ``error`` raises InputError.
    """
    _check_choice("duplicates", duplicates, get_args(Duplicates))
    _check_choice("self_loops", self_loops, get_args(SelfLoops))
    counts = Counter(
        dict.fromkeys(("self_loops", "self_loops_dropped", "reverse_added", "parallel", "parallel_dropped"), 0)
    )
    edges = {kind: _clean_loops(kind, table, self_loops, counts) for kind, table in graph.edges.items()}
    if undirected:
        edges = _add_reverse(graph, edges, counts)
    edges = {kind: _clean_parallel(kind, table, duplicates, counts) for kind, table in edges.items()}
    cleaned = Graph.of(graph.nodes, edges, name=graph.name, undirected=graph.undirected or undirected)
    return cleaned, dict(counts)


def add_inverse_edges(graph: Graph) -> Graph:
    """The reverse of every edge type (s, r, d) as an edge type of its own, (d, rev_r, s), unless that exists.

    Unlike ``clean_edges(undirected=True)`` this also parts the two directions within one node type: what relational
    models want. Held-out links stay with the given direction.
    """
    edges = dict(graph.edges)
    for kind, table in graph.edges.items():
        if (backward := inverse_type(kind)) in edges:
            continue
        back, rows = replace(table, links={}), torch.arange(table.count)
        edges[backward] = _sort(back, table.dst(), table.src, rows, num_dst=graph.nodes[kind.src].count)
    return Graph.of(graph.nodes, edges, name=graph.name, undirected=graph.undirected)


def inverse_type(kind: EdgeType) -> EdgeType:
    """(s, r, d) → (d, rev_r, s), and back."""
    if kind.relation.startswith(REVERSE_PREFIX):
        return EdgeType(kind.dst, kind.relation.removeprefix(REVERSE_PREFIX), kind.src)
    return EdgeType(kind.dst, REVERSE_PREFIX + kind.relation, kind.src)


def is_undirected(tables: Mapping[EdgeType, Edges]) -> bool:
    """True for a single edge type whose every edge has its reverse, equally often, and that has no data on edges."""
    if len(tables) != 1:
        return False
    kind, edges = next(iter(tables.items()))
    if kind.src != kind.dst or not edges.count or edges.has_data:
        return False
    count = edges.num_dst
    if not torch.equal(torch.bincount(edges.src, minlength=count), edges.in_degree()):
        return False
    dst = edges.dst()
    _, order = csr.sort_edges(dst, edges.src, num_src=count, num_dst=count)
    return torch.equal(dst[order], edges.src)


def filter_edges(edges: Edges, keep: Tensor) -> Edges:
    """The edges under a mask [E], in the same order."""
    kept = torch.zeros(edges.count + 1, dtype=torch.int64)
    torch.cumsum(keep, 0, out=kept[1:])
    order = edges.order
    if order is not None:
        order = kept[order[keep[order]]]
    return replace(
        edges,
        indptr=kept[edges.indptr],
        src=edges.src[keep],
        weight=None if edges.weight is None else edges.weight[keep],
        attr=None if edges.attr is None else edges.attr[keep],
        time=None if edges.time is None else edges.time[keep],
        y=None if edges.y is None else edges.y[keep],
        order=order,
    )


def _clean_loops(kind: EdgeType, edges: Edges, wish: SelfLoops, counts: Counter[str]) -> Edges:
    if kind.src != kind.dst:
        return edges
    loops = edges.src == edges.dst()
    found = int(loops.sum())
    counts["self_loops"] += found
    if not found or wish == "keep":
        return edges
    if wish == "error":
        node = int(edges.src[loops][0])
        raise InputError(
            f"edges {kind}: expected no self-loops, found {found}, the first at row {node}; keep or drop them"
        )
    counts["self_loops_dropped"] += found
    return filter_edges(edges, ~loops)


def _clean_parallel(kind: EdgeType, edges: Edges, wish: Duplicates, counts: Counter[str]) -> Edges:
    leader = _first_parallel(edges)
    first = leader == torch.arange(edges.count)
    found = edges.count - int(first.sum())
    counts["parallel"] += found
    if found and wish == "error":
        where = int((~first).nonzero()[0])
        pair = f"{int(edges.src[where])} to {int(edges.dst()[where])}"
        raise InputError(
            f"edges {kind}: expected no parallel edges, found {found}, the first from row {pair}; keep, drop or sum"
        )
    if wish in ("keep", "error"):
        return edges
    counts["parallel_dropped"] += found
    kept = filter_edges(edges, first) if found else edges
    if wish == "drop":
        return kept
    weight = torch.ones(edges.count) if edges.weight is None else edges.weight
    # float64 while adding: thousands of parallel edges would lose digits otherwise.
    place = (first.cumsum(0) - 1)[leader]
    total = torch.zeros(kept.count, dtype=torch.float64).index_add_(0, place, weight.double())
    return replace(kept, weight=total.float())


def _first_parallel(edges: Edges) -> Tensor:
    """[E]: the first edge with the same ends and, where there are times, the same time."""
    dst, order = edges.dst(), torch.arange(edges.count)
    new = torch.ones(edges.count, dtype=torch.bool)
    new[1:] = (edges.src[1:] != edges.src[:-1]) | (dst[1:] != dst[:-1])
    if edges.time is not None:
        pair = new.cumsum(0)
        order = torch.argsort(edges.time, stable=True)
        order = order[torch.argsort(pair[order], stable=True)]
        time, pair = edges.time[order], pair[order]
        new[1:] = (pair[1:] != pair[:-1]) | (time[1:] != time[:-1])
    leader = torch.empty(edges.count, dtype=torch.int64)
    leader[order] = order[new.nonzero()[:, 0]][new.cumsum(0) - 1]
    return leader


def _add_reverse(graph: Graph, edges: dict[EdgeType, Edges], counts: Counter[str]) -> dict[EdgeType, Edges]:
    result: dict[EdgeType, Edges] = {}
    for kind, table in edges.items():
        backward = EdgeType(kind.dst, REVERSE_PREFIX + kind.relation, kind.src)
        forward = EdgeType(kind.dst, kind.relation.removeprefix(REVERSE_PREFIX), kind.src)
        if kind.src == kind.dst:
            result[kind] = _both_directions(table)
            counts["reverse_added"] += result[kind].count - table.count
            continue
        result[kind] = table
        if backward in edges or (kind.relation.startswith(REVERSE_PREFIX) and forward in edges):
            continue
        back = replace(table, links={})
        result[backward] = _sort(
            back, table.dst(), table.src, torch.arange(table.count), num_dst=graph.nodes[kind.src].count
        )
        counts["reverse_added"] += table.count
    return result


def _both_directions(edges: Edges) -> Edges:
    dst = edges.dst()
    back = (edges.src != dst).nonzero()[:, 0]
    rows = torch.cat([torch.arange(edges.count), back])
    src = torch.cat([edges.src, dst[back]])
    return _sort(edges, src, torch.cat([dst, edges.src[back]]), rows, num_dst=edges.num_dst)


def _sort(edges: Edges, src: Tensor, dst: Tensor, rows: Tensor, *, num_dst: int) -> Edges:
    """New ends, each with the data of the old edge in ``rows``; copies stay behind their originals."""
    num_src = max(num_dst, edges.num_dst)
    indptr, order = csr.sort_edges(src.contiguous(), dst.contiguous(), num_src=num_src, num_dst=num_dst)
    rows_sorted = rows[order]
    by_time = None
    if edges.time is not None and edges.order is not None:
        # Ties in time keep the order in which the edges were given, which only ``order`` still knows.
        rank = torch.empty_like(edges.order)
        rank[edges.order] = torch.arange(edges.count)
        copy = torch.arange(rows.shape[0]) >= edges.count
        arrival = torch.argsort(rank[rows] + copy * edges.count)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.shape[0])
        by_time = place[arrival][torch.argsort(edges.time[rows][arrival], stable=True)]
    return replace(
        edges,
        indptr=indptr,
        src=src[order],
        weight=None if edges.weight is None else edges.weight[rows_sorted],
        attr=None if edges.attr is None else edges.attr[rows_sorted],
        time=None if edges.time is None else edges.time[rows_sorted],
        y=None if edges.y is None else edges.y[rows_sorted],
        order=by_time,
    )


def _check_choice(name: str, found: str, expected: tuple[str, ...]) -> None:
    if found not in expected:
        raise ConfigError(f"{name} must be one of {', '.join(expected)}; found {found!r}")
