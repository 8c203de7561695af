"""Edge tables into a store: match ids to rows, check, sort by (dst, src, input position), write.

All of it in DuckDB, which spills what does not fit; here only a batch of edges and a count per destination.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType, index_dtype
from gnnfleet.graph.ingest import duck as sql
from gnnfleet.graph.ingest import row_errors
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
from gnnfleet.graph.ingest.duck import ROWS_PER_BATCH, DuckConnection
from gnnfleet.graph.ingest.keys import IdColumn, NodeIdIndex
from gnnfleet.graph.ingest.labels import LabelSource, find_labels
from gnnfleet.graph.ingest.nodes import VALUES_PER_BATCH, OnAdvance, read_features
from gnnfleet.graph.ingest.row_errors import RowCheck
from gnnfleet.graph.ingest.source import TableSource, is_zoned_time
from gnnfleet.graph.ingest.spec import EdgeCounts, EdgeTable, TableSpec, count_labelled
from gnnfleet.graph.store import edge_dir
from gnnfleet.io.bundle import DTYPES, BundleWriter


@dataclass(frozen=True)
class TimeColumn:
    """A column of event times; SQL timestamps and dates become microseconds since 1970."""

    column: str
    value: str
    dtype: str

    def invalid_sql(self, value: str) -> str:
        """SQL that is true for what is no time; ``value`` is SQL too."""
        finite = f" OR NOT isfinite({value})" if self.dtype == "float64" else ""
        return f"({value} IS NULL OR {value} < 0{finite})"

    def check(self) -> RowCheck:
        return RowCheck(
            self.column,
            self.invalid_sql(self.value),
            "a time of 0 or later",
            "Correct or shift the times, or import without them: --time none",
        )


@dataclass(frozen=True)
class EdgeTablePlan:
    """An edge table with its columns found."""

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
        """Of the labels' columns in our tables."""
        return [f"y{i}" for i in range(len(self.labels.select()) if self.labels else 0)]

    def payload(self) -> dict[str, str]:
        """What travels with an edge: name in our tables → SQL over the source."""
        made = {"w": f"try_cast({sql.sql_name(self.weight)} AS FLOAT)"} if self.weight else {}
        if self.time:
            made["t"] = self.time.value
        made |= dict(zip(self.label_names, self.labels.select() if self.labels else [], strict=True))
        return made | {f"a{i}": value for i, value in enumerate(self.features.select())}


def plan_edges(source: TableSource, table: EdgeTable, dtype: str) -> EdgeTablePlan:
    """Find the columns of an edge table; raises InputError naming one that is missing."""
    src, dst = (find_column(source, part, getattr(table, part), required=True) for part in ("src", "dst"))
    assert src is not None and dst is not None
    weight = find_column(source, "weight", table.weight)
    column = find_column(source, "time", table.time)
    time = None if column is None else _read_time(source, column)
    labels = find_labels(source, table.label, "edge-label")
    # The name of an edge, or what is to be predicted of it, is no feature unless somebody says so.
    others = (
        [] if table.features else [find_by_usual_name(source.types, part, None) for part in ("id", "label", "split")]
    )
    others += labels.columns if labels else ()
    features = find_features(
        source, table.features, used=[src, dst, weight, column, *others], dtype=dtype, option="edge-features"
    )
    return EdgeTablePlan(source, IdColumn(source, src), IdColumn(source, dst), weight, time, features, labels)


def _read_time(source: TableSource, column: str) -> TimeColumn:
    cell, kind = sql.sql_name(column), source.types[column]
    as_integer = TimeColumn(column, f"try_cast({cell} AS BIGINT)", "int64")
    as_number = TimeColumn(column, f"try_cast({cell} AS DOUBLE)", "float64")
    # A timestamp with a zone keeps it, or it would be read in the zone of this machine.
    stamp = f"try_cast({cell} AS {'TIMESTAMPTZ' if is_zoned_time(kind) else 'TIMESTAMP'})"
    as_stamp = TimeColumn(column, f"epoch_us({stamp})", "int64")
    if not source.is_text:
        return as_integer if is_integer(kind) else as_number if is_floating(kind) else as_stamp
    readings = f"count(try_cast({cell} AS DOUBLE)), count({stamp})"
    facts = f"count({cell}), count(*) FILTER ({is_canonical(cell)}), {readings}"
    total, integers, numbers, stamps = source.duck.row(source.scan(facts))
    if integers == total:
        return as_integer
    # Where no reading fits every row, the one that fits most is meant, and the others are bad rows.
    return as_number if numbers >= stamps else as_stamp


class EdgeImporter:
    """The edges of one table on their way into a store."""

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
        if self.doubled:  # a reverse edge comes right after its edge, so positions are twice those of rows
            turned = f"SELECT d, s, 2 * p + 1{extra} FROM matched WHERE s <> d"
            rows = f"SELECT s, d, 2 * p AS p{extra} FROM ({rows}) UNION ALL {turned}"
        made = {kind: self._write(kind, rows, (src, dst), counts, advance)}
        if self.spec.undirected and not same:
            reverse = EdgeType(kind.dst, f"rev_{kind.relation}", kind.src)
            turned = f"SELECT d AS s, s AS d, p{extra} FROM ({rows})"
            made[reverse] = self._write(reverse, turned, (dst, src), replace(counts, reversed=counts.rows), advance)
        self.duck.run("DROP TABLE matched")
        return made

    def _match(self, src: NodeIdIndex, dst: NodeIdIndex, same: bool) -> int:
        """Make and check table ``matched``: rows of both ends, position and payload of every edge; count self-loops."""
        plan, source = self.plan, self.plan.source
        payload = plan.payload()
        columns = [
            f"{plan.src.select(src.kind)} AS src",
            f"{plan.dst.select(dst.kind)} AS dst",
            f"{source.position} AS p",
        ]
        columns += [f"{value} AS {column}" for column, value in payload.items()]
        row_s, join_s = src.join("e.src", "i")
        row_d, join_d = dst.join("e.dst", "j")
        integer = "INTEGER" if max(src.count, dst.count) < 2**31 else "BIGINT"
        extra = "".join(f", {column}" for column in payload)
        self.duck.keep_order(False)
        self.duck.run(
            f"CREATE TABLE matched AS SELECT ({row_s})::{integer} AS s, ({row_d})::{integer} AS d, e.p AS p{extra} "
            f"FROM ({source.scan(', '.join(columns))}) e {join_s} {join_d}"
        )
        bad = ["s IS NULL", "d IS NULL"]
        bad += ["w IS NULL OR NOT isfinite(w)"] if plan.weight else []
        bad += [plan.time.invalid_sql("t")] if plan.time else []
        facts = ", ".join(f"count(*) FILTER ({condition})" for condition in ["s = d", *bad])
        loops, *wrong = self.duck.row(f"SELECT {facts} FROM matched")
        if any(wrong[:2]):
            self._fail_unknown(src, dst)
        if any(wrong[2:]):
            row_errors.check_rows(source, [row_errors.number_check(plan.weight, "weight")] if plan.weight else [])
            row_errors.check_rows(source, [plan.time.check()] if plan.time else [])
        row_errors.check_rows(source, plan.labels.checks() if plan.labels else [])
        loops = loops if same else 0
        if loops and self.spec.self_loops == "error":
            first = self.duck.row("SELECT min(p) FROM matched WHERE s = d")[0]
            check = RowCheck(plan.dst.column, "", "another node than the source", "Pass --self-loops keep or drop")
            row_errors.raise_row_error(source, first, check, count=loops)
        return int(loops)

    def _fail_unknown(self, src: NodeIdIndex, dst: NodeIdIndex) -> None:
        count, first = self.duck.row("SELECT count(*), min(p) FROM matched WHERE s IS NULL OR d IS NULL")
        no_src = self.duck.row(f"SELECT s IS NULL FROM matched WHERE p = {first}")[0]
        key, keys = (self.plan.src, src) if no_src else (self.plan.dst, dst)
        missing = key.source.value(first, key.column) is None
        expected = f"the id of one of the {keys.count:,} nodes" + (" (integers)" if keys.kind == "integer" else "")
        advice = "Every edge needs both ends"
        if not missing:
            advice = "Add the node to its table, remove the edge, or pass --missing add"
        row_errors.raise_row_error(key.source, first, RowCheck(key.column, "", expected, advice), count=count)

    def _write(
        self, kind: EdgeType, rows: str, ends: tuple[NodeIdIndex, NodeIdIndex], counts: EdgeCounts, advance: OnAdvance
    ) -> EdgeCounts:
        """Sort what ``rows`` selects into store order and write it."""
        before = counts.rows - counts.self_loops_dropped + (counts.reversed if kind.src == kind.dst else 0)
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
        dropped = before - writer.count if rule in ("drop", "sum") else 0
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
        again = f"SELECT p, row_number() OVER (PARTITION BY {self._group()} ORDER BY p) AS n FROM ({rows})"
        count, first = self.duck.row(f"SELECT count(*), min(p) FROM ({again}) WHERE n > 1")
        if count:
            check = RowCheck(
                self.plan.dst.column, "", "a pair that no row before has", "Pass --duplicates keep, drop or sum"
            )
            row_errors.raise_row_error(self.plan.source, first // 2 if self.doubled else first, check, count=count)

    def _summed(self, rows: str) -> str:
        """Duplicates as one edge: weights (1 where there are none) and features added up, the rest the first's."""
        row_errors.check_rows(self.plan.source, self.plan.features.checks())  # sum() would pass over what is missing
        if "w" not in self.payload:
            self.payload = ["w", *self.payload]
        columns = [_sum("w") + " AS w" if self.plan.weight else "count(*)::FLOAT AS w"]
        columns += [f"arg_min({name}, p) AS {name}" for name in self.plan.label_names]
        for i, (_, width) in enumerate(self.plan.features.columns):
            items = [_sum(f"a{i}")] if width is None else [_sum(f"a{i}[{k + 1}]") for k in range(width)]
            columns.append(f"{items[0] if width is None else '[' + ', '.join(items) + ']'} AS a{i}")
        return f"SELECT {self._group()}, min(p) AS p, {', '.join(columns)} FROM ({rows}) GROUP BY {self._group()}"


def _sum(value: str) -> str:
    return f"try_cast(sum({value}::DOUBLE) AS FLOAT)"


class _SortedEdges:
    """Streams edges in store order into arrays; drops repeats of a pair when asked, and counts them anyway."""

    def __init__(
        self, edges: EdgeImporter, kind: EdgeType, ends: tuple[NodeIdIndex, NodeIdIndex], *, drop: bool
    ) -> None:
        self.edges = edges
        self.folder = edge_dir(kind)
        self.src, self.dst = ends
        self.drop = drop
        self.bits = max(1, self.src.count.bit_length())
        if self.bits + self.dst.count.bit_length() > 63:
            raise ConfigError(f"{self.src.count:,} by {self.dst.count:,} nodes are more than a store can number")
        self.count = 0
        self.parallel = 0
        self.labelled = 0
        self._degree = np.zeros(self.dst.count + 1, dtype=np.int64)
        self._last = -1

    def write(self, rows: str, advance: OnAdvance) -> None:
        """``rows`` selects s, d, p and the payload."""
        duck, payload = self.edges.duck, self.edges.payload
        extra = "".join(f", {column}" for column in payload)
        keyed = f"SELECT (d::BIGINT << {self.bits}) | s AS k, p{extra} FROM ({rows})"
        query = f"SELECT k{extra} FROM ({keyed}) ORDER BY k, p"
        duck.keep_order(True)
        if self.edges.plan.time:
            # Times need a second order, over the row numbers that the first one gives.
            duck.run(f"CREATE TABLE ordered AS SELECT k, p{extra} FROM ({keyed}) ORDER BY k, p")
            query = f"SELECT k{extra} FROM ordered"
        width = max(1, self.edges.plan.features.width)
        arrays = self._arrays(payload)
        for batch in duck.stream(query, batch=min(ROWS_PER_BATCH, max(2048, VALUES_PER_BATCH // width))):
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
            dtype = DTYPES[plan.features.dtype][0]
            arrays["a"] = out.array(f"{self.folder}/attr.npy", dtype, (plan.features.width,))
        if plan.labels:
            width = (plan.labels.width,) if plan.labels.width else ()
            arrays["y"] = out.array(f"{self.folder}/y.npy", torch.int8 if width else torch.int64, width)
        return arrays

    def _append(self, batch: Any, arrays: dict[str, Any]) -> None:
        key = np.asarray(batch.column("k"))
        repeats = np.empty(len(key), dtype=bool)
        repeats[0] = key[0] == self._last
        np.equal(key[1:], key[:-1], out=repeats[1:])
        assert key[0] >= self._last and bool((key[1:] >= key[:-1]).all()), "DuckDB's order was lost"
        self._last = int(key[-1])
        again = int(repeats.sum())
        self.parallel += again
        kept = np.flatnonzero(~repeats) if self.drop and again else slice(None)
        key = key[kept]
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
                arrays[column].append(torch.from_numpy(np.array(values)[kept]))
        if "a" in arrays:
            plan = self.edges.plan
            columns = [batch.column(f"a{i}") for i in range(len(plan.features.columns))]
            arrays["a"].append(read_features(plan.source, plan.features, columns)[kept])
        labels = self.edges.plan.labels
        if labels:
            y = labels.read([batch.column(name) for name in self.edges.plan.label_names])[kept]
            self.labelled += count_labelled(y)
            arrays["y"].append(y)
        self.count += len(key)
