"""PyG objects in and out: round trips against real torch_geometric, and plain objects without it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch_geometric.data import Data, HeteroData, TemporalData
from torch_geometric.data.collate import collate

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import EDGE, EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.ingest.pyg import from_pyg, read_pt, to_pyg

PAIRS = torch.tensor([[0, 3, 1, 2, 2], [1, 2, 2, 0, 3]])


def assert_equal(first: Graph, second: Graph) -> None:
    """Every tensor of two graphs is equal, and so are types, classes and ids."""
    assert list(first.nodes) == list(second.nodes) and list(first.edges) == list(second.edges)
    assert first.undirected == second.undirected
    for a, b in zip(first.nodes.values(), second.nodes.values(), strict=True):
        assert (a.count, a.classes) == (b.count, b.classes) and a.ids.values().equals(b.ids.values())
        for name in ("x", "y", "split"):
            check(getattr(a, name), getattr(b, name))
    for c, d in zip(first.edges.values(), second.edges.values(), strict=True):
        for name in ("indptr", "src", "weight", "attr", "time", "order"):
            check(getattr(c, name), getattr(d, name))
        assert c.links.keys() == d.links.keys()
        for name in c.links:
            check(c.links[name], d.links[name])


def check(a: torch.Tensor | None, b: torch.Tensor | None) -> None:
    assert (a is None) == (b is None)
    assert a is None or b is None or (a.dtype == b.dtype and torch.equal(a, b))


def full_data(**changes: object) -> Data:
    eye = torch.eye(4, dtype=torch.bool)
    values: dict[str, object] = {
        "x": torch.randn(4, 3),
        "edge_index": PAIRS,
        "edge_attr": torch.arange(10.0).reshape(5, 2),
        "edge_weight": torch.arange(5.0),
        "edge_time": torch.tensor([4, 1, 1, 0, 9]),
        "y": torch.tensor([0, 1, -1, 2]),
        "train_mask": eye[0],
        "val_mask": eye[1],
        "test_mask": eye[3],
        "n_id": torch.tensor([10, 7, 8, 3]),
        "val_edge_index": torch.tensor([[0], [3]]),
    }
    return Data(**{**values, **changes})


def hetero_graph() -> Graph:
    nodes = {
        "user": validated_nodes(3, x=torch.randn(3, 2), ids=["a", "b", "c"]),
        "item": validated_nodes(4, y=[0, 1, 0, -1], classes=["p", "q"]),
    }
    edges = {
        EdgeType("user", "buys", "item"): validated_edges(
            [[2, 0, 1], [0, 3, 0]], num_src=3, num_dst=4, time=[3.0, 1.0, 2.0]
        ),
        EdgeType("item", "like", "item"): validated_edges(torch.empty(2, 0, dtype=torch.int64), num_src=4, num_dst=4),
    }
    return Graph.of(nodes, edges)


def test_data_becomes_an_equal_graph() -> None:
    data = full_data()
    graph = from_pyg(data, name="tiny")
    edges, nodes = graph.single_edges, graph.single_nodes
    assert graph.name == "tiny" and nodes.ids.values().to_pylist() == [10, 7, 8, 3]
    assert nodes.split is not None and nodes.split.tolist() == [[0, 1, -1, 2]]
    position = {(s, d): i for i, (s, d) in enumerate(PAIRS.T.tolist())}
    rows = [position[s, d] for s, d in edges.edge_index().T.tolist()]
    check(edges.weight, data.edge_weight[rows])
    check(edges.attr, data.edge_attr[rows])
    check(edges.time, data.edge_time[rows])
    assert edges.links["val"].tolist() == [[0], [3]]


def test_data_is_converted_back_equal() -> None:
    graph = from_pyg(full_data())
    out = to_pyg(graph)
    assert isinstance(out, Data) and out.validate() and out.num_nodes == 4
    assert torch.equal(out.edge_index, graph.single_edges.edge_index())
    again = from_pyg(out)
    # The input order of edges is not kept, so ties in time may come out otherwise.
    assert graph.single_edges.order is not None and again.single_edges.order is not None
    untimed = from_pyg(full_data(x=out.x, edge_time=None))
    assert_equal(untimed, from_pyg(to_pyg(untimed)))
    check(again.single_edges.time, graph.single_edges.time)


def test_several_splits_are_columns_in_pyg() -> None:
    masks = {name: torch.zeros(4, 3, dtype=torch.bool) for name in ("train_mask", "val_mask", "test_mask")}
    masks["train_mask"][0] = masks["val_mask"][1] = True
    masks["test_mask"][2, 1] = True
    graph = from_pyg(Data(edge_index=PAIRS, num_nodes=4, **masks))
    split = graph.single_nodes.split
    assert split is not None and split.tolist() == [[0, 1, -1, -1], [0, 1, 2, -1], [0, 1, -1, -1]]
    out = to_pyg(graph)
    assert all(torch.equal(out[word], mask) for word, mask in masks.items())


def test_heterogeneous_data_is_converted_back_equal() -> None:
    graph = hetero_graph()
    out = to_pyg(graph)
    assert isinstance(out, HeteroData) and out["user"].ids == ["a", "b", "c"]
    assert_equal(graph, from_pyg(out))


def test_node_types_without_a_store_are_counted_by_edges() -> None:
    data = HeteroData()
    data["user"].x = torch.ones(3, 2)
    data["user", "buys", "item"].edge_index = torch.tensor([[0, 2], [4, 1]])
    graph = from_pyg(data)
    assert {kind: table.count for kind, table in graph.nodes.items()} == {"user": 3, "item": 5}


def test_edge_type_codes_become_edge_types() -> None:
    graph = from_pyg(
        Data(edge_index=PAIRS, edge_type=torch.tensor([2, 0, 0, 2, 2]), num_nodes=4, edge_weight=torch.arange(5.0))
    )
    assert [(str(kind), table.count) for kind, table in graph.edges.items()] == [
        ("node:r0:node", 2),
        ("node:r1:node", 0),
        ("node:r2:node", 3),
    ]
    assert sorted(graph.edges[EdgeType("node", "r0", "node")].weight.tolist()) == [1.0, 2.0]  # type: ignore[union-attr]


def test_temporal_data_becomes_timed_edges() -> None:
    events = TemporalData(
        src=torch.tensor([0, 1, 0]), dst=torch.tensor([2, 2, 2]), t=torch.tensor([5, 2, 1]), msg=torch.ones(3, 4)
    )
    edges = from_pyg(events).single_edges
    assert edges.order is not None and edges.time is not None and edges.time[edges.order].tolist() == [1, 2, 5]
    assert edges.attr is not None and edges.attr.shape == (3, 4)


def test_symmetric_edges_make_a_graph_undirected() -> None:
    both = torch.cat([PAIRS, PAIRS.flip(0)], 1)
    assert (
        from_pyg(Data(edge_index=both, num_nodes=4)).undirected
        and not from_pyg(Data(edge_index=PAIRS, num_nodes=4)).undirected
    )


def test_any_object_with_the_attributes_is_converted() -> None:
    graph = from_pyg(SimpleNamespace(edge_index=PAIRS, x=torch.ones(4, 2), color="red"))
    assert graph.num_nodes == 4 and graph.edges[EDGE].count == 5


def test_messages_name_the_bad_attribute(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError, match=r"edge_index = torch\.stack"):
        from_pyg(SimpleNamespace(adj_t=object(), num_nodes=3))
    with pytest.raises(InputError, match="edges node:to:node: edge_index names source 3"):
        from_pyg(Data(edge_index=PAIRS, num_nodes=3))
    with pytest.raises(InputError, match="nodes of type node: y has 1 rows"):
        from_pyg(Data(edge_index=PAIRS, x=torch.ones(4, 1), y=torch.tensor([1])))
    with caplog.at_level("INFO"):
        from_pyg(Data(edge_index=PAIRS, x=torch.ones(4, 1), smiles="CC"))
    assert "ignored attributes: smiles" in caplog.text


@pytest.mark.parametrize("shape", ["object", "dataset", "dict"])
def test_files_are_read(tmp_path: Path, shape: str) -> None:
    for data in (full_data(), to_pyg(hetero_graph())):
        path = tmp_path / "tiny.pt"
        torch.save({"object": data, "dataset": (data.to_dict(), None, type(data)), "dict": data.to_dict()}[shape], path)
        graph = read_pt(path)
        assert graph.name == "tiny"
        assert_equal(graph, from_pyg(data))


def test_other_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.pt"
    torch.save({"x": Path("needs/code")}, path)
    with pytest.raises(InputError, match=r"load it yourself and pass the object to gnnfleet\.from_pyg"):
        read_pt(path)
    data, slices, _ = collate(
        Data, [Data(x=torch.ones(1, 1)), Data(x=torch.ones(1, 1))], increment=False, add_batch=False
    )
    torch.save((data.to_dict(), slices, Data), path)
    with pytest.raises(InputError, match="several graphs"):
        read_pt(path)
    torch.save([1, 2], path)
    with pytest.raises(InputError, match="holds a list"):
        read_pt(path)
    path.write_text("hello")
    with pytest.raises(InputError, match=r"bad\.pt"):
        read_pt(path)
    with pytest.raises(InputError, match="no file"):
        read_pt(tmp_path / "absent.pt")


def test_a_missing_torch_geometric_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    for use in (lambda: read_pt(tmp_path / "a.pt"), lambda: to_pyg(Graph(PAIRS))):
        with pytest.raises(ConfigError, match=r"gnnfleet\[pyg\]"):
            use()


def test_import_does_not_load_torch_geometric() -> None:
    code = "import sys, gnnfleet.graph.ingest.pyg; sys.exit('torch_geometric' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
