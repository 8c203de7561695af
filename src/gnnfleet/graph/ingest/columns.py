"""Which column of a table plays which part, and how its values read in SQL."""

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

_INTEGER = re.compile(r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|UINTEGER")
_FLOATING = re.compile(r"FLOAT|DOUBLE|DECIMAL\(.*\)")
_LIST = re.compile(r"(.*)\[\d*\]")
_HEAD = 1000


def is_integer(kind: str) -> bool:
    return _INTEGER.fullmatch(kind) is not None


def is_floating(kind: str) -> bool:
    return _FLOATING.fullmatch(kind) is not None


def is_number(kind: str) -> bool:
    return is_integer(kind) or is_floating(kind) or kind == "BOOLEAN"


def list_item_type(kind: str) -> str | None:
    """The type of a list's items, None when it is no list."""
    found = _LIST.fullmatch(kind)
    return found[1] if found else None


def canonical_integer_sql(cell: str) -> str:
    """SQL that is true for text that is an integer written the one usual way: not '007', ' 7', '+7' or '7.0'."""
    return f"(coalesce(try_cast({cell} AS BIGINT)::VARCHAR, '') = {cell})"


def find_by_usual_name(columns: Iterable[str], part: str, wanted: str | None) -> str | None:
    """The column of a part among names: as named, or by its usual names in any case."""
    names = list(columns)
    if wanted is not None:
        return wanted if wanted in names else None
    for candidate in USUAL_NAMES[part]:
        found = [candidate] if candidate in names else [column for column in names if column.casefold() == candidate]
        if found:
            return found[0]
    return None


def find_column(source: TableSource, part: str, wanted: str | None, *, required: bool = False) -> str | None:
    """The column of a part in a table; raises InputError when it is named or needed but absent."""
    if wanted == NONE and not required:
        return None
    found = find_by_usual_name(source.types, part, wanted)
    if found is None and (wanted or required):
        expected = repr(wanted) if wanted else " or ".join(map(repr, USUAL_NAMES[part]))
        option = "split-column" if part == "split" else part
        header = (
            " (the first line of a CSV file holds the names; --columns gives them if not)" if source.is_text else ""
        )
        raise InputError(
            f"{source.shown}: expected a column {expected} for {part}, found {', '.join(source.types)}{header}. "
            f"Name the column with --{option}"
        )
    return found


def match_columns(source: TableSource, patterns: str, part: str) -> list[str]:
    """The columns that patterns name, in the order of the patterns, then of the table."""
    found: list[str] = []
    for pattern in _patterns(source, patterns):
        matches = _matches(source, pattern)
        if not matches:
            raise InputError(
                f"{source.shown}: no column matches {pattern!r} of --{part}; found {', '.join(source.types)}"
            )
        found += [column for column in matches if column not in found]
    return found


def _patterns(source: TableSource, text: str) -> list[str]:
    """Patterns by commas, or by spaces where no column is called so: commas separate the columns of ``--nodes``."""
    words = [word.strip() for word in text.split(",")]
    return [each for word in words for each in ([word] if _matches(source, word) else word.split() or [word])]


def _matches(source: TableSource, pattern: str) -> list[str]:
    return [pattern] if pattern in source.types else [c for c in source.types if fnmatchcase(c, pattern)]


@dataclass(frozen=True)
class FeatureSource:
    """The feature columns of a table: scalars have width None, lists theirs."""

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
        """As a store keeps them: a column of numbers is one feature."""
        return tuple((column, 1 if width is None else width) for column, width in self.columns)

    def select(self) -> list[str]:
        """SQL of each column as FLOAT or FLOAT[]; NULL where that cannot be."""
        return [f"try_cast({sql.sql_name(c)} AS FLOAT{'' if width is None else '[]'})" for c, width in self.columns]

    def checks(self) -> list[RowCheck]:
        return [feature_check(column, self.dtype, width=width, option=self.option) for column, width in self.columns]


def find_features(
    source: TableSource, patterns: str | None, *, used: Iterable[str | None], dtype: str, option: str = "features"
) -> FeatureSource:
    """The chosen feature columns, or every column of numbers that is not used otherwise."""
    if patterns == NONE:
        return FeatureSource((), dtype, option)
    taken = set(used)
    if patterns is None:
        chosen = _numeric(source, [column for column in source.types if column not in taken])
    else:
        chosen = match_columns(source, patterns, option)
        chosen = [c for c in chosen if c not in taken or c in _patterns(source, patterns)]
        for column in chosen:
            kind = source.types[column]
            if not source.is_text and not is_number(list_item_type(kind) or kind):
                raise InputError(
                    f"{source.shown}, column {column!r}: features are numbers or lists of numbers, found {kind}"
                )
    lists = [column for column in chosen if list_item_type(source.types[column])]
    widths: dict[str, int | None] = dict.fromkeys(chosen)
    for column in lists:
        first = source.duck.rows(
            source.scan(f"len({sql.sql_name(column)})", f"{sql.sql_name(column)} IS NOT NULL") + " LIMIT 1"
        )
        widths[column] = int(first[0][0]) if first else 0
    return FeatureSource(tuple(widths.items()), dtype, option)


def _numeric(source: TableSource, columns: Sequence[str]) -> list[str]:
    """Columns of numbers. For CSV the first rows decide by majority: a stray word is an error, not a silent loss."""
    if not source.is_text:
        return [c for c in columns if is_number(list_item_type(source.types[c]) or source.types[c])]
    if not columns:
        return []
    facts = ", ".join(f"2 * count(try_cast({sql.sql_name(c)} AS DOUBLE)) > count({sql.sql_name(c)})" for c in columns)
    head = source.scan(", ".join(sql.sql_name(c) for c in columns)) + f" LIMIT {_HEAD}"
    found = source.duck.row(f"SELECT {facts} FROM ({head})")
    return [column for column, numeric in zip(columns, found, strict=True) if numeric]


def unused_columns(source: TableSource, used: Iterable[str | None]) -> tuple[str, ...]:
    """The columns that nothing was made of."""
    taken = set(used)
    return tuple(column for column in source.types if column not in taken)
