"""The files of an OGB dataset: the arrays of its raw directory, as text or binary, and its CSV format."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv

from gnnfleet.errors import InputError
from gnnfleet.graph.graph import EDGE, NODE, EdgeType
from gnnfleet.graph.ingest.arrays_file import ArraysFile
from gnnfleet.graph.ingest.relations import Array

_DTYPES: dict[str, type[np.generic]] = {
    "node_feat": np.float32,
    "edge_feat": np.float32,
    "node_label": np.float64,
    "edge_weight": np.float64,
}


class TextFiles:
    """``edge.csv.gz`` and similar files; heterogeneous: one directory per relation and node type."""

    def __init__(self, raw: Path) -> None:
        self.raw = raw
        self.hetero = find_file(raw / "triplet-type-list.csv") is not None

    def node_counts(self) -> dict[str, int]:
        if not self.hetero:
            counts = read_numbers(_need(self.raw / "num-node-list.csv")).reshape(-1)
            _one_graph(counts, self.raw)
            return {NODE: int(counts[0])}
        table = read_table(_need(self.raw / "num-node-dict.csv"))
        for column in table.columns:
            _one_graph(column.to_numpy(), self.raw)
        return {str(kind): int(table[kind][0].as_py()) for kind in table.column_names}

    def edge_kinds(self) -> list[EdgeType]:
        if not self.hetero:
            return [EDGE]
        types = dict.fromkeys(EdgeType._fields, pa.string())
        table = read_table(_need(self.raw / "triplet-type-list.csv"), types=types)
        return [EdgeType(**row) for row in table.to_pylist()]

    def node(self, kind: str, name: str) -> Array | None:
        folder = "node-label" if name == "node_label" else "node-feat"
        return self._optional(self.raw / folder / kind if self.hetero else self.raw, name)

    def edge(self, kind: EdgeType, name: str) -> Array | None:
        return self._optional(self._relation(kind), name)

    def pairs(self, kind: EdgeType) -> Array:
        """[2, E] int64."""
        path = _need(self._relation(kind) / "edge.csv")
        pairs = read_numbers(path)
        if pairs.size and pairs.shape[1] != 2:
            raise InputError(f"{path}: expected two columns, found {pairs.shape[1]}")
        return pairs.reshape(-1, 2).T

    def _relation(self, kind: EdgeType) -> Path:
        return self.raw / "relations" / "___".join(kind) if self.hetero else self.raw

    def _optional(self, folder: Path, name: str) -> Array | None:
        # Features and labels are spelled with a hyphen, other arrays with an underscore.
        for spelling in (name.replace("_", "-"), name):
            if (path := find_file(folder / f"{spelling}.csv")) is not None:
                return read_numbers(path, _DTYPES.get(name, np.int64))
        return None


class BinaryFiles:
    """``data.npz`` and ``node-label.npz``; heterogeneous: one ``.npz`` per array with a key per type."""

    def __init__(self, raw: Path) -> None:
        self.raw = raw
        self.hetero = (raw / "edge_index_dict.npz").is_file()
        self._data = {} if self.hetero else self._load("data.npz", required=True)

    def node_counts(self) -> dict[str, int]:
        if self.hetero:
            counts = self._load("num_nodes_dict.npz", required=True)
        else:
            counts = {NODE: self._entry("num_nodes_list")}
        for count in counts.values():
            _one_graph(count.reshape(-1), self.raw)
        return {kind: int(count.reshape(-1)[0]) for kind, count in counts.items()}

    def edge_kinds(self) -> list[EdgeType]:
        return [EdgeType(*key.split("___")) for key in self._load("edge_index_dict.npz")] if self.hetero else [EDGE]

    def node(self, kind: str, name: str) -> Array | None:
        if name == "node_label":
            labels = self._load("node-label.npz")
            return labels.get(kind if self.hetero else name)
        return self._load(f"{name}_dict.npz").get(kind) if self.hetero else self._data.get(name)

    def edge(self, kind: EdgeType, name: str) -> Array | None:
        return self._load(f"{name}_dict.npz").get("___".join(kind)) if self.hetero else self._data.get(name)

    def pairs(self, kind: EdgeType) -> Array:
        """[2, E] int64."""
        pairs = self.edge(kind, "edge_index")
        return (self._entry("edge_index") if pairs is None else pairs).astype(np.int64)

    def _entry(self, name: str) -> Array:
        if name not in self._data:
            raise InputError(f"{self.raw / 'data.npz'} lacks the array {name}")
        return self._data[name]

    def _load(self, name: str, *, required: bool = False) -> dict[str, Array]:
        path = self.raw / name
        if not path.is_file():
            if required:
                raise InputError(f"{path} is missing: expected OGB's binary files there")
            return {}
        with ArraysFile(path) as file:
            return {name: file.read(name) for name in file.names}


RawFiles = TextFiles | BinaryFiles
"""Arrays of a raw directory by node type, or by edge type (``src___relation___dst`` on disk)."""


def open_raw(raw: Path) -> RawFiles:
    return BinaryFiles(raw) if any(raw.glob("*.npz")) else TextFiles(raw)


def _one_graph(counts: Array, raw: Path) -> None:
    if counts.size != 1:
        raise InputError(f"{raw} holds {counts.size} graphs, expected one: datasets of graph labels are not supported")


def find_file(path: Path) -> Path | None:
    """Find the file, compressed or not."""
    compressed = path.with_name(path.name + ".gz")
    return compressed if compressed.is_file() else path if path.is_file() else None


def _need(path: Path) -> Path:
    existing = find_file(path)
    if existing is None:
        raise InputError(f"{path}.gz is missing: expected OGB's files there")
    return existing


def read_table(path: Path, *, types: Mapping[str, pa.DataType] | None = None) -> pa.Table:
    """Read a CSV file with a header line, or with the columns of ``types`` and no header."""
    # Blocks of 16 MiB: a row of a thousand features in full precision exceeds pyarrow's default of 1 MiB.
    options = csv.ReadOptions(column_names=None if types is None else list(types), block_size=1 << 24)
    try:
        return csv.read_csv(path, read_options=options, convert_options=csv.ConvertOptions(column_types=types))
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} cannot be read as CSV: {error}") from error


def read_numbers(path: Path, dtype: type[np.generic] = np.int64) -> Array:
    """[rows, columns] of a file without a header, all of ``dtype``; empty cells are NaN."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            first = file.readline()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    columns = first.count(b",") + 1 if first.strip() else 0
    types = {f"column {i + 1}": pa.from_numpy_dtype(dtype) for i in range(columns)}
    table = read_table(path, types=types) if columns else pa.table({})
    numbers = np.empty((table.num_rows, columns), dtype=dtype)
    for i, column in enumerate(table.columns):
        if column.null_count and not np.issubdtype(dtype, np.floating):
            raise InputError(f"{path}, column {i + 1}: expected whole numbers, found empty cells")
        numbers[:, i] = column.to_numpy()
    return numbers
