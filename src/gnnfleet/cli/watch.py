"""``gnnfleet watch``: follow a run in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gnnfleet.report.phase_timer import COMPUTE, EXCHANGE, PHASES, WAIT
from gnnfleet.report.progress import format_epoch
from gnnfleet.report.run_reader import RUNNING, Run, mean_phase_seconds, read_run, summarize, worker_names
from gnnfleet.units import format_size

POLL_SECONDS = 0.5


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, for example runs/last.")],
) -> None:
    """Follow a run until it ends: loss, metric, time by phase, traffic and memory of each worker.

    On a terminal the view refreshes in place; elsewhere each epoch is one line. A finished run is shown once.
    """
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


_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = {COMPUTE: "blue", EXCHANGE: "yellow", WAIT: "bright_black"}
_WIDE = 40


def epoch_lines_since(run: Run, epoch: int) -> list[str]:
    """A line for each epoch after ``epoch``."""
    return [f"epoch {row['epoch']}/{run['epochs']}  {format_epoch(row)}" for row in run["rows"] if row["epoch"] > epoch]


def live_view(run: Run) -> Group:
    rows = run["rows"]
    head = Text(f"{run['name']}  {run['strategy']}, {run['model']}, {run['workers']} workers: {run['state']}", "bold")
    if not rows:
        return Group(head, Text("no epoch has finished yet", "dim"))
    done = rows[-1]["epoch"] / max(run["epochs"], 1)
    bar = "━" * round(_WIDE * done)
    remaining = (run["epochs"] - rows[-1]["epoch"]) * (summarize(run)["epoch_seconds"] or 0.0)
    lines = [
        head,
        Text.assemble((bar, "blue"), (" " * (_WIDE - len(bar))), f"  epoch {rows[-1]['epoch']} of {run['epochs']}"),
        Text(format_epoch(rows[-1]) + (f"  about {remaining:.0f} s left" if run["state"] == RUNNING else "")),
    ]
    for key, name in (("train_loss", "loss"), ("val", "val ")):
        values = [row[key] for row in rows if isinstance(row.get(key), (int, float))]
        if values:
            lines.append(Text(f"{name}  {sparkline(values)}  {values[0]:.4f} → {values[-1]:.4f}"))
    return Group(*lines, _workers(run), *(Text(text, "dim") for text in run["remarks"][-3:]))


def sparkline(values: Sequence[float]) -> str:
    """Values as block characters; of many values the last of each interval."""
    count = min(_WIDE, len(values))
    shown = [values[(i + 1) * len(values) // count - 1] for i in range(count)]
    low, high = min(shown), max(shown)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in shown)


def _workers(run: Run) -> Table:
    """Phase times, bytes sent and peak memory of each worker."""
    table = Table(box=None, pad_edge=False)
    for title in ("", "compute / exchange / wait", "", "sent", "memory"):
        table.add_column(title, justify="left" if title in ("", "compute / exchange / wait") else "right")
    split, totals = mean_phase_seconds(run), run["totals"]
    for worker, name in enumerate(worker_names(run)):
        seconds = split[worker] if worker < len(split) else None
        sent = "" if totals is None else format_size(sum(totals["bytes"][worker]))
        peak = "" if totals is None else format_size(totals["peak_rss"][worker])
        table.add_row(escape(name), *_split(seconds), sent, peak)
    return table


def _split(seconds: dict[str, float] | None) -> tuple[Text, str]:
    if not seconds or not sum(seconds.values()):
        return Text(""), ""
    total, bar = sum(seconds.values()), Text()
    for phase in PHASES:
        bar.append("█" * round(24 * seconds[phase] / total), _COLOURS[phase])
    return bar, " / ".join(f"{1e3 * seconds[phase]:.1f}" for phase in PHASES) + " ms"
