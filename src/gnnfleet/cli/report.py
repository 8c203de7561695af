"""``gnnfleet report``: a page about runs, written to a file or served while they go on."""

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

gnnfleet report runs/shop-sage-* -o compared.html                   several runs side by side

gnnfleet report runs/last --serve                                   in the browser, while the run goes on
"""


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Directories of runs, as runs/last.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page. Default report.html.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="What stands on top of the page.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the page instead; it refreshes itself.")] = False,
    host: Annotated[str, typer.Option(help="Where it is served: this machine only, unless you say.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Show runs on one page: loss and metric, time split, bytes from worker to worker, memory, partitions, rounds.

    The page is one file that works offline. It can be made while a run goes on.
    """
    from gnnfleet.io.atomic import write_atomically
    from gnnfleet.report.page import page_data, render_page
    from gnnfleet.report.run_reader import RUNNING, Run, read_run, summarize

    names = unique_names(runs)

    def read() -> list[Run]:
        return [read_run(path, name) for path, name in zip(runs, names, strict=True)]

    title = title or ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    found = read()
    if serve:
        if output is not None:
            raise ConfigError("--serve writes no file: leave out --output, or --serve")
        from gnnfleet.report.http import serve_page

        def data() -> dict[str, Any]:
            now = read()
            return page_data(now, title=title, live=any(run["state"] == RUNNING for run in now))

        serve_page(data, host, port, say=lambda text: print_note(text, quiet=quiet))
        return
    output = output or Path("report.html")
    try:
        write_atomically(output, render_page(page_data(found, title=title)).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror or error}: choose another --output") from error
    results = [{"run": run["name"], "state": run["state"], **summarize(run)} for run in found]
    print_result({"output": str(output), "runs": results}, as_json=as_json, human=[summary_table(found)])
    print_note(f"the page is {output}", quiet=quiet or as_json)


def unique_names(runs: list[Path]) -> list[str]:
    """What runs are called on a page: by their directories, with those above where two are the same."""
    paths = [path.resolve() for path in runs]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"a run is named twice: {max(paths, key=paths.count)}")
    names = [path.name for path in paths]
    depth = 2
    while len(set(names)) < len(names):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        depth += 1
    return names


def summary_table(runs: list[dict[str, Any]], equals: dict[str, str] | None = None) -> Any:
    """Runs by the numbers they are compared by."""
    from gnnfleet.report.run_reader import summarize

    found = [(run, summarize(run)) for run in runs]
    metrics = {each["metric"] for _, each in found if each["metric"]}
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    columns = ["run", "workers", "epochs", f"test {metric}", "s per epoch", "sent", "rounds", "largest worker"]
    several, has_baseline = metric == "metric", any(each["baseline"] is not None for _, each in found)
    rows: list[list[Any]] = []
    for run, each in found:
        peak = None if each["peak_rss"] is None else format_bytes(each["peak_rss"])
        test = f"{each['test']:.3f} {each['metric']}" if several and each["test"] is not None else each["test"]
        words = [run["name"], run["workers"], each["epochs"], test, each["epoch_seconds"]]
        rows.append([*words, format_bytes(each["bytes"]), each["rounds"], peak])
        if equals is not None:
            rows[-1].append(equals.get(run["name"]))
        if has_baseline:
            rows[-1].insert(4, each["baseline"])
    if has_baseline:
        columns.insert(4, "EdgeBank")
    return table(None, [*columns, *(["equals local"] if equals is not None else [])], rows)
