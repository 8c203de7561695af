"""One part of a partitioned graph, as one rank opens it.

Nodes of a type are rows 0 … n−1 here, ordered by cluster. In-edges are cut into blocks by the part q of their source,
out-edges by the part q of their destination. Inside a block rows are the nodes of this part that have an edge in it,
and columns point at the far ends: rows of this part when q is this part, otherwise places in the list of rows that q
sends (``HaloPlan``). All lists of rows at q are in q's own numbering, ascending, so neither side ever sends ids.
P parts, T edge types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gnnfleet.errors import PartitionError, StoreError
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.store import node_dir
from gnnfleet.io.bundle import Bundle

KIND = "part"
DIRECTIONS = ("in", "out")
NODE_ARRAYS = ("store_ids", "x", "y", "split")
EDGE_DATA = ("weight", "attr", "time")


@contextmanager
def partition_errors(path: str | Path) -> Iterator[None]:
    """Whatever is wrong with a partition's files becomes one PartitionError."""
    try:
        yield
    except StoreError as error:
        raise PartitionError(str(error)) from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise PartitionError(f"{path} is damaged ({error}): partition the graph again") from error


@dataclass(frozen=True, kw_only=True)
class ShardBlock:
    """Edges of one type between this part and part q, as compressed rows."""

    rows: Tensor  # [R] int32: rows of this part, ascending
    indptr: Tensor  # [R + 1] int64, starts at 0
    cols: Tensor  # [E] int32: rows of this part, or places in the plan's list for q
    edge_ids: Tensor  # [E] int64: store edge ids
    data: Mapping[str, Tensor]  # weight; for in-edges also attr and time, where the graph has them


@dataclass(frozen=True, kw_only=True)
class HaloPlan:
    """Rows of one node type that move before an aggregation: ``need[q]`` come from part q, ``give[q]`` go to it."""

    recv: tuple[Tensor, ...]  # P lists of rows in q's numbering, int32, ascending; empty for this part itself
    send: tuple[Tensor, ...]  # P lists of rows of this part


@dataclass(frozen=True, kw_only=True)
class ShardNodes:
    """This part's nodes of one type."""

    store_ids: Tensor  # [n] rows in the store
    x: Tensor | None = None
    y: Tensor | None = None
    split: Tensor | None = None  # [K, n]

    @property
    def count(self) -> int:
        return int(self.store_ids.shape[0])


class Shard:
    """A part opened for reading; everything is memory-mapped."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.part: int = bundle.meta["part"]
        self.parts: int = bundle.meta["parts"]
        self.node_types: tuple[str, ...] = tuple(bundle.meta["node_types"])
        self.edge_types: tuple[EdgeType, ...] = tuple(EdgeType(*words) for words in bundle.meta["edge_types"])

    @classmethod
    def open(cls, path: str | Path) -> Shard:
        return cls(Bundle.open(path, KIND))

    def nodes(self, node_type: str) -> ShardNodes:
        folder = node_dir(node_type)
        found = {name: f"{folder}/{name}.npy" for name in NODE_ARRAYS}
        return ShardNodes(**{name: self.bundle.tensor(file) for name, file in found.items() if file in self.bundle})

    def block(self, edge_type: EdgeType, direction: str, q: int) -> ShardBlock:
        """The edges of one type from (``in``) or to (``out``) part q."""
        if edge_type not in self.edge_types:
            raise PartitionError(f"no edge type {edge_type} in this partition")
        place = self.edge_types.index(edge_type) * self.parts + q
        low, high = self.bundle.tensor(f"{direction}/row_start.npy")[place : place + 2].tolist()
        indptr = self.bundle.tensor(f"{direction}/indptr.npy")[low : high + 1]
        first, last = int(indptr[0]), int(indptr[-1])
        data = {}
        for name in EDGE_DATA:
            file = edge_data_path(direction, self.edge_types.index(edge_type), name)
            if file in self.bundle:
                start = self._type_start(direction, edge_type)
                data[name] = self.bundle.tensor(file)[first - start : last - start]
        return ShardBlock(
            rows=self.bundle.tensor(f"{direction}/rows.npy")[low:high],
            indptr=indptr - first,
            cols=self.bundle.tensor(f"{direction}/cols.npy")[first:last],
            edge_ids=self.bundle.tensor(f"{direction}/edge_ids.npy")[first:last],
            data=data,
        )

    def edge_data(self, edge_type: EdgeType, name: str) -> Tensor | None:
        """[E, …] ``edge_ids``, ``weight``, ``attr`` or ``time`` of the in-edges of a type: its blocks in order."""
        number = self.edge_types.index(edge_type)
        if name != "edge_ids":
            file = edge_data_path("in", number, name)
            return self.bundle.tensor(file) if file in self.bundle else None
        rows = self.bundle.tensor("in/row_start.npy")[[number * self.parts, (number + 1) * self.parts]]
        low, high = self.bundle.tensor("in/indptr.npy")[rows].tolist()
        return self.bundle.tensor("in/edge_ids.npy")[low:high]

    def plan(self, node_type: str, direction: str) -> HaloPlan:
        """What moves before aggregating over in-edges (``in``: sources) or out-edges (``out``: destinations)."""
        folder = halo_plan_dir(direction, node_type)
        lists: dict[str, Any] = {}
        for field, name in (("recv", "need"), ("send", "give")):  # the names on disk are those of version 0.1.0
            starts = self.bundle.tensor(f"{folder}/{name}_start.npy").tolist()
            rows = self.bundle.tensor(f"{folder}/{name}.npy")
            lists[field] = tuple(rows[starts[q] : starts[q + 1]] for q in range(self.parts))
        return HaloPlan(**lists)

    def _type_start(self, direction: str, edge_type: EdgeType) -> int:
        """Where the edges of a type begin among all edges of that direction."""
        row = self.bundle.tensor(f"{direction}/row_start.npy")[self.edge_types.index(edge_type) * self.parts]
        return int(self.bundle.tensor(f"{direction}/indptr.npy")[int(row)])


def halo_plan_dir(direction: str, node_type: str) -> str:
    return f"{direction}/plan/{node_dir(node_type).removeprefix('nodes/')}"


def edge_data_path(direction: str, place: int, name: str) -> str:
    """Per-edge data of the edge type at ``place`` in the part's list."""
    return f"{direction}/{name}_{place}.npy"
