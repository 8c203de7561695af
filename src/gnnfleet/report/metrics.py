"""Metrics of epochs as JSON lines, in a file that a resumed run continues: no epoch twice, no incomplete line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from gnnfleet.errors import ConfigError, RunError


class MetricsSink(Protocol):
    """Takes the numbers of an epoch."""

    def write(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """``metrics.jsonl``: rows of ``epoch`` and its measurements."""

    def __init__(self, path: Path, *, epochs: int = 0) -> None:
        """Keep the first ``epochs`` epochs of an existing file, drop the rest."""
        self.path = path
        self.rows = [row for row in read_metrics(path) if type(row.get("epoch")) is int and row["epoch"] <= epochs]
        partial = path.with_name(f".{path.name}.partial")
        with self._writing():
            partial.write_text("".join(map(_line, self.rows)))
            partial.replace(path)
            self._file = path.open("a")

    def write(self, row: Mapping[str, Any]) -> None:
        with self._writing():
            self._file.write(_line(row))
            self._file.flush()

    def close(self) -> None:
        with self._writing():
            try:
                os.fsync(self._file.fileno())
            finally:
                self._file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn a full disk into an error that the user can act on."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"cannot write {self.path}: {error.strerror or error}. Checkpoints are kept; make room and use --resume"
            ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines in order, up to the first incomplete line."""
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = none_if_not_finite(json.loads(line))
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


def none_if_not_finite(value: Any) -> Any:
    """Replace NaN and infinities by None, since JSON cannot express them."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): none_if_not_finite(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [none_if_not_finite(member) for member in value]
    return value


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(none_if_not_finite(row), allow_nan=False) + "\n"


def check_tensorboard() -> None:
    """Raise ConfigError if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "report.tensorboard=true needs TensorBoard: pip install 'gnnfleet[tensorboard]', or leave it out"
        )


class TensorBoard:
    """Writes the same numbers for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def write(self, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            if key != "epoch" and isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, row["epoch"])

    def close(self) -> None:
        self._writer.close()
