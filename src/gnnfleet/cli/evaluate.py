"""``gnnfleet evaluate``: the exact metric of a run on one split."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli.options import (
    CheckpointChoice,
    JsonFlag,
    MemoryOption,
    QuietFlag,
    RunArgument,
    StoreOption,
    WorkersOption,
)
from gnnfleet.cli.output import print_result, table
from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.process_lifetime import prefer_huge_pages

if TYPE_CHECKING:
    from gnnfleet.graph.graph import Graph


class SplitChoice(StrEnum):
    train = "train"
    val = "val"
    test = "test"
    all = "all"


def evaluate(
    run: RunArgument,
    split: Annotated[
        SplitChoice, typer.Option(help="Which nodes or links; all: every labelled node.")
    ] = SplitChoice.test,
    checkpoint: Annotated[CheckpointChoice, typer.Option(help="Which weights.")] = CheckpointChoice.best,
    store: StoreOption = None,
    memory: MemoryOption = None,
    workers: WorkersOption = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure a trained run on a split, with full neighbourhoods.

    With --store on nodes it has never seen: the store needs labels and the same features. Classes go by their names.
    Several machines: torchrun … -m gnnfleet evaluate RUN, with run and store at the same place on each.
    """
    run_query_command(
        {"run": str(run), "checkpoint": str(checkpoint), "memory": memory, "split": str(split)},
        store,
        workers=workers,
        quiet=quiet,
        show=lambda found: print_result(found, as_json=as_json, human=[_measured(found)]),
    )


def _measured(found: Mapping[str, Any]) -> Any:
    unit = next(word for word in ("nodes", "links", "events") if word in found)
    columns = ["split", unit, *found["metrics"], "loss"]
    row = (found["split"], found[unit], *found["metrics"].values(), found["loss"])
    return table(f"{found['run']}, {found['checkpoint']} weights", columns, [row])


def run_query_command(
    words: Mapping[str, Any],
    store: Path | None,
    *,
    workers: int | None,
    quiet: bool,
    show: Callable[[dict[str, Any]], None],
) -> None:
    """Put a question, in the words of ``Query``: to this process, to workers it starts, or as one of torchrun's."""
    prefer_huge_pages()
    seat = LaunchEnv.from_environment()
    several = seat is not None and seat.size > 1
    if several:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a dead peer is reported once, in our words
    from gnnfleet.errors import ConfigError
    from gnnfleet.inference.query import Query, run_query, run_query_as_rank

    question = Query(**words)
    if seat is not None and several:
        if workers not in (None, seat.size):
            raise ConfigError(f"torchrun started {seat.size} workers, found --workers {workers}: leave it out")
        run_query_as_rank(seat, question, lambda: graph_of_run(Path(question.run), store), quiet=quiet, show=show)
    show(run_query(question, graph_of_run(Path(question.run), store), workers=workers, quiet=quiet))


def graph_of_run(run: Path, store: Path | None) -> Graph:
    """The store a run was trained on, or the one that is named instead."""
    from gnnfleet.errors import RunError
    from gnnfleet.graph.validate import open_validated_store
    from gnnfleet.training.run_dir import RunDirectory

    if store is not None:
        return open_validated_store(store)
    directory = RunDirectory(run)
    known = directory.info()["store"]
    if known is None:
        raise RunError(f"{run} was trained on a graph in memory: name its store with --store")
    graph = open_validated_store(known["path"])
    directory.check_graph(graph)
    return graph
