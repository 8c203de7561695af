"""``gnnfleet evaluate``: the exact metric of a run on one split."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.run.allocator import prefer_huge_pages
from gnnfleet.run.console import JsonFlag, QuietFlag, emit, table

if TYPE_CHECKING:
    from gnnfleet.graph.graph import Graph

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run, as runs/last.")]
MemoryOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Bytes of activations to hold at a time, as 4GiB or 500MB. Default the run's."),
]
StoreOption = Annotated[Path | None, typer.Option(help="Another store than the one the run was trained on.")]


class Split(StrEnum):
    train = "train"
    val = "val"
    test = "test"
    all = "all"


class Checkpoint(StrEnum):
    best = "best"
    last = "last"


def evaluate(
    run: RunArgument,
    split: Annotated[Split, typer.Option(help="Which nodes or links; all: every labelled node.")] = Split.test,
    checkpoint: Annotated[Checkpoint, typer.Option(help="Which weights.")] = Checkpoint.best,
    store: StoreOption = None,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure a trained run on a split, with full neighbourhoods.

    With --store on nodes it has never seen: the store needs labels and the same features. Classes go by their names.
    """
    prefer_huge_pages()
    from gnnfleet.nn.own import naming_line
    from gnnfleet.run.training import open_run

    graph = graph_of_run(run, store)
    built, position, used = open_run(run, graph, checkpoint=checkpoint, split=split, memory=memory, quiet=quiet)
    with naming_line(built.model_file):
        found = built.strategy.evaluate("test" if split is Split.all else split)
    name = built.task.metric
    result: dict[str, Any] = {
        "run": str(run),
        "checkpoint": used,
        "epoch": position.epoch,
        "split": str(split),
        "name": name,
        "value": found[name],
        "loss": found["loss"],
        built.unit: int(found["count"]),
        "metrics": {word: value for word, value in found.items() if word not in ("loss", "count")},
    }
    columns = ["split", built.unit, *result["metrics"], "loss"]
    shown = [(str(split), int(found["count"]), *result["metrics"].values(), found["loss"])]
    emit(result, as_json=as_json, human=[table(f"{run}, {used} weights", columns, shown)])


def graph_of_run(run: Path, store: Path | None) -> Graph:
    """The store a run was trained on, or the one that is named instead."""
    from gnnfleet.errors import RunError
    from gnnfleet.graph.store import open_store
    from gnnfleet.run.directory import RunDirectory

    if store is not None:
        return open_store(store)
    directory = RunDirectory(run)
    known = directory.about()["store"]
    if known is None:
        raise RunError(f"{run} was trained on a graph in memory: name its store with --store")
    graph = open_store(known["path"])
    directory.check_graph(graph)
    return graph
