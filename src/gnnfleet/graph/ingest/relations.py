"""Untrusted files of arrays, and splitting one list of edges into types, for ``.npz``, PyG's ``edge_type`` and OGB.

Files are read without running pickled code. Headers of ``.npz`` arrays are compared with the number of bytes in the
file before anything is allocated.

Nodes are numbered across all types (*file ids*); within a type a node has a row. An edge type is a relation between
two node types, so a relation that joins several pairs of node types becomes several edge types.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from gnnfleet.errors import InputError
from gnnfleet.graph.graph import EDGE, NODE, EdgeType
from gnnfleet.ops import csr

Array = np.ndarray[Any, Any]
SINGLE_RELATION = EDGE.relation


@dataclass(frozen=True)
class NodeTypeIndex:
    """Node types by file id (``code``), rows within the type (``row``), and the file ids of each type by row."""

    names: tuple[str, ...]
    code: Array
    row: Array
    members: tuple[Array, ...]

    @classmethod
    def single(cls, count: int) -> NodeTypeIndex:
        rows = np.arange(count)
        return cls((NODE,), np.zeros(count, dtype=np.int64), rows, (rows,))

    @classmethod
    def of(cls, names: Sequence[str], code: Array) -> NodeTypeIndex:
        """Build from the type number of every node; rows follow the file's order."""
        offsets, order = group_by_code(code, len(names))
        members = tuple(order[start:stop] for start, stop in pairwise(offsets.tolist()))
        row = np.empty(len(code), dtype=np.int64)
        for ids in members:
            row[ids] = np.arange(len(ids))
        return cls(tuple(names), code.astype(np.int64), row, members)

    def split_pairs(self, pairs: Array, relation: Array, relations: Sequence[str]) -> Iterator[tuple[EdgeType, Array]]:
        """Edge types in order of relation, with the positions of their pairs ([2, E] file ids) in input order."""
        kinds = len(self.names)
        keys = (relation.astype(np.int64) * kinds + self.code[pairs[0]]) * kinds + self.code[pairs[1]]
        offsets, order = group_by_code(keys, len(relations) * kinds * kinds)
        for key in np.flatnonzero(np.diff(offsets)).tolist():
            src, dst = self.names[key // kinds % kinds], self.names[key % kinds]
            yield self.name(relations[key // kinds // kinds], src, dst), order[offsets[key] : offsets[key + 1]]

    def name(self, relation: str, src: str, dst: str) -> EdgeType:
        """Shorten ``paper-cites-paper`` between papers to the relation ``cites``; keep any other relation name."""
        inner = relation.removeprefix(f"{src}-").removesuffix(f"-{dst}")
        return EdgeType(src, inner if relation == f"{src}-{inner}-{dst}" and inner else relation, dst)

    def declared(self, relation: str) -> EdgeType | None:
        """The edge type that a relation's name determines even without edges, if any."""
        if len(self.names) == 1:
            return self.name(relation, self.names[0], self.names[0])
        for src in self.names:
            for dst in self.names:
                if (kind := self.name(relation, src, dst)).relation != relation:
                    return kind
        return None


def relation_names(count: int) -> list[str]:
    """Names for numbered relations: r0, r1, …"""
    return [f"r{i}" for i in range(count)]


def split_relations(pairs: Array, codes: Array, num_nodes: int, name: str) -> dict[EdgeType, Array]:
    """Positions of the edges of each relation in a graph of one node type; ``name`` is the array of codes.

    Raises InputError for codes that do not fit the edges and for nodes out of range.
    """
    if codes.shape != pairs.shape[1:] or codes.dtype.kind not in "biu" or codes.min(initial=0) < 0:
        raise InputError(
            f"{name} must be {pairs.shape[1]} whole numbers from 0, found {codes.dtype} {list(codes.shape)}"
        )
    if pairs.size and (pairs.min() < 0 or pairs.max() >= num_nodes):
        raise InputError(f"edge_index must name nodes 0 to {num_nodes - 1}, found {pairs.min()} to {pairs.max()}")
    codes = codes.astype(np.int64)
    names = relation_names(int(codes.max(initial=-1)) + 1)
    positions = dict(NodeTypeIndex.single(num_nodes).split_pairs(pairs, codes, names))
    kinds = [EdgeType(NODE, name, NODE) for name in names]
    return {kind: positions.get(kind, np.empty(0, dtype=np.int64)) for kind in kinds}


def take_rows(arrays: Mapping[str, Any], rows: Array) -> dict[str, Any]:
    """Select rows of every array that is not None."""
    return {name: None if values is None else values[rows] for name, values in arrays.items()}


def group_by_code(codes: Array, buckets: int) -> tuple[Array, Array]:
    """(offsets [buckets + 1], order): positions by code, ties in input order."""
    offsets, order = csr.counting_sort(torch.from_numpy(np.ascontiguousarray(codes, dtype=np.int64)), buckets)
    return offsets.numpy(), order.numpy()


def check_links(links: Mapping[str, Array], num_src: int, num_dst: int) -> None:
    """Raise InputError unless links are [2, L] rows that exist."""
    for name, pairs in links.items():
        if pairs.ndim != 2 or pairs.shape[0] != 2 or pairs.dtype.kind not in "iu":
            raise InputError(f"held-out links {name} must be pairs of nodes, found {pairs.dtype} {list(pairs.shape)}")
        if pairs.size and (pairs.min() < 0 or pairs[0].max() >= num_src or pairs[1].max() >= num_dst):
            raise InputError(
                f"held-out links {name} name nodes that do not exist: expected sources below {num_src}, destinations "
                f"below {num_dst}"
            )


_KINDS = "biufSUcM"  # gnnfleet uses the first six; readers report the others with the array's name


@contextmanager
def locate_errors(location: object) -> Iterator[None]:
    """Put a file, node type or edge type in front of the InputErrors raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{location}: {error}") from error


def load_pt(path: Path, classes: list[Any], unsafe_message: str) -> Any:
    """Load a ``.pt`` file of tensors, plain containers and ``classes``.

    Raises InputError, with ``unsafe_message`` when the file needs other classes.
    """
    try:
        with torch.serialization.safe_globals(classes):
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise InputError(f"no file {path}") from error
    except pickle.UnpicklingError as error:
        raise InputError(unsafe_message) from error
    except Exception as error:  # a damaged file fails in many ways inside the unpickler
        raise InputError(f"{path} cannot be read as a .pt file: {error}") from error


class ArraysFile:
    """The arrays of one ``.npz`` file by name; raises InputError for arrays that cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except FileNotFoundError as error:
            raise InputError(f"no file {path}") from error
        except Exception as error:  # a damaged zip directory fails in many ways
            raise InputError(f"{path} cannot be read as .npz, a zip file of arrays: {error}") from error
        self.names = {info.filename.removesuffix(".npy"): info for info in self._zip.infolist()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()

    def read(self, name: str) -> Array:
        """Read an array after comparing its header with the size of the file."""
        info = self.names[name]
        try:
            with self._zip.open(info) as file:
                header = _read_header(file)
                shape, dtype = header[0], header[2]
                if dtype.kind not in _KINDS or dtype.hasobject:
                    raise ValueError(f"it holds {dtype}, expected numbers or text")
                if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > info.file_size:
                    raise ValueError(f"its header declares {dtype} {list(shape)} in {info.file_size} bytes")
            with self._zip.open(info) as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:  # zip, zlib and numpy's headers fail in many ways
            raise InputError(f"{self.path}: {name} cannot be read: {error}") from error


def _read_header(file: Any) -> tuple[Any, Any, Any]:
    """(shape, Fortran order, dtype)."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"version {version} of numpy's format")
