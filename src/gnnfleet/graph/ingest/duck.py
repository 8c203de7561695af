"""DuckDB with a bounded memory and its temporary files in our scratch; its errors in our words."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import duckdb
import pyarrow as pa

from gnnfleet.errors import ConfigError, GnnfleetError, InputError, first_line

ROWS_PER_BATCH = 1 << 17


def sql_string(text: str | Path) -> str:
    """A string in SQL."""
    return "'" + str(text).replace("'", "''") + "'"


def sql_name(column: str) -> str:
    """A column's name in SQL."""
    return '"' + column.replace('"', '""') + '"'


def sql_list(texts: Iterable[str | Path]) -> str:
    """A list of strings in SQL."""
    return "[" + ", ".join(sql_string(text) for text in texts) + "]"


class DuckConnection:
    """One connection; close it before the scratch goes."""

    def __init__(self, scratch: Path, memory: str) -> None:
        self.scratch = scratch
        self.memory = memory
        self._connection = duckdb.connect(":memory:")
        spill = scratch / "spill"
        self.run(f"SET memory_limit = {sql_string(memory)}")
        self.run(f"SET temp_directory = {sql_string(spill)}")
        self.run("SET enable_progress_bar = false")
        self.run("SET GLOBAL TimeZone = 'UTC'")  # what is read must not depend on where

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._connection.close()

    def run(self, sql: str) -> None:
        with self._translated_errors():
            self._connection.execute(sql)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with self._translated_errors():
            return list(self._connection.execute(sql).fetchall())

    def row(self, sql: str) -> tuple[Any, ...]:
        """The single row of an aggregate."""
        rows = self.rows(sql)
        assert len(rows) == 1, sql
        return rows[0]

    def stream(self, sql: str, batch: int = ROWS_PER_BATCH) -> Iterator[pa.RecordBatch]:
        """The result in pieces, never whole in memory."""
        # A connection of its own: since DuckDB 2.0 one with an open result takes no other query, and a bad row met on
        # the way has to be located.
        own = self._connection.cursor()
        try:
            with self._translated_errors():
                relation = own.sql(sql)
                # The newer name of the same; the older one warns in releases that have both.
                reader = (getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader)(batch)
                yield from (piece for piece in reader if piece.num_rows)
        finally:
            own.close()

    def keep_order(self, keep: bool) -> None:
        """Whether the next statements must give rows in input order; not caring saves memory."""
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
            # Ctrl-C during a query surfaces so: the signal is taken by DuckDB, not by Python.
            if "interrupt" in str(error).lower():
                raise KeyboardInterrupt from error
            raise
