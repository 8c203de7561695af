"""Progress of long work on standard error: a live bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINE_INTERVAL = 5.0


class Progress(Protocol):
    """Takes progress of long work. ``stage`` opens a named stage and returns a function that takes the amount done."""

    def stage(self, name: str, total: float | None = None) -> Callable[[float], None]: ...


class NoProgress:
    """No progress: the default of library calls."""

    def stage(self, name: str, total: float | None = None) -> Callable[[float], None]:
        return lambda amount: None


class LineProgress:
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


class BarProgress:
    """A live display, one line per stage."""

    def __init__(self, display: RichProgress) -> None:
        self._display = display
        self._current: int | None = None

    def stage(self, name: str, total: float | None = None) -> Callable[[float], None]:
        self.finish()
        task = self._display.add_task(name, total=total)
        self._current = task
        return lambda amount: self._display.advance(task, amount)

    def finish(self) -> None:
        """Complete the bar of the previous stage."""
        if self._current is not None:
            task = self._display.tasks[self._current]
            total = task.total or max(task.completed, 1)
            self._display.update(task.id, total=total, completed=total)


@contextmanager
def make_progress(quiet: bool = False) -> Iterator[Progress]:
    """Progress that suits standard error: bars on a terminal, plain lines elsewhere."""
    if quiet:
        yield NoProgress()
    elif not sys.stderr.isatty():
        yield LineProgress()
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=Console(stderr=True)) as display:
            bars = BarProgress(display)
            yield bars
            bars.finish()
