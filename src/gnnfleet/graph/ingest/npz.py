"""Graphs in ``.npz`` files: one list of edges and further plain arrays, read without pickle.

edge_index [2, E]                         the only required array; row 0 source, row 1 destination
x, or x_data/x_indices/x_indptr/x_shape   features, dense or compressed rows; per node type x__TYPE…
y, y_multi, class_names                   labels
train_mask, train_masks, train_mask_20    one split, [K, N] splits, further splits; likewise val and test
node_type(_names, _offset), target_type   node types; ids in the file are numbered across all types
edge_type(_names), edge_weight/attr/time  relations and data of edges
valid_edge, valid_edge_neg, …_edge_index  held-out links with …_type; likewise test
num_nodes, num_relations, ids, node_name  sizes and original ids; other arrays are ignored and logged
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from gnnfleet.errors import InputError
from gnnfleet.graph.graph import (
    SPLITS,
    Edges,
    EdgeType,
    Graph,
    Nodes,
    labelled_rows,
    masks_to_split,
    validated_edges,
    validated_nodes,
)
from gnnfleet.graph.ingest.clean import is_undirected
from gnnfleet.graph.ingest.relations import (
    SINGLE_RELATION,
    Array,
    ArraysFile,
    NodeTypeIndex,
    locate_errors,
    relation_names,
    take_rows,
)

_log = logging.getLogger(__name__)
_PER_NODE = ("x", "y", "y_multi", "train_mask", "val_mask", "test_mask", "ids", "node_name", "node_type")
MAX_COLUMNS = 1 << 20


class _Arrays(ArraysFile):
    """The arrays of a graph file; caches the arrays that were read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.used: dict[str, Array] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def get(self, name: str) -> Array | None:
        if name not in self.names:
            return None
        if name not in self.used:
            self.used[name] = self.read(name)
        return self.used[name]

    def need(self, name: str, purpose: str) -> Array:
        array = self.get(name)
        if array is None:
            raise InputError(f"{self.path} lacks the array {name}, {purpose}")
        return array

    def integer(self, name: str) -> int | None:
        array = self.get(name)
        if array is None:
            return None
        if array.size != 1 or array.dtype.kind not in "iu":
            self.fail(name, f"must be one whole number, found {array.dtype} {list(array.shape)}")
        return int(array.reshape(-1)[0])

    def strings(self, name: str) -> list[str] | None:
        array = self.get(name)
        if array is None:
            return None
        if array.dtype.kind == "S":
            array = np.char.decode(array, "utf-8")
        return [str(text) for text in array.reshape(-1).tolist()]

    def codes(self, name: str, *, length: int, below: int | None) -> Array | None:
        """[length] whole numbers from 0, less than ``below`` if it is set."""
        array = self.get(name)
        if array is None:
            return None
        if array.shape != (length,) or array.dtype.kind not in "iu":
            self.fail(name, f"must be {length} whole numbers, found {array.dtype} {list(array.shape)}")
        array = array.astype(np.int64)
        if length and (array.min() < 0 or (below is not None and array.max() >= below)):
            wrong = array.min() if array.min() < 0 else array.max()
            self.fail(name, f"must be from 0{'' if below is None else f' to {below - 1}'}, found {wrong}")
        return array

    def pairs(self, name: str, count: int) -> Array | None:
        """[2, n] node numbers below ``count``."""
        array = self.get(name)
        if array is None:
            return None
        if array.ndim != 2 or array.shape[0] != 2 or array.dtype.kind not in "iu":
            self.fail(name, f"must be whole numbers of shape [2, n], found {array.dtype} {list(array.shape)}")
        if array.size and (array.min() < 0 or array.max() >= count):
            wrong = array.min() if array.min() < 0 else array.max()
            self.fail(name, f"names node {wrong}, but there are {count} nodes (0 to {count - 1})")
        return array.astype(np.int64)

    def fail(self, name: str, problem: str) -> NoReturn:
        raise InputError(f"{self.path}: {name} {problem}")


def read_npz(path: str | Path) -> Graph:
    """Read a graph; raises InputError naming the file and the array that is missing or invalid."""
    path = Path(path)
    with _Arrays(path) as file:
        kinds = _node_kinds(file, _count_nodes(file))
        nodes = _read_nodes(file, kinds)
        edges = _read_edges(file, kinds)
        ignored = sorted(file.names.keys() - file.used.keys())
    if ignored:
        _log.info("%s: ignored arrays: %s", path, ", ".join(ignored))
    return Graph.of(nodes, edges, name=path.stem, undirected=is_undirected(edges))


def _count_nodes(file: _Arrays) -> int:
    """Determine the number of nodes on which all arrays agree, by default from the highest number in edge_index."""
    counts: dict[str, int] = {}
    if (num_nodes := file.integer("num_nodes")) is not None:
        counts["num_nodes"] = num_nodes
    if (shape := file.get("x_shape")) is not None and shape.size:
        counts["x_shape"] = int(shape.reshape(-1)[0])
    for name in _PER_NODE:
        if (array := file.get(name)) is not None and array.ndim:
            counts[name] = array.shape[0]
    for split in SPLITS:
        if (masks := file.get(f"{split}_masks")) is not None and masks.ndim:
            counts[f"{split}_masks"] = masks.shape[-1]
    if (offset := file.get("node_type_offset")) is not None and offset.size:
        counts["node_type_offset"] = int(offset[-1])
    if not counts:
        edges = file.need("edge_index", "the edges as [2, E] whole numbers")
        return int(edges.max()) + 1 if edges.size else 0
    first, expected = next(iter(counts.items()))
    for name, count in counts.items():
        if count != expected:
            file.fail(name, f"covers {count} nodes, but {first} has {expected}")
    return expected


def _node_kinds(file: _Arrays, count: int) -> NodeTypeIndex:
    names, offset = file.strings("node_type_names"), file.get("node_type_offset")
    code = file.codes("node_type", length=count, below=None if names is None else len(names))
    if code is None and offset is None:
        return NodeTypeIndex.single(count)
    if offset is not None:
        if (np.diff(offset) < 0).any() or not offset.size or offset[0] != 0:
            file.fail("node_type_offset", "must be offsets that increase from 0")
        ranges = np.repeat(np.arange(offset.size - 1), np.diff(offset))
        if code is not None and not np.array_equal(code, ranges):
            file.fail("node_type", "contradicts node_type_offset")
        code = ranges
    assert code is not None
    if names is None:
        names = [f"type{i}" for i in range(int(code.max(initial=-1)) + 1 if offset is None else offset.size - 1)]
    if len(set(names)) != len(names) or (offset is not None and len(names) != offset.size - 1):
        file.fail("node_type_names", "must be different names, one per node type")
    return NodeTypeIndex.of(names, code)


def _read_nodes(file: _Arrays, kinds: NodeTypeIndex) -> dict[str, Nodes]:
    count = len(kinds.code)
    several = len(kinds.names) > 1
    x, y, split = _features(file, "x"), _labels(file, count), _split(file, count)
    classes = file.strings("class_names") or []
    ids = file.get("ids") if "ids" in file else _names_of_nodes(file)
    target = _target(file, kinds)
    tables: dict[str, Nodes] = {}
    for name, members in zip(kinds.names, kinds.members, strict=True):
        type_x, type_ids = _features(file, f"x__{name}"), file.get(f"ids__{name}")
        if type_x is None and x is not None:
            type_x = x[members] if several else x
        if type_ids is None:
            type_ids = ids[members] if ids is not None else members if several else None
        labelled = y is not None and (
            name == target if target is not None else not several or labelled_rows(torch.from_numpy(y[members])).any()
        )
        has_split = split is not None and (not several or bool((split[:, members] >= 0).any()))
        with locate_errors(f"{file.path}, nodes of type {name}"):
            tables[name] = validated_nodes(
                len(members),
                x=type_x,
                y=y[members] if labelled and y is not None else None,
                split=split[:, members] if has_split and split is not None else None,
                ids=type_ids if type_ids is None or type_ids.dtype.kind in "iu" else type_ids.tolist(),
                classes=classes if labelled else (),
            )
    return tables


def _target(file: _Arrays, kinds: NodeTypeIndex) -> str | None:
    """The node type with labels, given by number or name."""
    array = file.get("target_type")
    if array is None or len(kinds.names) == 1:
        return None
    target = array.reshape(-1)[0].item() if array.size == 1 else None
    if isinstance(target, int) and 0 <= target < len(kinds.names):
        return kinds.names[target]
    if target not in kinds.names:
        file.fail("target_type", f"must name one of {', '.join(kinds.names)}, found {target!r}")
    return str(target)


def _names_of_nodes(file: _Arrays) -> Array | None:
    """Node names, which serve as ids only if they are unique."""
    names = file.strings("node_name")
    return np.array(names) if names is not None and len(set(names)) == len(names) else None


def _features(file: _Arrays, name: str) -> Array | None:
    """Read features, dense as stored or compressed rows as dense float32."""
    if name in file or f"{name}_data" not in file:
        return file.get(name)
    purpose = f"which {name}_data needs"
    values = file.need(f"{name}_data", purpose)
    indices, indptr, shape = (file.need(f"{name}_{part}", purpose) for part in ("indices", "indptr", "shape"))
    for part, array in (("indices", indices), ("indptr", indptr), ("shape", shape)):
        if array.dtype.kind not in "iu" or array.ndim != 1:
            file.fail(f"{name}_{part}", f"must be a list of whole numbers, found {array.dtype} {list(array.shape)}")
    if shape.shape != (2,) or int(shape.min()) < 0:
        file.fail(f"{name}_shape", "must be two sizes")
    if values.ndim != 1 or values.dtype.kind not in "iufb":
        file.fail(f"{name}_data", f"must be a list of numbers, found {values.dtype} {list(values.shape)}")
    rows, columns = (int(size) for size in shape)
    if indptr.shape != (rows + 1,) or indptr[0] != 0 or indptr[-1] != len(values) or (np.diff(indptr) < 0).any():
        file.fail(f"{name}_indptr", f"must be {rows + 1} offsets that increase from 0 to {len(values)}")
    if len(indices) != len(values) or (len(values) and (int(indices.min()) < 0 or int(indices.max()) >= columns)):
        file.fail(f"{name}_indices", f"must be {len(values)} columns from 0 to {columns - 1}")
    if columns > MAX_COLUMNS:
        file.fail(f"{name}_shape", f"has {columns} features, but at most {MAX_COLUMNS} can be made dense: choose some")
    dense = np.zeros((rows, columns), dtype=np.float32)
    dense[np.repeat(np.arange(rows), np.diff(indptr)), indices.astype(np.int64)] = values
    return dense


def _labels(file: _Arrays, count: int) -> Array | None:
    name = "y" if "y" in file else "y_multi"
    y = file.get(name)
    if y is not None and (y.ndim not in (1, 2) or y.shape[0] != count or y.dtype.kind not in "iufb"):
        file.fail(name, f"must be {count} class numbers or rows of 0 and 1, found {y.dtype} {list(y.shape)}")
    return y


def _split(file: _Arrays, count: int) -> Array | None:
    """[K, N] codes: ``train_masks`` if present, else ``train_mask`` and all different ``train_mask_<number>``."""
    suffixes = sorted({int(m[1]) for m in (re.fullmatch(r"train_mask_(\d+)", n) for n in file.names) if m})
    if "train_masks" in file:
        splits = [_codes(file, {name: file.need(f"{name}_masks", "which train_masks needs") for name in SPLITS}, count)]
    else:
        splits = [_codes(file, _masks(file, ending), count) for ending in ("", *(f"_{n}" for n in suffixes))]
    rows: list[Array] = []
    for codes in splits:
        if codes is not None and not any(np.array_equal(codes, row) for row in rows):
            rows.append(codes)
    _masks(file, "")  # never reported as ignored
    return np.concatenate(rows) if rows else None


def _masks(file: _Arrays, ending: str) -> dict[str, Array]:
    return {name: mask for name in SPLITS if (mask := file.get(f"{name}_mask{ending}")) is not None}


def _codes(file: _Arrays, masks: dict[str, Array], count: int) -> Array | None:
    for name, mask in masks.items():
        if mask.dtype != np.bool_ or mask.shape[-1:] != (count,):
            file.fail(f"the {name} mask", f"must be booleans for {count} nodes, found {mask.dtype} {list(mask.shape)}")
    with locate_errors(file.path):
        return (
            masks_to_split({n: torch.from_numpy(mask) for n, mask in masks.items()}, count).numpy() if masks else None
        )


def _read_edges(file: _Arrays, kinds: NodeTypeIndex) -> dict[EdgeType, Edges]:
    file.need("edge_index", "the edges as [2, E] whole numbers")
    pairs = file.pairs("edge_index", len(kinds.code))
    assert pairs is not None
    relations = _relations(file)
    code = file.codes("edge_type", length=pairs.shape[1], below=len(relations))
    code = np.zeros(pairs.shape[1], dtype=np.int64) if code is None else code
    edge_data = {name: file.get(f"edge_{name}") for name in ("weight", "attr", "time")}
    for name, values in edge_data.items():
        if values is not None and values.shape[:1] != (pairs.shape[1],):
            file.fail(
                f"edge_{name}", f"must have one row for each of {pairs.shape[1]} edges, found {list(values.shape)}"
            )
    positions = dict(kinds.split_pairs(pairs, code, relations))
    declared = [kind for name in relations if (kind := kinds.declared(name)) and kind not in positions]
    links = _read_links(file, kinds, relations, [*positions, *declared])
    empty = np.empty(0, dtype=np.int64)
    edges: dict[EdgeType, Edges] = {}
    for kind in dict.fromkeys([*positions, *declared, *links]):
        rows = positions.get(kind, empty)
        with locate_errors(f"{file.path}, edges {kind}"):
            edges[kind] = validated_edges(
                kinds.row[pairs[:, rows]],
                num_src=len(kinds.members[kinds.names.index(kind.src)]),
                num_dst=len(kinds.members[kinds.names.index(kind.dst)]),
                links=links.get(kind),
                **take_rows(edge_data, rows),
            )
    return edges


def _relations(file: _Arrays) -> list[str]:
    names, count = file.strings("edge_type_names"), file.integer("num_relations")
    if names is not None:
        if len(set(names)) != len(names) or not all(names):
            file.fail("edge_type_names", "must be different names, one per relation")
        return names
    used = [file.get(name) for name in ("edge_type", "valid_edge_type", "test_edge_type")]
    if count is None and used[0] is None:
        return [SINGLE_RELATION]
    highest = max((int(codes.max(initial=-1)) for codes in used if codes is not None), default=-1)
    return relation_names(highest + 1 if count is None else count)


def _read_links(
    file: _Arrays, kinds: NodeTypeIndex, relations: list[str], edge_types: list[EdgeType]
) -> dict[EdgeType, dict[str, Array]]:
    """Held-out pairs per edge type. Pairs without a relation belong to the first edge type between their node types."""
    links: dict[EdgeType, dict[str, Array]] = {}
    for split, prefix in (("val", "valid"), ("test", "test")):
        for name, stem in ((split, f"{prefix}_edge"), (f"{split}_neg", f"{prefix}_edge_neg")):
            array = stem if stem in file else f"{stem}_index"
            pairs = file.pairs(array, len(kinds.code))
            if pairs is None:
                continue
            code = file.codes(f"{stem}_type", length=pairs.shape[1], below=len(relations))
            typed = code is not None
            code = np.zeros(pairs.shape[1], dtype=np.int64) if code is None else code
            for kind, rows in kinds.split_pairs(pairs, code, relations):
                if not typed:
                    matches = [other for other in edge_types if (other.src, other.dst) == (kind.src, kind.dst)]
                    if not matches:
                        file.fail(array, f"pairs {kind.src} with {kind.dst}, but no edge type does")
                    kind = matches[0]
                links.setdefault(kind, {})[name] = kinds.row[pairs[:, rows]]
    return links
