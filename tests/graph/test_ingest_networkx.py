"""NetworkX graphs of all four kinds, their attributes, and the files networkx reads."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.ingest.networkx import from_networkx, read_graphml

KINDS = (nx.Graph, nx.DiGraph, nx.MultiGraph, nx.MultiDiGraph)


def named_edges(graph: Graph) -> list[tuple[Any, Any]]:
    ids, edges = graph.single_nodes.ids, graph.single_edges
    return sorted(zip(ids.select(edges.src).to_pylist(), ids.select(edges.dst()).to_pylist(), strict=True))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(KINDS), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_edges_equal_a_plain_conversion(kind: Any, pairs: list[tuple[int, int]]) -> None:
    g = kind([(f"n{s}", f"n{d}") for s, d in pairs])
    graph = from_networkx(g)
    expected = list(g.edges())
    if not g.is_directed():
        expected += [(d, s) for s, d in g.edges() if s != d]
    assert named_edges(graph) == sorted(expected)
    assert graph.undirected == (not g.is_directed())


def test_both_directions_of_an_edge_have_its_data() -> None:
    g = nx.Graph()
    g.add_edge("a", "b", weight=2.5, at=7, f=[1.0, 2.0], k=1)
    g.add_edge("b", "b", at=3, f=[3.0, 4.0], k=2)
    edges = from_networkx(g, time="at", edge_attr=["f", "k"]).single_edges
    assert edges.edge_index().tolist() == [[1, 0, 1], [0, 1, 1]]
    assert edges.weight is not None and edges.weight.tolist() == [2.5, 2.5, 1.0]
    assert edges.time is not None and edges.time.tolist() == [7, 7, 3]
    assert edges.attr is not None and edges.attr.tolist() == [[1, 2, 1], [1, 2, 1], [3, 4, 2]]
    assert from_networkx(g, weight=None).single_edges.weight is None


@pytest.mark.parametrize(
    ("nodes", "ids"),
    [
        ([0, 1, 2], [0, 1, 2]),
        ([5, 3], [5, 3]),
        (["b", "a"], ["b", "a"]),
        ([1, "a"], ["1", "a"]),
        ([(0, 1), (1, 0)], ["(0, 1)", "(1, 0)"]),
    ],
)
def test_ids_stay_integers_or_become_strings(nodes: list[Any], ids: list[Any]) -> None:
    g = nx.Graph()
    g.add_nodes_from(nodes)
    converted = from_networkx(g).single_nodes.ids
    assert converted.values().to_pylist() == ids
    assert converted.are_rows == (nodes == list(range(len(nodes))))


def test_ids_with_equal_text_are_refused() -> None:
    g = nx.Graph()
    g.add_nodes_from([1, "1"])
    with pytest.raises(InputError, match="unique"):
        from_networkx(g)


def test_node_attributes_become_features_labels_and_splits() -> None:
    g = nx.Graph()
    g.add_node("a", f=[1, 2], k=5, group="red", part="train", many=[1, 0])
    g.add_node("b", f=[3, 4], k=6, group="blue", part="valid", many=[0, 1])
    g.add_node("c", f=[5, 6], k=7)
    nodes = from_networkx(g, x=["f", "k"], y="group", split="part").single_nodes
    assert (
        nodes.x is not None and nodes.x.tolist() == [[1, 2, 5], [3, 4, 6], [5, 6, 7]] and nodes.x.dtype == torch.float32
    )
    assert nodes.y is not None and nodes.y.tolist() == [1, 0, -1] and nodes.classes == ("blue", "red")
    assert nodes.split is not None and nodes.split.tolist() == [[0, 1, -1]]
    several = from_networkx(g, y="many").single_nodes
    assert several.multilabel and several.y is not None and several.y.tolist() == [[1, 0], [0, 1], [-1, -1]]
    numbers = from_networkx(g, y="k").single_nodes.y
    assert numbers is not None and numbers.tolist() == [5, 6, 7] and numbers.dtype == torch.int64


def test_messages_name_the_bad_attribute() -> None:
    g = nx.Graph()
    g.add_node("a", f=1, part="dev", w="x")
    g.add_edge("a", "b", weight="heavy")
    with pytest.raises(InputError, match="node 'b' has no attribute 'f'"):
        from_networkx(g, x="f", weight=None)
    with pytest.raises(InputError, match="edge 'a' to 'b' has no attribute 'at'"):
        from_networkx(g, time="at", weight=None)
    with pytest.raises(InputError, match="'dev'"):
        from_networkx(g, split="part", weight=None)
    with pytest.raises(InputError, match="weight=None"):
        from_networkx(g)


@pytest.mark.parametrize("ending", ["graphml", "gml", "graphml.gz"])
@pytest.mark.parametrize("kind", KINDS)
def test_files_are_read(tmp_path: Path, ending: str, kind: Any) -> None:
    g = kind()
    g.add_node("a", f=1.5, group="red")
    g.add_node("b", f=2.5, group="blue")
    g.add_edge("a", "b", weight=0.5)
    g.add_edge("b", "b", weight=2.0)
    path = tmp_path / f"tiny.{ending}"
    (nx.write_gml if ending == "gml" else nx.write_graphml)(g, path)
    graph = read_graphml(path, x="f", y="group")
    direct = from_networkx(g, x="f", y="group")
    assert graph.name == "tiny" and named_edges(graph) == named_edges(direct)
    assert torch.equal(graph.single_nodes.x, direct.single_nodes.x)  # type: ignore[arg-type]
    assert torch.equal(graph.single_edges.weight, direct.single_edges.weight)  # type: ignore[arg-type]


def test_gml_without_labels_uses_node_numbers(tmp_path: Path) -> None:
    path = tmp_path / "bare.gml"
    path.write_text("graph [ node [ id 4 ] node [ id 2 ] edge [ source 4 target 2 ] ]")
    assert named_edges(read_graphml(path)) == [(2, 4), (4, 2)]


def test_other_and_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.graphml").write_text("hello")
    for path, message in (
        (tmp_path / "bad.graphml", "cannot be read"),
        (tmp_path / "a.gml", "no file"),
        (tmp_path / "a.txt", "ends in"),
    ):
        with pytest.raises(InputError, match=message):
            read_graphml(path)


def test_a_missing_networkx_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(ConfigError, match=r"gnnfleet\[networkx\]"):
        read_graphml(tmp_path / "a.gml")


def test_import_does_not_load_networkx() -> None:
    code = "import sys, gnnfleet.graph.ingest.networkx; sys.exit('networkx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
