"""``gnnfleet demo``: train every strategy on generated data and show them in one table and on one page."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli.compare import PAGE, RUNS, prepare_folder, show_comparison
from gnnfleet.cli.options import JsonFlag, QuietFlag, parse_settings
from gnnfleet.errors import ConfigError, GnnfleetError
from gnnfleet.report.remarks import print_note

if TYPE_CHECKING:
    from gnnfleet.analysis.compare import Comparison
    from gnnfleet.graph.graph import Graph
    from gnnfleet.report.progress import Progress

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
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
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
        graph = make_dataset("communities", progress=progress, **{**GRAPH_PARAMETERS, **parse_settings(settings)})
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
