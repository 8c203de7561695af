"""Label and split columns of a table, read as class numbers and split codes.

A label column holds class numbers from 0 (−1 or empty for none), or names, which are numbered in sorted order.
Several columns of 0 and 1, or lists, are several labels per node or edge. Columns of values are labels of a regression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.graph.graph import NO_SPLIT
from gnnfleet.graph.ingest import duck as sql
from gnnfleet.graph.ingest.columns import (
    canonical_integer_sql,
    find_column,
    is_number,
    list_item_type,
    list_width,
    match_columns,
)
from gnnfleet.graph.ingest.row_errors import RowCheck
from gnnfleet.graph.ingest.source import TableSource
from gnnfleet.graph.ingest.spec import NONE, SPLIT_CODES
from gnnfleet.io.bundle import ArrayWriter, BundleWriter

MAX_CLASSES = 1_000_000
LabelForm = Literal["value", "number", "name", "columns", "list", "names"]


@dataclass(frozen=True)
class LabelSource:
    """The label columns of a table. ``width`` is the number of labels per row, 0 for one class per row."""

    columns: tuple[str, ...]
    form: LabelForm
    classes: tuple[str, ...] = ()
    width: int = 0
    option: str = "label"

    @property
    def advice(self) -> str:
        value = f"predict them by regression (--value {self.columns[0]}), " if self.form == "number" else ""
        return f"Correct the values, {value}choose another column, or import without labels: --{self.option} none"

    def select(self) -> list[str]:
        cells = [sql.sql_name(column) for column in self.columns]
        if self.form == "value":
            return [f"try_cast({cell} AS FLOAT)" for cell in cells]
        if self.form == "number":
            # NaN is how pandas writes a missing integer.
            return [f"try_cast(nullif(try_cast({cells[0]} AS DOUBLE), 'nan'::DOUBLE) AS BIGINT)"]
        if self.form == "name":
            return [f"nullif({cells[0]}::VARCHAR, '')"]
        if self.form == "columns":
            return [f"try_cast({cell} AS TINYINT)" for cell in cells]
        return [f"try_cast({cells[0]} AS {'VARCHAR[]' if self.form == 'names' else 'TINYINT[]'})"]

    def checks(self) -> list[RowCheck]:
        return [check for column in self.columns if (check := self._check(column))]

    def _check(self, column: str) -> RowCheck | None:
        cell = sql.sql_name(column)
        number = f"try_cast({cell} AS DOUBLE)"
        if self.form == "value":
            invalid, expected = f"coalesce(isinf({number}::FLOAT), true)", "a finite number, or nothing for no label"
        elif self.form == "number":
            invalid = f"coalesce({number} < -1, true) OR (NOT isnan({number}) AND {number} <> floor({number}))"
            expected = "a class number from 0, −1 or nothing for no label"
        elif self.form == "columns":
            invalid, expected = f"coalesce({number} NOT IN (0, 1), true)", "0 or 1"
        elif self.form == "list":
            not_binary = f"len([1 FOR item IN {cell} IF item IS NULL OR item::DOUBLE NOT IN (0, 1)]) > 0"
            invalid, expected = f"len({cell}) <> {self.width} OR {not_binary}", f"{self.width} values of 0 or 1"
        else:
            return None
        return RowCheck(column, f"({cell} IS NOT NULL AND ({invalid}))", expected, self.advice)

    def read(self, arrays: list[Any]) -> Tensor:
        """[n] int64 or [n, C] int8 of one batch of ``select``."""
        array = arrays[0]
        if self.form == "value":
            y = np.stack([np.asarray(pc.fill_null(array, np.nan), np.float32) for array in arrays], axis=1)
            return torch.from_numpy(y if self.width else y[:, 0])
        if self.form in ("number", "name"):
            codes = array if self.form == "number" else pc.index_in(array, value_set=self._class_names(array.type))
            return torch.from_numpy(np.array(pc.fill_null(codes.cast(pa.int64()), -1)))
        if self.form == "columns":
            return torch.from_numpy(np.stack([np.asarray(pc.fill_null(array, -1)) for array in arrays], axis=1))
        is_valid = np.asarray(array.is_valid())
        y = np.full((len(array), self.width), -1, dtype=np.int8)
        if self.form == "list":
            y[is_valid] = np.asarray(array.flatten()).reshape(int(is_valid.sum()), self.width)
        else:
            y[is_valid] = 0
            row = np.asarray(pc.list_parent_indices(array), dtype=np.int64)
            column = pc.index_in(array.flatten(), value_set=self._class_names(array.type.value_type))
            y[row[np.asarray(column.is_valid())], np.asarray(column.drop_null())] = 1
        return torch.from_numpy(y)

    def missing(self, count: int) -> Tensor:
        """Labels for rows that have none."""
        return torch.full((count, *self._columns), torch.nan if self.form == "value" else -1, dtype=self._dtype)

    def open_array(self, out: BundleWriter, path: str) -> ArrayWriter:
        return out.array(path, self._dtype, self._columns)

    @property
    def _columns(self) -> tuple[int, ...]:
        return (self.width,) if self.width else ()

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.form == "value" else torch.int8 if self.width else torch.int64

    def _class_names(self, kind: Any) -> Any:
        return pa.array(self.classes, kind)


def find_labels(source: TableSource, patterns: str | None, option: str = "label") -> LabelSource | None:
    """Find the label columns of a table by name or by their usual names."""
    if patterns == NONE:
        return None
    if patterns is None or patterns in source.types:
        column = find_column(source, "label", patterns)
        columns = [] if column is None else [column]
    else:
        columns = match_columns(source, patterns, option)
    if not columns:
        return None
    if len(columns) > 1:
        return LabelSource(tuple(columns), "columns", classes=tuple(columns), width=len(columns), option=option)
    column, cell, kind = columns[0], sql.sql_name(columns[0]), source.types[columns[0]]
    item_type = list_item_type(kind)
    if item_type is not None and is_number(item_type):
        return LabelSource((column,), "list", width=list_width(source, column), option=option)
    if item_type is not None:
        classes = _distinct(source, column, f"unnest({cell})::VARCHAR")
        return LabelSource((column,), "names", classes=classes, width=len(classes), option=option)
    if source.is_text:
        numbers = source.duck.row(source.scan(f"coalesce(bool_and({canonical_integer_sql(cell)}), true)"))[0]
    else:
        numbers = is_number(kind)
    if numbers:
        return LabelSource((column,), "number", option=option)
    classes = _distinct(source, column, f"nullif({cell}::VARCHAR, '')")
    return LabelSource((column,), "name", classes=classes, option=option)


def find_values(source: TableSource, patterns: str) -> LabelSource:
    """Find the columns of values to predict."""
    columns = tuple(match_columns(source, patterns, "value"))
    width = len(columns) if len(columns) > 1 else 0
    return LabelSource(columns, "value", classes=columns if width else (), width=width, option="value")


def read_split(array: Any) -> np.ndarray[Any, np.dtype[np.int8]] | None:
    """[n] split codes of a batch of split names; None when a name is unknown."""
    index = pc.index_in(array, value_set=pa.array(list(SPLIT_CODES), array.type))
    if index.null_count > array.null_count:
        return None
    codes = np.asarray([*SPLIT_CODES.values(), NO_SPLIT], dtype=np.int8)
    split: np.ndarray[Any, np.dtype[np.int8]] = codes[np.asarray(pc.fill_null(index, len(SPLIT_CODES)))]
    return split


def split_select(column: str) -> str:
    return f"lower(trim({sql.sql_name(column)}::VARCHAR))"


def split_check(column: str) -> RowCheck:
    names = sql.sql_list(SPLIT_CODES)
    return RowCheck(
        column,
        f"({sql.sql_name(column)} IS NOT NULL AND NOT list_contains({names}, {split_select(column)}))",
        "train, val, test or nothing",
        "Correct the values, or import without them: --split-column none",
    )


def _distinct(source: TableSource, column: str, expression: str) -> tuple[str, ...]:
    names = source.scan(f"{expression} AS class")
    rows = source.duck.rows(
        f"SELECT class FROM ({names}) WHERE class IS NOT NULL GROUP BY class ORDER BY class LIMIT {MAX_CLASSES + 1}"
    )
    if len(rows) > MAX_CLASSES:
        raise InputError(
            f"{source.shown}, column {column!r}: found more than {MAX_CLASSES:,} different labels. "
            "Choose another column, or import without labels: --label none (of edges: --edge-label none)"
        )
    return tuple(row[0] for row in rows)
