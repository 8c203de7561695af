"""Import of edge tables: match ids to rows, check, sort by (dst, src, input position), write.

DuckDB does all of it and spills to disk; Python holds a batch of edges and a count per destination.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType, index_dtype
from gnnfleet.graph.ingest import duck as sql
from gnnfleet.graph.ingest import row_errors
from gnnfleet.graph.ingest.clean import reverse_type
from gnnfleet.graph.ingest.columns import (
    FeatureSource,
    find_by_usual_name,
    find_column,
    find_features,
    is_floating,
    is_integer,
    unused_columns,
)
from gnnfleet.graph.ingest.columns import canonical_integer_sql as is_canonical
from gnnfleet.graph.ingest.duck import DuckConnection
from gnnfleet.graph.ingest.keys import IdColumn, NodeIdIndex
from gnnfleet.graph.ingest.labels import LabelSource, find_labels
from gnnfleet.graph.ingest.nodes import OnAdvance, read_features
from gnnfleet.graph.ingest.row_errors import RowCheck
from gnnfleet.graph.ingest.source import TableSource, is_zoned_time
from gnnfleet.graph.ingest.spec import EdgeCounts, EdgeTable, TableSpec, count_labelled
from gnnfleet.graph.store import edge_dir
from gnnfleet.io.bundle import DTYPES, BundleWriter


@dataclass(frozen=True)
class TimeColumn:
    """A column of event times; SQL timestamps and dates become microseconds since 1970."""

    column: str
    expression: str
    dtype: str

    def invalid_sql(self, expression: str) -> str:
        """SQL that is true unless ``expression`` is a valid time."""
        finite = f" OR NOT isfinite({expression})" if self.dtype == "float64" else ""
        return f"({expression} IS NULL OR {expression} < 0{finite})"

    def check(self) -> RowCheck:
        return RowCheck(
            self.column,
            self.invalid_sql(self.expression),
            "a time of 0 or later",
            "Correct or shift the times, or import without them: --time none",
        )


@dataclass(frozen=True)
class EdgeTablePlan:
    """An edge table with the columns of its ends and edge data."""

    source: TableSource
    src: IdColumn
    dst: IdColumn
    weight: str | None
    time: TimeColumn | None
    features: FeatureSource
    labels: LabelSource | None = None

    @property
    def used(self) -> list[str | None]:
        time = self.time.column if self.time else None
        labels = self.labels.columns if self.labels else ()
        return [self.src.column, self.dst.column, self.weight, time, *self.features.names, *labels]

    @property
    def label_names(self) -> list[str]:
        """Names of the label columns in temporary tables."""
        return [f"y{i}" for i in range(len(self.labels.select()) if self.labels else 0)]

    def payload(self) -> dict[str, str]:
        """Edge data: column in temporary tables → SQL over the source."""
        payload = {"w": f"try_cast({sql.sql_name(self.weight)} AS FLOAT)"} if self.weight else {}
        if self.time:
            payload["t"] = self.time.expression
        payload |= dict(zip(self.label_names, self.labels.select() if self.labels else [], strict=True))
        return payload | {f"a{i}": expression for i, expression in enumerate(self.features.select())}


def plan_edges(
    source: TableSource, table: EdgeTable, spec: TableSpec, like: Mapping[str, Any] | None = None
) -> EdgeTablePlan:
    """Find the columns of an edge table; raises InputError naming one that is missing."""
    src, dst = (find_column(source, role, getattr(table, role), required=True) for role in ("src", "dst"))
    assert src is not None and dst is not None
    weight = find_column(source, "weight", table.weight)
    column = find_column(source, "time", table.time)
    time = None if column is None else _read_time(source, column)
    labels = find_labels(source, table.label, "edge-label")
    used = [src, dst, weight, column, *(labels.columns if labels else ())]
    if not table.features:  # an edge's id or label becomes a feature only when it is named
        used += [find_by_usual_name(source.types, role, None) for role in ("id", "label", "split")]
    features = find_features(source, table, spec, like, used=used, option="edge-features")
    return EdgeTablePlan(source, IdColumn(source, src), IdColumn(source, dst), weight, time, features, labels)


def _read_time(source: TableSource, column: str) -> TimeColumn:
    cell, kind = sql.sql_name(column), source.types[column]
    as_integer = TimeColumn(column, f"try_cast({cell} AS BIGINT)", "int64")
    as_number = TimeColumn(column, f"try_cast({cell} AS DOUBLE)", "float64")
    # A timestamp with a zone must keep it: without, DuckDB reads it in the zone of this machine.
    stamp = f"try_cast({cell} AS {'TIMESTAMPTZ' if is_zoned_time(kind) else 'TIMESTAMP'})"
    as_stamp = TimeColumn(column, f"epoch_us({stamp})", "int64")
    if not source.is_text:
        return as_integer if is_integer(kind) else as_number if is_floating(kind) else as_stamp
    counts = f"count({cell}), count(*) FILTER ({is_canonical(cell)}), count(try_cast({cell} AS DOUBLE)), count({stamp})"
    total, integers, numbers, stamps = source.duck.row(source.scan(counts))
    if integers == total:
        return as_integer
    # Where no format fits every row, the format of most rows decides, and the other rows are reported as bad.
    return as_number if numbers >= stamps else as_stamp


class EdgeImporter:
    """Writes the edges of one table to a store."""

    def __init__(self, duck: DuckConnection, out: BundleWriter, spec: TableSpec, plan: EdgeTablePlan) -> None:
        self.duck = duck
        self.out = out
        self.spec = spec
        self.plan = plan
        self.payload = list(plan.payload())
        self.doubled = False

    def run(self, kind: EdgeType, src: NodeIdIndex, dst: NodeIdIndex, advance: OnAdvance) -> dict[EdgeType, EdgeCounts]:
        """Write the edge type and, for an undirected graph of two node types, its reverse."""
        same = kind.src == kind.dst
        loops = self._match(src, dst, same)
        dropped = loops if self.spec.self_loops == "drop" else 0
        self.doubled = self.spec.undirected and same
        counts = EdgeCounts(
            rows=self.plan.source.rows,
            count=0,
            self_loops=loops,
            self_loops_dropped=dropped,
            reversed=self.plan.source.rows - loops if self.doubled else 0,
            features=self.plan.features.width,
            columns=self.plan.features.sizes,
            weighted="w" in self.payload or self.spec.duplicate_rule == "sum",
            time=self.plan.time.dtype if self.plan.time else None,
            unused=unused_columns(self.plan.source, self.plan.used),
        )
        extra = "".join(f", {column}" for column in self.payload)
        rows = f"SELECT s, d, p{extra} FROM matched" + (" WHERE s <> d" if dropped else "")
        if self.doubled:  # a reverse edge follows its edge, so positions are twice those of rows
            reverse_rows = f"SELECT d, s, 2 * p + 1{extra} FROM matched WHERE s <> d"
            rows = f"SELECT s, d, 2 * p AS p{extra} FROM ({rows}) UNION ALL {reverse_rows}"
        written = {kind: self._write(kind, rows, (src, dst), counts, advance)}
        if self.spec.undirected and not same:
            reverse = reverse_type(kind)
            reverse_rows = f"SELECT d AS s, s AS d, p{extra} FROM ({rows})"
            counts = replace(counts, reversed=counts.rows)
            written[reverse] = self._write(reverse, reverse_rows, (dst, src), counts, advance)
        self.duck.run("DROP TABLE matched")
        return written

    def _match(self, src: NodeIdIndex, dst: NodeIdIndex, same: bool) -> int:
        """Create and check table ``matched``: rows of both ends, position and payload per edge; count self-loops."""
        plan, source = self.plan, self.plan.source
        payload = {"src": plan.src.select(src.kind), "dst": plan.dst.select(dst.kind), "p": source.position}
        payload |= plan.payload()
        columns = ", ".join(f"{expression} AS {column}" for column, expression in payload.items())
        row_s, join_s = src.join("e.src", "i")
        row_d, join_d = dst.join("e.dst", "j")
        integer = "INTEGER" if max(src.count, dst.count) < 2**31 else "BIGINT"
        extra = "".join(f", {column}" for column in self.payload)
        self.duck.keep_order(False)
        self.duck.run(
            f"CREATE TABLE matched AS SELECT ({row_s})::{integer} AS s, ({row_d})::{integer} AS d, e.p AS p{extra} "
            f"FROM ({source.scan(columns)}) e {join_s} {join_d}"
        )
        invalid = ["s IS NULL", "d IS NULL"]
        invalid += ["w IS NULL OR NOT isfinite(w)"] if plan.weight else []
        invalid += [plan.time.invalid_sql("t")] if plan.time else []
        counts = ", ".join(f"count(*) FILTER ({condition})" for condition in ["s = d", *invalid])
        loops, *failures = self.duck.row(f"SELECT {counts} FROM matched")
        if any(failures[:2]):
            self._fail_unknown(src, dst)
        if any(failures[2:]):
            row_errors.check_rows(source, [row_errors.number_check(plan.weight, "weight")] if plan.weight else [])
            row_errors.check_rows(source, [plan.time.check()] if plan.time else [])
        row_errors.check_rows(source, plan.labels.checks() if plan.labels else [])
        loops = loops if same else 0
        if loops and self.spec.self_loops == "error":
            first = self.duck.row("SELECT min(p) FROM matched WHERE s = d")[0]
            check = RowCheck(plan.dst.column, "", "a node other than the source", "Pass --self-loops keep or drop")
            row_errors.raise_row_error(source, first, check, count=loops)
        return int(loops)

    def _fail_unknown(self, src: NodeIdIndex, dst: NodeIdIndex) -> None:
        count, first = self.duck.row("SELECT count(*), min(p) FROM matched WHERE s IS NULL OR d IS NULL")
        no_src = self.duck.row(f"SELECT s IS NULL FROM matched WHERE p = {first}")[0]
        key, keys = (self.plan.src, src) if no_src else (self.plan.dst, dst)
        expected = f"the id of one of the {keys.count:,} nodes" + (" (integers)" if keys.kind == "integer" else "")
        advice = "Add the node to its table, remove the edge, or pass --missing add"
        if key.source.value(first, key.column) is None:
            advice = "Every edge needs both ends"
        row_errors.raise_row_error(key.source, first, RowCheck(key.column, "", expected, advice), count=count)

    def _write(
        self, kind: EdgeType, rows: str, ends: tuple[NodeIdIndex, NodeIdIndex], counts: EdgeCounts, advance: OnAdvance
    ) -> EdgeCounts:
        """Sort the edges that ``rows`` selects into store order and write them."""
        num_matched = counts.rows - counts.self_loops_dropped + (counts.reversed if kind.src == kind.dst else 0)
        rule = self.spec.duplicate_rule
        timed = self.plan.time is not None
        if rule == "error":
            self._refuse_duplicates(rows)
        elif rule == "sum":
            rows = self._summed(rows)
        elif rule == "drop" and timed:
            rows = f"SELECT * FROM ({rows}) QUALIFY row_number() OVER (PARTITION BY s, d, t ORDER BY p) = 1"
        writer = _SortedEdges(self, kind, ends, drop=rule == "drop" and not timed)
        writer.write(rows, advance)
        if timed:
            self._write_order(kind)
        dropped = num_matched - writer.count if rule in ("drop", "sum") else 0
        return replace(
            counts,
            count=writer.count,
            parallel=max(writer.parallel, dropped),
            duplicates_dropped=dropped,
            labelled=writer.labelled,
        )

    def _write_order(self, kind: EdgeType) -> None:
        order = self.out.array(f"{edge_dir(kind)}/order.npy", torch.int64)
        self.duck.keep_order(True)
        for batch in self.duck.stream("SELECT rowid FROM ordered ORDER BY t, p"):
            order.append(torch.from_numpy(np.array(batch.column(0))))
        self.duck.run("DROP TABLE ordered")

    def _group(self) -> str:
        return "s, d, t" if self.plan.time else "s, d"

    def _refuse_duplicates(self, rows: str) -> None:
        numbered = f"SELECT p, row_number() OVER (PARTITION BY {self._group()} ORDER BY p) AS n FROM ({rows})"
        count, first = self.duck.row(f"SELECT count(*), min(p) FROM ({numbered}) WHERE n > 1")
        if count:
            check = RowCheck(
                self.plan.dst.column, "", "a pair that no earlier row has", "Pass --duplicates keep, drop or sum"
            )
            row_errors.raise_row_error(self.plan.source, first // 2 if self.doubled else first, check, count=count)

    def _summed(self, rows: str) -> str:
        """Merge duplicates: add up weights (1 where there are none) and features, keep the first label."""
        row_errors.check_rows(self.plan.source, self.plan.features.checks())  # sum() would ignore missing values
        if "w" not in self.payload:
            self.payload = ["w", *self.payload]
        columns = [_sum("w") + " AS w" if self.plan.weight else "count(*)::FLOAT AS w"]
        columns += [f"arg_min({name}, p) AS {name}" for name in self.plan.label_names]
        for i, (_, width) in enumerate(self.plan.features.columns):
            items = [_sum(f"a{i}")] if width is None else [_sum(f"a{i}[{k + 1}]") for k in range(width)]
            columns.append(f"{items[0] if width is None else '[' + ', '.join(items) + ']'} AS a{i}")
        return f"SELECT {self._group()}, min(p) AS p, {', '.join(columns)} FROM ({rows}) GROUP BY {self._group()}"


def _sum(expression: str) -> str:
    return f"try_cast(sum({expression}::DOUBLE) AS FLOAT)"


class _SortedEdges:
    """Streams edges in store order into arrays; counts duplicates of a pair and drops them if ``drop`` is set."""

    def __init__(
        self, edges: EdgeImporter, kind: EdgeType, ends: tuple[NodeIdIndex, NodeIdIndex], *, drop: bool
    ) -> None:
        self.edges = edges
        self.folder = edge_dir(kind)
        self.src, self.dst = ends
        self.drop = drop
        self.bits = max(1, self.src.count.bit_length())
        if self.bits + self.dst.count.bit_length() > 63:
            raise ConfigError(f"{self.src.count:,} by {self.dst.count:,} nodes are more than a store can address")
        self.count = 0
        self.parallel = 0
        self.labelled = 0
        self._degree = np.zeros(self.dst.count + 1, dtype=np.int64)
        self._last = -1

    def write(self, rows: str, advance: OnAdvance) -> None:
        """Sort and write the edges; ``rows`` selects s, d, p and the payload."""
        duck, payload = self.edges.duck, self.edges.payload
        extra = "".join(f", {column}" for column in payload)
        keyed = f"SELECT (d::BIGINT << {self.bits}) | s AS k, p{extra} FROM ({rows})"
        query = f"SELECT k{extra} FROM ({keyed}) ORDER BY k, p"
        duck.keep_order(True)
        if self.edges.plan.time:
            # The order by time is written later, as row numbers of this table.
            duck.run(f"CREATE TABLE ordered AS SELECT k, p{extra} FROM ({keyed}) ORDER BY k, p")
            query = f"SELECT k{extra} FROM ordered"
        arrays = self._arrays(payload)
        for batch in duck.stream(query, self.edges.plan.features.rows_per_batch):
            self._append(batch, arrays)
            advance(len(batch))
        np.cumsum(self._degree, out=self._degree)
        self.edges.out.put(f"{self.folder}/indptr.npy", torch.from_numpy(self._degree))

    def _arrays(self, payload: Sequence[str]) -> dict[str, Any]:
        out, plan = self.edges.out, self.edges.plan
        arrays = {"src": out.array(f"{self.folder}/src.npy", index_dtype(max(self.src.count, self.dst.count)))}
        if "w" in payload:
            arrays["w"] = out.array(f"{self.folder}/weight.npy", torch.float32)
        if plan.time:
            arrays["t"] = out.array(f"{self.folder}/time.npy", DTYPES[plan.time.dtype][0])
        if plan.features.columns:
            arrays["a"] = plan.features.open_array(out, f"{self.folder}/attr.npy")
        if plan.labels:
            arrays["y"] = plan.labels.open_array(out, f"{self.folder}/y.npy")
        return arrays

    def _append(self, batch: Any, arrays: dict[str, Any]) -> None:
        key = np.asarray(batch.column("k"))
        repeats = np.empty(len(key), dtype=bool)
        repeats[0] = key[0] == self._last
        np.equal(key[1:], key[:-1], out=repeats[1:])
        assert key[0] >= self._last and bool((key[1:] >= key[:-1]).all()), "DuckDB's order was lost"
        self._last = int(key[-1])
        num_repeats = int(repeats.sum())
        self.parallel += num_repeats
        keep = np.flatnonzero(~repeats) if self.drop and num_repeats else slice(None)
        key = key[keep]
        if not len(key):
            return
        dst = key >> self.bits
        first = int(dst[0])
        degrees = np.bincount(dst - first)
        self._degree[first + 1 : first + 1 + len(degrees)] += degrees
        arrays["src"].append(torch.from_numpy(key & ((1 << self.bits) - 1)))
        for column in ("w", "t"):
            if column in arrays:
                values = batch.column(column)
                if values.null_count:
                    row_errors.raise_sum_error(self.edges.plan.source, "weights", "float32")
                arrays[column].append(torch.from_numpy(np.array(values)[keep]))
        if "a" in arrays:
            plan = self.edges.plan
            columns = [batch.column(f"a{i}") for i in range(len(plan.features.columns))]
            arrays["a"].append(read_features(plan.source, plan.features, columns)[keep])
        labels = self.edges.plan.labels
        if labels:
            y = labels.read([batch.column(name) for name in self.edges.plan.label_names])[keep]
            self.labelled += count_labelled(y)
            arrays["y"].append(y)
        self.count += len(key)
