"""Display of epochs while a run trains: a live line on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINE_INTERVAL = 3.0


class EpochDisplay:
    """Takes the row of every epoch; this one shows nothing, the default of library calls."""

    def show(self, row: Mapping[str, Any]) -> None:
        return None


class _PlainEpochs(EpochDisplay):
    def __init__(self, total: int) -> None:
        self._total, self._last = total, 0.0

    def show(self, row: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self._last >= LINE_INTERVAL or row["epoch"] == self._total:
            self._last = now
            print(f"epoch {row['epoch']}/{self._total}  {format_epoch(row)}", file=sys.stderr, flush=True)  # noqa: T201


class _LiveEpochs(EpochDisplay):
    def __init__(self, display: RichProgress, total: int) -> None:
        self._display = display
        self._task = display.add_task("train", total=total, metrics="")

    def show(self, row: Mapping[str, Any]) -> None:
        self._display.update(self._task, completed=row["epoch"], metrics=format_epoch(row))


@contextmanager
def show_epochs(total: int, *, quiet: bool = False) -> Iterator[EpochDisplay]:
    """A display that suits standard error: live on a terminal, plain lines elsewhere."""
    if quiet:
        yield EpochDisplay()
    elif not sys.stderr.isatty():
        yield _PlainEpochs(total)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
        )
        with RichProgress(*columns, console=Console(stderr=True)) as display:
            yield _LiveEpochs(display, total)


def format_epoch(row: Mapping[str, Any]) -> str:
    """Loss, val metric and seconds of an epoch, as far as they are numbers."""
    numbers = {"loss": row.get("train_loss"), "val": row.get("val")}
    texts = [f"{key} {value:.4f}" for key, value in numbers.items() if isinstance(value, (int, float))]
    seconds = row.get("seconds")
    return "  ".join([*texts, *([f"{seconds:.2f} s"] if isinstance(seconds, (int, float)) else [])])
