"""One table: Parquet or CSV files of the same columns, scanned as one, each row with its position.

CSV is first copied to Parquet in the scratch, every value as text: '007' stays '007', and rows can be found again.
"""

from __future__ import annotations

import csv
import glob
import gzip
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from gnnfleet.errors import InputError
from gnnfleet.graph.ingest import duck as sql
from gnnfleet.graph.ingest.duck import Duck

CSV_ENDINGS = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz")
PARQUET_ENDINGS = (".parquet", ".pq")
_ROW, _FILE = "file_row_number", "gnnfleet_file"


@dataclass(frozen=True)
class TableFile:
    """A file of the user, the Parquet file that is scanned for it, and the positions of its rows."""

    path: str
    scanned: str
    start: int
    rows: int


@dataclass(frozen=True)
class Place:
    """Where a row is: 1-based data row, and for CSV the 1-based line."""

    path: str
    row: int
    line: int | None

    def __str__(self) -> str:
        return f"{self.path}, row {self.row}" + (f" (line {self.line})" if self.line else "")


class Source:
    """The files of one table. ``types`` are DuckDB's; for CSV (``is_text``) all VARCHAR."""

    def __init__(self, duck: Duck, files: Sequence[TableFile], is_text: bool) -> None:
        self.duck = duck
        self.files = tuple(files)
        self.is_text = is_text
        self.rows = sum(file.rows for file in files)
        found = duck.rows(f"DESCRIBE SELECT * FROM {self._reader()}")
        self.types: dict[str, str] = {row[0]: row[1] for row in found if row[0] not in (_ROW, _FILE)}

    @property
    def shown(self) -> str:
        """How messages name the table."""
        more = len(self.files) - 1
        return self.files[0].path + (f" and {more} more" if more else "")

    @cached_property
    def position(self) -> str:
        """The SQL of a row's position in the table."""
        if len(self.files) == 1:
            return _ROW
        starts = " ".join(f"WHEN {sql.literal(file.scanned)} THEN {file.start}" for file in self.files)
        return f"(CASE {_FILE} {starts} END + {_ROW})"

    def scan(self, columns: str, where: str = "true") -> str:
        """A query of SQL expressions over all rows."""
        return f"SELECT {columns} FROM {self._reader()} WHERE {where}"

    def place(self, position: int) -> Place:
        file = next(file for file in self.files if file.start <= position < file.start + file.rows)
        row = position - file.start + 1
        return Place(file.path, row, _line_of(file.path, row) if self.is_text else None)

    def value(self, position: int, column: str) -> Any:
        """What a cell holds."""
        return self.duck.one(self.scan(sql.name(column), f"{self.position} = {position}"))[0]

    def _reader(self) -> str:
        options = f"{_ROW} = true"
        if len(self.files) > 1:
            options += f", filename = '{_FILE}', union_by_name = true"
        return f"read_parquet({sql.list_of(file.scanned for file in self.files)}, {options})"


def find_files(patterns: Sequence[str]) -> list[str]:
    """Expand globs, sorted; raises InputError when a pattern matches nothing."""
    found: list[str] = []
    for pattern in patterns:
        matches = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
        matches = [match for match in matches if Path(match).is_file()]
        if not matches:
            raise InputError(
                f"no such file: {pattern}" + (" (nothing matches the pattern)" if glob.has_magic(pattern) else "")
            )
        found += [match for match in matches if match not in found]
    return found


def column_names(path: str) -> list[str]:
    """The columns of a Parquet or CSV file; raises InputError when it cannot be read."""
    return _csv_header(path)[0] if _is_csv(path) else list(_parquet_metadata(path).schema.to_arrow_schema().names)


def open_source(duck: Duck, patterns: Sequence[str]) -> Source:
    """Find, check and, for CSV, copy the files of a table; raises InputError when they do not fit together."""
    paths = find_files(patterns)
    is_text = _is_csv(paths[0])
    expected = column_names(paths[0])
    files, start = [], 0
    for path in paths:
        if _is_csv(path) != is_text:
            raise InputError(
                f"one table is either CSV or Parquet, found {paths[0]} and {path}: import them as two types"
            )
        names = column_names(path)
        if set(names) != set(expected):
            differing = ", ".join(sorted(set(names) ^ set(expected)))
            raise InputError(
                f"{path} has other columns than {paths[0]} (differing: {differing}): files of one table share them"
            )
        scanned = _copy_csv(duck, path) if is_text else path
        rows = _parquet_metadata(scanned).num_rows
        files.append(TableFile(path, scanned, start, rows))
        start += rows
    for name in expected:
        if name.lower() in (_ROW, _FILE):
            raise InputError(f"{paths[0]}: a column may not be called {name!r}, rename it")
    return Source(duck, files, is_text)


def _is_csv(path: str) -> bool:
    if path.lower().endswith(PARQUET_ENDINGS):
        return False
    if path.lower().endswith(CSV_ENDINGS):
        return True
    raise InputError(f"{path}: expected a table ending in {', '.join(PARQUET_ENDINGS + CSV_ENDINGS)}")


def _parquet_metadata(path: str) -> Any:
    try:
        return pq.read_metadata(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}") from error


def _open_text(path: str) -> TextIO:
    if path.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return Path(path).open(encoding="utf-8-sig", newline="")


def _csv_header(path: str) -> tuple[list[str], str]:
    """(column names, delimiter): the most frequent of comma, tab, semicolon and bar in the first line."""
    try:
        with _open_text(path) as file:
            first = file.readline()
            delimiter = max(",\t;|", key=first.count)
            file.seek(0)
            names = next(csv.reader(file, delimiter=delimiter), [])
    except (UnicodeDecodeError, OSError, csv.Error, EOFError) as error:
        raise InputError(f"{path} cannot be read as CSV in UTF-8: {error}") from error
    if not names or not all(names) or len(set(names)) != len(names):
        raise InputError(f"{path}: expected a first line with different column names, found {first.strip()!r}")
    return names, delimiter


def _copy_csv(duck: Duck, path: str) -> str:
    names, delimiter = _csv_header(path)
    columns = ", ".join(f"{sql.literal(name)}: 'VARCHAR'" for name in names)
    # Sniffing is off: what a column means must not depend on a sample of its rows. An unquoted nothing is missing,
    # a quoted one is the empty text.
    reader = (
        f"read_csv({sql.literal(path)}, auto_detect = false, header = true, delim = {sql.literal(delimiter)}, "
        f"quote = '\"', escape = '\"', nullstr = '', allow_quoted_nulls = false, columns = {{{columns}}})"
    )
    target = duck.scratch / f"csv-{len(list(duck.scratch.glob('csv-*')))}.parquet"
    duck.keep_order(True)
    try:
        duck.run(f"COPY (SELECT * FROM {reader}) TO {sql.literal(target)} (FORMAT parquet)")
    except InputError as error:
        raise InputError(f"{path}: {_csv_problem(str(error))}") from error
    return str(target)


def _csv_problem(text: str) -> str:
    """DuckDB's long advice in one sentence."""
    line = re.search(r"Line: (\d+)", text)
    columns = re.search(r"Expected Number of Columns: (\d+) Found: (\d+)", text)
    if line and columns:
        found = f"line {line[1]}: expected {columns[1]} values, found {columns[2]}"
        return f"{found}. Correct the line, or quote values that hold the delimiter"
    return text.partition("\nPossible fixes")[0].replace("\n", ". ")


def _line_of(path: str, row: int) -> int | None:
    """The line on which a data row starts; slow, for messages only."""
    _, delimiter = _csv_header(path)
    with _open_text(path) as file:
        reader = csv.reader(file, delimiter=delimiter)
        next(reader)
        done = 0
        before = reader.line_num
        for record in reader:
            done += bool(record)
            if done == row:
                return before + 1
            before = reader.line_num
    return None
