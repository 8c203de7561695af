"""Graphs in ``.npz`` files: one list of edges and plain arrays beside it, read without pickle.

edge_index [2, E]                         the only array that must be there; row 0 source, row 1 destination
x, or x_data/x_indices/x_indptr/x_shape   features, dense or compressed rows; per node type x__TYPE…
y, y_multi, class_names                   labels
train_mask, train_masks, train_mask_20    one split, [K, N] splits, further splits; likewise val and test
node_type(_names, _offset), target_type   node types; ids in the file run through all types
edge_type(_names), edge_weight/attr/time  relations and data of edges
valid_edge, valid_edge_neg, …_edge_index  held-out links with …_type; likewise test
num_nodes, num_relations, ids, node_name  sizes and original ids; anything else is ignored and logged
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, Self

import numpy as np

from gnnfleet.errors import InputError
from gnnfleet.graph.graph import Edges, EdgeType, Graph, Nodes, validated_edges, validated_nodes
from gnnfleet.graph.ingest.arrays_file import ArraysFile
from gnnfleet.graph.ingest.clean import is_undirected
from gnnfleet.graph.ingest.relations import SINGLE_RELATION, Array, NodeTypeIndex, relation_names

_log = logging.getLogger(__name__)
_PER_NODE = ("x", "y", "y_multi", "train_mask", "val_mask", "test_mask", "ids", "node_name", "node_type")
MAX_COLUMNS = 1 << 20
_SPLITS = ("train", "val", "test")


class _Arrays:
    """The arrays of one file; remembers which were asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.used: set[str] = set()
        self._file = ArraysFile(path)
        self._cache: dict[str, Array] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file.names

    def names(self) -> list[str]:
        return list(self._file.names)

    def get(self, name: str) -> Array | None:
        if name not in self._file.names:
            return None
        self.used.add(name)
        if name not in self._cache:
            self._cache[name] = self._file.read(name)
        return self._cache[name]

    def need(self, name: str, because: str) -> Array:
        array = self.get(name)
        if array is None:
            raise InputError(f"{self.path} lacks the array {name}, {because}")
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
        return [str(item) for item in array.reshape(-1).tolist()]

    def codes(self, name: str, *, length: int, below: int | None) -> Array | None:
        """[length] whole numbers from 0, under ``below`` when that is known."""
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

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Put the file in front of what the checks of a graph say."""
        try:
            yield
        except InputError as error:
            raise InputError(f"{self.path}, {what}: {error}") from error


def read_npz(path: str | Path) -> Graph:
    """The graph of one file; raises InputError naming the file and the array that is missing or does not fit."""
    path = Path(path)
    with _Arrays(path) as file:
        kinds = _node_kinds(file, _count_nodes(file))
        nodes = _read_nodes(file, kinds)
        edges = _read_edges(file, kinds)
        ignored = sorted(set(file.names()) - file.used)
    if ignored:
        _log.info("%s: arrays without a meaning here, ignored: %s", path, ", ".join(ignored))
    return Graph.of(nodes, edges, name=path.stem, undirected=is_undirected(edges))


def _count_nodes(file: _Arrays) -> int:
    """The number of nodes on which all arrays agree; without any of them, one more than the highest in edge_index."""
    found: dict[str, int] = {}
    if (given := file.integer("num_nodes")) is not None:
        found["num_nodes"] = given
    if (shape := file.get("x_shape")) is not None and shape.size:
        found["x_shape"] = int(shape.reshape(-1)[0])
    for name in _PER_NODE:
        if (array := file.get(name)) is not None and array.ndim:
            found[name] = array.shape[0]
    for split in _SPLITS:
        if (masks := file.get(f"{split}_masks")) is not None and masks.ndim:
            found[f"{split}_masks"] = masks.shape[-1]
    if (offset := file.get("node_type_offset")) is not None and offset.size:
        found["node_type_offset"] = int(offset[-1])
    if not found:
        edges = file.need("edge_index", "the edges as [2, E] whole numbers")
        return int(edges.max()) + 1 if edges.size else 0
    first, count = next(iter(found.items()))
    for name, other in found.items():
        if other != count:
            file.fail(name, f"covers {other} nodes, but {first} says {count}")
    return count


def _node_kinds(file: _Arrays, count: int) -> NodeTypeIndex:
    names, offset = file.strings("node_type_names"), file.get("node_type_offset")
    code = file.codes("node_type", length=count, below=None if names is None else len(names))
    if code is None and offset is None:
        return NodeTypeIndex.single(count)
    if offset is not None:
        if (np.diff(offset) < 0).any() or not offset.size or offset[0] != 0:
            file.fail("node_type_offset", "must grow from 0")
        ranges = np.repeat(np.arange(offset.size - 1), np.diff(offset))
        if code is not None and not np.array_equal(code, ranges):
            file.fail("node_type", "disagrees with node_type_offset")
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
        own_x, own_ids = _features(file, f"x__{name}"), file.get(f"ids__{name}")
        if own_ids is None:
            own_ids = ids[members] if ids is not None else members if several else None
        labelled = y is not None and (name == target if target is not None else not several or (y[members] >= 0).any())
        parted = split is not None and (not several or bool((split[:, members] >= 0).any()))
        with file.naming(f"nodes of type {name}"):
            tables[name] = validated_nodes(
                len(members),
                x=own_x if own_x is not None else None if x is None else x[members] if several else x,
                y=y[members] if labelled and y is not None else None,
                split=split[:, members] if parted and split is not None else None,
                ids=own_ids if own_ids is None or own_ids.dtype.kind in "iu" else own_ids.tolist(),
                classes=classes if labelled else (),
            )
    return tables


def _target(file: _Arrays, kinds: NodeTypeIndex) -> str | None:
    """The node type that labels belong to, given by number or name."""
    target = file.get("target_type")
    if target is None or len(kinds.names) == 1:
        return None
    value = target.reshape(-1)[0].item() if target.size == 1 else None
    if isinstance(value, int) and 0 <= value < len(kinds.names):
        return kinds.names[value]
    if value not in kinds.names:
        file.fail("target_type", f"must name one of {', '.join(kinds.names)}, found {value!r}")
    return str(value)


def _names_of_nodes(file: _Arrays) -> Array | None:
    """Names serve as ids only where no two nodes share one."""
    names = file.strings("node_name")
    return np.array(names) if names is not None and len(set(names)) == len(names) else None


def _features(file: _Arrays, name: str) -> Array | None:
    """Dense features as stored, or compressed rows as dense float32."""
    if name in file or f"{name}_data" not in file:
        return file.get(name)
    why = f"which {name}_data needs"
    data = file.need(f"{name}_data", why)
    indices, indptr, shape = (file.need(f"{name}_{part}", why) for part in ("indices", "indptr", "shape"))
    for part, array in (("indices", indices), ("indptr", indptr), ("shape", shape)):
        if array.dtype.kind not in "iu" or array.ndim != 1:
            file.fail(f"{name}_{part}", f"must be a list of whole numbers, found {array.dtype} {list(array.shape)}")
    if shape.shape != (2,) or int(shape.min()) < 0:
        file.fail(f"{name}_shape", "must be two sizes")
    if data.ndim != 1 or data.dtype.kind not in "iufb":
        file.fail(f"{name}_data", f"must be a list of numbers, found {data.dtype} {list(data.shape)}")
    rows, columns = (int(size) for size in shape)
    if indptr.shape != (rows + 1,) or indptr[0] != 0 or indptr[-1] != len(data) or (np.diff(indptr) < 0).any():
        file.fail(f"{name}_indptr", f"must be {rows + 1} offsets growing from 0 to {len(data)}")
    if len(indices) != len(data) or (len(data) and (int(indices.min()) < 0 or int(indices.max()) >= columns)):
        file.fail(f"{name}_indices", f"must be {len(data)} columns from 0 to {columns - 1}")
    if columns > MAX_COLUMNS:
        file.fail(f"{name}_shape", f"says {columns} features, at most {MAX_COLUMNS} are made dense: choose some")
    dense = np.zeros((rows, columns), dtype=np.float32)
    dense[np.repeat(np.arange(rows), np.diff(indptr)), indices.astype(np.int64)] = data
    return dense


def _labels(file: _Arrays, count: int) -> Array | None:
    name = "y" if "y" in file else "y_multi"
    y = file.get(name)
    if y is not None and (y.ndim not in (1, 2) or y.shape[0] != count or y.dtype.kind not in "iufb"):
        file.fail(name, f"must be {count} class numbers or rows of 0 and 1, found {y.dtype} {list(y.shape)}")
    return y


def _split(file: _Arrays, count: int) -> Array | None:
    """[K, N] codes: ``train_masks`` when there, else ``train_mask`` and every ``train_mask_<number>`` unlike it."""
    suffixes = sorted({int(m[1]) for m in (re.fullmatch(r"train_mask_(\d+)", n) for n in file.names()) if m})
    if "train_masks" in file:
        masks = [{split: file.need(f"{split}_masks", "which train_masks needs") for split in _SPLITS}]
    else:
        masks = [_mask_family(file, "_mask"), *(_mask_family(file, f"_mask_{n}") for n in suffixes)]
    rows: list[Array] = []
    for family in masks:
        codes = _codes_of(file, family, count)
        if codes is not None and not any(np.array_equal(codes, row) for row in rows):
            rows.append(codes)
    for split in _SPLITS:
        file.get(f"{split}_mask")
    return np.concatenate(rows) if rows else None


def _mask_family(file: _Arrays, ending: str) -> dict[str, Array]:
    found = {split: file.get(f"{split}{ending}") for split in _SPLITS}
    return {split: mask for split, mask in found.items() if mask is not None}


def _codes_of(file: _Arrays, family: dict[str, Array], count: int) -> Array | None:
    codes: Array | None = None
    for number, split in enumerate(_SPLITS):
        if split not in family:
            continue
        mask = np.atleast_2d(family[split])
        codes = np.full(mask.shape, -1, dtype=np.int8) if codes is None else codes
        if mask.dtype != np.bool_ or mask.shape[-1] != count or mask.shape != codes.shape:
            file.fail(f"the {split} mask", f"must be booleans for {count} nodes, found {mask.dtype} {list(mask.shape)}")
        if (codes[mask] != -1).any():
            file.fail(f"the {split} mask", "overlaps another one: a node belongs to one split only")
        codes[mask] = number
    return codes


def _read_edges(file: _Arrays, kinds: NodeTypeIndex) -> dict[EdgeType, Edges]:
    pairs = file.pairs("edge_index", len(kinds.code))
    if pairs is None:
        file.need("edge_index", "the edges as [2, E] whole numbers")
    assert pairs is not None
    relations = _relations(file)
    code = file.codes("edge_type", length=pairs.shape[1], below=len(relations))
    code = np.zeros(pairs.shape[1], dtype=np.int64) if code is None else code
    data = {name: file.get(f"edge_{name}") for name in ("weight", "attr", "time")}
    for name, values in data.items():
        if values is not None and values.shape[:1] != (pairs.shape[1],):
            file.fail(
                f"edge_{name}", f"must have one row for each of {pairs.shape[1]} edges, found {list(values.shape)}"
            )
    positions = dict(kinds.cut(pairs, code, relations))
    declared = [kind for name in relations if (kind := kinds.declared(name)) and kind not in positions]
    links = _read_links(file, kinds, relations, [*positions, *declared])
    empty = np.empty(0, dtype=np.int64)
    edges: dict[EdgeType, Edges] = {}
    for kind in dict.fromkeys([*positions, *declared, *links]):
        own = positions.get(kind, empty)
        with file.naming(f"edges {kind}"):
            edges[kind] = validated_edges(
                kinds.row[pairs[:, own]],
                num_src=len(kinds.members[kinds.names.index(kind.src)]),
                num_dst=len(kinds.members[kinds.names.index(kind.dst)]),
                links=links.get(kind),
                **{name: None if values is None else values[own] for name, values in data.items()},
            )
    return edges


def _relations(file: _Arrays) -> list[str]:
    names, given = file.strings("edge_type_names"), file.integer("num_relations")
    if names is not None:
        if len(set(names)) != len(names) or not all(names):
            file.fail("edge_type_names", "must be different names, one per relation")
        return names
    used = [file.get(name) for name in ("edge_type", "valid_edge_type", "test_edge_type")]
    if given is None and used[0] is None:
        return [SINGLE_RELATION]
    highest = max((int(codes.max(initial=-1)) for codes in used if codes is not None), default=-1)
    return relation_names(highest + 1 if given is None else given)


def _read_links(
    file: _Arrays, kinds: NodeTypeIndex, relations: list[str], known: list[EdgeType]
) -> dict[EdgeType, dict[str, Array]]:
    """Held-out pairs per edge type. Pairs without a relation belong to the first edge type between their node types."""
    links: dict[EdgeType, dict[str, Array]] = {}
    for split, word in (("val", "valid"), ("test", "test")):
        for name, stem in ((split, f"{word}_edge"), (f"{split}_neg", f"{word}_edge_neg")):
            array = stem if stem in file else f"{stem}_index"
            pairs = file.pairs(array, len(kinds.code))
            if pairs is None:
                continue
            code = file.codes(f"{stem}_type", length=pairs.shape[1], below=len(relations))
            typed = code is not None
            code = np.zeros(pairs.shape[1], dtype=np.int64) if code is None else code
            for kind, own in kinds.cut(pairs, code, relations):
                if not typed:
                    ends = [other for other in known if (other.src, other.dst) == (kind.src, kind.dst)]
                    if not ends:
                        file.fail(array, f"pairs {kind.src} with {kind.dst}, but no edge type does")
                    kind = ends[0]
                links.setdefault(kind, {})[name] = kinds.row[pairs[:, own]]
    return links
