"""``gnnfleet compare``: train with several strategies on one store and show them in one table and on one page."""

from __future__ import annotations

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli import options
from gnnfleet.cli.output import print_result
from gnnfleet.cli.report import summary_table
from gnnfleet.errors import ConfigError, GnnfleetError
from gnnfleet.report.remarks import print_note

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gnnfleet.analysis.compare import Comparison, EqualityCheck

COMPARE_EXAMPLES = """\
gnnfleet compare shop/ --strategies local,sar,macrobatch,tma,pipe --workers 2 --set train.epochs=30

gnnfleet compare shop/ --strategies sar,pipe --workers 4 --model gcn2 --set model.layers=16

gnnfleet compare shop/ --strategies sar,pipe --workers 4 --set pipe.graph_parallel=2  # for one strategy only
"""
PAGE, RUNS, MARK = "page.html", "strategies", ".compared"
"""Contents of the output directory: the page, the runs, and a marker that gnnfleet may replace all of it."""


def compare(
    store: options.StoreArgument,
    strategies: Annotated[
        str, typer.Option(metavar="NAMES", help="Strategies, separated by commas.")
    ] = "local,sar,macrobatch,tma,pipe",
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-w", metavar="N", min=1, help="Workers of every strategy except local. Default 2."),
    ] = None,
    model: Annotated[str | None, options.ModelOption] = None,
    task: Annotated[str | None, options.TaskOption] = None,
    split: Annotated[str | None, options.SplitOption] = None,
    settings: Annotated[list[str] | None, options.SettingsOption] = None,
    config: Annotated[Path | None, options.ConfigOption] = None,
    seed: Annotated[int | None, options.SeedOption] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Directory for runs and page.")] = Path(
        "compared"
    ),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier comparison.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Compare each strategy with local in two extra epochs, and check a torch_geometric module.",
        ),
    ] = True,
    as_json: options.JsonFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Train the same model with several strategies, one after the other, and compare the results.

    All use the same model, seed and epochs; local runs in one process. A round of tma is one pass over the training
    nodes unless tma.steps or tma.interval is set. Strategies that cannot train this model are skipped, with the reason.
    """
    from gnnfleet.analysis.compare import (
        Comparison,
        check_all,
        one_epoch_steps,
        parse_strategies,
        split_settings,
        train_all,
    )
    from gnnfleet.config.resolve import overlay, parse_value, unflatten
    from gnnfleet.graph.store import open_store
    from gnnfleet.report.progress import make_progress

    names = parse_strategies(strategies)
    values = {key: parse_value(value) for key, value in options.parse_settings(settings).items()}
    common, strategy_settings = split_settings(values)
    tree = overlay(options.read_settings(config, None), unflatten(common))
    run_options = {"model": model, "task": task, "split": split, "seed": seed, "workers": workers}
    tree = {"workers": 2, **overlay(tree, options.read_settings(None, None, **run_options))}
    tree = tree if check else {**tree, "check": False}
    tree.pop("strategy", None)
    num_workers = tree.pop("workers")
    comparison = Comparison(store, output / RUNS, names, num_workers, tree, strategy_settings)
    graph = open_store(store)
    comparison.require_strategies()  # reports an error that concerns all strategies once
    for name in names:
        with suppress(GnnfleetError):  # reported when it is trained
            strategy_settings.setdefault(name, {}).update(one_epoch_steps(graph, comparison.config(name)))
    prepare_folder(output, overwrite=overwrite)
    with make_progress(quiet) as progress:
        trained = train_all(comparison, progress=progress, say=partial(print_note, quiet=quiet))
        checks = check_all(comparison, trained, progress=progress) if check else {}
    title = f"{', '.join(trained)} on {store.resolve().name}"
    show_comparison(comparison, trained, checks, output / PAGE, title=title, as_json=as_json, quiet=quiet)


def prepare_folder(folder: Path, *, overwrite: bool, extra: Sequence[str] = ()) -> None:
    """Make an empty directory for runs, page and ``extra`` files; raises ConfigError if it is not empty.

    With ``overwrite`` an earlier comparison is replaced: a directory with the marker and without foreign files.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        expected = {RUNS, PAGE, MARK, *extra}
        replaceable = (folder / MARK).is_file() and {path.name for path in folder.iterdir()} <= expected
        if not overwrite or not replaceable:
            hint = "" if overwrite else ", or pass --overwrite to replace an earlier comparison"
            raise ConfigError(f"{folder} is not empty: choose another --output{hint}")
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}: choose another --output") from error


def show_comparison(
    comparison: Comparison,
    trained: Sequence[str],
    checks: Mapping[str, EqualityCheck],
    page: Path,
    *,
    title: str,
    partitions: Sequence[Mapping[str, Any]] = (),
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the page of the trained runs; print their table, or its content as one JSON object."""
    from gnnfleet.io.atomic import write_atomically
    from gnnfleet.report.page import page_data, render_page
    from gnnfleet.report.run_reader import read_run, summarize

    runs = [read_run(comparison.run_dir(name), name) for name in trained]
    equals = {name: str(check) for name, check in checks.items() if name != "local"}
    write_atomically(page, render_page(page_data(runs, title=title, equals=equals, partitions=partitions)).encode())
    results = []
    for run in runs:
        name, check = run["name"], checks.get(run["name"])
        results.append({"run": name, "strategy": run["strategy"], "workers": run["workers"], **summarize(run)})
        results[-1] |= {} if check is None else check.as_json()
    human = [summary_table(runs, {"local": "", **equals} if checks else None)]
    print_result({"page": str(page), "runs": results}, as_json=as_json, human=human)
    print_note(f"report page: {page}", quiet=quiet or as_json)
