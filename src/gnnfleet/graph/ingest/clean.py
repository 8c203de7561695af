"""Rules for self-loops, reverse edges and parallel edges of a graph in memory, applied in this order.

A graph that lists a pair in both directions therefore gets parallel edges when it is made undirected;
``duplicates="drop"`` removes them. Edges are parallel if they have the same ends and, in a graph with times, the same
time. Held-out links do not change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import Edges, EdgeType, Graph, time_order
from gnnfleet.ops import csr

DuplicateRule = Literal["keep", "drop", "sum", "error"]
SelfLoopRule = Literal["keep", "drop", "error"]
REVERSE_PREFIX = "rev_"


def clean_edges(
    graph: Graph, *, undirected: bool = False, duplicates: DuplicateRule = "keep", self_loops: SelfLoopRule = "keep"
) -> tuple[Graph, dict[str, int]]:
    """Apply the rules; returns the graph and the number of edges that each rule concerned.

    ``undirected`` adds the reverse of every edge: in the same edge type between nodes of one type, else as a new edge
    type (dst, rev_relation, src), unless that exists. ``drop`` keeps the first parallel edge in store order, in which
    added reverse edges come last; ``sum`` adds the weights, by default 1 each. ``error`` raises InputError.
    """
    check_choice("duplicates", duplicates, DuplicateRule)
    check_choice("self_loops", self_loops, SelfLoopRule)
    counts = Counter(self_loops=0, self_loops_dropped=0, reverse_added=0, parallel=0, parallel_dropped=0)
    edges = {kind: _clean_loops(kind, table, self_loops, counts) for kind, table in graph.edges.items()}
    if undirected:
        edges = _add_reverse(graph, edges, counts)
    edges = {kind: _clean_parallel(kind, table, duplicates, counts) for kind, table in edges.items()}
    cleaned = Graph.of(graph.nodes, edges, name=graph.name, undirected=graph.undirected or undirected)
    return cleaned, dict(counts)


def add_inverse_edges(graph: Graph) -> Graph:
    """Add the reverse of every edge type (s, r, d) as an edge type (d, rev_r, s), unless that exists.

    Unlike ``clean_edges(undirected=True)``, this also separates the two directions within one node type, as relational
    models need. Held-out links stay with the original direction.
    """
    edges = dict(graph.edges)
    for kind, table in graph.edges.items():
        if (inverse := inverse_type(kind)) not in edges:
            edges[inverse] = _reverse(table, graph.nodes[kind.src].count)
    return Graph.of(graph.nodes, edges, name=graph.name, undirected=graph.undirected)


def inverse_type(kind: EdgeType) -> EdgeType:
    """(s, r, d) → (d, rev_r, s), and (s, rev_r, d) → (d, r, s)."""
    if kind.relation.startswith(REVERSE_PREFIX):
        return EdgeType(kind.dst, kind.relation.removeprefix(REVERSE_PREFIX), kind.src)
    return reverse_type(kind)


def reverse_type(kind: EdgeType) -> EdgeType:
    """(s, r, d) → (d, rev_r, s)."""
    return EdgeType(kind.dst, REVERSE_PREFIX + kind.relation, kind.src)


def is_undirected(tables: Mapping[EdgeType, Edges]) -> bool:
    """True for a single edge type without edge data whose every edge has its reverse, equally often."""
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
    """Select the edges under a mask [E], in the same order."""
    offsets = csr.offsets_of(keep)
    order = None if edges.order is None else offsets[edges.order[keep[edges.order]]]
    data = edges.select_data(keep)
    return replace(edges, indptr=offsets[edges.indptr], src=edges.src[keep], order=order, **data)


def _clean_loops(kind: EdgeType, edges: Edges, rule: SelfLoopRule, counts: Counter[str]) -> Edges:
    if kind.src != kind.dst:
        return edges
    loops = edges.src == edges.dst()
    num_loops = int(loops.sum())
    counts["self_loops"] += num_loops
    if not num_loops or rule == "keep":
        return edges
    if rule == "error":
        node = int(edges.src[loops][0])
        raise InputError(
            f"edges {kind}: expected no self-loops, found {num_loops}, the first at row {node}; keep or drop them"
        )
    counts["self_loops_dropped"] += num_loops
    return filter_edges(edges, ~loops)


def _clean_parallel(kind: EdgeType, edges: Edges, rule: DuplicateRule, counts: Counter[str]) -> Edges:
    leader = _first_parallel(edges)
    is_first = leader == torch.arange(edges.count)
    num_parallel = edges.count - int(is_first.sum())
    counts["parallel"] += num_parallel
    if num_parallel and rule == "error":
        edge = int((~is_first).nonzero()[0])
        pair = f"{int(edges.src[edge])} to {int(edges.dst()[edge])}"
        raise InputError(
            f"edges {kind}: expected no parallel edges, found {num_parallel}, the first from row {pair}; "
            "keep, drop or sum them"
        )
    if rule in ("keep", "error"):
        return edges
    counts["parallel_dropped"] += num_parallel
    distinct = filter_edges(edges, is_first) if num_parallel else edges
    if rule == "drop":
        return distinct
    weight = torch.ones(edges.count) if edges.weight is None else edges.weight
    group = (is_first.cumsum(0) - 1)[leader]
    # Sums in float64: in float32, thousands of parallel edges would lose digits.
    total = torch.zeros(distinct.count, dtype=torch.float64).index_add_(0, group, weight.double())
    return replace(distinct, weight=total.float())


def _first_parallel(edges: Edges) -> Tensor:
    """[E]: the first edge with the same ends and, if there are times, the same time."""
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
    undirected: dict[EdgeType, Edges] = {}
    for kind, table in edges.items():
        if kind.src == kind.dst:
            undirected[kind] = _both_directions(table)
            counts["reverse_added"] += undirected[kind].count - table.count
            continue
        undirected[kind] = table
        reverse = reverse_type(kind)
        if reverse not in edges and inverse_type(kind) not in edges:
            undirected[reverse] = _reverse(table, graph.nodes[kind.src].count)
            counts["reverse_added"] += table.count
    return undirected


def _reverse(edges: Edges, num_src: int) -> Edges:
    rows = torch.arange(edges.count)
    return _sort(replace(edges, links={}), edges.dst(), edges.src, rows, num_dst=num_src)


def _both_directions(edges: Edges) -> Edges:
    dst = edges.dst()
    reversible = (edges.src != dst).nonzero()[:, 0]
    rows = torch.cat([torch.arange(edges.count), reversible])
    src = torch.cat([edges.src, dst[reversible]])
    return _sort(edges, src, torch.cat([dst, edges.src[reversible]]), rows, num_dst=edges.num_dst)


def _sort(edges: Edges, src: Tensor, dst: Tensor, rows: Tensor, *, num_dst: int) -> Edges:
    """Sort new ends that take the data of the old edges in ``rows``; copies come after their originals."""
    num_src = max(num_dst, edges.num_dst)
    indptr, order = csr.sort_edges(src.contiguous(), dst.contiguous(), num_src=num_src, num_dst=num_dst)
    by_time = None
    if edges.time is not None and edges.order is not None:
        # Ties in time keep the input order of the edges, which only ``edges.order`` still has.
        rank = csr.inverse_permutation(edges.order)
        copy = torch.arange(rows.shape[0]) >= edges.count
        arrival = torch.argsort(rank[rows] + copy * edges.count)
        by_time = time_order(edges.time[rows][arrival], torch.argsort(arrival)[order])
    return replace(edges, indptr=indptr, src=src[order], order=by_time, **edges.select_data(rows[order]))


def check_choice(name: str, choice: str, choices: Any) -> None:
    """Raise ConfigError unless a setting is one of the texts of a Literal type."""
    if choice not in get_args(choices):
        raise ConfigError(f"{name} must be one of {', '.join(get_args(choices))}; found {choice!r}")
