"""A DuckDB connection with bounded memory, temporary files in the scratch directory, and gnnfleet's errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import duckdb
import pyarrow as pa

from gnnfleet.errors import ConfigError, GnnfleetError, InputError, first_line

ROWS_PER_BATCH = 1 << 17


def sql_string(text: str | Path) -> str:
    return "'" + str(text).replace("'", "''") + "'"


def sql_name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def sql_list(texts: Iterable[str | Path]) -> str:
    return "[" + ", ".join(sql_string(text) for text in texts) + "]"


class DuckConnection:
    """One connection; close it before the scratch directory is removed."""

    def __init__(self, scratch: Path, memory: str) -> None:
        self.scratch = scratch
        self.memory = memory
        self._connection = duckdb.connect(":memory:")
        self.run(f"SET memory_limit = {sql_string(memory)}")
        self.run(f"SET temp_directory = {sql_string(scratch / 'spill')}")
        self.run("SET enable_progress_bar = false")
        self.run("SET GLOBAL TimeZone = 'UTC'")  # times must not depend on the machine's zone

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def run(self, sql: str) -> None:
        with self._translated_errors():
            self._connection.execute(sql)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with self._translated_errors():
            return list(self._connection.execute(sql).fetchall())

    def row(self, sql: str) -> tuple[Any, ...]:
        """Run an aggregate and return its single row."""
        rows = self.rows(sql)
        assert len(rows) == 1, sql
        return rows[0]

    def stream(self, sql: str, batch: int = ROWS_PER_BATCH) -> Iterator[pa.RecordBatch]:
        """Yield the rows in batches, never all in memory."""
        # A separate cursor: since DuckDB 2.0 a connection with an open result accepts no other query, and locating a
        # bad row needs one.
        cursor = self._connection.cursor()
        try:
            with self._translated_errors():
                relation = cursor.sql(sql)
                # The newer of two names; the older one warns in releases that have both.
                reader = (getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader)(batch)
                yield from (rows for rows in reader if rows.num_rows)
        finally:
            cursor.close()

    def keep_order(self, keep: bool) -> None:
        """Choose whether the next statements keep rows in input order; without it they need less memory."""
        self.run(f"SET preserve_insertion_order = {str(keep).lower()}")

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except duckdb.OutOfMemoryException as error:
            raise ConfigError(
                f"the import needs more than {self.memory} of memory or more room on disk for its temporary files: "
                f"pass a larger --memory or write to a larger disk. {first_line(error)}"
            ) from error
        except duckdb.InterruptException as error:
            raise KeyboardInterrupt from error
        except duckdb.InvalidInputException as error:
            raise InputError(str(error)) from error
        except duckdb.IOException as error:
            raise InputError(first_line(error)) from error
        except duckdb.Error as error:
            raise GnnfleetError(f"DuckDB: {first_line(error)}") from error
        except (RuntimeError, OSError) as error:
            # DuckDB handles the signal of Ctrl-C during a query, not Python.
            if "interrupt" in str(error).lower():
                raise KeyboardInterrupt from error
            raise
