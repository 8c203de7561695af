"""Checks of table rows: a fast count detects bad rows, a second query locates them only on failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from gnnfleet.errors import InputError
from gnnfleet.graph.ingest import duck as sql
from gnnfleet.graph.ingest.source import TableSource

FLOAT16_MAX = 65504  # the largest float16


@dataclass(frozen=True)
class RowCheck:
    """A condition that marks bad rows of a column, with the message texts for them."""

    column: str
    condition: str
    expected: str
    advice: str


def check_rows(source: TableSource, checks: Sequence[RowCheck]) -> None:
    """Raise InputError for the first row of a source that fails any of the checks."""
    if not checks:
        return
    counts = ", ".join(
        f"count(*) FILTER ({check.condition}), min({source.position}) FILTER ({check.condition})" for check in checks
    )
    row = source.duck.row(source.scan(counts))
    failures = [(first, count, check) for count, first, check in zip(row[::2], row[1::2], checks, strict=True) if count]
    if failures:
        first, count, check = min(failures, key=lambda failure: failure[0])
        raise_row_error(source, first, check, count=count)


def raise_row_error(source: TableSource, position: int, check: RowCheck, *, count: int) -> NoReturn:
    """Raise InputError with the location, the cell, the number of bad rows and advice."""
    cell = source.value(position, check.column)
    also = f" ({count:,} such rows)" if count > 1 else ""
    raise InputError(
        f"{source.location(position)}, column {check.column!r}: expected {check.expected}, "
        f"found {format_cell(cell)}{also}. {check.advice}"
    )


def raise_sum_error(source: TableSource, column_role: str, dtype: str) -> NoReturn:
    """Raise InputError for duplicate edges whose sum overflows although each of them is valid."""
    raise InputError(
        f"{source.shown}: the {column_role} of some duplicate edges add up to more than {dtype} can hold. "
        "Pass --duplicates keep or drop" + (", or --dtype float32" if dtype == "float16" else "")
    )


def format_cell(cell: Any) -> str:
    if cell is None:
        return "no value"
    if isinstance(cell, list | tuple):
        head = ", ".join(format_cell(entry) for entry in cell[:4])
        return f"{len(cell)} values [{head}{', …' if len(cell) > 4 else ''}]"
    text = repr(cell) if isinstance(cell, str) else str(cell)
    return text if len(text) <= 80 else text[:77] + "…"


def not_finite_sql(expression: str, dtype: str) -> str:
    """SQL that is true unless ``expression``, a FLOAT or NULL, is a finite number of a feature dtype."""
    limit = f" OR abs({expression}) > {FLOAT16_MAX}" if dtype == "float16" else ""
    return f"({expression} IS NULL OR NOT isfinite({expression}){limit})"


def feature_check(column: str, dtype: str, *, width: int | None, option: str) -> RowCheck:
    """Build the check of a feature column: a number, or a list of ``width`` numbers."""
    cell = sql.sql_name(column)
    advice = f"Fill the gaps or correct the values, or choose other columns with --{option}"
    finite = "a finite number" if dtype != "float16" else f"a finite number up to {FLOAT16_MAX} (float16)"
    if width is None:
        return RowCheck(column, not_finite_sql(f"try_cast({cell} AS FLOAT)", dtype), finite, advice)
    wrong = f"len([1 FOR item IN {cell} IF {not_finite_sql('try_cast(item AS FLOAT)', dtype)}]) > 0"
    return RowCheck(
        column, f"({cell} IS NULL OR len({cell}) <> {width} OR {wrong})", f"{width} values, each {finite}", advice
    )


def number_check(column: str, role: str) -> RowCheck:
    return RowCheck(
        column,
        not_finite_sql(f"try_cast({sql.sql_name(column)} AS FLOAT)", "float32"),
        f"a finite number as {role}",
        f"Correct the values, or import without them: --{role} none",
    )
