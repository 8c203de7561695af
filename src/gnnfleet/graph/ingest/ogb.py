"""Graphs in the layout in which OGB's node and link sets are downloaded: NAME/{raw,split,mapping}, as CSV or binary.

Whether an edge stands for both directions is not written in the files but in OGB's own table; ``UNDIRECTED_DATASETS`` repeats it
for the sets where it does, and ``undirected`` overrules it. Years of nodes and species are not read.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from gnnfleet.errors import InputError
from gnnfleet.graph.graph import EDGE, NODE, Edges, EdgeType, Graph, Nodes, validated_edges, validated_nodes
from gnnfleet.graph.ingest.clean import clean_edges
from gnnfleet.graph.ingest.ogb_files import RawFiles, find_file, open_raw, read_numbers, read_table
from gnnfleet.graph.ingest.relations import Array, NodeTypeIndex, check_links, relation_names

_log = logging.getLogger(__name__)
UNDIRECTED_DATASETS = ("products", "proteins", "ppa", "ppassoc", "collab", "ddi")
_SPLITS = {"train": "train", "valid": "val", "test": "test"}
_EDGE_DATA = {"weight": "edge_weight", "attr": "edge_feat", "time": "edge_year"}


def read_ogb(directory: str | Path, *, split: str | None = None, undirected: bool | None = None) -> Graph:
    """The graph of one downloaded set; raises InputError naming the file that is missing or does not fit.

    ``split`` names one of several split schemes. Relations (``edge_reltype``) of a graph of one node type become edge
    types. Held-out links with k negatives each give k pairs in a row per link.
    """
    directory = Path(directory)
    raw = directory / "raw"
    if not raw.is_dir():
        raise InputError(f"{directory} is not an OGB set: expected a directory raw in it, as OGB downloads it")
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
    for word, name in _SPLITS.items():
        if folder is not None and (path := find_file(folder / f"{word}.csv")) is not None:
            rows = torch.from_numpy(read_numbers(path).reshape(-1))
            if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= count):
                raise InputError(f"{path} names node {int(rows.max())}, but there are {count} of type {kind}")
            masks[name] = rows
    try:
        return validated_nodes(
            count,
            x=source.node(kind, "node_feat"),
            y=source.node(kind, "node_label"),
            split=masks or None,
            ids=_original_ids(directory / "mapping", kind, count),
        )
    except InputError as error:
        raise InputError(f"{source.raw}, nodes of type {kind}: {error}") from error


def _original_ids(mapping: Path, kind: str, count: int) -> pa.Array | None:
    """The second column of nodeidx2….csv.gz (or TYPE_entidx2name.csv.gz), where it is whole and without repeats."""
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
        _log.info("%s: ids repeat or are missing, rows serve as ids", path)
    return None


def _read_edges(source: RawFiles, scheme: Path | None, counts: Mapping[str, int]) -> dict[EdgeType, Edges]:
    arrays: dict[EdgeType, dict[str, Any]] = {}
    relation_of: dict[int, EdgeType] = {}
    for kind in source.edge_kinds():
        data: dict[str, Any] = {"edge_index": source.pairs(kind)}
        data |= {word: source.edge(kind, name) for word, name in _EDGE_DATA.items()}
        codes = source.edge(kind, "edge_reltype")
        if kind == EDGE and codes is not None:
            arrays |= _cut_relations(data, codes.reshape(-1), counts[NODE])
            relation_of |= dict(enumerate(arrays))
        else:
            arrays[kind] = data
            if codes is not None and codes.size:
                relation_of[int(codes.reshape(-1)[0])] = kind
    links = _read_links(scheme, list(arrays), relation_of)
    edges = {}
    for kind, data in arrays.items():
        for end in (kind.src, kind.dst):
            if end not in counts:
                raise InputError(f"{source.raw}: edges {kind} need nodes of type {end!r}, found {', '.join(counts)}")
        try:
            num_src, num_dst = counts[kind.src], counts[kind.dst]
            check_links(links.get(kind, {}), num_src, num_dst)
            edges[kind] = validated_edges(
                data.pop("edge_index"), num_src=num_src, num_dst=num_dst, links=links.get(kind), **data
            )
        except InputError as error:
            raise InputError(f"{source.raw}, edges {kind}: {error}") from error
    return edges


def _cut_relations(data: dict[str, Any], codes: Array, count: int) -> dict[EdgeType, dict[str, Any]]:
    names = relation_names(int(codes.max(initial=-1)) + 1)
    pairs = data["edge_index"]
    if len(codes) != pairs.shape[1] or codes.min(initial=0) < 0 or pairs.max(initial=-1) >= count:
        raise InputError(f"edge_reltype must be {pairs.shape[1]} whole numbers from 0, edges must name {count} nodes")
    positions = dict(NodeTypeIndex.single(count).cut(pairs, codes, names))
    none = np.empty(0, dtype=np.int64)
    cut = {}
    for kind in (EdgeType(NODE, name, NODE) for name in names):
        own = positions.get(kind, none)
        cut[kind] = {
            word: None if values is None else values[:, own] if word == "edge_index" else values[own]
            for word, values in data.items()
        }
    return cut


def _read_links(
    scheme: Path | None, kinds: list[EdgeType], relation_of: Mapping[int, EdgeType]
) -> dict[EdgeType, dict[str, Array]]:
    links: dict[EdgeType, dict[str, Array]] = {}
    for word, name in (("valid", "val"), ("test", "test")):
        path = None if scheme is None else scheme / f"{word}.pt"
        if path is None or not path.is_file():
            continue
        held = _load_pt(path)
        if "edge" in held:
            found = {name: held["edge"].T}
            if "edge_neg" in held:
                found[f"{name}_neg"] = held["edge_neg"].T
            links.setdefault(kinds[0], {}).update(found)
        elif "source_node" in held and "target_node" in held:
            source = held["source_node"].reshape(-1)
            found = {name: np.stack([source, held["target_node"].reshape(-1)])}
            if "target_node_neg" in held:
                negatives = held["target_node_neg"]
                found[f"{name}_neg"] = np.stack([np.repeat(source, negatives.shape[1]), negatives.reshape(-1)])
            links.setdefault(kinds[0], {}).update(found)
        elif {"head", "relation", "tail"} <= held.keys():
            _put_triples(links, held, name, relation_of, path)
        else:
            raise InputError(f"{path}: expected edge, source_node or head; found {', '.join(map(str, held))}")
    return links


def _put_triples(
    links: dict[EdgeType, dict[str, Array]],
    held: Mapping[str, Any],
    name: str,
    relation_of: Mapping[int, EdgeType],
    path: Path,
) -> None:
    """Triples of a knowledge graph, per relation. Their ready-made negatives are left: filtered ranking needs none."""
    relation = held["relation"].reshape(-1)
    pairs = np.stack([held["head"].reshape(-1), held["tail"].reshape(-1)])
    for code in np.unique(relation).tolist():
        if code not in relation_of:
            raise InputError(f"{path} has relation {code}, but no edge has it")
        links.setdefault(relation_of[code], {})[name] = pairs[:, relation == code]
    ignored = sorted(str(key) for key in held if str(key).endswith("_neg"))
    if ignored:
        _log.info("%s: ignored: %s", path, ", ".join(ignored))


def _load_pt(path: Path) -> dict[str, Any]:
    """Arrays of a split file; only tensors, numpy arrays and plain containers are loaded."""
    try:
        with torch.serialization.safe_globals(_numpy_classes()):
            held = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} needs more than tensors and arrays (or a newer pickle protocol than 2), and gnnfleet runs no "
            "code from a file: if you trust it, load it with weights_only=False and save it again with torch.save"
        ) from error
    except Exception as error:  # a damaged file fails in many ways inside the unpickler
        raise InputError(f"{path} cannot be read as a .pt file: {error}") from error
    if not isinstance(held, dict):
        raise InputError(f"{path}: expected a dict of arrays, found a {type(held).__name__}")
    return {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in held.items()}


def _numpy_classes() -> list[Any]:
    """What a pickled array of numbers is made of; old files name numpy.core, which numpy 2 calls numpy._core."""
    rebuild = np.empty(0).__reduce__()[0]
    scalar = np.int64(0).__reduce__()[0]
    dtypes = [type(np.dtype(code)) for code in "?bBhHiIlLqQefd"]
    old = [(rebuild, "numpy.core.multiarray._reconstruct"), (scalar, "numpy.core.multiarray.scalar")]
    return [np.ndarray, np.dtype, rebuild, scalar, *dtypes, *old]


def _scheme(directory: Path, wanted: str | None) -> Path | None:
    folders = sorted(path for path in (directory / "split").glob("*") if path.is_dir())
    names = [path.name for path in folders]
    if wanted is not None:
        if wanted not in names:
            raise InputError(f"{directory / 'split'} has no {wanted!r}; it has {', '.join(names) or 'nothing'}")
        return directory / "split" / wanted
    if len(folders) > 1:
        raise InputError(f"{directory / 'split'} has several schemes ({', '.join(names)}): choose one with split=")
    return folders[0] if folders else None
