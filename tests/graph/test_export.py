"""Tables out of a store: imported again they make an equal store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gnnfleet.errors import StoreError
from gnnfleet.graph.export import export_tables
from gnnfleet.graph.graph import EdgeType, Graph, validated_nodes
from gnnfleet.graph.ingest.tables import EdgeTable, NodeTable, TableSpec, classify_tables, import_tables
from gnnfleet.graph.store import EDGE_ARRAYS, NODE_ARRAYS, open_store
from gnnfleet.report.progress import Progress

BUYS, KNOWS = EdgeType("user", "buys", "a/b. product"), EdgeType("user", "knows", "user")


def assert_equal(first: Graph, second: Graph) -> None:
    assert list(first.nodes) == list(second.nodes) and list(first.edges) == list(second.edges)
    pairs: list[tuple[str, Any, Any]] = []
    for kind, nodes in first.nodes.items():
        other = second.nodes[kind]
        assert nodes.classes == other.classes and nodes.ids.are_rows == other.ids.are_rows
        assert nodes.ids.values().equals(other.ids.values())
        pairs += [(f"{kind} {name}", getattr(nodes, name), getattr(other, name)) for name in NODE_ARRAYS]
    for edge_type, edges in first.edges.items():
        again = second.edges[edge_type]
        pairs += [(f"{edge_type} {name}", getattr(edges, name), getattr(again, name)) for name in EDGE_ARRAYS]
    for name, a, b in pairs:
        assert (a is None) == (b is None), name
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), name


def tables(folder: Path, *, timed: bool) -> tuple[str, str]:
    draw = np.random.default_rng(5)
    names = [f"node {i} é" for i in range(40)]
    label: list[str | None] = [("cat", "dog", "eel")[i % 3] if i % 7 else None for i in range(40)]
    splits: list[str | None] = [("train", "val", "test", None)[i % 4] for i in range(40)]
    pq.write_table(
        pa.table({"id": names, "f": draw.normal(size=40), "g": np.arange(40), "label": label, "split": splits}),
        folder / "n.parquet",
    )
    ends = draw.integers(0, 40, (2, 500))
    columns: dict[str, Any] = {"src": [names[i] for i in ends[0]], "dst": [names[i] for i in ends[1]]}
    columns |= {"weight": draw.normal(size=500).astype(np.float32), "a": draw.normal(size=500), "b": np.arange(500)}
    if timed:
        columns["time"] = np.sort(draw.integers(0, 50, 500))
    pq.write_table(pa.table(columns), folder / "e.parquet")
    return str(folder / "n.parquet"), str(folder / "e.parquet")


@pytest.mark.parametrize("timed", [False, True])
def test_an_exported_graph_is_imported_equal(tmp_path: Path, timed: bool) -> None:
    import_tables(classify_tables(tables(tmp_path, timed=timed)), tmp_path / "first")
    first = open_store(tmp_path / "first")
    assert export_tables(first, tmp_path / "tables") == {"nodes.parquet": 40, "edges.parquet": 500}
    import_tables(classify_tables([str(tmp_path / "tables" / "*.parquet")]), tmp_path / "second")
    assert_equal(first, open_store(tmp_path / "second"))


def test_an_exported_heterogeneous_graph_is_imported_equal(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [3, 1], "y": [[0, 1], [1, 1]]}), tmp_path / "u.parquet")
    pq.write_table(
        pa.table({"src": [3, 1, 3], "dst": ["x", "y", "y"], "time": [2.5, 1.5, 1.5]}), tmp_path / "b.parquet"
    )
    pq.write_table(pa.table({"src": [3, 1, 3], "dst": [1, 1, 1]}), tmp_path / "k.parquet")
    spec = TableSpec(
        nodes={"user": NodeTable(files=(str(tmp_path / "u.parquet"),))},
        edges={
            BUYS: EdgeTable(files=(str(tmp_path / "b.parquet"),)),
            KNOWS: EdgeTable(files=(str(tmp_path / "k.parquet"),)),
        },
    )
    import_tables(spec, tmp_path / "first")
    first = open_store(tmp_path / "first")
    out = tmp_path / "tables"
    files = list(export_tables(first, out))
    assert len(files) == 4 and all((out / name).is_file() for name in files)
    again = TableSpec(
        nodes={kind: NodeTable(files=(str(out / name),)) for kind, name in zip(first.nodes, files, strict=False)},
        edges={kind: EdgeTable(files=(str(out / name),)) for kind, name in zip(first.edges, files[2:], strict=True)},
    )
    import_tables(again, tmp_path / "second")
    assert_equal(first, open_store(tmp_path / "second"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_graphs_in_memory_are_exported(tmp_path: Path, dtype: torch.dtype) -> None:
    split = torch.tensor([[0, 1, 2], [2, -1, 0]])
    graph = Graph(edge_index=[[0, 1], [1, 2]], x=torch.randn(3, 2).to(dtype), y=[0, -1, 2], split=split)
    export_tables(graph, tmp_path / "out")
    nodes = pq.read_table(tmp_path / "out" / "nodes.parquet")
    assert nodes["id"].to_pylist() == [0, 1, 2] and nodes["label"].to_pylist() == [0, None, 2]
    assert nodes["split_1"].to_pylist() == ["test", None, "train"]
    assert torch.equal(torch.tensor(nodes["x"].to_pylist()), graph.single_nodes.x.float())
    with pytest.raises(StoreError, match="already exists"):
        export_tables(graph, tmp_path / "out")
    export_tables(Graph(num_nodes=0), tmp_path / "empty")
    assert pq.read_table(tmp_path / "empty" / "edges.parquet").num_rows == 0


def test_a_failed_export_leaves_no_files(tmp_path: Path) -> None:
    class Broken(Progress):
        def stage(self, name: str, total: float | None = None) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_tables(Graph.of({"node": validated_nodes(2)}, {}), tmp_path / "out", progress=Broken())
    assert not list(tmp_path.iterdir())
