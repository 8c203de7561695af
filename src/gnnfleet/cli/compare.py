"""``gnnfleet compare`` and ``demo``: train with several strategies and show them in one table and on one page."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import replace
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
    from gnnfleet.graph.graph import Graph
    from gnnfleet.report.progress import Progress

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
    from gnnfleet.training.auto_defaults import with_auto_defaults

    names = parse_strategies(strategies)
    values = {key: parse_value(value) for key, value in options.parse_settings(settings).items()}
    common, strategy_settings = split_settings(values)
    tree = overlay(options.read_settings(config, None), unflatten(common))
    run_options = {"model": model, "task": task, "split": split, "seed": seed, "workers": workers}
    tree = {"workers": 2, **overlay(tree, options.read_settings(None, None, **run_options))}
    tree = tree if check else {**tree, "check": False}
    tree.pop("strategy", None)
    graph = open_store(store)
    tree = with_auto_defaults(graph, tree, for_all=True, quiet=quiet)
    num_workers = tree.pop("workers")
    comparison = Comparison(store, output / RUNS, names, num_workers, tree, strategy_settings)
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


# -- demo --

GRAPH_PARAMETERS = {"nodes": 20_000, "mean_degree": 16}
SETTINGS: dict[str, Any] = {
    "model": {"name": "sage", "hidden": 64, "layers": 3, "dropout": 0.2},
    "train": {"epochs": 25, "lr": 0.01},
}
"""Settings of every strategy but temporal."""

EVENTS = {"events": 20_000, "users": 1_000, "items": 500}
EVENT_SETTINGS: dict[str, Any] = {
    "model": {"name": "tgn", "hidden": 64, "pairs": True},
    "link": {"negatives": 5, "loss": "softmax"},
    "train": {"epochs": 6, "lr": 3e-3},
}
EVENT_STRATEGY_SETTINGS: dict[str, dict[str, Any]] = {"temporal": {"batch": 200, "static": False}}

STRATEGY_SETTINGS: dict[str, dict[str, Any]] = {
    "macrobatch": {"batch": 512, "fanouts": (10, 10, 5)},
    "tma": {"batch": 512, "fanouts": (10, 10, 5), "steps": 2},  # a round is one pass over the training nodes
    "pipe": {"graph_parallel": 1},  # pipeline stages, which the planner would not choose for so few layers
}


def demo(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Directory for stores, runs and page. An earlier demo there is replaced."),
    ] = Path("demo"),
    workers: Annotated[
        int, typer.Option("--workers", "-w", metavar="N", min=2, help="Workers of every strategy except local.")
    ] = 2,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a parameter of the generated graph. Repeatable."),
    ] = None,
    as_json: options.JsonFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Train every strategy on generated data and compare them in one table and on one page.

    temporal trains on an event stream, the others on a graph with communities. The demo also compares all partition
    methods on that graph. Nothing is downloaded.
    """
    from gnnfleet.analysis.compare import Comparison, check_all, train_all
    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.store import save_store
    from gnnfleet.report.progress import make_progress

    say = partial(print_note, quiet=quiet)
    started = time.monotonic()
    store, runs = output / "communities", output / RUNS
    strategies = ("local", "sar", "macrobatch", "tma", "pipe")
    comparison = Comparison(store, runs, strategies, workers, SETTINGS, STRATEGY_SETTINGS)
    with make_progress(quiet) as progress:
        graph = make_dataset(
            "communities", progress=progress, **{**GRAPH_PARAMETERS, **options.parse_settings(settings)}
        )
        prepare_folder(output, overwrite=True, extra=("communities", "events"))
        graph = save_store(graph, store)
        partitions = _measure_partitions(graph, workers, progress)
        trained = train_all(comparison, progress=progress, say=say)
        checks = check_all(comparison, trained, progress=progress)
        save_store(make_dataset("events", progress=progress, **EVENTS), output / "events")
        with suppress(GnnfleetError):  # reported already; the page shows the other strategies
            events = _event_comparison(comparison, output / "events")
            trained += train_all(events, progress=progress, say=say)
            checks |= check_all(events, events.strategies, progress=progress)
    title = f"gnnfleet demo: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges, {workers} workers"
    page = output / PAGE
    show_comparison(comparison, trained, checks, page, title=title, partitions=partitions, as_json=as_json, quiet=quiet)
    took = time.monotonic() - started
    print_note(
        f"finished in {took / 60:.1f} minutes; to inspect the graph: gnnfleet info {store}", quiet=quiet or as_json
    )


def _event_comparison(comparison: Comparison, store: Path) -> Comparison:
    """The comparison for strategy temporal; one worker if it cannot use as many as the others."""
    events = replace(
        comparison,
        store=store,
        strategies=("temporal",),
        settings=EVENT_SETTINGS,
        strategy_settings=EVENT_STRATEGY_SETTINGS,
    )
    try:
        events.config("temporal")
    except ConfigError:
        events = replace(events, workers=1)
    return events


def _measure_partitions(graph: Graph, parts: int, progress: Progress) -> list[dict[str, Any]]:
    """Quality of the partition that each method makes; none is saved."""
    from gnnfleet.graph.partition.assign import PARTITIONERS, assign_nodes
    from gnnfleet.graph.partition.edge_scan import measure_partition

    partitions = []
    for method in PARTITIONERS:
        assignment = assign_nodes(graph, parts, method, progress=progress)
        quality = measure_partition(graph, assignment.part, parts, progress=progress)
        partitions.append({"name": graph.name, "method": method, **quality.summary()})
    return partitions
