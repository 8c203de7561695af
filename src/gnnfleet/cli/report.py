"""``gnnfleet report``: show runs on one page, in a file or served while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gnnfleet.cli.options import JsonFlag, QuietFlag
from gnnfleet.cli.output import format_bytes, print_result, table
from gnnfleet.errors import ConfigError
from gnnfleet.report.remarks import print_note

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
    from gnnfleet.report.run_reader import RUNNING, Run, read_run, summarize

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
    from gnnfleet.report.run_reader import summarize

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
