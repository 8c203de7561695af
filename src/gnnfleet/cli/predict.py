"""``gnnfleet predict``: write classes or embeddings of nodes, or scores of pairs or events, with original ids."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gnnfleet.cli import options
from gnnfleet.cli.evaluate import run_query_command
from gnnfleet.cli.output import print_result


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
