"""What people see while a run trains: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class EpochDisplay(Protocol):
    """Told of every epoch."""

    def show(self, row: Mapping[str, Any]) -> None: ...


class NoDisplay:
    """The default of library calls."""

    def show(self, row: Mapping[str, Any]) -> None:
        return None


class _PlainEpochs:
    def __init__(self, total: int, every: float = 3.0) -> None:
        self._total, self._every = total, every
        self._last = 0.0

    def show(self, row: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self._last >= self._every or row["epoch"] == self._total:
            self._last = now
            print(f"epoch {row['epoch']}/{self._total}  {_format_row(row)}", file=sys.stderr, flush=True)  # noqa: T201


class _LiveEpochs:
    def __init__(self, display: RichProgress, total: int) -> None:
        self._display = display
        self._task = display.add_task("train", total=total, words="")

    def show(self, row: Mapping[str, Any]) -> None:
        self._display.update(self._task, completed=row["epoch"], words=_format_row(row))


@contextmanager
def show_epochs(total: int, *, quiet: bool = False) -> Iterator[EpochDisplay]:
    """The display that fits where standard error goes."""
    if quiet:
        yield NoDisplay()
    elif not sys.stderr.isatty():
        yield _PlainEpochs(total)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[words]}"),
        )
        with RichProgress(*columns, console=Console(stderr=True)) as display:
            yield _LiveEpochs(display, total)


def _format_row(row: Mapping[str, Any]) -> str:
    shown = {"loss": row["train_loss"], "val": row.get("val")}
    words = [f"{key} {value:.4f}" for key, value in shown.items() if value is not None]
    return "  ".join([*words, f"{row['seconds']:.2f} s"])
