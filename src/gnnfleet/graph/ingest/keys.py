"""Node ids across tables: their type, the ids that occur in edges, and the row of every id.

Each node type has one Parquet file of ids whose row numbers are the store ids. Edges are matched by joining it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gnnfleet.errors import InputError
from gnnfleet.graph.ids import ID_COLUMN
from gnnfleet.graph.ingest import duck as sql
from gnnfleet.graph.ingest import row_errors
from gnnfleet.graph.ingest.columns import canonical_integer_sql, is_integer
from gnnfleet.graph.ingest.duck import DuckConnection
from gnnfleet.graph.ingest.source import TableSource

IdKind = Literal["integer", "text"]
_ROW_GROUP = 1 << 17


@dataclass(frozen=True)
class IdColumn:
    """A column of node ids in a node or edge table."""

    source: TableSource
    column: str

    @property
    def kind(self) -> IdKind | None:
        """The kind that the column's type implies; None for CSV, where the values decide."""
        if self.source.is_text:
            return None
        column_type = self.source.types[self.column]
        if is_integer(column_type):
            return "integer"
        if column_type in ("VARCHAR", "UUID") or column_type.startswith("ENUM"):
            return "text"
        raise InputError(
            f"{self.source.shown}, column {self.column!r}: ids must be integers or text, found {column_type}: cast them"
        )

    def all_canonical(self) -> bool:
        cell = sql.sql_name(self.column)
        return bool(
            self.source.duck.row(self.source.scan(f"coalesce(bool_and({canonical_integer_sql(cell)}), false)"))[0]
        )

    def select(self, kind: IdKind) -> str:
        """SQL of the id; NULL where it is missing or not of that kind."""
        cell = sql.sql_name(self.column)
        if kind == "text":
            return f"{cell}::VARCHAR"
        as_integer = f"try_cast({cell} AS BIGINT)"
        return f"CASE WHEN {canonical_integer_sql(cell)} THEN {as_integer} END" if self.source.is_text else as_integer


def infer_id_kind(nodes: IdColumn | None, ends: Sequence[IdColumn]) -> IdKind:
    """Decide if the ids of a node type are integers or text; raises InputError when its tables disagree."""
    typed = {end.kind for end in ends} - {None}
    if nodes is not None and nodes.kind is not None:
        kind: IdKind = nodes.kind
    elif nodes is not None:
        kind = "text" if "text" in typed or not nodes.all_canonical() else "integer"
    elif typed:
        kind = "text" if "text" in typed else "integer"
    else:
        kind = "integer" if all(end.all_canonical() for end in ends) else "text"
    reference = nodes or next((end for end in ends if end.kind == kind), None)
    for end in ends:
        if end.kind not in (None, kind):
            assert reference is not None
            expected, actual = ("text", "integers") if kind == "text" else ("integers", "text")
            raise InputError(
                f"the id types of two tables differ: {reference.source.shown}, column {reference.column!r} holds "
                f"{expected}, but {end.source.shown}, column {end.column!r} holds {actual} "
                f"({end.source.types[end.column]}). Write the ids of both tables in the same type"
            )
    return kind


@dataclass(frozen=True)
class NodeIdIndex:
    """The ids of a node type in row order. ``are_rows``: they are 0, 1, 2, …, and no file is needed."""

    kind: IdKind
    count: int
    are_rows: bool
    path: Path

    def join(self, end: str, alias: str) -> tuple[str, str]:
        """(SQL of the row of ``end``, its join clause); the row is NULL for an unknown id."""
        if self.are_rows:
            return f"CASE WHEN {end} BETWEEN 0 AND {self.count - 1} THEN {end} END", ""
        ids = f"read_parquet({sql.sql_string(self.path)}, file_row_number = true)"
        return f"{alias}.file_row_number", f"LEFT JOIN {ids} {alias} ON {end} = {alias}.{ID_COLUMN}"


class IdWriter:
    """Writes ids in row order to Parquet and notices if they are just the row numbers."""

    def __init__(self, path: Path, kind: IdKind) -> None:
        self.path = path
        self.kind = kind
        self.count = 0
        self.are_rows = kind == "integer"
        self._type = pa.int64() if kind == "integer" else pa.large_string()
        self._writer = pq.ParquetWriter(path, pa.schema([(ID_COLUMN, self._type)]), compression="zstd")
        self._pending: list[Any] = []

    def append(self, ids: Any) -> None:
        ids = ids.cast(self._type)
        if self.are_rows:
            rows = pa.array(np.arange(self.count, self.count + len(ids)))
            self.are_rows = bool(ids.equals(rows))
        self.count += len(ids)
        self._pending.append(ids)
        if sum(map(len, self._pending)) >= _ROW_GROUP:
            self._flush()

    def close(self) -> NodeIdIndex:
        self._flush()
        self._writer.close()
        return NodeIdIndex(self.kind, self.count, self.are_rows, self.path)

    def _flush(self) -> None:
        if self._pending:
            self._writer.write_table(pa.table({ID_COLUMN: pa.chunked_array(self._pending)}), row_group_size=_ROW_GROUP)
            self._pending = []


def ids_from_edges(duck: DuckConnection, ends: Sequence[IdColumn], path: Path) -> NodeIdIndex:
    """Number the ids that occur in edges, sorted: the nodes of a type without a table."""
    kind = infer_id_kind(None, ends)
    writer = IdWriter(path, kind)
    for batch in duck.stream(f"{_ids_of_ends(ends, kind)} GROUP BY id ORDER BY id"):
        writer.append(batch.column(0))
    return writer.close()


def append_missing_ids(duck: DuckConnection, keys: NodeIdIndex, ends: Sequence[IdColumn]) -> NodeIdIndex:
    """Append the ids that occur in edges only, sorted, after those of the table."""
    table_ids = f"SELECT {ID_COLUMN} FROM read_parquet({sql.sql_string(keys.path)})"
    writer = IdWriter(keys.path.with_name(keys.path.name + "-more"), keys.kind)
    for query in (table_ids, f"{_ids_of_ends(ends, keys.kind)} EXCEPT ({table_ids}) ORDER BY id"):
        duck.keep_order(True)
        for batch in duck.stream(query):
            writer.append(batch.column(0))
    return writer.close()


def check_unique_ids(source: TableSource, column: str, keys: NodeIdIndex) -> None:
    """Raise InputError naming an id that two rows of a node table share."""
    if keys.are_rows:
        return
    ids = f"read_parquet({sql.sql_string(keys.path)}, file_row_number = true)"
    distinct = source.duck.row(f"SELECT count(DISTINCT {ID_COLUMN}) FROM {ids}")[0]
    if distinct == keys.count:
        return
    # Row numbers of the ids file are positions of the table.
    firsts = f"SELECT file_row_number r, min(file_row_number) OVER (PARTITION BY {ID_COLUMN}) AS first FROM {ids}"
    second, first = source.duck.row(f"SELECT min(r), arg_min(first, r) FROM ({firsts}) WHERE r > first")
    check = row_errors.RowCheck(
        column, "", f"a unique id, not the one of {source.location(first)}", "Keep one row per node"
    )
    row_errors.raise_row_error(source, second, check, count=keys.count - distinct)


def _ids_of_ends(ends: Sequence[IdColumn], kind: IdKind) -> str:
    scans = " UNION ALL ".join(end.source.scan(f"{end.select(kind)} AS id") for end in ends)
    return f"SELECT id FROM ({scans}) WHERE id IS NOT NULL"
