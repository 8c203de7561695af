"""One table: Parquet or CSV files with the same columns, scanned as one.

Every row has a position in the table. CSV is first copied to Parquet in the scratch directory with every value as
text, so '007' stays '007' and rows can be located again for messages.
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
from gnnfleet.graph.ingest.duck import DuckConnection

CSV_ENDINGS = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz")
PARQUET_ENDINGS = (".parquet", ".pq")
_ROW, _FILE = "file_row_number", "gnnfleet_file"


@dataclass(frozen=True)
class TableFile:
    """An input file, the Parquet file scanned in its stead, and the positions of its rows."""

    path: str
    parquet_path: str
    start: int
    rows: int
    columns: str | None = None  # column names of a file without a header line


class TableSource:
    """The files of one table. ``types`` are DuckDB's; for CSV (``is_text``) all VARCHAR."""

    def __init__(self, duck: DuckConnection, files: Sequence[TableFile], is_text: bool) -> None:
        self.duck = duck
        self.files = tuple(files)
        self.is_text = is_text
        self.rows = sum(file.rows for file in files)
        description = duck.rows(f"DESCRIBE SELECT * FROM {self._reader()}")
        self.types: dict[str, str] = {row[0]: row[1] for row in description if row[0] not in (_ROW, _FILE)}

    @property
    def shown(self) -> str:
        """The table's name in messages."""
        more = len(self.files) - 1
        return self.files[0].path + (f" and {more} more" if more else "")

    @cached_property
    def position(self) -> str:
        """SQL of a row's position in the table."""
        if len(self.files) == 1:
            return _ROW
        starts = " ".join(f"WHEN {sql.sql_string(file.parquet_path)} THEN {file.start}" for file in self.files)
        return f"(CASE {_FILE} {starts} END + {_ROW})"

    def scan(self, columns: str, where: str = "true") -> str:
        """Build a query of SQL expressions over all rows."""
        return f"SELECT {columns} FROM {self._reader()} WHERE {where}"

    def location(self, position: int) -> str:
        """Name a row for messages: file, 1-based data row, and for CSV the 1-based line."""
        file = next(file for file in self.files if file.start <= position < file.start + file.rows)
        row = position - file.start + 1
        line = _line_of(file, row) if self.is_text else None
        return f"{file.path}, row {row}" + (f" (line {line})" if line else "")

    def value(self, position: int, column: str) -> Any:
        cell = sql.sql_name(column)
        if is_zoned_time(self.types[column]):
            cell += "::VARCHAR"  # DuckDB needs another library to convert it to a Python value
        return self.duck.row(self.scan(cell, f"{self.position} = {position}"))[0]

    def _reader(self) -> str:
        options = f"{_ROW} = true"
        if len(self.files) > 1:
            options += f", filename = '{_FILE}', union_by_name = true"
        return f"read_parquet({sql.sql_list(file.parquet_path for file in self.files)}, {options})"


def is_zoned_time(kind: str) -> bool:
    """True for a DuckDB type that is a time with a zone."""
    return "TIME ZONE" in kind or kind.startswith("TIMESTAMPTZ")


def find_files(patterns: Sequence[str]) -> list[str]:
    """Expand globs, sorted; raises InputError when a pattern matches nothing."""
    paths: list[str] = []
    for pattern in patterns:
        matches = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
        matches = [match for match in matches if Path(match).is_file()]
        if not matches:
            raise InputError(
                f"no such file: {pattern}" + (" (nothing matches the pattern)" if glob.has_magic(pattern) else "")
            )
        paths += [match for match in matches if match not in paths]
    return paths


def column_names(path: str, columns: str | None = None) -> list[str]:
    """Read the column names of a file; ``columns`` names those of a CSV file without a header. Raises InputError."""
    if _is_csv(path):
        return _csv_layout(path, columns)[0]
    if columns is not None:
        raise InputError(f"{path}: a Parquet file already names its columns: remove --columns {columns}")
    return list(_parquet_metadata(path).schema.to_arrow_schema().names)


def open_source(duck: DuckConnection, patterns: Sequence[str], columns: str | None = None) -> TableSource:
    """Find, check and, for CSV, copy the files of a table; raises InputError when their columns differ."""
    paths = find_files(patterns)
    is_text = _is_csv(paths[0])
    expected = column_names(paths[0], columns)
    files, start = [], 0
    for path in paths:
        if _is_csv(path) != is_text:
            raise InputError(
                f"the files of one table are either CSV or Parquet, found {paths[0]} and {path}: import them as two "
                "node or edge types"
            )
        names = column_names(path, columns)
        if set(names) != set(expected):
            differing = ", ".join(sorted(set(names) ^ set(expected)))
            raise InputError(
                f"{path} has other columns than {paths[0]} (different: {differing}): all files of a table must have "
                "the same columns"
            )
        scanned = _copy_csv(duck, path, columns) if is_text else path
        rows = _parquet_metadata(scanned).num_rows
        files.append(TableFile(path, scanned, start, rows, columns))
        start += rows
    for name in expected:
        if name.lower() in (_ROW, _FILE):
            raise InputError(f"{paths[0]}: the column name {name!r} is reserved: rename the column")
    return TableSource(duck, files, is_text)


def _is_csv(path: str) -> bool:
    if path.lower().endswith(PARQUET_ENDINGS):
        return False
    if path.lower().endswith(CSV_ENDINGS):
        return True
    raise InputError(f"{path}: expected a table whose name ends in {', '.join(PARQUET_ENDINGS + CSV_ENDINGS)}")


def _parquet_metadata(path: str) -> Any:
    try:
        return pq.read_metadata(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}") from error


def _open_text(path: str) -> TextIO:
    if path.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return Path(path).open(encoding="utf-8-sig", newline="")


def _csv_layout(path: str, columns: str | None) -> tuple[list[str], str]:
    """(column names, delimiter). If ``columns`` names the columns, there is no header line and all lines are rows."""
    try:
        with _open_text(path) as file:
            first, second = file.readline(), file.readline()
            delimiter = _delimiter(first, second)
            cells = next(csv.reader([first], delimiter=delimiter), [])
            if columns is None and first.count('"') % 2:  # a quoted name continues on the next line
                file.seek(0)
                cells = next(csv.reader(file, delimiter=delimiter), [])
    except (UnicodeDecodeError, OSError, csv.Error, EOFError) as error:
        raise InputError(f"{path} cannot be read as CSV in UTF-8: {error}") from error
    names = cells if columns is None else re.split(r"[,\s]+", columns.strip())
    if not names or not all(names) or len(set(names)) != len(names):
        origin = "a first line with" if columns is None else "--columns with"
        raise InputError(f"{path}: expected {origin} different column names, found {(columns or first).strip()!r}")
    if columns is not None and cells and len(cells) != len(names):
        raise InputError(
            f"{path}: --columns names {len(names)} columns ({', '.join(names)}), but the first line has {len(cells)}: "
            f"{first.strip()!r}"
        )
    return names, delimiter


def _delimiter(first: str, second: str) -> str:
    """The most frequent of comma, tab, semicolon and bar in the first line, else a space."""
    best = max(",\t;|", key=first.count)
    # The name of a single column may contain a space; its rows then contain none.
    spaced = " " in first.strip() and (" " in second.strip() or not second.strip())
    return " " if spaced and not first.count(best) else best


def _copy_csv(duck: DuckConnection, path: str, columns: str | None) -> str:
    names, delimiter = _csv_layout(path, columns)
    types = ", ".join(f"{sql.sql_string(name)}: 'VARCHAR'" for name in names)
    # Sniffing is off, because the type of a column must not depend on a sample of its rows. An empty cell is missing;
    # an empty cell in quotes is the empty text.
    reader = (
        f"read_csv({sql.sql_string(path)}, auto_detect = false, header = {str(columns is None).lower()}, "
        f"delim = {sql.sql_string(delimiter)}, "
        f"quote = '\"', escape = '\"', nullstr = '', allow_quoted_nulls = false, columns = {{{types}}})"
    )
    target = duck.scratch / f"csv-{len(list(duck.scratch.glob('csv-*')))}.parquet"
    duck.keep_order(True)
    try:
        duck.run(f"COPY (SELECT * FROM {reader}) TO {sql.sql_string(target)} (FORMAT parquet)")
    except InputError as error:
        raise InputError(f"{path}: {_csv_problem(str(error))}") from error
    return str(target)


def _csv_problem(text: str) -> str:
    """Shorten DuckDB's error to one sentence."""
    line = re.search(r"Line: (\d+)", text)
    columns = re.search(r"Expected Number of Columns: (\d+) Found: (\d+)", text)
    if line and columns:
        return (
            f"line {line[1]}: expected {columns[1]} values, found {columns[2]}. Correct the line, or quote values that "
            "contain the delimiter"
        )
    if line and "unicode" in text:
        return f"line {line[1]} is not in UTF-8. Write the file in that encoding"
    return text.partition("\nPossible fixes")[0].replace("\n", ". ")


def _line_of(table: TableFile, row: int) -> int | None:
    """Find the line on which a data row starts; slow, for messages only."""
    names, delimiter = _csv_layout(table.path, table.columns)
    with _open_text(table.path) as file:
        reader = csv.reader(file, delimiter=delimiter)
        if table.columns is None:
            next(reader)  # the header
        rows_read = 0
        last_line = reader.line_num
        for record in reader:
            rows_read += bool(record) or len(names) == 1  # an empty line is a row only in a table of one column
            if rows_read == row:
                return last_line + 1
            last_line = reader.line_num
    return None
