"""``gnnfleet report``: show runs on one page, in a file or served; ``watch``: follow a run in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gnnfleet.cli.options import JsonFlag, QuietFlag, RunArgument
from gnnfleet.cli.output import format_bytes, print_result, table
from gnnfleet.errors import ConfigError
from gnnfleet.report.phase_timer import COMPUTE, EXCHANGE, PHASES, WAIT
from gnnfleet.report.progress import format_epoch
from gnnfleet.report.remarks import print_note
from gnnfleet.report.run_reader import RUNNING, Run, mean_phase_seconds, read_run, summarize, worker_names
from gnnfleet.units import format_size

REPORT_EXAMPLES = """\
gnnfleet report runs/last -o page.html

gnnfleet report runs/shop-sage-* -o compared.html  # several runs side by side

gnnfleet report runs/last --serve  # in the browser, while it trains
"""


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Directories of runs, for example runs/last.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="File to write. Default report.html.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the page over HTTP; it refreshes by itself.")] = False,
    host: Annotated[
        str, typer.Option(help="Address to serve on. With 127.0.0.1 only this machine can connect.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve on; 0 picks a free one.")] = 0,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Show runs on one page: loss and metric, time by phase, traffic between workers, memory, partitions, rounds.

    The page is one file that works offline. Runs may still be training.
    """
    from gnnfleet.io.atomic import write_atomically
    from gnnfleet.report.page import page_data, render_page
    from gnnfleet.report.run_reader import RUNNING, read_run, summarize

    names = unique_names(runs)

    def read() -> list[Run]:
        return [read_run(path, name) for path, name in zip(runs, names, strict=True)]

    title = title or ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    current = read()
    if serve:
        if output is not None:
            raise ConfigError("--serve writes no file: leave out --output or --serve")
        from gnnfleet.report.page import serve_page

        def data() -> dict[str, Any]:
            latest = read()
            return page_data(latest, title=title, live=any(run["state"] == RUNNING for run in latest))

        serve_page(data, host, port, log_user=lambda text: print_note(text, quiet=quiet))
        return
    output = output or Path("report.html")
    try:
        write_atomically(output, render_page(page_data(current, title=title)).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror or error}: choose another --output") from error
    results = [{"run": run["name"], "state": run["state"], **summarize(run)} for run in current]
    print_result({"output": str(output), "runs": results}, as_json=as_json, human=[summary_table(current)])
    print_note(f"report page: {output}", quiet=quiet or as_json)


def unique_names(runs: list[Path]) -> list[str]:
    """Names of runs on a page: their directory names, with parent directories added until all differ."""
    paths = [path.resolve() for path in runs]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"the same run is given twice: {max(paths, key=paths.count)}")
    names = [path.name for path in paths]
    depth = 2
    while len(set(names)) < len(names):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        depth += 1
    return names


def summary_table(runs: list[dict[str, Any]], equals: dict[str, str] | None = None) -> Any:
    """One row per run: metric, time, traffic, memory."""
    summaries = [summarize(run) for run in runs]
    metrics = {summary["metric"] for summary in summaries if summary["metric"]}
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    mixed, has_baseline = metric == "metric", any(summary["baseline"] is not None for summary in summaries)
    columns = ["run", "workers", "epochs", f"test {metric}", *(["EdgeBank"] if has_baseline else [])]
    columns += ["s per epoch", "sent", "rounds", "largest worker", *([] if equals is None else ["equals local"])]
    rows: list[list[Any]] = []
    for run, summary in zip(runs, summaries, strict=True):
        peak = None if summary["peak_rss"] is None else format_bytes(summary["peak_rss"])
        test = summary["test"]
        if mixed and test is not None:
            test = f"{test:.3f} {summary['metric']}"
        rows.append([run["name"], run["workers"], summary["epochs"], test])
        rows[-1] += [summary["baseline"]] if has_baseline else []
        rows[-1] += [summary["epoch_seconds"], format_bytes(summary["bytes"]), summary["rounds"], peak]
        rows[-1] += [] if equals is None else [equals.get(run["name"])]
    return table(None, columns, rows)


POLL_SECONDS = 0.5


def watch(run: RunArgument) -> None:
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
    view = Table(box=None, pad_edge=False)
    for title in ("", "compute / exchange / wait", "", "sent", "memory"):
        view.add_column(title, justify="left" if title in ("", "compute / exchange / wait") else "right")
    split, totals = mean_phase_seconds(run), run["totals"]
    for worker, name in enumerate(worker_names(run)):
        seconds = split[worker] if worker < len(split) else None
        sent = "" if totals is None else format_size(sum(totals["bytes"][worker]))
        peak = "" if totals is None else format_size(totals["peak_rss"][worker])
        view.add_row(escape(name), *_split(seconds), sent, peak)
    return view


def _split(seconds: dict[str, float] | None) -> tuple[Text, str]:
    if not seconds or not sum(seconds.values()):
        return Text(""), ""
    total, bar = sum(seconds.values()), Text()
    for phase in PHASES:
        bar.append("█" * round(24 * seconds[phase] / total), _COLOURS[phase])
    return bar, " / ".join(f"{1e3 * seconds[phase]:.1f}" for phase in PHASES) + " ms"
