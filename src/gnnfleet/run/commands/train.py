"""``gnnfleet train``: a store, a strategy, a model; a run directory and one record."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.run.allocator import prefer_huge_pages
from gnnfleet.run.console import JsonFlag, QuietFlag, emit, parse_settings, remark, size_text, table

if TYPE_CHECKING:
    from gnnfleet.report.record import RunRecord

TRAIN_EXAMPLES = """\
gnnfleet train shop/ --model gcn --set model.hidden=64 --set train.lr=0.01 --split 20-per-class

gnnfleet train shop/ --config run.toml --seed 1 --run-dir runs/first --resume
"""


class Precision(StrEnum):
    float32 = "float32"
    bf16 = "bf16"
    float64 = "float64"


def train(
    store: Annotated[Path, typer.Argument(help="The store to train on.")],
    strategy: Annotated[str | None, typer.Option("--strategy", "-s", help="How training runs. Default local.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", "-w", help="Processes. Default 1.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="sage, gcn, gat, … Default sage.")] = None,
    task: Annotated[str | None, typer.Option(help="node: classify nodes; link: predict edges. Default node.")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A TOML file with the words of a run.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One word of the config, as train.lr=0.01; repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same weights, bit for bit.")] = None,
    split: Annotated[
        str | None,
        typer.Option(help="0.6/0.2/0.2 of nodes or edges, 20-per-class, or the number of a split of the store."),
    ] = None,
    precision: Annotated[Precision | None, typer.Option(help="Default float32.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where --run-dir (or runs/last) stopped.")] = False,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run goes. Default runs/STORE-MODEL-N.")] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Train a model and keep the best weights.

    Words come from --config, then --set, then the options; what is not said has the default of docs/defaults.md.
    Interrupt it at any time: --resume ends in the same weights as a run that was never interrupted.
    """
    prefer_huge_pages()
    from gnnfleet.graph.store import open_store
    from gnnfleet.run.config import nest, overlay, parse_value, read_toml
    from gnnfleet.run.training import Place, run_training

    words = {} if config is None else read_toml(config)
    given = {key: parse_value(value) for key, value in parse_settings(settings).items()}
    options = {
        "strategy": None if strategy is None else {"name": strategy},
        "workers": workers,
        "model": None if model is None else {"name": model},
        "task": task,
        "seed": seed,
        "split": split,
        "precision": None if precision is None else str(precision),
    }
    words = overlay(overlay(words, nest(given)), {key: value for key, value in options.items() if value is not None})
    graph = open_store(store)
    trained = run_training(graph, words, place=Place(run_dir, keep=True, resume=resume), quiet=quiet)
    record = trained.record
    emit(record.as_json(), as_json=as_json, human=[_table(store.resolve().name, record)])
    if trained.stopped_early:
        remark(
            f"stopped after {record.epochs} epochs: val did not get better for {trained.config.train.patience}",
            quiet=quiet,
        )
    remark(f"kept in {record.run_dir}", quiet=quiet)


def _table(name: str, record: RunRecord) -> Any:
    seconds = sorted(record.seconds_per_epoch)
    rows = [
        ("epochs", record.epochs),
        ("best epoch", record.metrics["best_epoch"]),
        ("train loss", record.metrics["train_loss"]),
        *((f"{split} {record.metrics['name']}", record.metrics[split]) for split in ("val", "test")),
        ("seconds per epoch (median)", seconds[len(seconds) // 2] if seconds else None),
        ("peak memory", size_text(record.memory["peak_rss"][0])),
    ]
    return table(f"{record.model} on {name}, strategy {record.strategy}", ["", "value"], rows)
