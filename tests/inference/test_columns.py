"""Features are matched by column name, from the tables of an import to predictions on another store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import gnnfleet as gf
from gnnfleet.errors import RunError, StoreError
from gnnfleet.graph.graph import ColumnGroups, Edges, EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.inference.query import Query, open_trained_run, run_query
from gnnfleet.io.bundle import Bundle, manifest_digest
from gnnfleet.nn.config import GAT, RGCN, SAGE
from gnnfleet.training import output_schema as output_module
from gnnfleet.training.output_schema import OutputSchema, column_order
from tests.shell import call, fails, run_json, torchrun

COUNT = 40


def write_nodes(path: Path, names: str, *, label: bool = False, rename: dict[str, str] | None = None) -> None:
    """Write a table of people: the same values under each name, in any order of columns."""
    random = torch.Generator().manual_seed(1)
    draws = torch.randn(COUNT, 3, generator=random)
    values: dict[str, list[Any]] = dict(zip(("age", "spent", "noise"), draws.T.tolist(), strict=True))
    values["id"] = [f"n{i}" for i in range(COUNT)]
    names += ",label" * label
    values["label"] = ["keeps" if age > 0 else "leaves" for age in values["age"]]
    header = ",".join((rename or {}).get(name, name) for name in names.split(","))
    lines = zip(*(values[name] for name in names.split(",")), strict=True)
    path.write_text("\n".join([header, *(",".join(map(str, line)) for line in lines)]) + "\n")


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on people with named columns, and its predictions."""
    path = tmp_path_factory.mktemp("columns")
    write_nodes(path / "nodes.csv", "id,age,spent,noise", label=True)
    edges = "".join(f"n{i},n{(3 * i + 1) % COUNT},{i % 5}\n" for i in range(COUNT))
    (path / "edges.csv").write_text("src,dst,rating\n" + edges)
    run_json("import", path / "nodes.csv", path / "edges.csv", "-o", path / "store", "--split", "0.6/0.2/0.2")
    gf.train(path / "store", model=SAGE(hidden=8, layers=2), epochs=8, lr=0.1, run_dir=path / "run")
    run_json("predict", path / "run", "-o", path / "expected.parquet", "--logits")
    return path


def import_nodes(people: Path, folder: Path, names: str, **options: Any) -> Path:
    write_nodes(folder / "nodes.csv", names, **options)
    run_json("import", folder / "nodes.csv", people / "edges.csv", "-o", folder / "store")
    return folder / "store"


def test_a_store_saves_the_names_of_feature_columns(people: Path, tmp_path: Path) -> None:
    graph = open_store(people / "store")
    assert graph.single_nodes.columns == (("age", 1), ("spent", 1), ("noise", 1))
    assert graph.single_edges.columns == (("rating", 1),)
    copy = save_store(graph, tmp_path / "copy")
    assert copy.single_nodes.columns == graph.single_nodes.columns and copy.single_edges.columns == (("rating", 1),)
    x = graph.single_nodes.x
    assert x is not None and graph.with_nodes("node", x=2 * x).single_nodes.columns == graph.single_nodes.columns
    assert graph.with_nodes("node", x=x[:, :2]).single_nodes.columns == ()
    pq.write_table(pa.table({"id": [1, 2], "v": [[1.0, 2.0], [3.0, 4.0]], "a": [5, 6]}), tmp_path / "n.parquet")
    report = run_json("import", tmp_path / "n.parquet", "-o", tmp_path / "lists")
    assert open_store(tmp_path / "lists").single_nodes.columns == (("v", 2), ("a", 1))
    assert report["nodes"]["node"]["columns"] == [["v", 2], ["a", 1]]
    assert "columns" not in Bundle.open(save_unnamed(tmp_path), "graph").meta["nodes"][0]


def save_unnamed(folder: Path) -> Path:
    save_store(Graph(torch.tensor([[0], [1]]), x=torch.ones(2, 3)), folder / "unnamed")
    return folder / "unnamed"


@pytest.mark.parametrize("columns", [[["a", 1]], [["a", 3.0]], [[1, 3]], ["abc"], 3, [["a", -1], ["b", 4]]])
def test_columns_that_do_not_fit_the_features_are_refused(tmp_path: Path, columns: Any) -> None:
    file = save_unnamed(tmp_path) / "graph.json"
    manifest = json.loads(file.read_text())
    manifest["meta"]["nodes"][0]["columns"] = columns
    file.write_text(json.dumps({**manifest, "digest": manifest_digest(manifest)}))
    with pytest.raises(StoreError, match="is invalid"):
        open_store(file.parent)


def test_columns_in_another_order_are_matched_by_name(people: Path, tmp_path: Path) -> None:
    """In one process, and in two, which read parts."""
    store = import_nodes(people, tmp_path, "id,spent,noise,age")
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    expected = pq.read_table(people / "expected.parquet")
    for workers in ("1", "2"):
        options = ("--store", store, "-o", tmp_path / "out.parquet", "--logits", "-w", workers)
        run_json("predict", people / "run", *options)
        table = pq.read_table(tmp_path / "out.parquet")
        assert table["prediction"] == expected["prediction"]
        torch.testing.assert_close(*(torch.tensor(rows["logits"].to_pylist()) for rows in (table, expected)))
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before, "nothing is written"


def test_evaluation_matches_columns_by_name(people: Path, tmp_path: Path) -> None:
    store = import_nodes(people, tmp_path, "id,noise,age,spent", label=True)
    expected = run_json("evaluate", people / "run", "--split", "all")
    assert run_json("evaluate", people / "run", "--split", "all", "--store", store) == expected


def test_ranks_of_torchrun_refuse_columns_in_another_order(people: Path, tmp_path: Path) -> None:
    store = import_nodes(people, tmp_path, "id,spent,noise,age")
    done = torchrun("predict", people / "run", "--store", store, "-o", tmp_path / "out.parquet")
    assert done.returncode != 0
    assert "in another order than the run" in done.stderr and "leave torchrun out" in done.stderr
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_columns_of_other_names_are_refused(people: Path, tmp_path: Path, workers: str) -> None:
    store = import_nodes(people, tmp_path, "id,age,spent,noise", rename={"spent": "paid"})
    message = fails("predict", people / "run", "--store", store, "-o", tmp_path / "out.parquet", "-w", workers, code=7)
    assert "feature columns age, spent, noise; this store has age, paid, noise (without spent, with paid)" in message
    assert not (tmp_path / "out.parquet").exists()


def test_features_without_names_are_matched_by_position(people: Path) -> None:
    graph = open_store(people / "store")
    bare = graph.with_nodes("node", columns=())
    expected = open_trained_run(people / "run", graph)[0].strategy.predict().logits
    assert torch.equal(open_trained_run(people / "run", bare)[0].strategy.predict().logits, expected)
    output = OutputSchema.from_json(json.loads((people / "run" / "config.json").read_text())["output"])
    assert output.columns == {"node": (("age", 1), ("spent", 1), ("noise", 1))} and output == OutputSchema.of(graph)
    fields = {key: value for key, value in output.as_json().items() if key not in ("columns", "edge_columns")}
    old = OutputSchema.from_json(json.loads(json.dumps(fields)))  # saved by an older version
    assert old.columns == {} and old.adapt(graph) is graph and output.adapt(bare) is bare


def test_column_order_maps_columns_of_the_run_to_the_store() -> None:
    def order(trained: ColumnGroups, stored: ColumnGroups) -> list[int] | None:
        indices = column_order(trained, stored)
        return None if indices is None else indices.tolist()

    assert order((("a", 1), ("v", 3), ("b", 1)), (("b", 1), ("a", 1), ("v", 3))) == [1, 2, 3, 4, 0]
    assert order((("a", 1), ("b", 1)), (("a", 1), ("b", 1))) is None
    assert order((("v", 3),), (("w", 3),)) is None, "items of a list have no names"
    assert order((("x", 2),), (("a", 1), ("b", 1))) is None, "as after an export"
    wide = tuple((f"f{i}", 1) for i in range(300))
    assert order(wide, wide[::-1]) == list(range(300))[::-1]
    with pytest.raises(RunError, match=r"f0, f1, .*, f9, … \(300 in all\); .*\(without f7, with g\)"):
        order(wide, tuple(("g", 1) if column == ("f7", 1) else column for column in wide))
    with pytest.raises(RunError, match=r"has a, v \[4\] \(without v \[3\], with v \[4\]\)"):
        order((("a", 1), ("v", 3)), (("a", 1), ("v", 4)))


def test_features_too_large_to_reorder_fail(people: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = import_nodes(people, tmp_path, "id,spent,age,noise")
    monkeypatch.setattr(output_module, "FULL_CHECK_BYTES", 100)
    message = fails("predict", people / "run", "--store", store, "-o", tmp_path / "out.parquet", code=7)
    assert "in another order" in message and "--features" in message


def test_edge_features_are_matched_by_name(tmp_path: Path) -> None:
    write_nodes(tmp_path / "nodes.csv", "id,age,spent", label=True)
    rows = [(f"n{i}", f"n{(7 * i + 2) % COUNT}", i % 5 / 5, i % 3 / 3) for i in range(COUNT)]
    for name, header, order in (("one", "src,dst,near,late", (0, 1, 2, 3)), ("two", "src,dst,late,near", (0, 1, 3, 2))):
        lines = [",".join(str(row[i]) for i in order) for row in rows]
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *lines]) + "\n")
        tables = (tmp_path / "nodes.csv", tmp_path / f"{name}.csv")
        run_json("import", *tables, "-o", tmp_path / name, "--split", "0.6/0.2/0.2")
    record = gf.train(tmp_path / "one", model=GAT(hidden=8, layers=2, heads=2), epochs=2, run_dir=tmp_path / "run")
    built = open_trained_run(tmp_path / "run", open_store(tmp_path / "two"))[0]
    torch.testing.assert_close(built.strategy.predict().logits, record.logits())


def test_edge_types_are_matched_by_name(tmp_path: Path) -> None:
    """Relations of rgcn are numbered in the order of the store; one without edges yet may be left out."""
    random = torch.Generator().manual_seed(2)
    nodes = {"node": validated_nodes(30, x=torch.randn(30, 4, generator=random), y=torch.arange(30) % 2)}
    kinds = [EdgeType("node", name, "node") for name in ("likes", "knows")]
    pairs = [torch.randint(0, 30, (2, 60), generator=random) for _ in kinds]
    edges = {kind: validated_edges(ends, num_src=30, num_dst=30) for kind, ends in zip(kinds, pairs, strict=True)}
    model = RGCN(hidden=8, layers=2)
    record = gf.train(Graph.of(nodes, edges), model=model, epochs=3, split="0.6/0.2/0.2", run_dir=tmp_path / "run")

    def logits(edges: dict[EdgeType, Edges]) -> torch.Tensor:
        return open_trained_run(tmp_path / "run", Graph.of(nodes, edges))[0].strategy.predict().logits

    assert torch.equal(logits(dict(reversed(edges.items()))), record.logits())
    empty = validated_edges(torch.empty((2, 0), dtype=torch.int64), num_src=30, num_dst=30)
    assert torch.equal(logits({kinds[1]: edges[kinds[1]]}), logits({**edges, kinds[0]: empty}))
    with pytest.raises(RunError, match=r"edges node:likes:node, this store has node:likse:node, node:knows:node"):
        logits({EdgeType("node", "likse", "node"): edges[kinds[0]], kinds[1]: edges[kinds[1]]})


@pytest.mark.parametrize("workers", [1, 2])
def test_new_nodes_need_no_edges(people: Path, tmp_path: Path, workers: int) -> None:
    """As in docs/tour.md: they are predicted from their features."""
    write_nodes(tmp_path / "new.csv", "id,spent,age,noise")
    done = call("import", tmp_path / "new.csv", "-o", tmp_path / "new")
    assert done.returncode == 0 and "this store has no edges" in done.stderr
    query = Query(run=str(people / "run"), output=str(tmp_path / "out.csv"))
    assert run_query(query, open_store(tmp_path / "new"), workers=workers)["rows"] == COUNT
    graph = open_store(people / "store")
    edges = validated_edges(torch.empty((2, 0), dtype=torch.int64), num_src=COUNT, num_dst=COUNT)
    built = open_trained_run(people / "run", Graph.of(graph.nodes, {next(iter(graph.edges)): edges}))[0]
    names = [built.nodes.classes[i] for i in built.strategy.predict().logits.argmax(1).tolist()]
    lines = (tmp_path / "out.csv").read_text().splitlines()[1:]
    assert [line.split(",")[1].strip('"') for line in lines] == names


def test_link_runs_refuse_columns_in_another_order(people: Path, tmp_path: Path) -> None:
    """The names are those of the store they were trained on, as long as it exists."""
    settings = {"task": "link", "split": "0.8/0.1/0.1", "link.exclude": "none"}
    gf.train(people / "store", model=SAGE(hidden=8, layers=2), epochs=1, run_dir=tmp_path / "run", **settings)
    store = import_nodes(people, tmp_path, "id,spent,age,noise")
    message = fails("predict", tmp_path / "run", "--store", store, "-o", tmp_path / "out.parquet", code=7)
    assert "feature columns of node are in another order" in message and "with --features" in message
    write_nodes(tmp_path / "same.csv", "id,age,spent,noise")
    run_json("import", tmp_path / "same.csv", people / "edges.csv", "-o", tmp_path / "same")
    run_json("predict", tmp_path / "run", "--store", tmp_path / "same", "-o", tmp_path / "out.parquet")


def test_outputs_that_cannot_be_written_are_refused(people: Path, tmp_path: Path) -> None:
    for name in ("out.xlsx", "out", "out.parquet.gz"):
        message = fails("predict", people / "run", "-o", tmp_path / name, code=2)
        assert "written as .parquet or .csv" in message and name in message
    message = fails("predict", people / "run", "-o", tmp_path / "no" / "out.csv", code=2)
    assert f"the directory {tmp_path / 'no'} does not exist" in message
    assert not list(tmp_path.iterdir())
    run_json("predict", people / "run", "-o", tmp_path / "out.pq")
    assert pq.read_table(tmp_path / "out.pq").num_rows == COUNT
