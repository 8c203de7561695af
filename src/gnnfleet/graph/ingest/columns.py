"""Assignment of table columns to their roles (id, src, label, features, …), and SQL for their values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from gnnfleet.errors import InputError
from gnnfleet.graph.graph import ColumnGroups
from gnnfleet.graph.ingest import duck as sql
from gnnfleet.graph.ingest.row_errors import RowCheck, feature_check
from gnnfleet.graph.ingest.source import TableSource
from gnnfleet.graph.ingest.spec import NONE, USUAL_NAMES, EdgeTable, NodeTable, TableSpec
from gnnfleet.io.bundle import DTYPES, ArrayWriter, BundleWriter

_INTEGER = re.compile(r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|UINTEGER")
_FLOATING = re.compile(r"FLOAT|DOUBLE|DECIMAL\(.*\)")
_LIST = re.compile(r"(.*)\[\d*\]")
_SAMPLE_ROWS = 1000
MAX_ONE_HOT = 64
"""Number of values of a category that get a column each; with more, values are hashed into ``HASHED_WIDTH`` columns."""
HASHED_WIDTH = 64
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
    scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # (mean, deviation) of standardised columns
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # values of one-hot columns; (): hashed

    @property
    def preparation(self) -> dict[str, Any]:
        """The numbers and values that prepare the same columns of another table, for the manifest of a store."""
        return {"scales": dict(self.scales), "categories": dict(self.categories)}

    @property
    def width(self) -> int:
        return sum(1 if width is None else width for _, width in self.columns)

    @property
    def names(self) -> list[str]:
        return [column for column, _ in self.columns]

    @property
    def sizes(self) -> ColumnGroups:
        """Columns as a store describes them: a scalar column is one feature."""
        groups: list[tuple[str, int]] = []
        for column, width in self.columns:
            if column in self.categories:  # names tell apart what another preparation would mix
                values = self.categories[column]
                groups += [(f"{column}={value}", 1) for value in values] or [(f"{column} (hashed)", HASHED_WIDTH)]
            else:
                groups.append((f"{column} (standardized)" if column in self.scales else column, width or 1))
        return tuple(groups)

    @property
    def rows_per_batch(self) -> int:
        return min(sql.ROWS_PER_BATCH, max(2048, _VALUES_PER_BATCH // max(self.width, 1)))

    def open_array(self, out: BundleWriter, path: str) -> ArrayWriter:
        return out.array(path, DTYPES[self.dtype][0], (self.width,))

    def select(self) -> list[str]:
        """SQL of each column as FLOAT or FLOAT[]; NULL for values that are no numbers."""
        return [self._select(column, is_list=width is not None) for column, width in self.columns]

    def _select(self, column: str, *, is_list: bool) -> str:
        cell = sql.sql_name(column)
        if column in self.categories:
            values = self.categories[column]
            if values:
                tests = (f"coalesce({cell}::VARCHAR = {sql.sql_string(value)}, false)" for value in values)
            else:
                bucket = f"('0x' || left(md5({cell}::VARCHAR), 8))::BIGINT % {HASHED_WIDTH}"
                tests = (f"coalesce({bucket} = {number}, false)" for number in range(HASHED_WIDTH))
            return f"[{', '.join(f'{test}::FLOAT' for test in tests)}]"
        if column in self.scales:
            mean, deviation = self.scales[column]
            return f"((try_cast({cell} AS DOUBLE) - {mean!r}) * {1 / deviation if deviation else 0.0!r})::FLOAT"
        return f"try_cast({cell} AS FLOAT{'[]' if is_list else ''})"

    def checks(self) -> list[RowCheck]:
        return [
            feature_check(column, "float32" if column in self.scales else self.dtype, width=width, option=self.option)
            for column, width in self.columns
            if column not in self.categories
        ]


def find_features(
    source: TableSource,
    table: NodeTable | EdgeTable,
    spec: TableSpec,
    like: Mapping[str, Any] | None,
    *,
    used: Iterable[str | None],
    option: str = "features",
) -> FeatureSource:
    """Find the chosen feature columns, or all columns of numbers that have no other role, and prepare them.

    Columns of ``category`` become one-hot, other numbers are perhaps standardised. ``like`` has the preparation of the
    same type in another store, whose numbers and values are used.
    """
    if like is not None:
        categories = {column: tuple(values) for column, values in like["categories"].items()}
    else:
        columns = match_columns(source, table.category, "category") if table.category else []
        categories = {column: _categories(source, column) for column in columns}
    roles = [column for column in used if column]
    if wrong := [column for column in categories if column in roles or column not in source.types]:
        reason = "has another use" if wrong[0] in roles else "is missing"
        raise InputError(f"{source.shown}: the column {wrong[0]!r} of --category {reason}: choose another")
    numbers = _find_numbers(source, table.features, [*roles, *categories], spec.feature_dtype, option)
    scalars = [column for column, width in numbers.columns if width is None]
    if like is not None:
        scales = {column: (float(mean), float(deviation)) for column, (mean, deviation) in like["scales"].items()}
        if missing := [column for column in scales if column not in scalars]:
            raise InputError(f"{source.shown}: the store of --like has a feature {missing[0]!r}, this table has none")
    else:
        scales = _scales(source, scalars) if spec.standardize else {}
    one_hot = tuple((column, len(values) or HASHED_WIDTH) for column, values in categories.items())
    return replace(numbers, columns=numbers.columns + one_hot, scales=scales, categories=categories)


def _categories(source: TableSource, column: str) -> tuple[str, ...]:
    """The values of a column in order; () if there are too many for a column each."""
    cell = f"{sql.sql_name(column)}::VARCHAR"
    values = source.duck.rows(
        f"SELECT DISTINCT v FROM ({source.scan(f'{cell} AS v')}) WHERE v <> '' ORDER BY v LIMIT {MAX_ONE_HOT + 1}"
    )
    if not values:
        raise InputError(f"{source.shown}: column {column!r} has no values: leave it out of --category")
    return tuple(value for (value,) in values) if len(values) <= MAX_ONE_HOT else ()


def _scales(source: TableSource, columns: Sequence[str]) -> dict[str, tuple[float, float]]:
    """(mean, deviation) of columns of numbers; a constant column has deviation 0."""
    if not columns or not source.rows:
        return dict.fromkeys(columns, (0.0, 0.0))
    numbers = ", ".join(f"try_cast({sql.sql_name(c)} AS DOUBLE) AS n{i}" for i, c in enumerate(columns))
    terms = (f"{f}(n{i}) FILTER (isfinite(n{i}))" for i in range(len(columns)) for f in ("avg", "stddev_pop"))
    row = source.duck.row(f"SELECT {', '.join(terms)} FROM ({source.scan(numbers)})")
    pairs = zip(row[::2], row[1::2], strict=True)
    scales = {c: (mean or 0.0, deviation or 0.0) for c, (mean, deviation) in zip(columns, pairs, strict=True)}
    # The deviation of a constant is its rounding error.
    return {c: (mean, deviation if deviation > 1e-9 * abs(mean) else 0.0) for c, (mean, deviation) in scales.items()}


def _find_numbers(
    source: TableSource, patterns: str | None, used: Iterable[str | None], dtype: str, option: str
) -> FeatureSource:
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
