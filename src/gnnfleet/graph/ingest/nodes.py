"""Import of node tables: one pass in input order writes ids, features, labels and split to the store.

It holds a batch of rows and some bytes per node for split codes and counts, never all features.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import NO_SPLIT, Nodes
from gnnfleet.graph.ids import ID_COLUMN
from gnnfleet.graph.ingest import keys, labels, row_errors
from gnnfleet.graph.ingest.columns import FeatureSource, find_column, find_features, unused_columns
from gnnfleet.graph.ingest.duck import DuckConnection
from gnnfleet.graph.ingest.keys import IdColumn, IdKind, IdWriter, NodeIdIndex
from gnnfleet.graph.ingest.labels import LabelSource
from gnnfleet.graph.ingest.row_errors import RowCheck
from gnnfleet.graph.ingest.source import TableSource
from gnnfleet.graph.ingest.spec import NONE, NodeCounts, NodeTable, TableSpec, count_nodes
from gnnfleet.graph.split import NodeKeys, make_split, parse_rule, value_keys
from gnnfleet.graph.store import node_dir
from gnnfleet.io.bundle import DTYPES, ArrayWriter, BundleWriter

OnAdvance = Callable[[float], None]


@dataclass(frozen=True)
class NodeTablePlan:
    """A node table with the columns of its ids, features, labels and split."""

    source: TableSource
    id: str
    features: FeatureSource
    labels: LabelSource | None
    split: str | None

    @property
    def key(self) -> IdColumn:
        return IdColumn(self.source, self.id)

    @property
    def used(self) -> list[str | None]:
        return [self.id, self.split, *self.features.names, *(self.labels.columns if self.labels else ())]


@dataclass(frozen=True)
class NodeResult:
    """A node type that was written to the store."""

    keys: NodeIdIndex
    counts: NodeCounts
    classes: tuple[str, ...]


def plan_nodes(
    source: TableSource, table: NodeTable, spec: TableSpec, like: Mapping[str, Any] | None = None
) -> NodeTablePlan:
    """Find the columns of a node table; raises InputError naming one that is missing."""
    id_column = find_column(source, "id", table.id, required=True)
    assert id_column is not None
    if table.value is not None and table.label not in (None, NONE):
        raise ConfigError("a node type has classes or values to predict: name --label or --value, not both")
    values = None if table.value is None else labels.find_values(source, table.value)
    label_source = values or labels.find_labels(source, table.label)
    split = find_column(source, "split", table.split)
    used = [id_column, split, *(label_source.columns if label_source else ())]
    features = find_features(source, table, spec, like, used=used)
    if spec.split_rule is not None and table.split is None:
        split = None  # a rule on the command line overrides a column found by its usual name
    return NodeTablePlan(source, id_column, features, label_source, split)


class NodeImporter:
    """Writes one node type to a store."""

    def __init__(
        self, duck: DuckConnection, out: BundleWriter, spec: TableSpec, node_type: str, *, draw_split: bool = True
    ) -> None:
        self.duck = duck
        self.out = out
        self.spec = spec
        self.draw_split = draw_split
        self.folder = node_dir(node_type)
        self.ids_path = out.scratch_dir() / f"{self.folder.replace('/', '-')}.parquet"
        self.split: Tensor | None = None
        self._arrays: dict[str, ArrayWriter] = {}

    def from_table(self, plan: NodeTablePlan, ends: Sequence[IdColumn], advance: OnAdvance) -> NodeResult:
        """Import the rows of a table in order, then with ``missing="add"`` the ids that occur in edges only."""
        kind = keys.infer_id_kind(plan.key, ends)
        row_errors.check_rows(plan.source, plan.labels.checks() if plan.labels else [])
        ids = self._stream(plan, kind, advance)
        keys.check_unique_ids(plan.source, plan.id, ids)
        added = 0
        if self.spec.missing == "add" and ends:
            table_count, ids = ids.count, keys.append_missing_ids(self.duck, ids, ends)
            added = ids.count - table_count
            self._add_empty(plan, added)
        return self._finish(ids, plan, added)

    def from_edges(self, ends: Sequence[IdColumn]) -> NodeResult:
        """Import a type without a table: the sorted ids that occur in edges."""
        return self._finish(keys.ids_from_edges(self.duck, ends, self.ids_path), None, 0)

    def _stream(self, plan: NodeTablePlan, kind: IdKind, advance: OnAdvance) -> NodeIdIndex:
        source, features = plan.source, plan.features
        parts = [plan.key.select(kind), *features.select()]
        parts += plan.labels.select() if plan.labels else []
        parts += [labels.split_select(plan.split)] if plan.split else []
        columns = ", ".join(f"{part} AS c{i}" for i, part in enumerate([source.position, *parts]))
        writer = IdWriter(self.ids_path, kind)
        arrays = self._arrays
        if features.columns:
            arrays["x"] = features.open_array(self.out, f"{self.folder}/x.npy")
        if plan.labels:
            arrays["y"] = plan.labels.open_array(self.out, f"{self.folder}/y.npy")
        self.duck.keep_order(True)
        codes = []
        for batch in self.duck.stream(source.scan(columns), features.rows_per_batch):
            position, ids, *rest = batch.columns
            assert position[0].as_py() == writer.count and position[-1].as_py() == writer.count + len(batch) - 1
            if ids.null_count:
                expected = "an integer of 64 bits" if kind == "integer" else "an id"
                condition = f"({plan.key.select(kind)} IS NULL)"
                row_errors.check_rows(source, [RowCheck(plan.id, condition, expected, "Every node needs an id")])
            writer.append(ids)
            if features.columns:
                arrays["x"].append(read_features(source, features, rest[: len(features.columns)]))
            if plan.labels:
                arrays["y"].append(plan.labels.read(rest[len(features.columns) : len(rest) - bool(plan.split)]))
            if plan.split:
                split = labels.read_split(rest[-1])
                if split is None:
                    row_errors.check_rows(source, [labels.split_check(plan.split)])
                codes.append(split)
            advance(len(batch))
        if plan.split:
            self.split = torch.from_numpy(np.concatenate([np.empty(0, np.int8), *codes]))[None]
        return writer.close()

    def _add_empty(self, plan: NodeTablePlan, added: int) -> None:
        """Append nodes without a row in the table: features 0, no label, no split."""
        if plan.features.columns:
            rows = plan.features.rows_per_batch
            for start in range(0, added, rows):
                self._arrays["x"].append(torch.zeros(min(rows, added - start), plan.features.width))
        if plan.labels:
            self._arrays["y"].append(plan.labels.missing(added))
        if self.split is not None:
            self.split = torch.cat([self.split, torch.full((1, added), NO_SPLIT, dtype=torch.int8)], dim=1)

    def _finish(self, ids: NodeIdIndex, plan: NodeTablePlan | None, added: int) -> NodeResult:
        if not ids.are_rows:
            path = self.out.file(f"{self.folder}/ids.parquet")
            shutil.move(ids.path, path)
            ids = replace(ids, path=path)
        y = self.out.written(f"{self.folder}/y.npy") if plan and plan.labels else None
        if self.spec.split_rule is not None and self.draw_split:
            if self.split is not None:
                raise ConfigError("a split comes either from a column or from a rule: remove --split or --split-column")
            self.split = make_split(parse_rule(self.spec.split_rule), _draw_keys(ids), y, seed=self.spec.seed)
        if self.split is not None:
            self.out.put(f"{self.folder}/split.npy", self.split)
        classes = plan.labels.classes if plan and plan.labels else ()
        counts = replace(
            count_nodes(Nodes(count=ids.count, y=y, classes=classes, split=self.split)),
            ids="rows" if ids.are_rows else ids.kind,
            features=plan.features.width if plan else 0,
            columns=plan.features.sizes if plan else (),
            added=added,
            unused=unused_columns(plan.source, plan.used) if plan else (),
        )
        return NodeResult(ids, counts, classes)


def read_features(source: TableSource, features: FeatureSource, arrays: Sequence[Any]) -> Tensor:
    """[n, F] features of one batch; raises InputError locating a value that is not a finite number of the dtype."""
    rows = np.empty((len(arrays[0]), features.width), dtype=np.float32)
    start, bad = 0, False
    for array, (_, width) in zip(arrays, features.columns, strict=True):
        if width is None:
            bad = bad or array.null_count > 0
            rows[:, start] = array.to_numpy(zero_copy_only=False)
        else:
            items = array.flatten()
            lengths = array.value_lengths().to_numpy(zero_copy_only=False)
            bad = bad or array.null_count > 0 or items.null_count > 0 or not bool((lengths == width).all())
            if bad:
                break
            rows[:, start : start + width] = items.to_numpy(zero_copy_only=False).reshape(len(array), width)
        start += 1 if width is None else width
    x = torch.from_numpy(rows).to(DTYPES[features.dtype][0])
    if bad or not bool(torch.isfinite(x).all()):
        row_errors.check_rows(source, features.checks())
        row_errors.raise_sum_error(source, "features", features.dtype)  # every row is valid by itself
    return x


def _draw_keys(ids: NodeIdIndex) -> NodeKeys:
    if ids.are_rows:
        return np.arange(ids.count, dtype=np.uint64)
    batches = [value_keys(batch.column(ID_COLUMN)) for batch in pq.ParquetFile(ids.path).iter_batches()]
    return np.concatenate([np.empty(0, dtype=np.uint64), *batches])
