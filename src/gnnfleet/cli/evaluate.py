"""``gnnfleet evaluate`` measures a run exactly on a split; ``gnnfleet predict`` writes outputs with original ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from gnnfleet.cli import options
from gnnfleet.cli.output import print_result, table
from gnnfleet.errors import ConfigError

SplitChoice = StrEnum("SplitChoice", ["train", "val", "test", "all"])


def evaluate(
    run: options.RunArgument,
    split: Annotated[SplitChoice, typer.Option(help="Split to evaluate; all: every labelled node.")] = SplitChoice.test,
    checkpoint: options.CheckpointOption = options.CheckpointChoice.best,
    store: options.StoreOption = None,
    memory: options.MemoryOption = None,
    workers: options.WorkersOption = None,
    as_json: options.JsonFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Evaluate a trained run on a split, with full neighbourhoods.

    Another store (--store) needs labels and the same feature columns. Classes are matched by name.

    On several machines: torchrun … -m gnnfleet evaluate RUN, with run and store under the same path on each.
    """
    run_query_command(
        {"run": str(run), "checkpoint": str(checkpoint), "memory": memory, "split": str(split)},
        store,
        workers=workers,
        quiet=quiet,
        show=lambda answer: print_result(answer, as_json=as_json, human=[_metrics_table(answer)]),
    )


def _metrics_table(answer: Mapping[str, Any]) -> Any:
    unit = next(name for name in ("nodes", "links", "events") if name in answer)
    columns = ["split", unit, *answer["metrics"], "loss"]
    row = (answer["split"], answer[unit], *answer["metrics"].values(), answer["loss"])
    return table(f"{answer['run']}, {answer['checkpoint']} weights", columns, [row])


def run_query_command(
    query_fields: Mapping[str, Any],
    store: Path | None,
    *,
    workers: int | None,
    quiet: bool,
    show: Callable[[dict[str, Any]], None],
) -> None:
    """Run a ``Query`` in this process, on workers it starts, or as one rank under torchrun."""
    launch_env = options.start_process()
    from gnnfleet.inference.query import Query, run_query, run_query_as_rank
    from gnnfleet.training.run_dir import RunDirectory

    query = Query(**query_fields)
    open_graph = partial(RunDirectory(Path(query.run)).open_graph, store)
    if launch_env is not None:
        if workers not in (None, launch_env.size):
            raise ConfigError(f"torchrun started {launch_env.size} workers, found --workers {workers}: leave it out")
        run_query_as_rank(launch_env, query, open_graph, quiet=quiet, show=show)
    show(run_query(query, open_graph(), workers=workers, quiet=quiet))


def predict(
    run: options.RunArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Output file: Parquet, or CSV if it ends in .csv.")
    ],
    logits: Annotated[bool, typer.Option("--logits", help="Add a column of logits.")] = False,
    embeddings: Annotated[bool, typer.Option("--embeddings", help="Add a column of embeddings.")] = False,
    pairs: Annotated[
        Path | None,
        typer.Option("--pairs", metavar="FILE", help="Score these pairs: CSV or Parquet with columns src and dst."),
    ] = None,
    events: Annotated[
        Path | None,
        typer.Option(
            "--events",
            metavar="FILE",
            help="Score these events: CSV or Parquet with columns src, dst, time and the features of the run.",
        ),
    ] = None,
    relation: Annotated[str, typer.Option(help="With --pairs: the edge type, for example user:buys:product.")] = "",
    checkpoint: options.CheckpointOption = options.CheckpointChoice.best,
    store: options.StoreOption = None,
    memory: options.MemoryOption = None,
    workers: options.WorkersOption = None,
    as_json: options.JsonFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Write id, prediction and probability of every node of the labelled type.

    For multi-label data, prediction is a list and probabilities has one number per class. A link run writes id and
    embedding of every node, or with --pairs the probability of each pair. An event run writes the probability of each
    event of --events, given all earlier events.

    Another store (--store) needs the same feature columns, in any order, and no labels.
    """
    run_query_command(
        {
            "run": str(run),
            "checkpoint": str(checkpoint),
            "memory": memory,
            "output": str(output.resolve()),
            "logits": logits,
            "embeddings": embeddings,
            "pairs": None if pairs is None else str(pairs.resolve()),
            "events": None if events is None else str(events.resolve()),
            "relation": relation,
        },
        store,
        workers=workers,
        quiet=quiet,
        show=lambda answer: print_result(
            {**answer, "output": str(output)}, as_json=as_json, human=[f"{answer['rows']:,} rows written to {output}"]
        ),
    )
