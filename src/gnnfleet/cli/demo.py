"""``gnnfleet demo``: every strategy on generated data, one table, one page, in a few minutes."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli.compare import PAGE, RUNS, prepare_folder, read_all, show_runs, write_page
from gnnfleet.cli.options import JsonFlag, QuietFlag, parse_settings
from gnnfleet.errors import ConfigError, GnnfleetError
from gnnfleet.report.remarks import print_note

if TYPE_CHECKING:
    from gnnfleet.analysis.compare import Comparison
    from gnnfleet.graph.graph import Graph
    from gnnfleet.report.progress import Progress

GRAPH_PARAMETERS = {"nodes": 20_000, "mean_degree": 16}
WORDS: dict[str, Any] = {
    "model": {"name": "sage", "hidden": 64, "layers": 3, "dropout": 0.2},
    "train": {"epochs": 25, "lr": 0.01},
}
"""Of all static strategies."""

EVENTS = {"events": 20_000, "users": 1_000, "items": 500}
EVENT_SETTINGS: dict[str, Any] = {
    "model": {"name": "tgn", "hidden": 64, "pairs": True},
    "link": {"negatives": 5, "loss": "softmax"},
    "train": {"epochs": 6, "lr": 3e-3},
}
EVENT_STRATEGY_SETTINGS: dict[str, dict[str, Any]] = {"temporal": {"batch": 200, "static": False}}

OWN: dict[str, dict[str, Any]] = {
    "macrobatch": {"batch": 512, "fanouts": (10, 10, 5)},
    "tma": {"batch": 512, "fanouts": (10, 10, 5), "steps": 2},  # a round is one pass over the training nodes
    "pipe": {"graph_parallel": 1},  # in stages, which a planner would not do with so few layers
}


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the demo writes.")] = Path("demo"),
    workers: Annotated[int, typer.Option("--workers", "-w", metavar="N", min=2, help="Of each strategy.")] = 2,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the generated graph.")
    ] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Train every strategy on generated data, and compare them in one table and on one page.

    The static ones on a graph with communities, temporal on a stream of events. It also cuts the graph with every
    partitioner and compares what the cuts cost. Nothing is downloaded. The directory is the demo's own: what an earlier
    demo left there is replaced.
    """
    from gnnfleet.analysis.compare import Comparison, check_all, train_all
    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.store import save_store
    from gnnfleet.report.progress import make_progress

    say = partial(print_note, quiet=quiet)
    started = time.monotonic()
    store, runs = output / "communities", output / RUNS
    contest = Comparison(store, runs, ("local", "sar", "macrobatch", "tma", "pipe"), workers, WORDS, OWN)
    with make_progress(quiet) as progress:
        graph = make_dataset("communities", progress=progress, **{**GRAPH_PARAMETERS, **parse_settings(settings)})
        prepare_folder(output, overwrite=True, beside=("communities", "events"))
        graph = save_store(graph, store)
        cuts = _cut(graph, workers, progress)
        done = train_all(contest, progress=progress, say=say)
        verdicts = check_all(contest, done, progress=progress)
        save_store(make_dataset("events", progress=progress, **EVENTS), output / "events")
        with suppress(GnnfleetError):  # it was said; the others have something to show
            events = _on_events(contest, output / "events")
            done += train_all(events, progress=progress, say=say)
            verdicts |= check_all(events, events.strategies, progress=progress)
    found = read_all({name: contest.run_dir(name) for name in done})
    title = f"gnnfleet demo: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges, {workers} workers"
    write_page(output / PAGE, found, title=title, verdicts=verdicts, partitions=cuts)
    show_runs(found, verdicts, output / PAGE, as_json=as_json, quiet=quiet)
    took = time.monotonic() - started
    print_note(f"it took {took / 60:.1f} minutes; look closer with  gnnfleet info {store}", quiet=quiet or as_json)


def _on_events(contest: Comparison, store: Path) -> Comparison:
    """The strategy for streams, on as many workers as it takes."""
    found = replace(
        contest,
        store=store,
        strategies=("temporal",),
        settings=EVENT_SETTINGS,
        strategy_settings=EVENT_STRATEGY_SETTINGS,
    )
    try:
        found.config("temporal")
    except ConfigError:
        found = replace(found, workers=1)
    return found


def _cut(graph: Graph, parts: int, progress: Progress) -> list[dict[str, Any]]:
    """What every partitioner's cut would cost; none is kept."""
    from gnnfleet.graph.partition.assign import PARTITIONERS, assign_nodes
    from gnnfleet.graph.partition.partition_metrics import measure_partition

    found = []
    for method in PARTITIONERS:
        assignment = assign_nodes(graph, parts, method, progress=progress)
        quality = measure_partition(graph, assignment.part, parts, progress=progress)
        found.append({"name": graph.name, "method": method, **quality.summary()})
    return found
