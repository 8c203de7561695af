"""Rows that cannot be imported: found by a fast count, then located by a second query that only runs on failure."""

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
    """A condition that no row of a column may meet, and the words for one that does."""

    column: str
    condition: str
    expected: str
    advice: str


def check_rows(source: TableSource, checks: Sequence[RowCheck]) -> None:
    """Raise InputError for the first bad row of a source under any of the checks; return if there is none."""
    if not checks:
        return
    counts = ", ".join(
        f"count(*) FILTER ({check.condition}), min({source.position}) FILTER ({check.condition})" for check in checks
    )
    found = source.duck.row(source.scan(counts))
    bad = [(found[2 * i + 1], found[2 * i], check) for i, check in enumerate(checks) if found[2 * i]]
    if bad:
        position, count, check = min(bad, key=lambda item: item[0])
        raise_row_error(source, position, check, count=count)


def raise_row_error(source: TableSource, position: int, check: RowCheck, *, count: int) -> NoReturn:
    """InputError with the place, the value found, how many there are and what to do."""
    value = source.value(position, check.column)
    also = f" ({count:,} such rows)" if count > 1 else ""
    raise InputError(
        f"{source.location(position)}, column {check.column!r}: expected {check.expected}, "
        f"found {format_value(value)}{also}. {check.advice}"
    )


def raise_sum_error(source: TableSource, what: str, dtype: str) -> NoReturn:
    """InputError for duplicates that are fine one by one, but not added up."""
    raise InputError(
        f"{source.shown}: the {what} of some duplicate edges add up to more than {dtype} can hold. "
        "Pass --duplicates keep or drop" + (", or --dtype float32" if dtype == "float16" else "")
    )


def format_value(value: Any) -> str:
    """A value in a message."""
    if value is None:
        return "no value"
    if isinstance(value, list | tuple):
        head = ", ".join(format_value(item) for item in value[:4])
        return f"{len(value)} values [{head}{', …' if len(value) > 4 else ''}]"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "…"


def not_finite_sql(expression: str, dtype: str) -> str:
    """SQL that is true for what is no finite number of a feature type; ``expression`` is a FLOAT or NULL."""
    limit = f" OR abs({expression}) > {FLOAT16_MAX}" if dtype == "float16" else ""
    return f"({expression} IS NULL OR NOT isfinite({expression}){limit})"


def feature_check(column: str, dtype: str, *, width: int | None, option: str) -> RowCheck:
    """The check of a feature column: a number, or ``width`` numbers where it holds lists."""
    cell = sql.sql_name(column)
    advice = f"Fill the gaps or correct the values, or choose other columns with --{option}"
    finite = "a finite number" if dtype != "float16" else f"a finite number up to {FLOAT16_MAX} (float16)"
    if width is None:
        return RowCheck(column, not_finite_sql(f"try_cast({cell} AS FLOAT)", dtype), finite, advice)
    wrong = f"len([1 FOR item IN {cell} IF {not_finite_sql('try_cast(item AS FLOAT)', dtype)}]) > 0"
    return RowCheck(
        column, f"({cell} IS NULL OR len({cell}) <> {width} OR {wrong})", f"{width} values, each {finite}", advice
    )


def number_check(column: str, what: str) -> RowCheck:
    return RowCheck(
        column,
        not_finite_sql(f"try_cast({sql.sql_name(column)} AS FLOAT)", "float32"),
        f"a finite number as {what}",
        f"Correct the values, or import without them: --{what} none",
    )
