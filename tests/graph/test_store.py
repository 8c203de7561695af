from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from gnnfleet.errors import ConfigError, InputError, StoreError
from gnnfleet.graph.graph import EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.store import EDGE_ARRAYS, NODE_ARRAYS, open_store, save_store
from tests.graph.strategies import graphs


def assert_equal(first: Graph, second: Graph) -> None:
    """Every tensor, every id."""
    assert list(first.nodes) == list(second.nodes) and list(first.edges) == list(second.edges)
    assert (first.name, first.undirected) == (second.name, second.undirected)
    for kind, nodes in first.nodes.items():
        for name in NODE_ARRAYS:
            _assert_same(getattr(nodes, name), getattr(second.nodes[kind], name))
        assert nodes.classes == second.nodes[kind].classes
        assert nodes.ids.values().to_pylist() == second.nodes[kind].ids.values().to_pylist()
    for edge_type, edges in first.edges.items():
        for name in EDGE_ARRAYS:
            _assert_same(getattr(edges, name), getattr(second.edges[edge_type], name))
        assert edges.links.keys() == second.edges[edge_type].links.keys()
        for name, pairs in edges.links.items():
            _assert_same(pairs, second.edges[edge_type].links[name])


def _assert_same(a: torch.Tensor | None, b: torch.Tensor | None) -> None:
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        assert a.dtype == b.dtype and torch.equal(a, b)


@given(graph=graphs())
@settings(max_examples=25, deadline=None)
def test_a_store_is_read_back_bit_for_bit(graph: Graph) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_equal(graph, save_store(graph, Path(folder) / "s"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_features_keep_their_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.randn(7, 3).to(dtype)
    stored = save_store(Graph(num_nodes=7, x=x), tmp_path / "s").single_nodes.x
    assert stored is not None and stored.dtype == dtype and torch.equal(stored, x)


def test_unusual_names_and_ids_are_read_back(tmp_path: Path) -> None:
    ids = ["", "007", "7", " a b ", "naïve/../x", "数", "a'b\"c", "\n"]
    nodes = {
        "..": validated_nodes(len(ids), ids=ids),
        "a__b": validated_nodes(3, ids=[-5, 0, 2**62]),
        "a": validated_nodes(2),
    }
    edges = {
        EdgeType("a__b", "c", ".."): validated_edges([[0], [7]], num_src=3, num_dst=8),
        EdgeType("a", "b__c", ".."): validated_edges([[1], [0]], num_src=2, num_dst=8),
        EdgeType("a", "in/to", "a__b"): validated_edges([[1], [0]], num_src=2, num_dst=3),
    }
    graph = Graph.of(nodes, edges, name="strange")
    stored = save_store(graph, tmp_path / "s")
    assert_equal(graph, stored)
    assert {path.parent for path in tmp_path.rglob("*.npy")} <= set((tmp_path / "s").rglob("*"))
    assert stored.nodes[".."].ids.rows(["7", "007"]).tolist() == [2, 1]
    with pytest.raises(InputError, match="no node with id 'nobody'"):
        stored.nodes[".."].ids.rows(["nobody"])
    with pytest.raises(InputError, match="row numbers"):
        stored.nodes["a"].ids.rows([2])


def test_edges_are_sorted_by_destination_source_and_input() -> None:
    index = torch.tensor([[2, 0, 1, 0, 0], [1, 1, 0, 1, 2]])
    graph = Graph(index, num_nodes=3, edge_weight=torch.arange(5.0), time=torch.tensor([5, 4, 3, 4, 1]))
    edges = graph.single_edges
    assert edges.edge_index().tolist() == [[1, 0, 0, 2, 0], [0, 1, 1, 1, 2]]
    assert edges.weight is not None and edges.weight.tolist() == [2, 1, 3, 0, 4]
    assert edges.order is not None and edges.order.tolist() == [4, 0, 1, 2, 3], "by time, ties in input order"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Graph(torch.tensor([[0], [9]]), num_nodes=3), "names destination 9, but there are 3 nodes"),
        (lambda: Graph(torch.tensor([[-1], [0]]), num_nodes=3), "names source -1"),
        (lambda: Graph(torch.zeros(3, 2)), r"shape \[2, E\]"),
        (lambda: Graph(num_nodes=3, x=torch.zeros(2, 4)), "x has 2 rows"),
        (lambda: Graph(num_nodes=2, x=torch.tensor([[0.0], [float("nan")]])), "row 1, column 0"),
        (lambda: Graph(num_nodes=2, y=torch.tensor([-2, 1])), "found -2"),
        (lambda: Graph(num_nodes=2, ids=["a", "a"]), "found 'a' more than once"),
        (lambda: Graph(num_nodes=2, ids=["a"]), "expected 2 ids, one per node, found 1"),
        (lambda: Graph(num_nodes=2, split=[0, 5]), "split codes"),
        (lambda: Graph(num_nodes=2, split={"train": [True, False], "test": [True, True]}), "overlaps"),
        (lambda: Graph(num_nodes=2, split={"training": [True, False]}), "found training"),
        (lambda: Graph(torch.tensor([[0], [1]]), time=[-1]), "negative"),
        (lambda: Graph(torch.tensor([[0], [1]]), edge_weight=[1.0, 2.0]), "edge_weight has 2 rows"),
    ],
)
def test_messages_name_the_wrong_input(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(InputError, match=message):
        make()


def test_types_must_be_named_when_there_are_several() -> None:
    graph = Graph.of({"a": validated_nodes(1), "b": validated_nodes(1)}, {})
    with pytest.raises(ConfigError, match="several node types"):
        _ = graph.single_nodes
    with pytest.raises(InputError, match="need nodes of type 'c'"):
        Graph.of({"a": validated_nodes(1)}, {EdgeType("a", "to", "c"): validated_edges([[], []], num_src=1, num_dst=1)})


def test_a_directory_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        open_store(tmp_path / "nothing")
    with pytest.raises(StoreError, match=r"graph\.json is missing"):
        open_store(tmp_path)
