"""Assignment of table columns to their roles (id, src, label, features, …), and SQL for their values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gnnfleet.errors import InputError
from gnnfleet.graph.graph import ColumnGroups
from gnnfleet.graph.ingest import duck as sql
from gnnfleet.graph.ingest.row_errors import RowCheck, feature_check
from gnnfleet.graph.ingest.source import TableSource
from gnnfleet.graph.ingest.spec import NONE, USUAL_NAMES
from gnnfleet.io.bundle import DTYPES, ArrayWriter, BundleWriter

_INTEGER = re.compile(r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|UINTEGER")
_FLOATING = re.compile(r"FLOAT|DOUBLE|DECIMAL\(.*\)")
_LIST = re.compile(r"(.*)\[\d*\]")
_SAMPLE_ROWS = 1000
_VALUES_PER_BATCH = 1 << 23  # feature values in a batch: 32 MiB


def is_integer(kind: str) -> bool:
    return _INTEGER.fullmatch(kind) is not None


def is_floating(kind: str) -> bool:
    return _FLOATING.fullmatch(kind) is not None


def is_number(kind: str) -> bool:
    return is_integer(kind) or is_floating(kind) or kind == "BOOLEAN"


def list_item_type(kind: str) -> str | None:
    """The item type of a list type, None for other types."""
    match = _LIST.fullmatch(kind)
    return match[1] if match else None


def list_width(source: TableSource, column: str) -> int:
    """The length of the first list in a column, 0 without any."""
    cell = sql.sql_name(column)
    first = source.duck.rows(source.scan(f"len({cell})", f"{cell} IS NOT NULL") + " LIMIT 1")
    return int(first[0][0]) if first else 0


def canonical_integer_sql(cell: str) -> str:
    """SQL that is true for an integer in canonical form: not '007', ' 7', '+7' or '7.0'."""
    return f"(coalesce(try_cast({cell} AS BIGINT)::VARCHAR, '') = {cell})"


def find_by_usual_name(columns: Iterable[str], role: str, name: str | None) -> str | None:
    """Find the column of a role: ``name`` if it is set, else one of the usual names in any case."""
    names = list(columns)
    if name is not None:
        return name if name in names else None
    for usual_name in USUAL_NAMES[role]:
        matches = [usual_name] if usual_name in names else [c for c in names if c.casefold() == usual_name]
        if matches:
            return matches[0]
    return None


def find_column(source: TableSource, role: str, name: str | None, *, required: bool = False) -> str | None:
    """Find the column of a role in a table; raises InputError when it is named or required but absent."""
    if name == NONE and not required:
        return None
    column = find_by_usual_name(source.types, role, name)
    if column is None and (name or required):
        expected = repr(name) if name else " or ".join(map(repr, USUAL_NAMES[role]))
        option = "split-column" if role == "split" else role
        header = (
            " (names are read from the first line of a CSV file; for a file without a header use --columns)"
            if source.is_text
            else ""
        )
        raise InputError(
            f"{source.shown}: expected a column {expected} for {role}, found {', '.join(source.types)}{header}. "
            f"Name the column with --{option}"
        )
    return column


def match_columns(source: TableSource, patterns: str, option: str) -> list[str]:
    """Find the columns that match patterns, in the order of the patterns, then of the table."""
    columns: list[str] = []
    for pattern in _patterns(source, patterns):
        matches = _matches(source, pattern)
        if not matches:
            raise InputError(
                f"{source.shown}: no column matches {pattern!r} of --{option}; found {', '.join(source.types)}"
            )
        columns += [column for column in matches if column not in columns]
    return columns


def _patterns(source: TableSource, text: str) -> list[str]:
    """Split patterns at commas, else at spaces if no column matches: ``--nodes`` needs the commas itself."""
    patterns: list[str] = []
    for part in map(str.strip, text.split(",")):
        patterns += [part] if _matches(source, part) else part.split() or [part]
    return patterns


def _matches(source: TableSource, pattern: str) -> list[str]:
    return [pattern] if pattern in source.types else [c for c in source.types if fnmatchcase(c, pattern)]


@dataclass(frozen=True)
class FeatureSource:
    """The feature columns of a table. Scalar columns have width None."""

    columns: tuple[tuple[str, int | None], ...]
    dtype: str
    option: str = "features"

    @property
    def width(self) -> int:
        return sum(1 if width is None else width for _, width in self.columns)

    @property
    def names(self) -> list[str]:
        return [column for column, _ in self.columns]

    @property
    def sizes(self) -> ColumnGroups:
        """Columns as a store describes them: a scalar column is one feature."""
        return tuple((column, 1 if width is None else width) for column, width in self.columns)

    @property
    def rows_per_batch(self) -> int:
        return min(sql.ROWS_PER_BATCH, max(2048, _VALUES_PER_BATCH // max(self.width, 1)))

    def open_array(self, out: BundleWriter, path: str) -> ArrayWriter:
        return out.array(path, DTYPES[self.dtype][0], (self.width,))

    def select(self) -> list[str]:
        """SQL of each column as FLOAT or FLOAT[]; NULL for values that are no numbers."""
        return [f"try_cast({sql.sql_name(c)} AS FLOAT{'' if width is None else '[]'})" for c, width in self.columns]

    def checks(self) -> list[RowCheck]:
        return [feature_check(column, self.dtype, width=width, option=self.option) for column, width in self.columns]


def find_features(
    source: TableSource, patterns: str | None, *, used: Iterable[str | None], dtype: str, option: str = "features"
) -> FeatureSource:
    """Find the chosen feature columns, or all columns of numbers that have no other role."""
    if patterns == NONE:
        return FeatureSource((), dtype, option)
    if patterns is None:
        chosen = _numeric(source, unused_columns(source, used))
    else:
        taken = set(used)
        chosen = match_columns(source, patterns, option)
        chosen = [c for c in chosen if c not in taken or c in _patterns(source, patterns)]
        for column in chosen:
            kind = source.types[column]
            if not source.is_text and not is_number(list_item_type(kind) or kind):
                raise InputError(
                    f"{source.shown}, column {column!r}: features must be numbers or lists of numbers, found {kind}"
                )
    widths = tuple((c, list_width(source, c) if list_item_type(source.types[c]) else None) for c in chosen)
    return FeatureSource(widths, dtype, option)


def _numeric(source: TableSource, columns: Sequence[str]) -> list[str]:
    """Select the columns of numbers; in CSV by the majority of the first rows, so that one bad cell is an error."""
    if not source.is_text:
        return [c for c in columns if is_number(list_item_type(source.types[c]) or source.types[c])]
    if not columns:
        return []
    majorities = ", ".join(
        f"2 * count(try_cast({sql.sql_name(c)} AS DOUBLE)) > count({sql.sql_name(c)})" for c in columns
    )
    sample = source.scan(", ".join(sql.sql_name(c) for c in columns)) + f" LIMIT {_SAMPLE_ROWS}"
    flags = source.duck.row(f"SELECT {majorities} FROM ({sample})")
    return [column for column, is_numeric in zip(columns, flags, strict=True) if is_numeric]


def unused_columns(source: TableSource, used: Iterable[str | None]) -> tuple[str, ...]:
    taken = set(used)
    return tuple(column for column in source.types if column not in taken)
