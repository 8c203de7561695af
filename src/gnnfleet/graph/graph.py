"""A graph: node types and edge types with their data, as tensors in memory or memory-mapped from a store.

Edges of a type are sorted by destination, then source, then input order (CSC): ``indptr[v]:indptr[v + 1]`` are the
in-edges of node v. The position in that order is the *store edge id*; the row of a node is its *store id*.
N nodes of a type, E edges of a type, F features, K splits, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.ids import Ids
from gnnfleet.io.bundle import Bundle
from gnnfleet.ops import csr

TRAIN, VAL, TEST, NO_SPLIT = 0, 1, 2, -1
SPLITS = {"train": TRAIN, "val": VAL, "test": TEST}
FEATURE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
EDGE_DATA = ("weight", "attr", "time", "y")


class EdgeType(NamedTuple):
    """Source type, relation, destination type: the direction of the message."""

    src: str
    relation: str
    dst: str

    def __str__(self) -> str:
        return ":".join(self)

    @classmethod
    def parse(cls, text: str) -> EdgeType:
        """Parse ``user:buys:product``; raises ConfigError for other texts."""
        fields = text.split(":")
        if len(fields) != 3 or not all(fields):
            raise ConfigError(f"an edge type has the form SRC:RELATION:DST, found {text!r}")
        return cls(*fields)


ColumnGroups = tuple[tuple[str, int], ...]
"""Names of the table columns that became features, in order, with their numbers of features."""

NODE = "node"
EDGE = EdgeType(NODE, "to", NODE)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """One node type. ``y`` is [N] int64 with −1 for no label, [N, C] int8 for several labels per node, or values.

    Values are [N] or [N, K] float32, NaN for no label; ``classes`` are then their names.
    """

    count: int
    x: Tensor | None = None
    y: Tensor | None = None
    classes: tuple[str, ...] = ()
    split: Tensor | None = None  # [K, N] int8: TRAIN, VAL, TEST or NO_SPLIT; most graphs have K = 1
    ids: Ids = field(default_factory=lambda: Ids(0))
    columns: ColumnGroups = ()  # of x, if it was imported from a table

    def __post_init__(self) -> None:
        if not len(self.ids) and self.count:
            object.__setattr__(self, "ids", Ids(self.count))
        for name, rows in (("x", self.x), ("y", self.y)):
            if rows is not None and rows.shape[0] != self.count:
                raise InputError(f"{name} has {rows.shape[0]} rows, expected one for each of {self.count} nodes")
        if self.split is not None and self.split.shape[-1] != self.count:
            raise InputError(f"split covers {self.split.shape[-1]} nodes, expected {self.count}")
        if len(self.ids) != self.count:
            raise InputError(f"expected {self.count} ids, one per node, found {len(self.ids)}")

    @property
    def multilabel(self) -> bool:
        return self.y is not None and self.y.dim() == 2 and not self.regression

    @property
    def regression(self) -> bool:
        """True if labels are values."""
        return self.y is not None and self.y.is_floating_point()

    @property
    def num_classes(self) -> int:
        """Number of classes, labels or values per node."""
        if self.y is None:
            return 0
        if self.y.dim() == 2:
            return int(self.y.shape[1])
        if self.regression:
            return 1
        highest = int(self.y.max()) + 1 if self.y.numel() else 0
        return max(len(self.classes), highest)

    def mask(self, split: str, index: int = 0) -> Tensor:
        """[N] bool: the nodes of ``train``, ``val`` or ``test``; none when the graph has no split."""
        if self.split is None:
            return torch.zeros(self.count, dtype=torch.bool)
        return self.split[index] == SPLITS[split]


@dataclass(frozen=True, kw_only=True)
class Edges:
    """One edge type. All per-edge tensors are in store order."""

    indptr: Tensor  # [N_dst + 1] int64
    src: Tensor  # [E] int32, or int64 for 2^31 sources or more
    weight: Tensor | None = None  # [E] float32
    attr: Tensor | None = None  # [E, F]
    time: Tensor | None = None  # [E] int64 or float64
    order: Tensor | None = None  # [E] store edge ids by time, ties in input order; set if time is
    y: Tensor | None = None  # [E] int64 with −1 for no label, or [E, C] int8
    links: Mapping[str, Tensor] = field(default_factory=dict)  # val, test, val_neg, test_neg: [2, L] held-out pairs
    columns: ColumnGroups = ()  # of attr, if it was imported from a table

    @property
    def count(self) -> int:
        return int(self.src.shape[0])

    @property
    def num_dst(self) -> int:
        return int(self.indptr.shape[0]) - 1

    @property
    def has_data(self) -> bool:
        """True if edges have weights, features, times or labels."""
        return any(getattr(self, name) is not None for name in EDGE_DATA)

    def select_data(self, rows: Tensor) -> dict[str, Any]:
        """Weights, features, times and labels of the edges under a mask or index."""
        columns = {name: getattr(self, name) for name in EDGE_DATA}
        return {name: None if values is None else values[rows] for name, values in columns.items()}

    def dst(self) -> Tensor:
        """[E] destinations in store order."""
        return torch.repeat_interleave(
            torch.arange(self.num_dst, dtype=self.src.dtype), self.indptr.diff(), output_size=self.count
        )

    def edge_index(self) -> Tensor:
        """[2, E] int64 as in PyG, in store order."""
        return torch.stack([self.src.long(), self.dst().long()])

    def in_degree(self) -> Tensor:
        """[N_dst] int64."""
        return self.indptr.diff()


def labelled_rows(y: Tensor) -> Tensor:
    """[N] bool: nodes that have a label, or a known one of several."""
    known = ~y.isnan() if y.is_floating_point() else y >= 0
    return known.any(1) if y.dim() == 2 else known


class Graph:
    """Node types and edge types. The constructor builds a graph with one node type and one edge type.

    >>> graph = Graph(edge_index=edge_index, x=x, y=y, split={"train": train_mask, "val": val_mask, "test": test_mask})
    """

    def __init__(
        self,
        edge_index: Any = None,
        *,
        x: Any = None,
        y: Any = None,
        split: Any = None,
        edge_weight: Any = None,
        edge_attr: Any = None,
        time: Any = None,
        edge_y: Any = None,
        num_nodes: int | None = None,
        ids: Any = None,
        name: str = "graph",
    ) -> None:
        lengths = [len(a) for a in (x, y, ids) if a is not None]
        if edge_index is None:
            edge_index = torch.empty((2, 0), dtype=torch.int64)
        edge_index = torch.as_tensor(edge_index)
        if num_nodes is None:
            num_nodes = lengths[0] if lengths else (int(edge_index.max()) + 1 if edge_index.numel() else 0)
        nodes = validated_nodes(num_nodes, x=x, y=y, split=split, ids=ids)
        edges = validated_edges(
            edge_index, num_src=num_nodes, num_dst=num_nodes, weight=edge_weight, attr=edge_attr, time=time, y=edge_y
        )
        self._set({NODE: nodes}, {EDGE: edges}, name, undirected=False, store=None)

    @classmethod
    def of(
        cls,
        nodes: Mapping[str, Nodes],
        edges: Mapping[EdgeType, Edges],
        *,
        name: str = "graph",
        undirected: bool = False,
        store: Bundle | None = None,
    ) -> Graph:
        """Build from node and edge types; raises InputError if the node type of an edge type is missing."""
        graph = cls.__new__(cls)
        graph._set(dict(nodes), dict(edges), name, undirected, store)
        return graph

    def _set(
        self, nodes: dict[str, Nodes], edges: dict[EdgeType, Edges], name: str, undirected: bool, store: Bundle | None
    ) -> None:
        for kind, table in edges.items():
            for end in (kind.src, kind.dst):
                if end not in nodes:
                    raise InputError(f"edges {kind} need nodes of type {end!r}, found {', '.join(nodes) or 'none'}")
            if table.num_dst != nodes[kind.dst].count:
                raise InputError(f"edges {kind} cover {table.num_dst} destinations, expected {nodes[kind.dst].count}")
        self.nodes = nodes
        self.edges = edges
        self.name = name
        self.undirected = undirected
        self.store = store

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, nodes={self.num_nodes}, edges={self.num_edges})"

    @property
    def num_nodes(self) -> int:
        return sum(table.count for table in self.nodes.values())

    @property
    def num_edges(self) -> int:
        return sum(table.count for table in self.edges.values())

    @property
    def is_hetero(self) -> bool:
        return len(self.nodes) > 1 or len(self.edges) > 1

    def metadata(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """Node types and edge types, as torch_geometric's heterogeneous modules take them."""
        return list(self.nodes), [tuple(edge_type) for edge_type in self.edges]

    @property
    def node_offsets(self) -> dict[str, int]:
        """First number of each node type when all types are numbered in order."""
        offsets, start = {}, 0
        for kind, table in self.nodes.items():
            offsets[kind] = start
            start += table.count
        return offsets

    @property
    def single_nodes(self) -> Nodes:
        """The nodes of a graph of one type; raises ConfigError for a heterogeneous one."""
        if len(self.nodes) != 1:
            raise ConfigError(f"the graph has several node types ({', '.join(self.nodes)}): name one")
        return next(iter(self.nodes.values()))

    @property
    def single_edges(self) -> Edges:
        """The edges of a graph of one type; raises ConfigError for a heterogeneous one."""
        if len(self.edges) != 1:
            raise ConfigError(
                f"the graph has {len(self.edges)} edge types ({', '.join(map(str, self.edges))}): name one"
            )
        return next(iter(self.edges.values()))

    @property
    def labelled_type(self) -> str | None:
        """The first node type that has labels."""
        return next((kind for kind, table in self.nodes.items() if table.y is not None), None)

    def with_nodes(self, kind: str, **changes: Any) -> Graph:
        """Replace fields of one node type; feature names stay if the number of features does."""
        before, after = self.nodes[kind].x, changes.get("x", self.nodes[kind].x)
        if before is None or after is None or before.shape[1] != after.shape[1]:
            changes = {"columns": (), **changes}
        nodes = {**self.nodes, kind: replace(self.nodes[kind], **changes)}
        return Graph.of(nodes, self.edges, name=self.name, undirected=self.undirected)


def validated_nodes(
    count: int, *, x: Any = None, y: Any = None, split: Any = None, ids: Any = None, classes: Sequence[str] = ()
) -> Nodes:
    """Check and convert the arrays of one node type; raises InputError naming the bad array."""
    return Nodes(
        count=count,
        x=None if x is None else _features(x, "x"),
        y=None if y is None else _labels(y),
        classes=tuple(classes),
        split=None if split is None else _split(split, count),
        ids=Ids(count) if ids is None else Ids.from_values(ids),
    )


def validated_edges(
    edge_index: Any,
    *,
    num_src: int,
    num_dst: int,
    weight: Any = None,
    attr: Any = None,
    time: Any = None,
    y: Any = None,
    links: Mapping[str, Any] | None = None,
) -> Edges:
    """Sort one edge type into store order; raises InputError for ids out of range or data of another length."""
    edge_index = torch.as_tensor(edge_index)
    edge_index = edge_index if edge_index.numel() else edge_index.long()  # torch converts an empty list to floats
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.is_floating_point():
        raise InputError(
            f"edge_index must be integers of shape [2, E], found {edge_index.dtype} {list(edge_index.shape)}"
        )
    for row, count, end in ((edge_index[0], num_src, "source"), (edge_index[1], num_dst, "destination")):
        low, high = (int(bound) for bound in torch.aminmax(row)) if row.numel() else (0, -1)
        if low < 0 or high >= count:
            node = low if low < 0 else high
            raise InputError(f"edge_index names {end} {node}, but there are {count} nodes (0 to {count - 1})")
    index = index_dtype(max(num_src, num_dst))
    indptr, order, src = csr.sort_into_rows(*edge_index.to(index), num_src=num_src, num_dst=num_dst)
    length = edge_index.shape[1]
    time = None if time is None else _times(time, length)
    weight = None if weight is None else _per_edge(weight, "edge_weight", length).to(torch.float32).reshape(-1)
    return Edges(
        indptr=indptr,
        src=src,
        weight=None if weight is None else weight[order],
        attr=None if attr is None else _features(_per_edge(attr, "edge_attr", length), "edge_attr")[order],
        time=None if time is None else time[order],
        order=None if time is None else time_order(time, order),
        y=None if y is None else _per_edge(_labels(y, of_edges=True), "edge_y", length)[order],
        links={name: torch.as_tensor(pairs).long() for name, pairs in (links or {}).items()},
    )


def time_order(time: Tensor, order: Tensor) -> Tensor:
    """Store edge ids by time, ties in input order; ``order[i]`` is the input position of store edge i."""
    edge_of_input = csr.inverse_permutation(order)
    if bool((time[1:] >= time[:-1]).all()):  # most streams are sorted already
        return edge_of_input
    return edge_of_input[torch.argsort(time, stable=True)]


def index_dtype(count: int) -> torch.dtype:
    """The dtype of indices below ``count``: int32 if it suffices."""
    return torch.int32 if count < 2**31 else torch.int64


def _features(values: Any, name: str) -> Tensor:
    x = torch.as_tensor(values if isinstance(values, Tensor) else np.asarray(values))
    x = x[:, None] if x.dim() == 1 else x
    if x.dim() != 2:
        raise InputError(f"{name} must have shape [rows, features], found {list(x.shape)}")
    x = x if x.dtype in FEATURE_DTYPES else x.to(torch.float32)
    if x.numel() and not torch.isfinite(x).all():
        row, column = (~torch.isfinite(x)).nonzero()[0].tolist()
        raise InputError(f"{name} must be finite, found {x[row, column].item()} in row {row}, column {column}")
    return x


def _labels(values: Any, *, of_edges: bool = False) -> Tensor:
    """Class numbers, or float32 if numbers are no class numbers."""
    y = torch.as_tensor(values)
    if y.dim() == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.is_floating_point():
        whole = y.nan_to_num(-1)
        is_class = (whole >= -1) & (whole <= (1 if y.dim() == 2 else 1e9)) & (whole == whole.round())
        if not bool(is_class.all()) and of_edges:
            raise InputError("labels of edges must be whole numbers (class numbers, −1 for none), found fractions")
        if not bool(is_class.all()):
            return y.to(torch.float32)
        y = whole
    if y.dim() == 2:
        return y.to(torch.int8)
    y = y.to(torch.int64)
    if y.numel() and int(y.min()) < -1:
        raise InputError(f"labels are class numbers from 0, or −1 for none; found {int(y.min())}")
    return y


def _split(split: Any, count: int) -> Tensor:
    if isinstance(split, Mapping):
        unknown = set(split) - set(SPLITS)
        if unknown:
            raise InputError(f"a split has masks train, val and test, found {', '.join(sorted(unknown))}")
        return masks_to_split({name: torch.as_tensor(mask) for name, mask in split.items()}, count)
    codes = torch.as_tensor(split).to(torch.int8)
    codes = codes[None] if codes.dim() == 1 else codes
    if codes.numel() and (int(codes.min()) < NO_SPLIT or int(codes.max()) > TEST):
        raise InputError("split codes must be 0 (train), 1 (val), 2 (test) or −1 (none)")
    return codes


def masks_to_split(masks: Mapping[str, Tensor], count: int) -> Tensor:
    """[K, N] codes from boolean masks ([N] or [K, N]) or index lists; raises InputError when two masks overlap."""
    codes: Tensor | None = None
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            rows = mask.long()
            mask = torch.zeros(count, dtype=torch.bool)
            mask[rows] = True
        mask = mask[None] if mask.dim() == 1 else mask
        if codes is None:
            codes = torch.full((mask.shape[0], count), NO_SPLIT, dtype=torch.int8)
        if mask.shape != codes.shape:
            raise InputError(f"{name} mask has shape {list(mask.shape)}, expected {list(codes.shape)}")
        if bool((codes[mask] != NO_SPLIT).any()):
            raise InputError(f"the {name} mask overlaps another one: a node belongs to one split only")
        codes[mask] = SPLITS[name]
    return codes if codes is not None else torch.full((1, count), NO_SPLIT, dtype=torch.int8)


def _per_edge(values: Any, name: str, length: int) -> Tensor:
    tensor = torch.as_tensor(values)
    if tensor.shape[0] != length:
        raise InputError(f"{name} has {tensor.shape[0]} rows, expected one for each of {length} edges")
    return tensor


def _times(values: Any, length: int) -> Tensor:
    time = _per_edge(values, "time", length).reshape(-1)
    time = time.to(torch.float64) if time.is_floating_point() else time.to(torch.int64)
    if time.numel() and not bool((time >= 0).all()):
        raise InputError("event times must not be negative or missing")
    return time
