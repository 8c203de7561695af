"""``gnnfleet predict``: classes and embeddings of every node, scores of pairs, under the ids the user came with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gnnfleet.cli.evaluate import run_query_command
from gnnfleet.cli.options import (
    CheckpointChoice,
    JsonFlag,
    MemoryOption,
    QuietFlag,
    RunArgument,
    StoreOption,
    WorkersOption,
)
from gnnfleet.cli.output import print_result


def predict(
    run: RunArgument,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="The Parquet file to write; CSV where it ends in .csv."),
    ],
    logits: Annotated[bool, typer.Option("--logits", help="Also a column of logits.")] = False,
    embeddings: Annotated[bool, typer.Option("--embeddings", help="Also a column of embeddings.")] = False,
    pairs: Annotated[
        Path | None, typer.Option("--pairs", metavar="FILE", help="Score these pairs: CSV or Parquet with src and dst.")
    ] = None,
    events: Annotated[
        Path | None,
        typer.Option(
            "--events",
            metavar="FILE",
            help="Score these events: CSV or Parquet with src, dst, time and the features of the run's events.",
        ),
    ] = None,
    relation: Annotated[str, typer.Option(help="With --pairs: the edge type, as user:buys:product.")] = "",
    checkpoint: Annotated[CheckpointChoice, typer.Option(help="Which weights.")] = CheckpointChoice.best,
    store: StoreOption = None,
    memory: MemoryOption = None,
    workers: WorkersOption = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Write a Parquet file with id, prediction and probability of every node of the labelled type.

    With several labels per node, prediction is a list and probabilities has one number per class. A run on links
    writes id and embedding of every node, or the probability of every pair of --pairs. A run on events writes
    the probability of every event of --events, each with all events before it known.
    With --store for nodes the run has never seen: no labels are needed, the same features are, by name in any order.
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
        show=lambda found: print_result(
            {**found, "output": str(output)},
            as_json=as_json,
            human=[f"{found['rows']:,} predictions written to {output}"],
        ),
    )
