"""Tables into a store: equal to a brute force over Python lists, whatever the format, the ids and the rules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import torch

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.export import export_tables
from gnnfleet.graph.graph import EDGE, NODE, EdgeType, Graph
from gnnfleet.graph.ingest.tables import EdgeTable, NodeTable, TableSpec, classify_tables, import_tables
from gnnfleet.graph.store import open_store

BUYS = EdgeType("user", "buys", "product")


def write(path: Path, columns: dict[str, Any]) -> str:
    table = pa.table(columns)
    if path.suffix == ".csv":
        pacsv.write_csv(table, path)
    else:
        pq.write_table(table, path, row_group_size=7)
    return str(path)


def spec_of(nodes: str | None, edges: str | None, **rules: Any) -> TableSpec:
    return TableSpec(
        nodes={NODE: NodeTable(files=(nodes,))} if nodes else {},
        edges={EDGE: EdgeTable(files=(edges,))} if edges else {},
        **rules,
    )


def load(spec: TableSpec, path: Path) -> Graph:
    import_tables(spec, path)
    return open_store(path)


def edges_of(graph: Graph) -> list[tuple[Any, Any]]:
    """(src id, dst id) in store order."""
    src, dst = graph.single_edges.edge_index()
    ids = graph.single_nodes.ids
    return list(zip(ids.select(src).to_pylist(), ids.select(dst).to_pylist(), strict=True))


def expected_edges(
    ids: Sequence[Any], pairs: Sequence[tuple[Any, Any]], *, undirected: bool, drop: bool, loops: bool
) -> list[tuple[Any, Any]]:
    """The expected edges of the store: expand, drop, sort by (dst row, src row, position)."""
    row = {name: i for i, name in enumerate(ids)}
    edges = [(row[s], row[d]) for s, d in pairs if loops or s != d]
    if undirected:
        edges = [pair for s, d in edges for pair in ([(s, d), (d, s)] if s != d else [(s, d)])]
    if drop:
        edges = list(dict.fromkeys(edges))
    return [(ids[s], ids[d]) for s, d in sorted(edges, key=lambda pair: (pair[1], pair[0]))]


IDS: dict[str, list[Any]] = {
    "rows": list(range(12)),
    "integers": [5, -3, 0, 2**62 + 1, 2**53 + 1, 7, -(2**63), 2**63 - 1, 11, 10, 9, 8],
    "text": ["b", "a", "", " ", "007", "7", "é", "e\u0301", "日本", "a b,c", 'q"q', "line\nbreak"],
}


@pytest.mark.parametrize("ending", ["parquet", "csv"])
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize(("undirected", "drop", "loops"), list(itertools.product([False, True], repeat=3)))
def test_imported_edges_equal_a_plain_implementation(
    tmp_path: Path, ending: str, ids: str, undirected: bool, drop: bool, loops: bool
) -> None:
    names = IDS[ids]
    draw = np.random.default_rng(3)
    pairs = [(names[i], names[j]) for i, j in draw.integers(0, 12, (60, 2))]
    x = draw.normal(size=(12, 2)).astype(np.float32)
    weight = np.arange(60, dtype=np.float32)
    nodes = write(tmp_path / f"n.{ending}", {"id": names, "a": x[:, 0], "b": x[:, 1]})
    edges = write(
        tmp_path / f"e.{ending}", {"src": [s for s, _ in pairs], "dst": [d for _, d in pairs], "weight": weight}
    )
    rules: dict[str, Any] = {"duplicates": "drop" if drop else "keep", "self_loops": "keep" if loops else "drop"}
    graph = load(spec_of(nodes, edges, undirected=undirected, **rules), tmp_path / "store")

    assert graph.single_nodes.ids.values().to_pylist() == names
    assert graph.single_nodes.ids.are_rows == (ids == "rows")
    torch.testing.assert_close(graph.single_nodes.x, torch.from_numpy(x), rtol=0, atol=0)
    assert edges_of(graph) == expected_edges(names, pairs, undirected=undirected, drop=drop, loops=loops)
    # The weight is the input position, so it shows that payload stays with its edge and ties keep input order.
    for (s, d), w in zip(edges_of(graph), graph.single_edges.weight.tolist(), strict=True):
        assert pairs[int(w)] == (s, d) or (undirected and pairs[int(w)] == (d, s))
    graph.store.verify()


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_several_files_are_one_table(tmp_path: Path, ending: str) -> None:
    draw = np.random.default_rng(0)
    ends = draw.integers(0, 50, (2, 300))
    for k in range(6):
        part = slice(k * 50, k * 50 + 50)
        write(
            tmp_path / f"e{k}.{ending}", {"src": ends[0, part], "dst": ends[1, part], "weight": np.arange(300.0)[part]}
        )
        write(
            tmp_path / f"n{k}.{ending}", {"id": np.arange(k * 10, k * 10 + 10), "f": np.arange(k * 10.0, k * 10 + 10)}
        )
    spec = classify_tables([str(tmp_path / f"*.{ending}")])
    graph = load(spec, tmp_path / "store")
    expected = Graph(edge_index=torch.from_numpy(ends), edge_weight=torch.arange(300.0), num_nodes=60)
    assert torch.equal(graph.single_nodes.x[:, 0], torch.arange(60.0))
    for name in ("indptr", "src", "weight"):
        assert torch.equal(getattr(graph.single_edges, name), getattr(expected.single_edges, name)), name


@pytest.mark.parametrize("ending", ["parquet", "csv"])
@pytest.mark.parametrize("kind", [np.int64, np.float64])
def test_events_of_equal_time_keep_their_order(tmp_path: Path, ending: str, kind: Any) -> None:
    draw = np.random.default_rng(1)
    ends, time = draw.integers(0, 9, (2, 200)), draw.integers(0, 30, 200).astype(kind)
    if kind is np.float64:
        time += 0.5
    edges = write(tmp_path / f"e.{ending}", {"from": ends[0], "to": ends[1], "t": time, "f": np.arange(200.0)})
    graph = load(spec_of(None, edges), tmp_path / "store")
    expected = Graph(edge_index=ends, time=time, edge_attr=torch.arange(200.0)[:, None]).single_edges
    for name in ("indptr", "src", "time", "order", "attr"):
        column = getattr(graph.single_edges, name)
        assert torch.equal(column, getattr(expected, name).to(column.dtype)), name
    assert graph.single_edges.time.dtype == (torch.int64 if kind is np.int64 else torch.float64)


@pytest.mark.parametrize(("undirected", "drop"), list(itertools.product([False, True], repeat=2)))
def test_timed_edges_equal_a_plain_implementation(tmp_path: Path, undirected: bool, drop: bool) -> None:
    draw = np.random.default_rng(2)
    ends, time = draw.integers(0, 6, (2, 80)), draw.integers(0, 4, 80)
    path = write(tmp_path / "e.parquet", {"src": ends[0], "dst": ends[1], "time": time, "f": np.arange(80)})
    graph = load(spec_of(None, path, undirected=undirected, duplicates="drop" if drop else "keep"), tmp_path / "store")
    rows = []
    for row, (s, d, t) in enumerate(zip(*ends.tolist(), time.tolist(), strict=True)):
        rows.append((s, d, t, 2 * row))
        if undirected and s != d:
            rows.append((d, s, t, 2 * row + 1))
    if drop:
        rows = list({row[:3]: row for row in reversed(rows)}.values())
    rows.sort(key=lambda row: (row[1], row[0], row[3]))
    edges = graph.single_edges
    assert edges.src.tolist() == [row[0] for row in rows] and edges.dst().tolist() == [row[1] for row in rows]
    assert edges.time.tolist() == [row[2] for row in rows]
    assert edges.attr[:, 0].tolist() == [row[3] // 2 for row in rows]
    assert edges.order.tolist() == sorted(range(len(rows)), key=lambda i: (rows[i][2], rows[i][3]))


def test_duplicates_of_timed_edges_share_the_time(tmp_path: Path) -> None:
    edges = write(tmp_path / "e.parquet", {"src": [0, 0, 0, 1], "dst": [1, 1, 1, 0], "time": [5, 5, 6, 5]})
    report = import_tables(spec_of(None, edges, duplicates="drop"), tmp_path / "store")
    assert open_store(tmp_path / "store").single_edges.time.tolist() == [5, 5, 6]
    assert (report.edges[EDGE].duplicates_dropped, report.edges[EDGE].rows) == (1, 4)


def test_timestamps_become_microseconds(tmp_path: Path) -> None:
    stamps = pa.array([1_700_000_000_000, 1_600_000_000_500], pa.timestamp("ms"))
    parquet = write(tmp_path / "e.parquet", {"src": ["a", "b"], "dst": ["b", "a"], "time": stamps})
    csv = write(tmp_path / "e.csv", {"src": ["a", "b"], "dst": ["b", "a"], "time": stamps.cast(pa.string())})
    zones = []
    for unit in ("us", "ns"):
        zoned = stamps.cast(pa.timestamp(unit, "Asia/Tokyo"))
        zones.append(write(tmp_path / f"{unit}.parquet", {"src": ["a", "b"], "dst": ["b", "a"], "time": zoned}))
    for path in (parquet, csv, *zones):
        edges = load(spec_of(None, path), tmp_path / Path(path).name.replace(".", "-")).single_edges
        assert edges.time[edges.order].tolist() == [1_600_000_000_500_000, 1_700_000_000_000_000]


def test_sum_adds_weights_and_features(tmp_path: Path) -> None:
    columns = {"src": [0, 0, 1, 0], "dst": [1, 1, 0, 1], "f": [1.0, 2.0, 4.0, 8.0], "v": [[1.0, 2.0]] * 4}
    counted = write(tmp_path / "c.parquet", columns)
    weighted = write(tmp_path / "w.parquet", {**columns, "weight": [0.5, 1.0, 2.0, 4.0]})
    plain = load(spec_of(None, counted, duplicates="sum"), tmp_path / "c").single_edges
    assert plain.weight.tolist() == [1, 3]
    assert plain.attr.tolist() == [[4, 1, 2], [11, 3, 6]]
    assert load(spec_of(None, weighted, duplicates="sum"), tmp_path / "w").single_edges.weight.tolist() == [2, 5.5]


def test_sums_that_overflow_are_refused(tmp_path: Path) -> None:
    gap = write(tmp_path / "g.parquet", {"src": [0, 0], "dst": [1, 1], "f": [1.0, None]})
    refused(spec_of(None, gap, duplicates="sum"), tmp_path, ["row 2", "column 'f'", "--edge-features"])
    large = write(tmp_path / "l.parquet", {"src": [0, 0], "dst": [1, 1], "f": [6e4, 6e4]})
    refused(spec_of(None, large, duplicates="sum", dtype="float16"), tmp_path, ["add up", "float16", "--dtype float32"])
    heavy = write(tmp_path / "h.parquet", {"src": [0, 0], "dst": [1, 1], "weight": [3e38, 3e38]})
    refused(spec_of(None, heavy, duplicates="sum"), tmp_path, ["weights", "add up"])


def test_nodes_come_from_edges_or_are_added(tmp_path: Path) -> None:
    edges = write(tmp_path / "e.csv", {"source": ["z", "b", "10"], "target": ["a", "z", "9"]})
    graph = load(spec_of(None, edges), tmp_path / "s1")
    assert graph.single_nodes.ids.values().to_pylist() == ["10", "9", "a", "b", "z"]
    nodes = write(
        tmp_path / "n.parquet", {"id": ["z", "q"], "f": [1.0, 2.0], "label": ["u", None], "split": ["train", ""]}
    )
    report = import_tables(spec_of(nodes, edges, missing="add"), tmp_path / "s2")
    table = open_store(tmp_path / "s2").single_nodes
    assert table.ids.values().to_pylist() == ["z", "q", "10", "9", "a", "b"]
    assert table.x[:, 0].tolist() == [1, 2, 0, 0, 0, 0]
    assert table.y.tolist() == [0] + [-1] * 5 and table.split.tolist() == [[0] + [-1] * 5]
    assert report.nodes[NODE].added == 4


def test_undirected_heterogeneous_tables_get_reverse_edge_types(tmp_path: Path) -> None:
    users = write(tmp_path / "u.csv", {"uid": ["x", "y"], "age": [3, 4]})
    orders = write(tmp_path / "o.parquet", {"u": ["x", "y", "x"], "p": [30, 10, 10], "weight": [1, 2, 3]})
    spec = TableSpec(
        nodes={"user": NodeTable(files=(users,), id="uid")},
        edges={BUYS: EdgeTable(files=(orders,), src="u", dst="p")},
        undirected=True,
    )
    graph = load(spec, tmp_path / "store")
    back = EdgeType("product", "rev_buys", "user")
    assert list(graph.edges) == [BUYS, back] and graph.undirected
    assert graph.nodes["product"].ids.values().to_pylist() == [10, 30]
    assert graph.edges[BUYS].edge_index().tolist() == [[0, 1, 0], [0, 0, 1]]
    assert graph.edges[BUYS].weight.tolist() == [3, 2, 1]
    assert graph.edges[back].edge_index().tolist() == [[0, 1, 0], [0, 0, 1]]
    assert graph.edges[back].weight.tolist() == [3, 1, 2]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_features_are_read_from_scalars_and_lists(tmp_path: Path, dtype: Any) -> None:
    columns = {
        "id": ["a", "b"],
        "f": pa.array([1, 2], pa.int8()),
        "text": ["no", "no"],
        "flag": [True, False],
        "list": [[1.5, 2.5], [3.5, 4.5]],
        "fixed": pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.int32(), 3)),
        "price": pa.array([1.25, 2.5]).cast(pa.decimal128(5, 2)),
    }
    nodes = write(tmp_path / "n.parquet", columns)
    report = import_tables(spec_of(nodes, None, dtype=dtype), tmp_path / "store")
    x = open_store(tmp_path / "store").single_nodes.x
    assert x.dtype == getattr(torch, dtype)
    assert x.tolist() == [[1, 1, 1.5, 2.5, 1, 2, 3, 1.25], [2, 0, 3.5, 4.5, 4, 5, 6, 2.5]]
    assert report.nodes[NODE].unused == ("text",)
    some = TableSpec(nodes={NODE: NodeTable(files=(nodes,), features="p*,f")})
    assert load(some, tmp_path / "some").single_nodes.x.tolist() == [[1.25, 1], [2.5, 2]]
    none = TableSpec(nodes={NODE: NodeTable(files=(nodes,), features="none")})
    assert load(none, tmp_path / "none").single_nodes.x is None


@pytest.mark.parametrize(
    ("column", "y", "classes"),
    [
        ([2, None, -1, 0], [2, -1, -1, 0], ()),
        ([2.0, float("nan"), None, 0.0], [2, -1, -1, 0], ()),
        ([True, False, None, True], [1, 0, -1, 1], ()),
        (["b", None, "", "a"], [1, -1, -1, 0], ("a", "b")),
        (["10", "9", None, "9"], [0, 1, -1, 1], ("10", "9")),
        ([[1, 0], None, [0, 0], [1, 1]], [[1, 0], [-1, -1], [0, 0], [1, 1]], ()),
        ([["u", "t"], [], None, ["u"]], [[1, 1], [0, 0], [-1, -1], [0, 1]], ("t", "u")),
    ],
)
def test_labels_are_numbers_names_or_lists(tmp_path: Path, column: Any, y: Any, classes: Any) -> None:
    nodes = write(tmp_path / "n.parquet", {"id": list("abcd"), "y": pa.array(column)})
    table = load(spec_of(nodes, None), tmp_path / "store").single_nodes
    assert table.y.tolist() == y and table.classes == classes and table.x is None


def test_several_label_columns_are_several_labels(tmp_path: Path) -> None:
    nodes = write(tmp_path / "n.csv", {"id": list("abc"), "tag_x": [1, 0, None], "f": [1, 2, 3], "tag_y": [0, 1, 1]})
    spec = TableSpec(nodes={NODE: NodeTable(files=(nodes,), label="tag_*")})
    table = load(spec, tmp_path / "store").single_nodes
    assert table.y.tolist() == [[1, 0], [0, 1], [-1, 1]] and table.classes == ("tag_x", "tag_y")
    assert table.x.tolist() == [[1], [2], [3]]


def test_splits_come_from_a_column_or_a_rule(tmp_path: Path) -> None:
    names = ["train", "Valid", " test ", "val", None, "none"]
    nodes = write(tmp_path / "n.parquet", {"id": list("abcdef"), "split": names})
    assert load(spec_of(nodes, None), tmp_path / "s").single_nodes.split.tolist() == [[0, 1, 2, 1, -1, -1]]
    assert load(spec_of(nodes, None, split_rule="1/0/0"), tmp_path / "t").single_nodes.split.tolist() == [[0] * 6]
    both = TableSpec(nodes={NODE: NodeTable(files=(nodes,), split="split")}, split_rule="1/0/0")
    with pytest.raises(ConfigError, match="either from a column or from a rule"):
        import_tables(both, tmp_path / "u")
    names = [f"n{i}" for i in range(40)]
    codes = []
    for order in (names, names[::-1]):
        nodes = write(tmp_path / "r.parquet", {"id": order})
        table = load(spec_of(nodes, None, split_rule="0.5/0.25/0.25", seed=4), tmp_path / f"r{order[0]}").single_nodes
        codes.append(dict(zip(table.ids.values().to_pylist(), table.split[0].tolist(), strict=True)))
    assert codes[0] == codes[1]
    assert [list(codes[0].values()).count(code) for code in (0, 1, 2)] == [20, 10, 10]


def bad_nodes(**columns: Any) -> dict[str, Any]:
    return {"id": ["a", "b", "c"], "f": ["1", "2", "3"], **columns}


@pytest.mark.parametrize(
    ("nodes", "parts"),
    [
        (bad_nodes(f=["1", "x", "y"]), ["n.csv, row 2 (line 3), column 'f'", "found 'x' (2 such rows)", "--features"]),
        (bad_nodes(f=["1", None, "2"]), ["row 2", "column 'f'", "found no value"]),
        (bad_nodes(f=["1", "2", "inf"]), ["row 3 (line 4)", "finite", "'inf'"]),
        (bad_nodes(f=["1", "2", "1e300"]), ["row 3", "'1e300'"]),
        (bad_nodes(id=["a", "b", "a"]), ["row 3 (line 4)", "'a'", "row 1"]),
        (bad_nodes(id=["a", None, "c"]), ["row 2", "column 'id'", "no value"]),
        (bad_nodes(split=["train", "val", "tset"]), ["row 3", "'tset'", "train, val, test"]),
        (bad_nodes(label=["0", "1", "-2"]), ["row 3", "column 'label'", "'-2'", "--label"]),
    ],
)
def test_messages_locate_bad_node_rows(tmp_path: Path, nodes: dict[str, Any], parts: list[str]) -> None:
    path = tmp_path / "n.csv"
    lines = [",".join(nodes)] + [
        ",".join("" if cell is None else cell for cell in row) for row in zip(*nodes.values(), strict=True)
    ]
    if nodes["f"][1] == "x":  # a word among numbers is bad only behind the rows that decide; here the user decides
        spec = TableSpec(nodes={NODE: NodeTable(files=(str(path),), features="f")})
    else:
        spec = spec_of(str(path), None)
    path.write_text("\n".join(lines) + "\n")
    refused(spec, tmp_path, parts)


@pytest.mark.parametrize("ending", ["parquet", "csv"])
@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        ({"dst": ["b", "nobody", "c"]}, ["row 2", "column 'dst'", "'nobody'", "--missing add"]),
        ({"src": ["a", "b", None]}, ["row 3", "column 'src'", "no value"]),
        ({"weight": [1.0, float("nan"), 2.0]}, ["row 2", "column 'weight'", "nan"]),
        ({"weight": [1.0, None, None]}, ["row 2", "column 'weight'", "2 such rows"]),
        ({"time": [1, -5, 2]}, ["row 2", "column 'time'", "-5", "0 or later"]),
        ({"time": [1.0, 2.0, None]}, ["row 3", "column 'time'", "no value"]),
        ({"g": [1.0, float("inf"), 2.0]}, ["row 2", "column 'g'", "inf"]),
    ],
)
def test_messages_locate_bad_edge_rows(tmp_path: Path, ending: str, columns: dict[str, Any], parts: list[str]) -> None:
    nodes = write(tmp_path / "n.parquet", {"id": ["a", "b", "c"]})
    edges = write(tmp_path / f"e.{ending}", {"src": ["a", "b", "c"], "dst": ["b", "c", "a"], **columns})
    refused(spec_of(nodes, edges), tmp_path, [f"e.{ending}, {parts[0]}", *parts[1:]])


def refused(spec: TableSpec, tmp_path: Path, parts: Sequence[str]) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError) as caught:
        import_tables(spec, tmp_path / "store")
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert sorted(tmp_path.iterdir()) == before, "the failed import left files"


def test_mismatched_and_damaged_tables_are_refused(tmp_path: Path) -> None:
    text = write(tmp_path / "text.parquet", {"id": ["1", "2"]})
    numbers = write(tmp_path / "numbers.parquet", {"src": [1, 2], "dst": [2, 1]})
    refused(
        spec_of(text, numbers), tmp_path, ["id types of two tables differ", "text.parquet", "numbers.parquet", "BIGINT"]
    )
    loops = write(tmp_path / "loops.parquet", {"src": [1, 2, 2], "dst": [2, 2, 2]})
    refused(spec_of(None, loops, self_loops="error"), tmp_path, ["row 2", "2 such rows", "--self-loops"])
    refused(spec_of(None, loops, duplicates="error"), tmp_path, ["row 3", "--duplicates"])
    refused(spec_of(None, numbers, duplicates="error", undirected=True), tmp_path, ["row 2", "--duplicates"])
    refused(spec_of(None, text), tmp_path, ["'src' or 'source' or 'from'", "found id"])
    refused(spec_of(str(tmp_path / "no*.csv"), None), tmp_path, ["nothing matches"])
    lists = write(tmp_path / "lists.parquet", {"id": [1, 2], "v": [[1.0], [1.0, 2.0]]})
    refused(spec_of(lists, None), tmp_path, ["row 2", "column 'v'", "1 values", "2 values"])
    half = write(tmp_path / "half.parquet", {"id": [1, 2], "v": [1.0, 1e5]})
    refused(spec_of(half, None, dtype="float16"), tmp_path, ["row 2", "65504", "100000.0"])
    refused(spec_of(None, str(tmp_path / "half.parquet")), tmp_path, ["half.parquet: expected a column 'src'"])
    early = write(tmp_path / "early.parquet", {"src": [1], "dst": [2], "t": pa.array([-1], pa.timestamp("s", "UTC"))})
    refused(spec_of(None, early), tmp_path, ["row 1", "column 't'", "1969-12-31", "--time none"])
    fraction = write(tmp_path / "y.parquet", {"id": [1, 2], "y": [1.0, 0.5]})
    refused(spec_of(fraction, None), tmp_path, ["row 2", "column 'y'", "0.5", "--label none"])
    (tmp_path / "ragged.csv").write_text("id,f\n1,2\n3,4,5\n")
    refused(
        spec_of(str(tmp_path / "ragged.csv"), None), tmp_path, ["ragged.csv", "line 3", "expected 2 values, found 3"]
    )
    (tmp_path / "broken.parquet").write_bytes(b"PAR1nonsense")
    refused(spec_of(str(tmp_path / "broken.parquet"), None), tmp_path, ["broken.parquet cannot be read"])
    with pytest.raises(ConfigError, match="duplicates"):
        TableSpec(edges={EDGE: EdgeTable(files=("e",))}, duplicates="twice")  # type: ignore[arg-type]


def test_line_numbers_count_breaks_inside_quotes(tmp_path: Path) -> None:
    path = tmp_path / "n.csv"
    path.write_text('id,f\r\n"a\nb",1\r\n\r\nc,2\r\nd,\r\n')
    refused(spec_of(str(path), None), tmp_path, ["row 3 (line 6)", "column 'f'"])


def test_ids_of_csv_stay_text_unless_all_are_plain_integers(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("src;dst\n007;7\n7;8\n")
    ids = load(spec_of(None, str(tmp_path / "e.csv")), tmp_path / "s").single_nodes.ids
    assert ids.values().to_pylist() == ["007", "7", "8"]
    (tmp_path / "n.csv").write_text("id\n7\n8\n")
    refused(
        spec_of(str(tmp_path / "n.csv"), str(tmp_path / "e.csv")), tmp_path, ["row 1 (line 2)", "'007'", "integers"]
    )


def test_spills_under_a_small_memory_limit(tmp_path: Path) -> None:
    count = 400_000
    edges = tmp_path / "e.parquet"
    duckdb.sql(
        f"""COPY (SELECT 'a rather long name of a node number ' || (i * 7919 % 100000) AS src,
            'a rather long name of a node number ' || (i * 31 % 100000) AS dst, i::DOUBLE AS time
            FROM range({count}) t(i)) TO '{edges}' (FORMAT parquet)"""
    )
    graph = load(spec_of(None, str(edges), memory="128MiB"), tmp_path / "store")
    assert graph.num_edges == count
    order = graph.single_edges.order
    assert torch.equal(graph.single_edges.time[order], torch.arange(count, dtype=torch.float64))


def test_empty_tables_are_imported(tmp_path: Path) -> None:
    nodes = write(tmp_path / "n.parquet", {"id": pa.array([], pa.string()), "f": pa.array([], pa.float32())})
    edges = write(tmp_path / "e.parquet", {"src": pa.array([], pa.string()), "dst": pa.array([], pa.string())})
    graph = load(spec_of(nodes, edges), tmp_path / "store")
    assert (graph.num_nodes, graph.num_edges) == (0, 0)
    assert load(spec_of(None, edges), tmp_path / "other").num_nodes == 0


def test_a_single_text_in_a_short_column_of_numbers_is_a_bad_row(tmp_path: Path) -> None:
    """Not a reason to take the whole column for text and lose it."""
    (tmp_path / "n.csv").write_text("id,age,remark\na,1,x\nb,oops,7\nc,3,z\n")
    (tmp_path / "e.csv").write_text("src,dst\na,b\n")
    spec = classify_tables([str(tmp_path / "n.csv"), str(tmp_path / "e.csv")])
    with pytest.raises(InputError, match=r"n\.csv, row 2 \(line 3\), column 'age'.*'oops'"):
        import_tables(spec, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_labels_of_edges_follow_their_edges(tmp_path: Path, ending: str) -> None:
    pairs = [(3, 1), (1, 2), (3, 1), (2, 1), (3, 1)]
    columns = {"src": [s for s, _ in pairs], "dst": [d for _, d in pairs], "time": [5, 4, 3, 3, 5]}
    path = write(
        tmp_path / f"e.{ending}", {**columns, "label": [0, 1, 2, None, 4], "kind": list("babab"), "f": [1.5] * 5}
    )
    kept = load(spec_of(None, path), tmp_path / "kept").single_edges
    assert kept.y is not None and kept.attr is not None and kept.order is not None
    assert kept.y[kept.order].tolist() == [2, -1, 1, 0, 4] and kept.attr.shape == (5, 1)
    for rule in ("drop", "sum"):
        first = load(spec_of(None, path, duplicates=rule), tmp_path / rule).single_edges
        assert first.y is not None and first.order is not None
        assert first.y[first.order].tolist() == [2, -1, 1, 0]
    doubled = load(spec_of(None, path, undirected=True, duplicates="keep"), tmp_path / "doubled").single_edges
    assert doubled.y is not None and doubled.order is not None
    assert doubled.y[doubled.order].tolist() == [2, 2, -1, -1, 1, 1, 0, 0, 4, 4]
    named = TableSpec(edges={EDGE: EdgeTable(files=(path,), label="kind")})
    edges = load(named, tmp_path / "named").single_edges
    assert edges.y is not None and edges.order is not None and edges.y[edges.order].tolist() == [1, 0, 0, 1, 1]
    none = TableSpec(edges={EDGE: EdgeTable(files=(path,), label="none")})
    report = import_tables(none, tmp_path / "none")
    assert open_store(tmp_path / "none").single_edges.y is None and report.edges[EDGE].labelled == 0
    export_tables(open_store(tmp_path / "kept"), tmp_path / "out")
    again = load(spec_of(None, str(tmp_path / "out" / "edges.parquet")), tmp_path / "again").single_edges
    assert again.y is not None and torch.equal(again.y, kept.y)


def test_messages_locate_a_bad_edge_label(tmp_path: Path) -> None:
    path = write(tmp_path / "e.csv", {"src": [1, 2], "dst": [2, 1], "label": [0, -3]})
    with pytest.raises(InputError, match=r"row 2 \(line 3\).*'label'.*--edge-label none"):
        import_tables(spec_of(None, path), tmp_path / "store")
