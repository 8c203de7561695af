"""The specification of an import and its report.

A column is given by name; ``None`` looks for its usual names, ``NONE`` imports without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import NO_SPLIT, SPLITS, TEST, TRAIN, VAL, ColumnGroups, Edges, EdgeType, Nodes, labelled_rows
from gnnfleet.graph.ingest.clean import DuplicateRule, SelfLoopRule, check_choice
from gnnfleet.graph.split import parse_rule
from gnnfleet.io.bundle import dtype_name

NONE = "none"
USUAL_NAMES = {
    "id": ("id",),
    "src": ("src", "source", "from"),
    "dst": ("dst", "target", "to"),
    "label": ("label", "y"),
    "split": ("split",),
    "time": ("time", "timestamp", "t"),
    "weight": ("weight",),
}

SPLIT_CODES = {**SPLITS, "valid": VAL, "validation": VAL, "none": NO_SPLIT, "": NO_SPLIT}
MissingIds = Literal["error", "add"]
FeatureType = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class NodeTable:
    """The files of one node type and their columns; ``features``, ``label`` and ``value`` take patterns, by commas
    or spaces.

    ``columns`` names the columns of CSV files without a header line, by commas or spaces.
    """

    files: tuple[str, ...]
    columns: str | None = None
    id: str | None = None
    label: str | None = None
    value: str | None = None
    split: str | None = None
    features: str | None = None
    category: str | None = None


@dataclass(frozen=True, kw_only=True)
class EdgeTable:
    """The files of one edge type and their columns, as in ``NodeTable``."""

    files: tuple[str, ...]
    columns: str | None = None
    src: str | None = None
    dst: str | None = None
    weight: str | None = None
    time: str | None = None
    label: str | None = None
    features: str | None = None
    category: str | None = None


@dataclass(frozen=True, kw_only=True)
class ImportRules:
    """Rules for edges, ids, features and splits; raises ConfigError for a setting that is not allowed.

    ``duplicates`` applies to edges with the same source and destination and, where there are times, the same time. By
    default they are dropped from undirected graphs and kept in others. ``split_rule`` is for ``split.parse_rule``.
    ``missing``, ``memory``, ``standardize`` and ``like`` apply to tables only. ``like`` is a store whose means,
    deviations and values of categories are used.
    """

    undirected: bool = False
    duplicates: DuplicateRule | None = None
    self_loops: SelfLoopRule = "keep"
    missing: MissingIds = "error"
    dtype: FeatureType | None = None
    split_rule: str | None = None
    seed: int = 0
    memory: str = "1GiB"
    name: str | None = None
    standardize: bool = False
    like: str | None = None

    def __post_init__(self) -> None:
        for option, setting, choices in (
            ("duplicates", self.duplicate_rule, DuplicateRule),
            ("self-loops", self.self_loops, SelfLoopRule),
            ("missing", self.missing, MissingIds),
            ("dtype", self.dtype or "float32", FeatureType),
        ):
            check_choice(f"--{option}", setting, choices)
        if not re.fullmatch(r"\s*\d+(\.\d+)?\s*([KMGT]i?B)\s*", self.memory):
            raise ConfigError(f"--memory must be a size such as 1GiB or 800MB, found {self.memory!r}")
        if self.split_rule is not None:
            parse_rule(self.split_rule)
        if self.standardize and self.like:
            raise ConfigError("--like already says which columns are standardised: leave out --standardize")
        if (self.standardize or self.like) and self.duplicate_rule == "sum":
            raise ConfigError("--duplicates sum would add standardised values: choose keep or drop")

    @property
    def duplicate_rule(self) -> DuplicateRule:
        return self.duplicates or ("drop" if self.undirected else "keep")


@dataclass(frozen=True, kw_only=True)
class TableSpec(ImportRules):
    """The tables of an import and its rules; features become float32 unless ``dtype`` is set."""

    nodes: Mapping[str, NodeTable] = field(default_factory=dict)
    edges: Mapping[EdgeType, EdgeTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.nodes and not self.edges:
            raise ConfigError("there is nothing to import: name a node table or an edge table")

    @property
    def feature_dtype(self) -> FeatureType:
        return self.dtype or "float32"


@dataclass(frozen=True, kw_only=True)
class NodeCounts:
    """Counts of one imported node type. ``added`` nodes occur in edges only; ``unused`` columns were not imported.

    ``columns`` are the columns that became features, with their widths.
    """

    count: int
    ids: str
    features: int = 0
    columns: ColumnGroups = ()
    classes: int = 0
    labelled: int = 0
    train: int = 0
    val: int = 0
    test: int = 0
    added: int = 0
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EdgeCounts:
    """Counts of one imported edge type. ``parallel`` counts edges beyond the first with the same ends."""

    rows: int
    count: int
    self_loops: int = 0
    self_loops_dropped: int = 0
    reversed: int = 0
    parallel: int = 0
    duplicates_dropped: int = 0
    features: int = 0
    columns: ColumnGroups = ()
    weighted: bool = False
    time: str | None = None
    labelled: int = 0
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """The store that an import wrote, with counts per type."""

    path: Path
    name: str
    undirected: bool
    nodes: Mapping[str, NodeCounts]
    edges: Mapping[EdgeType, EdgeCounts]
    seconds: float
    cleaned: Mapping[str, int] = field(default_factory=dict)  # of a graph read into memory: sums over all edge types
    remarks: tuple[str, ...] = ()  # what columns look like, and what to do about it

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {
            "store": str(self.path),
            "name": self.name,
            "undirected": self.undirected,
            "nodes": {kind: asdict(counts) for kind, counts in self.nodes.items()},
            "edges": {str(kind): asdict(counts) for kind, counts in self.edges.items()},
            "seconds": round(self.seconds, 3),
            **({"cleaned": dict(self.cleaned)} if self.cleaned else {}),
            "remarks": list(self.remarks),
        }


def count_nodes(nodes: Nodes) -> NodeCounts:
    ids = "rows" if nodes.ids.are_rows else "integer" if str(nodes.ids.values().type) == "int64" else "text"
    return NodeCounts(
        count=nodes.count,
        ids=ids,
        features=0 if nodes.x is None else int(nodes.x.shape[1]),
        columns=nodes.columns,
        classes=nodes.num_classes,
        labelled=count_labelled(nodes.y),
        train=count_split(nodes.split, TRAIN),
        val=count_split(nodes.split, VAL),
        test=count_split(nodes.split, TEST),
    )


def count_labelled(y: Tensor | None) -> int:
    return 0 if y is None or not y.numel() else int(labelled_rows(y).sum())


def count_split(split: Tensor | None, code: int) -> int:
    """Count the nodes that the first split puts into train, val or test."""
    return 0 if split is None else int((split[0] == code).sum())


def count_edges(kind: EdgeType, edges: Edges) -> EdgeCounts:
    dst = edges.dst()
    return EdgeCounts(
        rows=edges.count,
        count=edges.count,
        self_loops=int((edges.src == dst).sum()) if kind.src == kind.dst else 0,
        parallel=int(((edges.src[1:] == edges.src[:-1]) & (dst[1:] == dst[:-1])).sum()),
        features=0 if edges.attr is None else int(edges.attr.shape[1]),
        columns=edges.columns,
        weighted=edges.weight is not None,
        time=None if edges.time is None else dtype_name(edges.time.dtype),
        labelled=count_labelled(edges.y),
    )
