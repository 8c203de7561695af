"""``gnnfleet watch``: a run as it goes on, in the terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

LOOK_SECONDS = 0.5


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run, as runs/last.")],
) -> None:
    """Follow a run until it ends: loss, metric, what workers do with their time, bytes and memory.

    A live view on a terminal, elsewhere a line for each epoch that is seen. A run that has ended is shown once.
    """
    from rich.console import Console
    from rich.live import Live

    from gnnfleet.report.live_view import epoch_lines_since, live_view
    from gnnfleet.report.run_reader import RUNNING, read_run

    found = read_run(run)
    if not sys.stdout.isatty():
        seen = 0
        while True:
            for line in epoch_lines_since(found, seen):
                sys.stdout.write(line + "\n")
            sys.stdout.flush()
            seen = found["rows"][-1]["epoch"] if found["rows"] else 0
            if found["state"] != RUNNING:
                sys.stdout.write(f"{found['name']}: {found['state']}\n")
                return
            time.sleep(LOOK_SECONDS)
            found = read_run(run)
    with Live(live_view(found), console=Console(emoji=False), auto_refresh=False) as live:
        while found["state"] == RUNNING:
            time.sleep(LOOK_SECONDS)
            found = read_run(run)
            live.update(live_view(found), refresh=True)
