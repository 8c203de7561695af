"""``gnnfleet import`` and ``export`` as a user calls them."""

from __future__ import annotations

import gzip
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import networkx as nx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer
from torch_geometric.data import Data
from typer.testing import CliRunner

from gnnfleet.cli.importing import IMPORT_EXAMPLES, export_graph, import_graph
from gnnfleet.errors import ConfigError, InputError, StoreError
from gnnfleet.graph.graph import EDGE, EdgeType
from gnnfleet.graph.store import open_store
from tests import shell
from tests.graph.test_export import assert_equal
from tests.shell import start

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command("import", epilog=IMPORT_EXAMPLES)(import_graph)
app.command("export")(export_graph)


def call(*arguments: Any) -> dict[str, Any]:
    """The JSON that a command prints; its errors are raised."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json", "--quiet"])
    if result.exception is not None:
        raise result.exception
    return dict(json.loads(result.stdout))


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    pq.write_table(
        pa.table({"id": ["u1", "u2", "u3"], "f": [1.0, 2.0, 3.0], "label": [0, 1, 0]}), tmp_path / "n.parquet"
    )
    pq.write_table(pa.table({"src": ["u1", "u2"], "dst": ["u2", "u3"], "note": ["a", "b"]}), tmp_path / "e.parquet")
    (tmp_path / "events.txt").write_text("7 8 2\n9 8 1\n7 7 2\n")
    (tmp_path / "broken.txt").write_text("7 8 2\n9 8 soon\n")
    (tmp_path / "short.txt").write_text("7 8 2\n9 8\n")
    (tmp_path / "orders.csv").write_text("who,what,day\nu1,7,2024-01-02\nu2,8,2024-01-01\nu1,8,2024-01-03\n")
    return tmp_path


def test_two_tables_are_imported_without_options(shop: Path) -> None:
    report = call("import", shop / "n.parquet", shop / "e.parquet", "-o", shop / "store")
    assert report["nodes"]["node"]["count"] == 3 and report["edges"][str(EDGE)]["count"] == 2
    assert report["edges"][str(EDGE)]["unused"] == ["note"]
    graph = open_store(shop / "store")
    assert graph.name == "store" and graph.single_edges.edge_index().tolist() == [[0, 1], [1, 2]]
    with pytest.raises(StoreError, match="--overwrite"):
        call("import", shop / "e.parquet", "-o", shop / "store")
    call("import", shop / "e.parquet", "-o", shop / "store", "--overwrite", "--undirected", "--name", "again")
    graph = open_store(shop / "store")
    assert (graph.name, graph.num_edges, graph.undirected) == ("again", 4, True)


def test_several_types_with_their_own_columns(shop: Path) -> None:
    orders = f"user:buys:product={shop / 'orders.csv'},src=who,dst=what,time=day"
    options = ("--nodes", f"user={shop / 'n.parquet'},features=none", "--edges", orders, "--split", "1/0/0")
    report = call("import", "-o", shop / "store", *options)
    graph = open_store(shop / "store")
    buys = EdgeType("user", "buys", "product")
    assert graph.nodes["product"].ids.values().to_pylist() == [7, 8]
    assert graph.edges[buys].edge_index().tolist() == [[0, 0, 1], [0, 1, 1]]
    assert graph.edges[buys].order.tolist() == [2, 0, 1]
    assert report["nodes"]["user"]["train"] == 3 and graph.nodes["product"].split is None
    assert graph.nodes["user"].x is None


def test_several_patterns_of_one_table(shop: Path) -> None:
    """By spaces, as commas separate columns; a column whose name has spaces is meant first."""
    (shop / "people.csv").write_text("id,age,shoe size,shoe,size,h1,h2\nann,3,4,5,6,7,8\n")
    for features, row in (("h* age", [7, 8, 3]), ("shoe size", [4]), ("size shoe", [6, 5]), ("h2", [8])):
        nodes = f"user={shop / 'people.csv'},features={features}"
        call("import", "-o", shop / "store", "--nodes", nodes, "--overwrite")
        x = open_store(shop / "store").nodes["user"].x
        assert x is not None and x.tolist() == [row], features
    labels = f"user={shop / 'people.csv'},label=h1 h2,features=age"
    (shop / "people.csv").write_text("id,age,h1,h2\nann,3,0,1\n")
    call("import", "-o", shop / "store", "--nodes", labels, "--overwrite")
    assert open_store(shop / "store").nodes["user"].classes == ("h1", "h2")


def test_columns_are_named_by_options(shop: Path) -> None:
    options = ("--src", "who", "--dst", "what", "--time", "none")
    report = call("import", shop / "orders.csv", "-o", shop / "store", *options)
    assert report["nodes"]["node"]["ids"] == "text"
    assert open_store(shop / "store").single_nodes.ids.values().to_pylist() == ["7", "8", "u1", "u2"]


def test_tables_without_a_header_are_read(shop: Path) -> None:
    call("import", shop / "events.txt", "-o", shop / "store", "--columns", "src,dst,time")
    graph = open_store(shop / "store")
    edges = graph.single_edges
    assert graph.single_nodes.ids.values().to_pylist() == [7, 8, 9]
    assert edges.edge_index().tolist() == [[0, 0, 2], [0, 1, 1]] and edges.time.tolist() == [2, 2, 1]
    assert edges.order.tolist() == [2, 1, 0], "by time, then in input order"
    typed = f"user:edits:page={shop / 'events.txt'},columns=src dst time"
    report = call("import", "-o", shop / "typed", "--edges", typed)
    assert report["nodes"]["user"]["count"] == 2 and report["nodes"]["page"]["count"] == 2
    (shop / "spaces.txt").write_text("src dst time\n7 8 1\n")
    assert call("import", shop / "spaces.txt", "-o", shop / "spaced")["edges"][str(EDGE)]["time"] == "int64"
    (shop / "names.csv").write_text("node id\nann\n")
    assert call("import", shop / "names.csv", "-o", shop / "names", "--id", "node id")["nodes"]["node"]["count"] == 1


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (["orders.csv"], ConfigError, "expected columns src and dst"),
        (["e.parquet", "--nodes", "user=n.parquet"], ConfigError, "named both with and without --nodes"),
        (["--nodes", "n.parquet"], ConfigError, "expected --nodes TYPE=FILES"),
        (["--edges", "user:product=orders.csv"], ConfigError, "SRC:RELATION:DST"),
        (["--nodes", "user=n.parquet,key=id"], ConfigError, "'key' is not a column"),
        ([], ConfigError, "nothing to import"),
        (["nowhere.parquet"], InputError, "no such file"),
        (
            ["n.parquet", "e.parquet", "--id", "uid"],
            InputError,
            r"n.parquet: there is no column 'uid' \(--id\), found id",
        ),
        (["e.parquet", "--src", "from"], InputError, r"there is no column 'from' \(--src\), found src, dst, note"),
        (["orders.csv", "--src", "who", "--id", "no"], InputError, r"'no' \(--id\), found who.* columns who and dst,"),
        (["e.parquet", "--duplicates", "some"], ConfigError, "keep, drop, sum, error"),
        (["e.parquet", "--memory", "lots"], ConfigError, "1GiB"),
        (["e.parquet", "--split", "most"], ConfigError, "20-per-class"),
        (["g.npz", "--label", "y"], ConfigError, "--label does not apply to"),
        (["g.npz", "--split-column", "part"], ConfigError, "--split-column does not apply to"),
        (["--nodes", "user=n.parquet,features=f g*"], InputError, "no column matches 'g"),
        (["n.parquet", "--features", "g*"], InputError, "no column matches 'g"),
        (["events.txt"], ConfigError, "found 7, 8, 2\\..*--columns src,dst,time"),
        (["events.txt", "--columns", "src,dst"], InputError, "names 2 columns .src, dst., but the first line has 3"),
        (["events.txt", "--columns", "src,src,time"], InputError, "different column names"),
        (["events.txt", "--columns", "src,dst,time", "--time", "when"], InputError, "expected a column 'when'"),
        (["e.parquet", "--columns", "src,dst,note"], InputError, "remove --columns"),
        (["broken.txt", "--columns", "src,dst,time"], InputError, "line 2\\)?, column 'time'"),
        (["short.txt", "--columns", "src,dst,time"], InputError, "line 2: expected 3 values, found 2"),
    ],
)
def test_wrong_imports_are_refused(shop: Path, monkeypatch: Any, arguments: list[str], error: Any, match: str) -> None:
    monkeypatch.chdir(shop)
    before = sorted(shop.iterdir())
    with pytest.raises(error, match=match):
        call("import", *arguments, "-o", "store")
    assert sorted(shop.iterdir()) == before


def test_import_prints_tables_and_notes(shop: Path) -> None:
    result = shell.call("import", shop / "e.parquet", "-o", shop / "store")
    assert result.returncode == 0 and "self-loops" in result.stdout
    assert "columns not used: note" in result.stderr and "saved to" in result.stderr
    assert "no edges" not in result.stderr
    help_text = CliRunner().invoke(app, ["import", "--help"], env={"COLUMNS": "200"})
    assert "gnnfleet import nodes.parquet edges.parquet -o shop" in help_text.stdout


def test_the_report_names_feature_columns(shop: Path) -> None:
    names = [f"f{i}" for i in range(9)]
    (shop / "wide.csv").write_text(f"id,{','.join(names)}\nu1,{','.join('1' * 9)}\nu2,{','.join('2' * 9)}\n")
    (shop / "rated.csv").write_text("src,dst,rating\nu1,u2,3\n")
    arguments = ["import", str(shop / "wide.csv"), str(shop / "rated.csv"), "-o", str(shop / "store")]
    result = CliRunner().invoke(app, arguments)
    assert "9 (f0, f1, f2, f3, f4, …)" in result.stdout and "1 feature (rating)" in result.stdout
    report = call(*arguments, "--overwrite")
    assert report["nodes"]["node"]["columns"] == [[name, 1] for name in names]
    assert report["edges"][str(EDGE)]["columns"] == [["rating", 1]]


def test_a_store_without_edges_gives_a_note(shop: Path) -> None:
    result = shell.call("import", shop / "n.parquet", "-o", shop / "store")
    assert result.returncode == 0 and "this store has no edges" in result.stderr


def test_an_output_that_cannot_be_written_is_named(shop: Path) -> None:
    (shop / "file").write_text("")
    for output in (Path("/proc/none"), shop / "file" / "store"):
        with pytest.raises(OSError, match=f", the directory cannot be created: '{output}'$"):
            call("import", shop / "e.parquet", "-o", output)


def test_export_writes_the_original_ids(shop: Path) -> None:
    call("import", shop / "n.parquet", shop / "e.parquet", "-o", shop / "store")
    report = call("export", shop / "store", "-o", shop / "tables")
    assert report["files"] == {"nodes.parquet": 3, "edges.parquet": 2}
    assert pq.read_table(shop / "tables" / "edges.parquet")["dst"].to_pylist() == ["u2", "u3"]


def test_exported_tables_are_imported_to_an_equal_store(shop: Path) -> None:
    """The commands of docs/import.md, with the names that export gives."""
    call("import", shop / "n.parquet", shop / "e.parquet", "-o", shop / "first")
    call("export", shop / "first", "-o", shop / "tables")
    call("import", shop / "tables" / "*.parquet", "-o", shop / "again")
    assert_equal(open_store(shop / "first"), open_store(shop / "again"))
    orders = f"user:buys:product={shop / 'orders.csv'},src=who,dst=what,time=day"
    typed = ("--nodes", f"user={shop / 'n.parquet'}", "--edges", orders, "--split", "1/0/0")
    call("import", "-o", shop / "typed", *typed)
    tables = shop / "typed tables"
    files = call("export", shop / "typed", "-o", tables)["files"]
    assert list(files) == ["nodes-user.parquet", "nodes-product.parquet", "edges-user+buys+product.parquet"]
    arguments = [f"--nodes={kind}={tables}/nodes-{kind}.parquet" for kind in ("user", "product")]
    arguments.append(f"--edges=user:buys:product={tables}/edges-user+buys+product.parquet")
    call("import", "-o", shop / "typed again", *arguments)
    assert_equal(open_store(shop / "typed"), open_store(shop / "typed again"))


def write_npz(folder: Path) -> Path:
    np.savez(folder / "g.npz", edge_index=np.array([[0, 1, 1], [1, 2, 2]]), y=np.array([0, 1, 0]))
    return folder / "g.npz"


def write_pt(folder: Path) -> Path:
    data = Data(edge_index=torch.tensor([[0, 1, 1], [1, 2, 2]]), y=torch.tensor([0, 1, 0]), num_nodes=3)
    torch.save(data, folder / "g.pt")
    return folder / "g.pt"


def write_graphml(folder: Path) -> Path:
    graph = nx.MultiDiGraph([("a", "b"), ("b", "c"), ("b", "c")])
    nx.set_node_attributes(graph, {"a": 0, "b": 1, "c": 0}, "y")
    nx.write_graphml(graph, folder / "g.graphml")
    return folder / "g.graphml"


def write_ogb(folder: Path) -> Path:
    raw, split = folder / "ogbn_tiny" / "raw", folder / "ogbn_tiny" / "split" / "random"
    for name, text in {
        raw / "edge.csv.gz": "0,1\n1,2\n1,2\n",
        raw / "num-node-list.csv.gz": "3\n",
        raw / "num-edge-list.csv.gz": "3\n",
        raw / "node-label.csv.gz": "0\n1\n0\n",
        split / "train.csv.gz": "0\n",
        split / "valid.csv.gz": "1\n",
        split / "test.csv.gz": "2\n",
    }.items():
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(gzip.compress(text.encode()))
    return folder / "ogbn_tiny"


@pytest.mark.parametrize("write", [write_npz, write_pt, write_graphml, write_ogb])
def test_graphs_of_other_tools_are_imported(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """The same three edges from every format; undirected drops the parallel one and its reverse."""
    labels = ["--label", "y"] if write is write_graphml else []
    report = call("import", write(tmp_path), "-o", tmp_path / "store", "--undirected", *labels)
    graph = open_store(tmp_path / "store")
    assert graph.undirected and graph.name == "store"
    assert graph.single_edges.edge_index().tolist() == [[1, 0, 2, 1], [0, 1, 1, 2]]
    assert report["cleaned"]["parallel_dropped"] == 2
    assert graph.single_nodes.y is not None and graph.single_nodes.y.tolist() == [0, 1, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_interrupted_imports_leave_nothing_that_opens(tmp_path: Path, number: signal.Signals) -> None:
    edges = tmp_path / "e.parquet"
    count = 2_000_000
    select = (
        f"SELECT 'node ' || hash(i) % 900000 AS src, 'node ' || hash(i + 1) % 900000 AS dst FROM range({count}) t(i)"
    )
    duckdb.sql(f"COPY ({select}) TO '{edges}' (FORMAT parquet)")
    out = tmp_path / "out"
    out.mkdir()
    process = start("import", edges, "-o", out / "store")
    assert process.stderr is not None
    while "edges node:to:node" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if number is signal.SIGKILL:
        assert not (out / "store").exists()
        for path in out.iterdir():
            with pytest.raises(StoreError):
                open_store(path)
        call("import", shop_edges(tmp_path), "-o", out / "store")
        assert [path.name for path in out.iterdir()] == ["store"], "the next import cleans up"
    else:
        assert process.returncode == 130 and not list(out.iterdir()), errors


def shop_edges(folder: Path) -> Path:
    (folder / "few.csv").write_text("src,dst\n1,2\n")
    return folder / "few.csv"
