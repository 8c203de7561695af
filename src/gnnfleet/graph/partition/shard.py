"""One part of a partitioned graph, as one rank opens it.

The nodes of a type are rows 0 to n − 1, ordered by cluster. In-edges are grouped into blocks by the part q of their
source, out-edges by the part q of their destination. The rows of a block are the nodes of this part with an edge in
it. Its columns are the other ends: rows of this part if q is this part, else positions in the list of rows that q
sends (``HaloPlan``). Lists of rows of q are in q's numbering and ascending, so neither side sends ids.
P parts, E edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gnnfleet.errors import PartitionError, StoreError
from gnnfleet.graph.graph import EdgeType, Graph
from gnnfleet.graph.store import node_dir
from gnnfleet.io.bundle import Bundle

KIND = "part"
DIRECTIONS = ("in", "out")
_NODE_ARRAYS = ("store_ids", "x", "y", "split")
_EDGE_DATA = ("weight", "attr", "time")


@contextmanager
def partition_errors(path: str | Path) -> Iterator[None]:
    """Raise PartitionError for any error that damaged files cause."""
    try:
        yield
    except StoreError as error:
        raise PartitionError(str(error)) from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise PartitionError(f"{path} is damaged ({error}): partition the graph again") from error


def check_store_digest(bundle: Bundle, graph: Graph | None) -> None:
    """Raise PartitionError if ``graph`` is from another store than the one the bundle was made from."""
    digest = bundle.meta["store"]
    if graph is not None and graph.store is not None and digest != graph.store.digest:
        raise PartitionError(f"{bundle.path} was made from another version of this graph: partition it again")


@dataclass(frozen=True, kw_only=True)
class ShardBlock:
    """Edges of one type between this part and part q, in CSR form."""

    rows: Tensor  # [R] int32: rows of this part, ascending
    indptr: Tensor  # [R + 1] int64, starts at 0
    cols: Tensor  # [E] int32: rows of this part, or positions in the plan's ``recv[q]``
    edge_ids: Tensor  # [E] int64: store edge ids
    data: Mapping[str, Tensor]  # weight if the graph has it; for in-edges also attr and time


@dataclass(frozen=True, kw_only=True)
class HaloPlan:
    """Rows of one node type to exchange before an aggregation, by the part q on the other side."""

    recv: tuple[Tensor, ...]  # P lists of rows in q's numbering, int32, ascending; empty for this part itself
    send: tuple[Tensor, ...]  # P lists of rows of this part, int32, ascending


@dataclass(frozen=True, kw_only=True)
class ShardNodes:
    """This part's nodes of one type."""

    store_ids: Tensor  # [n]
    x: Tensor | None = None
    y: Tensor | None = None
    split: Tensor | None = None  # [K, n]

    @property
    def count(self) -> int:
        return int(self.store_ids.shape[0])


class Shard:
    """A part opened for reading; its arrays are memory-mapped."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.part: int = bundle.meta["part"]
        self.parts: int = bundle.meta["parts"]
        self.node_types: tuple[str, ...] = tuple(bundle.meta["node_types"])
        self.edge_types: tuple[EdgeType, ...] = tuple(EdgeType(*names) for names in bundle.meta["edge_types"])

    @classmethod
    def open(cls, path: str | Path) -> Shard:
        return cls(Bundle.open(path, KIND))

    def nodes(self, node_type: str) -> ShardNodes:
        folder = node_dir(node_type)
        files = {name: f"{folder}/{name}.npy" for name in _NODE_ARRAYS}
        return ShardNodes(**{name: self.bundle.tensor(file) for name, file in files.items() if file in self.bundle})

    def block(self, edge_type: EdgeType, direction: str, q: int) -> ShardBlock:
        """The edges of one type from (direction ``in``) or to (direction ``out``) part q."""
        if edge_type not in self.edge_types:
            raise PartitionError(f"no edge type {edge_type} in this partition")
        number = self.edge_types.index(edge_type)
        block = number * self.parts + q
        low, high = self.bundle.tensor(f"{direction}/row_start.npy")[block : block + 2].tolist()
        indptr = self.bundle.tensor(f"{direction}/indptr.npy")[low : high + 1]
        first, last = int(indptr[0]), int(indptr[-1])
        data = {}
        for name in _EDGE_DATA:
            file = edge_data_path(direction, number, name)
            if file in self.bundle:
                start, _ = self._edge_range(direction, number)
                data[name] = self.bundle.tensor(file)[first - start : last - start]
        return ShardBlock(
            rows=self.bundle.tensor(f"{direction}/rows.npy")[low:high],
            indptr=indptr - first,
            cols=self.bundle.tensor(f"{direction}/cols.npy")[first:last],
            edge_ids=self.bundle.tensor(f"{direction}/edge_ids.npy")[first:last],
            data=data,
        )

    def edge_data(self, edge_type: EdgeType, name: str) -> Tensor | None:
        """[E, …] ``edge_ids``, ``weight``, ``attr`` or ``time`` of the in-edges of a type, block after block."""
        number = self.edge_types.index(edge_type)
        if name != "edge_ids":
            file = edge_data_path("in", number, name)
            return self.bundle.tensor(file) if file in self.bundle else None
        first, last = self._edge_range("in", number)
        return self.bundle.tensor("in/edge_ids.npy")[first:last]

    def plan(self, node_type: str, direction: str) -> HaloPlan:
        """The exchange before aggregating over in-edges (``in``: sources) or out-edges (``out``: destinations)."""
        folder = halo_plan_dir(direction, node_type)
        lists: dict[str, Any] = {}
        for field, name in (("recv", "need"), ("send", "give")):  # the names on disk are those of version 0.1.0
            starts = self.bundle.tensor(f"{folder}/{name}_start.npy").tolist()
            rows = self.bundle.tensor(f"{folder}/{name}.npy")
            lists[field] = tuple(rows[starts[q] : starts[q + 1]] for q in range(self.parts))
        return HaloPlan(**lists)

    def _edge_range(self, direction: str, number: int) -> tuple[int, int]:
        """The edges of edge type ``number`` among all edges of a direction."""
        rows = self.bundle.tensor(f"{direction}/row_start.npy")[[number * self.parts, (number + 1) * self.parts]]
        first, last = self.bundle.tensor(f"{direction}/indptr.npy")[rows].tolist()
        return first, last


def halo_plan_dir(direction: str, node_type: str) -> str:
    return f"{direction}/plan/{node_dir(node_type).removeprefix('nodes/')}"


def edge_data_path(direction: str, number: int, name: str) -> str:
    """The file with ``name`` of the edges of edge type ``number``."""
    return f"{direction}/{name}_{number}.npy"
