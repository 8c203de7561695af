"""Cleaning against a brute force on lists of edges."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import EDGE, Edges, EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.ingest.clean import DuplicateRule, SelfLoopRule, clean_edges, is_undirected

NODES = 5
Row = tuple[int, int, float, int]  # src, dst, weight, time
lists = st.lists(
    st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1), st.integers(1, 9), st.integers(0, 3)), max_size=25
)


def graph_of(rows: list[Row], weighted: bool = True) -> Graph:
    pairs = torch.tensor([row[:2] for row in rows], dtype=torch.int64).reshape(-1, 2).T
    weight = torch.tensor([float(row[2]) for row in rows]) if weighted else None
    time = torch.tensor([row[3] for row in rows], dtype=torch.int64)
    return Graph(
        pairs, num_nodes=NODES, edge_weight=weight, edge_attr=torch.arange(len(rows)).float()[:, None], time=time
    )


def rows_of(edges: Edges) -> list[tuple[float, ...]]:
    assert edges.attr is not None and edges.time is not None
    weight = torch.zeros(edges.count) if edges.weight is None else edges.weight
    columns = (edges.src, edges.dst(), weight, edges.time, edges.attr[:, 0])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def brute_force(
    rows: list[Row], *, undirected: bool, duplicates: str, self_loops: str
) -> tuple[list[tuple[float, ...]], dict[str, int]]:
    edges = [(*row, i) for i, row in enumerate(rows)]
    loops = sum(e[0] == e[1] for e in edges)
    if self_loops == "drop":
        edges = [e for e in edges if e[0] != e[1]]
    back = (
        [(e[1], e[0], *e[2:]) for e in sorted(edges, key=lambda e: (e[1], e[0], e[4])) if e[0] != e[1]]
        if undirected
        else []
    )
    edges = edges + back
    parallel = sum(n - 1 for n in Counter((*e[:2], e[3]) for e in edges).values())
    if duplicates != "keep":
        groups: dict[tuple[int, int, int], list[tuple[int, int, float, int, int]]] = {}
        for e in edges:
            groups.setdefault((*e[:2], e[3]), []).append(e)
        total = sum if duplicates == "sum" else lambda weights: weights[0]
        edges = [(*group[0][:2], total([e[2] for e in group]), *group[0][3:]) for group in groups.values()]
    counts = {
        "self_loops": loops,
        "self_loops_dropped": loops if self_loops == "drop" else 0,
        "reverse_added": len(back),
        "parallel": parallel,
        "parallel_dropped": 0 if duplicates == "keep" else parallel,
    }
    return [tuple(map(float, e)) for e in sorted(edges, key=lambda e: (e[1], e[0]))], counts


@settings(deadline=None, max_examples=100)
@given(lists, st.booleans(), st.sampled_from(["keep", "drop", "sum"]), st.sampled_from(["keep", "drop"]))
def test_cleaned_edges_equal_a_plain_implementation(
    rows: list[Row], undirected: bool, duplicates: DuplicateRule, self_loops: SelfLoopRule
) -> None:
    cleaned, counts = clean_edges(graph_of(rows), undirected=undirected, duplicates=duplicates, self_loops=self_loops)
    expected, expected_counts = brute_force(rows, undirected=undirected, duplicates=duplicates, self_loops=self_loops)
    assert rows_of(cleaned.single_edges) == expected
    assert counts == expected_counts
    assert cleaned.undirected == undirected


@settings(deadline=None, max_examples=40)
@given(lists, st.booleans(), st.sampled_from(["keep", "drop"]))
def test_order_by_time_stays_stable(rows: list[Row], undirected: bool, duplicates: DuplicateRule) -> None:
    edges = clean_edges(graph_of(rows), undirected=undirected, duplicates=duplicates)[0].single_edges
    assert edges.order is not None and edges.time is not None and edges.attr is not None
    assert sorted(edges.order.tolist()) == list(range(edges.count))
    given_order = edges.attr[:, 0]  # the input position of each edge or of its original
    keys = [(edges.time[i].item(), given_order[i].item()) for i in edges.order.tolist()]
    times = [time for time, _ in keys]
    assert times == sorted(times)
    if not undirected:
        assert keys == sorted(keys)


@settings(deadline=None, max_examples=40)
@given(lists)
def test_undirected_without_duplicates_is_symmetric_and_idempotent(rows: list[Row]) -> None:
    bare = Graph(torch.tensor([row[:2] for row in rows], dtype=torch.int64).reshape(-1, 2).T, num_nodes=NODES)
    once, _ = clean_edges(bare, undirected=True, duplicates="drop")
    twice, counts = clean_edges(once, undirected=True, duplicates="drop")
    assert is_undirected(once.edges) == bool(rows)
    assert torch.equal(once.single_edges.edge_index(), twice.single_edges.edge_index())
    assert counts["reverse_added"] == counts["parallel_dropped"]


@settings(deadline=None, max_examples=40)
@given(lists)
def test_is_undirected_equals_a_plain_implementation(rows: list[Row]) -> None:
    pairs = Counter(row[:2] for row in rows)
    graph = Graph(torch.tensor([row[:2] for row in rows], dtype=torch.int64).reshape(-1, 2).T, num_nodes=NODES)
    assert is_undirected(graph.edges) == (bool(rows) and all(pairs[d, s] == n for (s, d), n in pairs.items()))


def test_sum_counts_edges_without_weight() -> None:
    cleaned, _ = clean_edges(
        graph_of([(0, 1, 5.0, 0), (0, 1, 7.0, 0), (2, 1, 1.0, 0)], weighted=False), duplicates="sum"
    )
    assert cleaned.single_edges.weight is not None and cleaned.single_edges.weight.tolist() == [2.0, 1.0]


def test_the_reverse_between_two_node_types_is_a_new_edge_type() -> None:
    writes, cites = EdgeType("author", "writes", "paper"), EdgeType("paper", "cites", "paper")
    nodes = {"author": validated_nodes(2), "paper": validated_nodes(3)}
    edges = {
        writes: validated_edges(
            [[0, 1, 1], [2, 0, 2]], num_src=2, num_dst=3, weight=[1, 2, 3], links={"val": [[0], [0]]}
        ),
        cites: validated_edges([[0, 1], [1, 1]], num_src=3, num_dst=3),
    }
    graph, counts = clean_edges(Graph.of(nodes, edges), undirected=True)
    back = graph.edges[EdgeType("paper", "rev_writes", "author")]
    assert back.edge_index().tolist() == [[2, 0, 2], [0, 1, 1]]
    assert back.weight is not None and back.weight.tolist() == [1.0, 2.0, 3.0]
    assert "val" in graph.edges[writes].links and not back.links
    assert graph.edges[cites].edge_index().tolist() == [[1, 0, 1], [0, 1, 1]]
    assert counts["reverse_added"] == 4
    again, counts = clean_edges(graph, undirected=True, duplicates="drop")
    assert again.edges.keys() == graph.edges.keys() and again.num_edges == graph.num_edges


def test_errors_name_the_edge_type() -> None:
    graph = Graph([[0, 0, 2], [1, 1, 2]])
    with pytest.raises(InputError, match=f"{EDGE}.* found 1, the first from row 0 to 1"):
        clean_edges(graph, duplicates="error")
    with pytest.raises(InputError, match="found 1, the first at row 2"):
        clean_edges(graph, self_loops="error")
    with pytest.raises(ConfigError, match="keep, drop, sum, error"):
        clean_edges(graph, duplicates="merge")  # type: ignore[arg-type]
