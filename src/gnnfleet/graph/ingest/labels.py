"""Labels and split words of a table: how a column reads, and its values as class numbers.

A label column holds class numbers from 0 (−1 or nothing for none), or names, which are numbered in sorted order.
Several columns of 0 and 1, or lists, make several labels per node or edge.
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
from gnnfleet.graph.graph import NO_SPLIT, TEST, TRAIN, VAL
from gnnfleet.graph.ingest import duck as sql
from gnnfleet.graph.ingest.columns import canonical_integer_sql, find_column, is_number, list_item_type, match_columns
from gnnfleet.graph.ingest.row_errors import RowCheck
from gnnfleet.graph.ingest.source import TableSource
from gnnfleet.graph.ingest.spec import NONE

SPLIT_CODES = {
    "train": TRAIN,
    "val": VAL,
    "valid": VAL,
    "validation": VAL,
    "test": TEST,
    "none": NO_SPLIT,
    "": NO_SPLIT,
}
MAX_CLASSES = 1_000_000
LabelForm = Literal["number", "name", "columns", "list", "names"]


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
        return f"Correct the values, choose another column, or import without labels: --{self.option} none"

    def select(self) -> list[str]:
        cells = [sql.sql_name(column) for column in self.columns]
        if self.form == "number":
            # NaN is how pandas writes a missing integer.
            return [f"try_cast(nullif(try_cast({cells[0]} AS DOUBLE), 'nan'::DOUBLE) AS BIGINT)"]
        if self.form == "name":
            return [f"nullif({cells[0]}::VARCHAR, '')"]
        if self.form == "columns":
            return [f"try_cast({cell} AS TINYINT)" for cell in cells]
        return [f"try_cast({cells[0]} AS {'VARCHAR[]' if self.form == 'names' else 'TINYINT[]'})"]

    def checks(self) -> list[RowCheck]:
        """What no row may hold."""
        cells = [(column, sql.sql_name(column)) for column in self.columns]
        if self.form == "number":
            column, cell = cells[0]
            value = f"try_cast({cell} AS DOUBLE)"
            wrong = f"coalesce({value} < -1, true) OR (NOT isnan({value}) AND {value} <> floor({value}))"
            return [
                RowCheck(
                    column,
                    f"({cell} IS NOT NULL AND ({wrong}))",
                    "a class number from 0, −1 or nothing for no label",
                    self.advice,
                )
            ]
        if self.form == "columns":
            return [
                RowCheck(
                    c,
                    f"({cell} IS NOT NULL AND coalesce(try_cast({cell} AS DOUBLE) NOT IN (0, 1), true))",
                    "0 or 1",
                    self.advice,
                )
                for c, cell in cells
            ]
        if self.form == "list":
            column, cell = cells[0]
            wrong = f"len([1 FOR item IN {cell} IF item IS NULL OR item::DOUBLE NOT IN (0, 1)]) > 0"
            bad = f"({cell} IS NOT NULL AND (len({cell}) <> {self.width} OR {wrong}))"
            return [RowCheck(column, bad, f"{self.width} values of 0 or 1", self.advice)]
        return []

    def read(self, arrays: list[Any]) -> Tensor:
        """[n] int64 or [n, C] int8 of one batch of ``select``."""
        if self.form in ("number", "name"):
            found = arrays[0] if self.form == "number" else pc.index_in(arrays[0], value_set=self._set(arrays[0].type))
            return torch.from_numpy(np.array(pc.fill_null(found.cast(pa.int64()), -1)))
        if self.form == "columns":
            return torch.from_numpy(np.stack([np.asarray(pc.fill_null(array, -1)) for array in arrays], axis=1))
        array = arrays[0]
        made = np.full((len(array), self.width), -1 if array.null_count else 0, dtype=np.int8)
        made[np.asarray(array.is_valid())] = 0
        row = np.asarray(pc.list_parent_indices(array), dtype=np.int64)
        if self.form == "list":
            full = np.flatnonzero(np.asarray(array.is_valid()))
            made[full] = np.asarray(array.flatten()).reshape(len(full), self.width)
        else:
            column = pc.index_in(array.flatten(), value_set=self._set(array.type.value_type))
            made[row[np.asarray(column.is_valid())], np.asarray(column.drop_null())] = 1
        return torch.from_numpy(made)

    def missing(self, count: int) -> Tensor:
        """The labels of rows that have none."""
        return torch.full((count, self.width), -1, dtype=torch.int8) if self.width else torch.full((count,), -1)

    def _set(self, kind: Any) -> Any:
        return pa.array(self.classes, kind)


def find_labels(source: TableSource, wanted: str | None, option: str = "label") -> LabelSource | None:
    """The label columns of a table, named or by their usual names."""
    if wanted == NONE:
        return None
    if wanted is None or wanted in source.types:
        column = find_column(source, "label", wanted)
        columns = [] if column is None else [column]
    else:
        columns = match_columns(source, wanted, option)
    if not columns:
        return None
    if len(columns) > 1:
        return LabelSource(tuple(columns), "columns", classes=tuple(columns), width=len(columns), option=option)
    column, cell, kind = columns[0], sql.sql_name(columns[0]), source.types[columns[0]]
    item = list_item_type(kind)
    if item is not None and is_number(item):
        width = source.duck.rows(source.scan(f"len({cell})", f"{cell} IS NOT NULL") + " LIMIT 1")
        return LabelSource((column,), "list", width=int(width[0][0]) if width else 0, option=option)
    if item is not None:
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


def read_split(array: Any) -> np.ndarray[Any, np.dtype[np.int8]] | None:
    """[n] split codes of a batch of words; None when one is no such word."""
    found = pc.index_in(array, value_set=pa.array(list(SPLIT_CODES), array.type))
    if found.null_count > array.null_count:
        return None
    codes = np.asarray([*SPLIT_CODES.values(), NO_SPLIT], dtype=np.int8)
    made: np.ndarray[Any, np.dtype[np.int8]] = codes[np.asarray(pc.fill_null(found, len(SPLIT_CODES)))]
    return made


def split_select(column: str) -> str:
    return f"lower(trim({sql.sql_name(column)}::VARCHAR))"


def split_check(column: str) -> RowCheck:
    words = sql.sql_list(SPLIT_CODES)
    return RowCheck(
        column,
        f"({sql.sql_name(column)} IS NOT NULL AND NOT list_contains({words}, {split_select(column)}))",
        "train, val, test or nothing",
        "Correct the words, or import without them: --split-column none",
    )


def _distinct(source: TableSource, column: str, expression: str) -> tuple[str, ...]:
    inner = source.scan(f"{expression} AS class")
    found = source.duck.rows(
        f"SELECT class FROM ({inner}) WHERE class IS NOT NULL GROUP BY class ORDER BY class LIMIT {MAX_CLASSES + 1}"
    )
    if len(found) > MAX_CLASSES:
        raise InputError(
            f"{source.shown}, column {column!r}: found more than {MAX_CLASSES:,} different labels. "
            "Choose another column, or import without labels: --label none (of edges: --edge-label none)"
        )
    return tuple(row[0] for row in found)
