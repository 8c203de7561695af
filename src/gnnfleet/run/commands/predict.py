"""``gnnfleet predict``: classes and embeddings of every node, scores of pairs, under the ids the user came with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gnnfleet.run.allocator import prefer_huge_pages
from gnnfleet.run.commands.evaluate import Checkpoint, MemoryOption, RunArgument, StoreOption, graph_of_run
from gnnfleet.run.console import JsonFlag, QuietFlag, emit


def predict(
    run: RunArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The Parquet file to write.")],
    logits: Annotated[bool, typer.Option("--logits", help="Also a column of logits.")] = False,
    embeddings: Annotated[bool, typer.Option("--embeddings", help="Also a column of embeddings.")] = False,
    pairs: Annotated[
        Path | None, typer.Option("--pairs", metavar="FILE", help="Score these pairs: CSV or Parquet with src and dst.")
    ] = None,
    relation: Annotated[str, typer.Option(help="With --pairs: the edge type, as user:buys:product.")] = "",
    checkpoint: Annotated[Checkpoint, typer.Option(help="Which weights.")] = Checkpoint.best,
    store: StoreOption = None,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Write a Parquet file with id, prediction and probability of every node of the labelled type.

    With several labels per node, prediction is a list and probabilities has one number per class. A run on links
    writes id and embedding of every node, or the probability of every pair of --pairs.
    With --store for nodes the run has never seen: no labels are needed, the same features are.
    """
    prefer_huge_pages()
    from gnnfleet.nn.own import naming_line
    from gnnfleet.run.prediction import Columns, write_predictions, write_scores
    from gnnfleet.run.training import open_run

    graph = graph_of_run(run, store)
    built, position, used = open_run(run, graph, checkpoint=checkpoint, memory=memory, quiet=quiet)
    with naming_line(built.model_file):
        if pairs is None:
            rows = write_predictions(built, output, Columns(logits=logits, embeddings=embeddings))
        else:
            rows = write_scores(built, pairs, output, relation=relation)
    result = {"run": str(run), "checkpoint": used, "epoch": position.epoch, "output": str(output), "rows": rows}
    emit(result, as_json=as_json, human=[f"{rows:,} predictions written to {output}"])
