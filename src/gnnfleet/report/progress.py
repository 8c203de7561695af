"""Progress of long work on standard error: a live bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINE_INTERVAL = 5.0


class Progress:
    """Takes progress of long work. This one drops it: the default of library calls."""

    def stage(self, name: str, total: float | None = None) -> Callable[[float], None]:
        """Open a named stage; the result takes the amount done."""
        return lambda amount: None


class LineProgress(Progress):
    """One line when a stage starts, then at most one every ``LINE_INTERVAL`` seconds: for logs and pipes."""

    def stage(self, name: str, total: float | None = None) -> Callable[[float], None]:
        done, last = 0.0, time.monotonic()
        print(name, file=sys.stderr, flush=True)  # noqa: T201

        def advance(amount: float) -> None:
            nonlocal done, last
            done += amount
            now = time.monotonic()
            if now - last >= LINE_INTERVAL:
                last = now
                share = f"{100 * done / total:.0f} %" if total else f"{done:,.0f}"
                print(f"{name}: {share}", file=sys.stderr, flush=True)  # noqa: T201

        return advance


class BarProgress(RichProgress, Progress):
    """A live display, one line per stage."""

    def stage(self, name: str, total: float | None = None) -> Callable[[float], None]:
        self.finish()
        return partial(self.advance, self.add_task(name, total=total))

    def finish(self) -> None:
        """Complete the bar of the last stage."""
        for task in self.tasks[-1:]:
            total = task.total or max(task.completed, 1)
            self.update(task.id, total=total, completed=total)


@contextmanager
def make_progress(quiet: bool = False) -> Iterator[Progress]:
    """Progress that suits standard error: bars on a terminal, plain lines elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield Progress() if quiet else LineProgress()
        return
    columns = (*RichProgress.get_default_columns(), TimeElapsedColumn())
    with BarProgress(*columns, console=Console(stderr=True)) as bars:
        yield bars
        bars.finish()


EPOCH_INTERVAL = 3.0

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
        if now - last >= EPOCH_INTERVAL or row["epoch"] == total:
            last = now
            print(f"epoch {row['epoch']}/{total}  {format_epoch(row)}", file=sys.stderr, flush=True)  # noqa: T201

    return show


def format_epoch(row: Mapping[str, Any]) -> str:
    """Loss, val metric and seconds of an epoch, as far as they are numbers."""
    numbers = {"loss": row.get("train_loss"), "val": row.get("val")}
    texts = [f"{key} {value:.4f}" for key, value in numbers.items() if isinstance(value, (int, float))]
    seconds = row.get("seconds")
    return "  ".join([*texts, *([f"{seconds:.2f} s"] if isinstance(seconds, (int, float)) else [])])
