"""``gnnfleet import`` and ``export`` as a user calls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from gnnfleet.errors import ConfigError, InputError, StoreError
from gnnfleet.graph.graph import EDGE, EdgeType, Graph
from gnnfleet.graph.store import open_store
from gnnfleet.run.commands.importing import IMPORT_EXAMPLES, export_graph, import_graph

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command("import", epilog=IMPORT_EXAMPLES)(import_graph)
app.command("export")(export_graph)


def call(*words: Any) -> dict[str, Any]:
    """The JSON a command prints; raises what it raises."""
    result = CliRunner().invoke(app, [*map(str, words), "--json", "--quiet"])
    if result.exception is not None:
        raise result.exception
    return dict(json.loads(result.stdout))


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    pq.write_table(
        pa.table({"id": ["u1", "u2", "u3"], "f": [1.0, 2.0, 3.0], "label": [0, 1, 0]}), tmp_path / "n.parquet"
    )
    pq.write_table(pa.table({"src": ["u1", "u2"], "dst": ["u2", "u3"], "note": ["a", "b"]}), tmp_path / "e.parquet")
    (tmp_path / "orders.csv").write_text("who,what,day\nu1,7,2024-01-02\nu2,8,2024-01-01\nu1,8,2024-01-03\n")
    return tmp_path


def test_two_tables_just_work(shop: Path) -> None:
    report = call("import", shop / "n.parquet", shop / "e.parquet", "-o", shop / "store")
    assert report["nodes"]["node"]["count"] == 3 and report["edges"][str(EDGE)]["count"] == 2
    assert report["edges"][str(EDGE)]["unused"] == ["note"]
    graph = open_store(shop / "store")
    assert graph.name == "store" and graph.only_edges.edge_index().tolist() == [[0, 1], [1, 2]]
    with pytest.raises(StoreError, match="--overwrite"):
        call("import", shop / "e.parquet", "-o", shop / "store")
    call("import", shop / "e.parquet", "-o", shop / "store", "--overwrite", "--undirected", "--name", "again")
    graph = open_store(shop / "store")
    assert (graph.name, graph.num_edges, graph.undirected) == ("again", 4, True)


def test_several_types_with_their_own_columns(shop: Path) -> None:
    orders = f"user:buys:product={shop / 'orders.csv'},src=who,dst=what,time=day"
    words = ("--nodes", f"user={shop / 'n.parquet'},features=none", "--edges", orders, "--split", "1/0/0")
    report = call("import", "-o", shop / "store", *words)
    graph = open_store(shop / "store")
    buys = EdgeType("user", "buys", "product")
    assert graph.nodes["product"].ids.values().to_pylist() == [7, 8]
    assert graph.edges[buys].edge_index().tolist() == [[0, 0, 1], [0, 1, 1]]
    assert graph.edges[buys].order.tolist() == [2, 0, 1]
    assert report["nodes"]["user"]["train"] == 3 and graph.nodes["product"].split is None
    assert graph.nodes["user"].x is None


def test_named_columns(shop: Path) -> None:
    words = ("--src", "who", "--dst", "what", "--time", "none")
    report = call("import", shop / "orders.csv", "-o", shop / "store", *words)
    assert report["nodes"]["node"]["ids"] == "text"
    assert open_store(shop / "store").only_nodes.ids.values().to_pylist() == ["7", "8", "u1", "u2"]


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        (["orders.csv"], ConfigError, "expected columns src and dst"),
        (["e.parquet", "--nodes", "user=n.parquet"], ConfigError, "either plainly"),
        (["--nodes", "n.parquet"], ConfigError, "expected --nodes TYPE=FILES"),
        (["--edges", "user:product=orders.csv"], ConfigError, "SRC:RELATION:DST"),
        (["--nodes", "user=n.parquet,key=id"], ConfigError, "'key' is no column"),
        ([], ConfigError, "nothing to import"),
        (["nowhere.parquet"], InputError, "no such file"),
        (["e.parquet", "--duplicates", "some"], ConfigError, "keep, drop, sum, error"),
        (["e.parquet", "--memory", "lots"], ConfigError, "1GiB"),
        (["e.parquet", "--split", "most"], ConfigError, "20-per-class"),
        (["g.npz", "--label", "y"], ConfigError, "--label concerns tables"),
        (["n.parquet", "--features", "g*"], InputError, "no column matches 'g"),
    ],
)
def test_what_cannot_be(shop: Path, monkeypatch: Any, words: list[str], error: Any, match: str) -> None:
    monkeypatch.chdir(shop)
    before = sorted(shop.iterdir())
    with pytest.raises(error, match=match):
        call("import", *words, "-o", "store")
    assert sorted(shop.iterdir()) == before


def test_people_get_tables_and_remarks(shop: Path) -> None:
    result = CliRunner().invoke(app, ["import", str(shop / "e.parquet"), "-o", str(shop / "store")])
    assert result.exit_code == 0 and "self-loops" in result.stdout
    assert "columns not used: note" in result.stderr and "is ready" in result.stderr
    helped = CliRunner().invoke(app, ["import", "--help"], env={"COLUMNS": "200"})
    assert "gnnfleet import nodes.parquet edges.parquet -o shop" in helped.stdout


def test_export_gives_the_ids_back(shop: Path) -> None:
    call("import", shop / "n.parquet", shop / "e.parquet", "-o", shop / "store")
    report = call("export", shop / "store", "-o", shop / "tables")
    assert report["files"] == {"nodes.parquet": 3, "edges.parquet": 2}
    assert pq.read_table(shop / "tables" / "edges.parquet")["dst"].to_pylist() == ["u2", "u3"]


def test_graphs_of_other_tools(shop: Path, monkeypatch: Any) -> None:
    clean = pytest.importorskip("gnnfleet.graph.ingest.clean")
    assert clean is not None
    from gnnfleet.graph.ingest import whole

    monkeypatch.setattr(whole, "read_whole", lambda source: Graph(edge_index=[[0, 1, 1], [1, 2, 2]], y=[0, 1, 0]))
    report = call("import", "g.npz", "-o", shop / "store", "--undirected", "--split", "1-per-class")
    graph = open_store(shop / "store")
    assert graph.undirected and graph.num_edges == 4 and graph.name == "store"
    assert report["nodes"]["node"]["train"] == 2 and report["cleaned"]["parallel_dropped"] == 2


SCRIPT = """
import sys
from gnnfleet.run import cli
from gnnfleet.run.commands.importing import import_graph
cli.app.command("import")(import_graph)
sys.argv[0] = "gnnfleet"
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_imports_leave_nothing(tmp_path: Path, number: signal.Signals) -> None:
    edges = tmp_path / "e.parquet"
    count = 6_000_000
    select = (
        f"SELECT 'node ' || hash(i) % 900000 AS src, 'node ' || hash(i + 1) % 900000 AS dst FROM range({count}) t(i)"
    )
    duckdb.sql(f"COPY ({select}) TO '{edges}' (FORMAT parquet)")
    out = tmp_path / "out"
    out.mkdir()
    words = [sys.executable, "-c", SCRIPT, "import", str(edges), "-o", str(out / "store")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, env=os.environ, text=True) as process:
        assert process.stderr is not None
        while "edges node:to:node" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(0.4)
        process.send_signal(number)
        said = process.stderr.read()
    assert process.returncode == 130, said
    assert not list(out.iterdir()), said
