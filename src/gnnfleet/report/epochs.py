"""Display of epochs while a run trains: a live line on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINE_INTERVAL = 3.0


OnEpoch = Callable[[Mapping[str, Any]], None]
"""Takes the row of every epoch."""


@contextmanager
def show_epochs(total: int, *, quiet: bool = False) -> Iterator[OnEpoch]:
    """A display that suits standard error: live on a terminal, plain lines elsewhere."""
    if quiet:
        yield lambda row: None
    elif not sys.stderr.isatty():
        yield _plain_display(total)
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
            task = display.add_task("train", total=total, metrics="")
            yield lambda row: display.update(task, completed=row["epoch"], metrics=format_epoch(row))


def _plain_display(total: int) -> OnEpoch:
    last = 0.0

    def show(row: Mapping[str, Any]) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_INTERVAL or row["epoch"] == total:
            last = now
            print(f"epoch {row['epoch']}/{total}  {format_epoch(row)}", file=sys.stderr, flush=True)  # noqa: T201

    return show


def format_epoch(row: Mapping[str, Any]) -> str:
    """Loss, val metric and seconds of an epoch, as far as they are numbers."""
    numbers = {"loss": row.get("train_loss"), "val": row.get("val")}
    texts = [f"{key} {value:.4f}" for key, value in numbers.items() if isinstance(value, (int, float))]
    seconds = row.get("seconds")
    return "  ".join([*texts, *([f"{seconds:.2f} s"] if isinstance(seconds, (int, float)) else [])])
