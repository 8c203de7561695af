"""``gnnfleet watch``: follow a run in the terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

POLL_SECONDS = 0.5


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, for example runs/last.")],
) -> None:
    """Follow a run until it ends: loss, metric, time by phase, traffic and memory of each worker.

    On a terminal the view refreshes in place; elsewhere each epoch is one line. A finished run is shown once.
    """
    from rich.console import Console
    from rich.live import Live

    from gnnfleet.report.live_view import epoch_lines_since, live_view
    from gnnfleet.report.run_reader import RUNNING, read_run

    current = read_run(run)
    if not sys.stdout.isatty():
        last_epoch = 0
        while True:
            for line in epoch_lines_since(current, last_epoch):
                sys.stdout.write(line + "\n")
            sys.stdout.flush()
            last_epoch = current["rows"][-1]["epoch"] if current["rows"] else 0
            if current["state"] != RUNNING:
                sys.stdout.write(f"{current['name']}: {current['state']}\n")
                return
            time.sleep(POLL_SECONDS)
            current = read_run(run)
    with Live(live_view(current), console=Console(emoji=False), auto_refresh=False) as live:
        while current["state"] == RUNNING:
            time.sleep(POLL_SECONDS)
            current = read_run(run)
            live.update(live_view(current), refresh=True)
