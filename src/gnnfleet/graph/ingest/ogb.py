"""Graphs in OGB's download layout of node and link datasets: NAME/{raw,split,mapping}, as CSV or binary.

OGB's files do not tell which graphs are undirected, only OGB's own table does. ``UNDIRECTED_DATASETS`` repeats it and
``undirected`` overrides it. Years of nodes and species are not read.
"""

from __future__ import annotations

import gzip
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv

from gnnfleet.errors import InputError
from gnnfleet.graph.graph import EDGE, NODE, Edges, EdgeType, Graph, Nodes, validated_edges, validated_nodes
from gnnfleet.graph.ingest.clean import clean_edges
from gnnfleet.graph.ingest.relations import (
    Array,
    ArraysFile,
    check_links,
    load_pt,
    locate_errors,
    split_relations,
    take_rows,
)

_log = logging.getLogger(__name__)
UNDIRECTED_DATASETS = ("products", "proteins", "ppa", "ppassoc", "collab", "ddi")
_SPLITS = {"train": "train", "valid": "val", "test": "test"}
_EDGE_DATA = {"weight": "edge_weight", "attr": "edge_feat", "time": "edge_year"}


def read_ogb(directory: str | Path, *, split: str | None = None, undirected: bool | None = None) -> Graph:
    """Read a downloaded dataset; raises InputError naming the file that is missing or invalid.

    ``split`` names one of several split schemes. Relations (``edge_reltype``) of a graph of one node type become edge
    types. The k negatives of a held-out link become k consecutive pairs.
    """
    directory = Path(directory)
    raw = directory / "raw"
    if not raw.is_dir():
        raise InputError(f"{directory} is not an OGB dataset: expected a directory raw in it, as OGB downloads it")
    name = directory.name
    source = open_raw(raw)
    scheme = _scheme(directory, split)
    counts = source.node_counts()
    nodes = {kind: _read_nodes(directory, source, scheme, kind, count) for kind, count in counts.items()}
    edges = _read_edges(source, scheme, counts)
    graph = Graph.of(nodes, edges, name=name)
    if undirected is None:
        undirected = (
            not graph.is_hetero
            and name.removeprefix("ogbn_").removeprefix("ogbl_").split("_")[0] in UNDIRECTED_DATASETS
        )
    return clean_edges(graph, undirected=True)[0] if undirected else graph


def _read_nodes(directory: Path, source: RawFiles, scheme: Path | None, kind: str, count: int) -> Nodes:
    folder = None if scheme is None else scheme if kind == NODE else scheme / kind
    masks: dict[str, torch.Tensor] = {}
    for file_name, name in _SPLITS.items():
        if folder is not None and (path := find_file(folder / f"{file_name}.csv")) is not None:
            rows = torch.from_numpy(read_numbers(path).reshape(-1))
            if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= count):
                raise InputError(f"{path} names node {int(rows.max())}, but there are {count} of type {kind}")
            masks[name] = rows
    with locate_errors(f"{source.raw}, nodes of type {kind}"):
        return validated_nodes(
            count,
            x=source.node(kind, "node_feat"),
            y=source.node(kind, "node_label"),
            split=masks or None,
            ids=_original_ids(directory / "mapping", kind, count),
        )


def _original_ids(mapping: Path, kind: str, count: int) -> pa.Array | None:
    """Read the second column of nodeidx2….csv.gz (or TYPE_entidx2name.csv.gz) if it is complete and unique."""
    patterns = ("nodeidx2*.csv*",) if kind == NODE else (f"{kind}_entidx2*.csv*", f"nodeidx2{kind}*.csv*")
    for path in sorted(path for pattern in patterns for path in mapping.glob(pattern) if path.is_file()):
        table = read_table(path)
        if table.num_columns < 2 or table.num_rows != count:
            continue
        rows, ids = table.column(0).to_numpy(), table.column(1).combine_chunks()
        if rows.dtype.kind != "i" or not np.array_equal(np.sort(rows), np.arange(count)):
            continue
        ids = ids.take(pa.array(np.argsort(rows)))
        if not pa.types.is_integer(ids.type):
            ids = ids.cast(pa.string())
        if ids.null_count == 0 and len(ids.unique()) == count:
            return ids
        _log.info("%s: ids are missing or repeated; row numbers serve as ids", path)
    return None


def _read_edges(source: RawFiles, scheme: Path | None, counts: Mapping[str, int]) -> dict[EdgeType, Edges]:
    tables: dict[EdgeType, tuple[Array, dict[str, Any]]] = {}
    relation_of: dict[int, EdgeType] = {}
    for kind in source.edge_kinds():
        pairs = source.pairs(kind)
        edge_data = {name: source.edge(kind, array) for name, array in _EDGE_DATA.items()}
        codes = source.edge(kind, "edge_reltype")
        if kind == EDGE and codes is not None:
            with locate_errors(source.raw):
                positions = split_relations(pairs, codes.reshape(-1), counts[NODE], "edge_reltype")
            tables |= {kind: (pairs[:, rows], take_rows(edge_data, rows)) for kind, rows in positions.items()}
            relation_of |= dict(enumerate(positions))
        else:
            tables[kind] = (pairs, edge_data)
            if codes is not None and codes.size:
                relation_of[int(codes.reshape(-1)[0])] = kind
    links = _read_links(scheme, list(tables), relation_of)
    edges = {}
    for kind, (pairs, edge_data) in tables.items():
        for end in (kind.src, kind.dst):
            if end not in counts:
                raise InputError(f"{source.raw}: edges {kind} need nodes of type {end!r}, found {', '.join(counts)}")
        with locate_errors(f"{source.raw}, edges {kind}"):
            num_src, num_dst = counts[kind.src], counts[kind.dst]
            check_links(links.get(kind, {}), num_src, num_dst)
            edges[kind] = validated_edges(pairs, num_src=num_src, num_dst=num_dst, links=links.get(kind), **edge_data)
    return edges


def _read_links(
    scheme: Path | None, kinds: list[EdgeType], relation_of: Mapping[int, EdgeType]
) -> dict[EdgeType, dict[str, Array]]:
    links: dict[EdgeType, dict[str, Array]] = {}
    for file_name, split in (("valid", "val"), ("test", "test")):
        path = None if scheme is None else scheme / f"{file_name}.pt"
        if path is None or not path.is_file():
            continue
        arrays = _load_arrays(path)
        if {"head", "relation", "tail"} <= arrays.keys():
            _put_triples(links, arrays, split, relation_of, path)
            continue
        if "edge" in arrays:
            pairs, negatives = arrays["edge"].T, arrays.get("edge_neg")
            negatives = None if negatives is None else negatives.T
        elif {"source_node", "target_node"} <= arrays.keys():
            source = arrays["source_node"].reshape(-1)
            pairs, negatives = np.stack([source, arrays["target_node"].reshape(-1)]), arrays.get("target_node_neg")
            if negatives is not None:
                negatives = np.stack([np.repeat(source, negatives.shape[1]), negatives.reshape(-1)])
        else:
            raise InputError(f"{path}: expected edge, source_node or head; found {', '.join(map(str, arrays))}")
        links.setdefault(kinds[0], {})[split] = pairs
        if negatives is not None:
            links[kinds[0]][f"{split}_neg"] = negatives
    return links


def _put_triples(
    links: dict[EdgeType, dict[str, Array]],
    arrays: Mapping[str, Any],
    split: str,
    relation_of: Mapping[int, EdgeType],
    path: Path,
) -> None:
    """Add the triples of a knowledge graph per relation. Their negatives are ignored: filtered ranking needs none."""
    relation = arrays["relation"].reshape(-1)
    pairs = np.stack([arrays["head"].reshape(-1), arrays["tail"].reshape(-1)])
    for code in np.unique(relation).tolist():
        if code not in relation_of:
            raise InputError(f"{path} has relation {code}, but no edge has it")
        links.setdefault(relation_of[code], {})[split] = pairs[:, relation == code]
    ignored = sorted(str(key) for key in arrays if str(key).endswith("_neg"))
    if ignored:
        _log.info("%s: ignored arrays: %s", path, ", ".join(ignored))


def _load_arrays(path: Path) -> dict[str, Any]:
    """Load the arrays of a split file; only tensors, numpy arrays and plain containers are allowed."""
    arrays = load_pt(
        path,
        _numpy_classes(),
        f"{path} needs more than tensors and arrays (or a newer pickle protocol than 2), and gnnfleet runs no "
        "code from a file: if you trust it, load it with weights_only=False and save it again with torch.save",
    )
    if not isinstance(arrays, dict):
        raise InputError(f"{path}: expected a dict of arrays, found a {type(arrays).__name__}")
    return {name: array.numpy() if isinstance(array, torch.Tensor) else array for name, array in arrays.items()}


def _numpy_classes() -> list[Any]:
    """Classes of a pickled array of numbers; old files name numpy.core, which numpy 2 calls numpy._core."""
    rebuild = np.empty(0).__reduce__()[0]
    scalar = np.int64(0).__reduce__()[0]
    dtypes = [type(np.dtype(code)) for code in "?bBhHiIlLqQefd"]
    old = [(rebuild, "numpy.core.multiarray._reconstruct"), (scalar, "numpy.core.multiarray.scalar")]
    return [np.ndarray, np.dtype, rebuild, scalar, *dtypes, *old]


def _scheme(directory: Path, name: str | None) -> Path | None:
    folders = sorted(path for path in (directory / "split").glob("*") if path.is_dir())
    names = [path.name for path in folders]
    if name is not None:
        if name not in names:
            raise InputError(f"{directory / 'split'} has no {name!r}; it has {', '.join(names) or 'nothing'}")
        return directory / "split" / name
    if len(folders) > 1:
        raise InputError(f"{directory / 'split'} has several schemes ({', '.join(names)}): choose one with split=")
    return folders[0] if folders else None


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
