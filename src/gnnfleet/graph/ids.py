"""Original node ids: integers or strings, one per row, used in every output.

Row numbers are the ids of a node type without original ids. ``Ids`` reads Parquet on first use only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gnnfleet.errors import InputError, StoreError, first_line

ID_COLUMN = "id"


class Ids:
    """Original ids in row order."""

    def __init__(self, count: int, load: Callable[[], pa.Array] | None = None) -> None:
        self.count = count
        self._load = load
        self._values: pa.Array | None = None

    @classmethod
    def from_values(cls, values: Any) -> Ids:
        """Build from integers or strings; raises InputError for missing, repeated or other ids."""
        array = pa.array(values)
        if pa.types.is_integer(array.type):
            array = array.cast(pa.int64())
        elif pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
            array = array.cast(pa.large_string())
        elif len(array):
            raise InputError(f"node ids must be integers or strings, found {array.type}")
        if array.null_count:
            raise InputError(f"node ids must not be missing, found {array.null_count} without a value")
        if pc.count_distinct(array).as_py() != len(array):
            counts = pc.value_counts(array)
            repeated = next(entry["values"].as_py() for entry in counts if entry["counts"].as_py() > 1)
            raise InputError(f"node ids must be unique, found {repeated!r} more than once")
        return cls(len(array), lambda: array)

    @classmethod
    def from_parquet(cls, path: Path, count: int) -> Ids:
        return cls(count, lambda: _read(path, count))

    def __len__(self) -> int:
        return self.count

    @property
    def are_rows(self) -> bool:
        """True if the ids are the row numbers."""
        return self._load is None

    def values(self) -> pa.Array:
        """All ids in row order."""
        if self._values is None:
            self._values = pa.array(np.arange(self.count)) if self._load is None else self._load()
        return self._values

    def select(self, rows: Any) -> pa.Array:
        """Look up the ids of rows."""
        rows = pa.array(np.asarray(rows, dtype=np.int64))
        return rows if self._load is None else self.values().take(rows)

    def rows(self, ids: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Find the rows of ids, or of a mask of all nodes; raises InputError naming the first unknown id."""
        array = np.asarray(ids)
        if array.dtype == np.bool_:
            if array.shape != (self.count,):
                raise InputError(
                    f"a mask must have one value for each of {self.count} nodes, found {list(array.shape)}"
                )
            return np.flatnonzero(array).astype(np.int64)
        if self._load is None:
            unknown = [i for i in array.tolist() if not isinstance(i, int) or not 0 <= i < self.count]
            if unknown:
                raise InputError(
                    f"no node with id {unknown[0]!r}: the ids are the row numbers from 0 to {self.count - 1}"
                )
            return array.astype(np.int64)
        values, queries = self.values(), ids.tolist() if hasattr(ids, "tolist") else list(ids)
        try:
            typed_queries = pa.array(queries).cast(values.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
            kind = "integers" if pa.types.is_integer(values.type) else "strings"
            raise InputError(f"the ids of this node type are {kind}, found others ({first_line(error)})") from error
        rows = pc.index_in(typed_queries, value_set=values)
        if rows.null_count:
            missing = next(i for i, row in zip(queries, rows, strict=True) if not row.is_valid)
            raise InputError(f"no node with id {missing!r}")
        return np.asarray(rows.to_numpy(zero_copy_only=False), dtype=np.int64)

    def write(self, path: Path) -> None:
        """Write one Parquet column named ``id``."""
        pq.write_table(pa.table({ID_COLUMN: self.values()}), path, compression="zstd")


def _read(path: Path, count: int) -> pa.Array:
    try:
        values = pq.read_table(path, columns=[ID_COLUMN])[ID_COLUMN].combine_chunks()
    except (pa.ArrowException, OSError, KeyError) as error:
        raise StoreError(
            f"{path} cannot be read ({first_line(error)}): make the store again from its source"
        ) from error
    if len(values) != count or values.null_count:
        raise StoreError(f"{path} has {len(values)} ids, expected {count}: make the store again from its source")
    return values
