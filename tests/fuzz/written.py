"""Files that users write: configs, tables, arrays, files of other tools. See subjects.py."""

from __future__ import annotations

import gzip
import io
import json
import random
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch

from gnnfleet.config.resolve import overlay, parse_value, read_toml, resolve, unflatten
from gnnfleet.graph.ingest.in_memory import import_in_memory
from gnnfleet.graph.ingest.spec import ImportRules
from gnnfleet.graph.ingest.tables import classify_tables, import_tables
from gnnfleet.graph.validate import open_validated_store
from tests.fuzz import damage
from tests.fuzz.damage import HUGE
from tests.fuzz.graphs import COUNT, read_graph

TOML = """
seed = 3
precision = "float32"
memory = "2GiB"
split = "0.6/0.2/0.2"
[strategy]
name = "local"
fanouts = [10, 5]
batch = 64
[model]
name = "sage"
hidden = 32
layers = 2
dropout = 0.5
[train]
epochs = 3
lr = 0.01
patience = 4
[link]
negatives = 3
"""

KEYS = [
    "seed", "workers", "memory", "split", "partition", "precision", "task", "strategy", "strategy.name",
    "strategy.batch",
    "strategy.fanouts", "strategy.interval", "strategy.group", "strategy.graph_parallel", "strategy.chunks",
    "strategy.listen",
    "strategy.quorum", "model", "model.name", "model.hidden", "model.layers", "model.heads", "model.dropout",
    "model.embedding", "train", "train.epochs", "train.lr", "train.patience", "train.weight_decay", "train.schedule",
    "train.checkpoint_seconds", "train.optimizer", "link.negatives", "link", "report.memory", "x", "", ".", "model.",
    "a.b.c.d", "strategy.batches_per_fetch", "strategy.scheme", "strategy.deadline", "strategy.wire_dtype",
    "strategy.gradient",
]  # fmt: skip
VALUES = [
    "0", "-1", "1", "3", "1e400", "nan", "inf", "-inf", "1e-320", str(2**63), str(2**64), "9" * 5000, "true", "''",
    "[]",
    "[10, 5]", "[1e9]", "[[1]]", "{}", "{a=1}", "local", "sar", "tma", "pipe", "macrobatch", "sage", "gat", "auto",
    "0.6/0.2/0.2", "2/2", "20-per-class", "0x", "\0", "é", "a=b", "1GiB", "-1GiB", "1e99TiB", "GiB", "../x",
    "127.0.0.1:0",
    "host:99999999", "1979-05-27", "adam", "none", "bf16", "link", "node", "random", "[true]", "['a','b']",
    "file.py:make",
]  # fmt: skip


def damage_settings(folder: Path, draw: random.Random) -> str:
    """Damaged TOML, or valid TOML with random settings of the command line."""
    arguments: list[str] = []
    if draw.random() < 0.4:
        operations = (damage.flip, damage.flip, damage.cut, damage.blank, damage.nest_deep, damage.delete, damage.loop)
        draw.choice(operations)(folder / "run.toml", draw)
    for _ in range(draw.randrange(4)):
        value = draw.choice(VALUES) if draw.random() < 0.9 else "".join(chr(draw.randrange(1, 300)) for _ in range(5))
        arguments.append(f"{draw.choice(KEYS)}={value}")
    (folder / "settings.json").write_text(json.dumps(arguments))
    return f"set {arguments}"[:300]


def read_settings(folder: Path) -> object:
    pairs = (argument.partition("=") for argument in json.loads((folder / "settings.json").read_text()))
    settings = {key: parse_value(value) for key, _, value in pairs}
    config = resolve(overlay(read_toml(folder / "run.toml"), unflatten(settings)))
    assert resolve(config.model_dump(mode="json")) == config, "a saved config differs when it is read again"
    return None


def make_settings(folder: Path) -> None:
    (folder / "run.toml").write_text(TOML)
    (folder / "settings.json").write_text("[]")


def tables() -> tuple[pa.Table, pa.Table]:
    draw = np.random.default_rng(0)
    ids = [f"n{i}" for i in range(COUNT)]
    nodes = pa.table(
        {
            "id": ids,
            "label": [("a", "b", "c")[i % 3] for i in range(COUNT)],
            "split": [("train", "val", "test")[i % 3] for i in range(COUNT)],
            "f1": draw.normal(size=COUNT),
            "f2": draw.integers(0, 9, COUNT),
        }
    )
    pairs = draw.integers(0, COUNT, (2, 60))
    edges = {"src": [ids[i] for i in pairs[0]], "dst": [ids[i] for i in pairs[1]], "weight": draw.random(60)}
    return nodes, pa.table({**edges, "time": draw.integers(0, 999, 60)})


def make_csv(folder: Path) -> None:
    for name, table in zip(("nodes", "edges"), tables(), strict=True):
        pyarrow.csv.write_csv(table, folder / f"{name}.csv")


def make_parquet(folder: Path) -> None:
    for name, table in zip(("nodes", "edges"), tables(), strict=True):
        pq.write_table(table, folder / f"{name}.parquet")


CELLS = [
    "",
    "nan",
    "inf",
    "-inf",
    "1e999",
    '"',
    '""',
    "\0",
    "a,b",
    "\n",
    "\r",
    "é",
    "train",
    "n0",
    "-1",
    "1e30",
    str(2**63),
]


def damage_csv(folder: Path, draw: random.Random) -> str:
    """Damaged bytes, or cells of a valid file with strange values."""
    if draw.random() < 0.4:
        return damage.damage_files(folder, draw)
    path = draw.choice(damage.files_of(folder))
    lines = path.read_text().split("\n")
    row = draw.randrange(len(lines) - 1)
    cells = lines[row].split(",")
    cells[draw.randrange(len(cells))] = draw.choice(CELLS)
    lines[row] = ",".join(cells)
    path.write_text("\n".join(lines))
    return f"row {row} is {cells}"


def damage_parquet(folder: Path, draw: random.Random) -> str:
    """Damaged bytes, or columns of another type."""
    if draw.random() < 0.6:
        return damage.damage_files(folder, draw)
    path = draw.choice(damage.files_of(folder))
    table = pq.read_table(path)
    name, n = draw.choice(table.column_names), len(table)
    values = draw.choice(
        [
            pa.array([None] * n),
            pa.array([b"\xff\0"] * n),
            pa.array([[1.0, None]] * n),
            pa.array([{"a": 1}] * n),
            pa.array([float("nan")] * n),
            pa.array([2**63] * n, pa.uint64()),
            pa.array([1] * n, pa.timestamp("ns", "Europe/Berlin")),
            pa.array([1] * n, pa.duration("s")),
            pa.array([True] * n),
            pa.array([[float(i)] * (i % 3) for i in range(n)]),
            pa.array([[]] * n, pa.list_(pa.float32())),
            pa.array(["x"] * n).dictionary_encode(),
            pa.array([1] * n, pa.decimal128(38, 10)),
            pa.array([1] * n, pa.float16())
            if hasattr(pa, "float16") and draw.random() < 0.2
            else pa.array([1e300] * n),
        ]
    )
    pq.write_table(table.set_column(table.column_names.index(name), name, values), path)
    return f"{path.name}: {name} is {values.type}"


def read_tables(folder: Path) -> object:
    out = folder.with_name(f"{folder.name}-out")
    files = [str(path) for path in sorted(folder.iterdir())]
    rules = {"undirected": False, "memory": "200MB", "missing": "add"}
    spec = replace(classify_tables(files), **rules)
    import_tables(spec, out, overwrite=True)
    content, graph = read_graph(out), open_validated_store(out)
    assert all(nodes.x is None or bool(torch.isfinite(nodes.x).all()) for nodes in graph.nodes.values())
    assert all(edges.weight is None or bool(torch.isfinite(edges.weight).all()) for edges in graph.edges.values())
    return content


def arrays() -> dict[str, Any]:
    draw = np.random.default_rng(3)
    mask = np.arange(COUNT) % 3
    return {
        "edge_index": draw.integers(0, COUNT, (2, 70)),
        "x": draw.normal(size=(COUNT, 3)).astype(np.float32),
        "y": np.arange(COUNT) % 4,
        "train_mask": mask == 0,
        "val_mask": mask == 1,
        "test_mask": mask == 2,
        "edge_weight": draw.random(70).astype(np.float32),
        "edge_time": np.arange(70),
        "num_nodes": np.array(COUNT),
        "class_names": np.array(["a", "b", "c", "d"]),
    }


def sparse_arrays() -> dict[str, Any]:
    plain = arrays()
    del plain["x"]
    return plain | {
        "x_data": np.ones(COUNT, np.float32),
        "x_indices": np.arange(COUNT) % 5,
        "x_indptr": np.arange(COUNT + 1),
        "x_shape": np.array([COUNT, 5]),
        "node_type": np.arange(COUNT) // 12,
        "node_type_names": np.array(["p", "q"]),
        "node_type_offset": np.array([0, 12, 24]),
        "edge_type": np.arange(70) % 2,
        "edge_type_names": np.array(["r", "s"]),
        "target_type": np.array(0),
        "valid_edge": np.zeros((2, 3), np.int64),
    }


def bare_arrays() -> dict[str, Any]:
    return {name: array for name, array in arrays().items() if name in ("edge_index", "num_nodes", "edge_time")}


def make_npz(folder: Path) -> None:
    np.savez(folder / "a.npz", **arrays())


def damage_npz(folder: Path, draw: random.Random) -> str:
    path = folder / "a.npz"
    if draw.random() < 0.35:
        return damage.damage_files(folder, draw)
    if draw.random() < 0.15:
        return _write_false_shape(path, draw)
    columns = draw.choice((arrays, sparse_arrays, bare_arrays))()
    name = draw.choice(list(columns))
    columns[name] = strange_array(np.asarray(columns[name]), draw)
    saver = np.savez if draw.random() < 0.5 else np.savez_compressed
    saver(path, **columns)
    return f"{name} is {columns[name].dtype} {list(columns[name].shape)} {str(columns[name].reshape(-1)[:3])[:60]}"


def _write_false_shape(path: Path, draw: random.Random) -> str:
    """Write a header whose shape exceeds any memory."""
    header = io.BytesIO()
    shape = draw.choice([(2, 10**12), (2**40, 3), (2**62,), (-1, 3)])
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(
            f"{draw.choice(['edge_attr', 'ids', 'y_multi', 'node_name'])}.npy", header.getvalue() + b"\0" * 64
        )
    return f"an array of {shape}"


def strange_array(array: Any, draw: random.Random) -> Any:
    changes: list[Callable[[], Any]] = [
        lambda: array.astype(np.float64) if array.dtype.kind in "iufb" else array,
        lambda: array.astype(str),
        lambda: array.astype(np.complex64) if array.dtype.kind in "iufb" else array.astype("S4"),
        lambda: array.astype(np.uint64) + np.uint64(2**63) if array.dtype.kind in "iu" else array,
        lambda: array.astype(np.int8) if array.dtype.kind in "iu" else array,
        lambda: array[..., :-1] if array.ndim else array.reshape(1),
        lambda: array[:0] if array.ndim else array.reshape(1, 1),
        lambda: np.zeros((0, 0)),
        lambda: np.zeros((2, 2, 2)),
        lambda: np.full(array.shape, draw.choice([np.nan, np.inf, -1e300])),
        lambda: np.full(array.shape, draw.choice([n for n in HUGE if isinstance(n, int) and abs(n) < 2**63])),
        lambda: np.array("x"),
        lambda: array.astype("datetime64[s]") if array.dtype.kind in "iu" else array,
        lambda: np.zeros(array.shape, dtype=[("a", "<i4")]),
        lambda: array.T,
    ]
    return draw.choice(changes)()


def read_in_memory(name: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        out = folder.with_name(f"{folder.name}-out")
        import_in_memory(folder / name, out, ImportRules(), overwrite=True)
        return read_graph(out)

    return read


def make_ogb(folder: Path) -> None:
    from tests.graph.test_ingest_ogb import binary_set, hetero_text, text_set

    for name, build in (("text", text_set), ("binary", binary_set), ("hetero", hetero_text)):
        build(folder / name)


def damage_ogb(folder: Path, draw: random.Random) -> str:
    chosen = draw.choice(("text", "binary", "hetero"))
    (folder / "chosen").write_text(chosen)
    packed = sorted((folder / chosen).rglob("*.csv.gz"))
    if draw.random() < 0.5:
        return damage.damage_files(folder / chosen, draw)
    path = draw.choice(packed)
    lines = gzip.decompress(path.read_bytes()).decode().split("\n")
    lines[draw.randrange(len(lines))] = draw.choice((*CELLS, "1,2,3", "0.5", "99999999999", "0", "a,b"))
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return f"{path.name} says {lines[:4]}"


def read_ogb(folder: Path) -> object:
    chosen = (folder / "chosen").read_text() if (folder / "chosen").exists() else "text"
    return read_in_memory(chosen)(folder)


def make_foreign(folder: Path) -> None:
    """Write files of PyG and NetworkX."""
    import networkx as nx
    from torch_geometric.data import Data

    plain = arrays()
    torch.save(
        Data(
            x=torch.from_numpy(plain["x"]),
            edge_index=torch.from_numpy(plain["edge_index"]),
            y=torch.from_numpy(plain["y"]),
        ),
        folder / "a.pt",
    )
    nx.write_graphml(nx.path_graph(5), folder / "a.graphml")
    nx.write_gml(nx.path_graph(5), folder / "a.gml")


def damage_foreign(folder: Path, draw: random.Random) -> str:
    path = draw.choice(sorted(folder.glob("a.*")))
    (folder / "chosen").write_text(path.name)
    operations = (damage.flip, damage.flip, damage.cut, damage.blank, damage.lengthen, damage.empty)
    return f"{draw.choice(operations)(path, draw)} {path.name}"


def read_foreign(folder: Path) -> object:
    chosen = (folder / "chosen").read_text() if (folder / "chosen").exists() else "a.pt"
    return read_in_memory(chosen)(folder)
