"""``gnnfleet train``: a store, a strategy, a model; a run directory and one record."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli.options import (
    _HOW,
    _WHERE,
    ConfigOption,
    JsonFlag,
    LauncherOption,
    ModelOption,
    PartitionOption,
    QuietFlag,
    RestartsOption,
    RunDirOption,
    SeedOption,
    SettingsOption,
    SplitOption,
    StoreArgument,
    StrategyOption,
    TaskOption,
    TrainMemoryOption,
    TrainWorkersOption,
    parse_settings,
)
from gnnfleet.cli.output import format_bytes, print_result, table
from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.process_lifetime import prefer_huge_pages
from gnnfleet.errors import ConfigError
from gnnfleet.report.remarks import print_note

if TYPE_CHECKING:
    from gnnfleet.config.schema import RunConfig
    from gnnfleet.report.run_record import RunRecord

TRAIN_EXAMPLES = """\
gnnfleet train shop/ --model gcn --set model.hidden=64 --set train.lr=0.01 --split 20-per-class

gnnfleet train shop/ --model mine.py:make --set model.settings.depth=4        a model of your own, docs/models.md

gnnfleet train shop/ --config run.toml --seed 1 --run-dir runs/first --resume

gnnfleet train shop/ --strategy sar --workers 4 --max-restarts 3               four processes on this machine

gnnfleet train shop/ --strategy macrobatch --workers 4 --set 'strategy.fanouts=[15,10,5]'

gnnfleet train shop/ --strategy tma --workers 3 --set strategy.interval=10     three trainers and a coordinator

gnnfleet train events/ --strategy temporal --model tgn                         a stream of events

torchrun --nnodes 4 --node-rank I --rdzv-backend static --master-addr HOST --master-port 29400 \\
  -m gnnfleet train shop/ --strategy sar                                       four machines, docs/two-machines.md
"""


def _strategy(name: str | None, launcher: str | None) -> dict[str, str] | None:
    words = {"name": name, "launcher": launcher}
    return {key: value for key, value in words.items() if value is not None} or None


class PrecisionChoice(StrEnum):
    float32 = "float32"
    bf16 = "bf16"
    float64 = "float64"


def train(
    store: StoreArgument,
    model: Annotated[str | None, ModelOption] = None,
    task: Annotated[str | None, TaskOption] = None,
    split: Annotated[str | None, SplitOption] = None,
    settings: Annotated[list[str] | None, SettingsOption] = None,
    config: Annotated[Path | None, ConfigOption] = None,
    seed: Annotated[int | None, SeedOption] = None,
    strategy: Annotated[str | None, StrategyOption] = None,
    workers: Annotated[int | None, TrainWorkersOption] = None,
    max_restarts: Annotated[int, RestartsOption] = 0,
    launcher: Annotated[str | None, LauncherOption] = None,
    partition: Annotated[str | None, PartitionOption] = None,
    precision: Annotated[
        PrecisionChoice | None,
        typer.Option(
            rich_help_panel=_HOW,
            help="bf16 stores what dense products give in bfloat16, and multiplies in it where the CPU can; weights "
            "stay float32, sums are taken in it. Default float32.",
        ),
    ] = None,
    memory: Annotated[str | None, TrainMemoryOption] = None,
    run_dir: Annotated[Path | None, RunDirOption] = None,
    resume: Annotated[
        bool, typer.Option("--resume", rich_help_panel=_WHERE, help="Go on where --run-dir (or runs/last) stopped.")
    ] = False,
    trace: Annotated[
        bool,
        typer.Option("--trace", rich_help_panel=_WHERE, help="Keep trace.json: what workers did when, for Perfetto."),
    ] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Train a model, keep the weights that are best on val, measure them on test.

    Interrupt it at any time: --resume ends in the same weights.
    Options win over --set, --set wins over --config. Some words and their defaults:

    model.hidden=256  model.layers=3  model.dropout=0.5  model.norm=none
    train.epochs=100  train.lr=0.01  train.weight_decay=0.0005  train.patience=0

    All of them are in docs/defaults.md, models in docs/models.md.
    """
    prefer_huge_pages()
    seat = LaunchEnv.from_environment()
    if seat is not None and seat.size > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a dead peer is reported once, in our words
    from gnnfleet.config.resolve import merge_settings, parse_value, read_toml
    from gnnfleet.graph.store import open_store
    from gnnfleet.session.prepare import RunLocation
    from gnnfleet.session.training import run_training

    words = {} if config is None else read_toml(config)
    given = {key: parse_value(value) for key, value in parse_settings(settings).items()}
    options = {
        "strategy": _strategy(strategy, launcher),
        "workers": workers,
        "model": None if model is None else {"name": model},
        "task": task,
        "seed": seed,
        "split": split,
        "partition": partition,
        "memory": memory,
        "precision": None if precision is None else str(precision),
        "report": {"trace": True} if trace else None,
    }
    words = merge_settings(words, given, {key: value for key, value in options.items() if value is not None})
    place = RunLocation(run_dir, keep=True, resume=resume)

    def show(record: RunRecord, resolved: RunConfig) -> None:
        print_result(record.as_json(), as_json=as_json, human=_summary(store.resolve().name, record))
        if record.epochs < resolved.train.epochs:
            waited = record.epochs - record.metrics["best_epoch"]
            print_note(f"stopped after {record.epochs} epochs: val did not get better for {waited}", quiet=quiet)
        print_note(f"kept in {record.run_dir}", quiet=quiet)

    if seat is not None and seat.size > 1:
        from gnnfleet.session.torchrun import train_as_rank

        if max_restarts:
            raise ConfigError("restarts are torchrun's: put --max-restarts before -m gnnfleet")
        train_as_rank(seat, store, words, place=place, quiet=quiet, show=show)
    graph = open_store(store)
    if resume and run_dir is not None and not (run_dir / "config.json").exists():
        print_note(f"there is no run in {run_dir} to go on with: it begins", quiet=quiet)
    trained = run_training(graph, words, place=place, quiet=quiet, restarts=max_restarts)
    show(trained.record, trained.config)


def _summary(name: str, record: RunRecord) -> list[Any]:
    several = " (of the largest worker)" if record.workers > 1 else ""
    rows = [
        ("epochs", record.epochs),
        ("best epoch", record.metrics["best_epoch"]),
        ("train loss", record.metrics["train_loss"]),
        *((f"{split} {record.metrics['name']}", record.metrics[split]) for split in ("val", "test")),
        *(
            (f"{split} {name}", value)
            for split, found in record.metrics.get("beside", {}).items()
            for name, value in found.items()
        ),
        ("seconds per epoch (median)", median(record.seconds_per_epoch) if record.seconds_per_epoch else None),
        ("peak memory" + several, format_bytes(max(record.memory["peak_rss"]))),
    ]
    if record.workers > 1:
        rows.append(("sent in all", format_bytes(sum(record.traffic["bytes_sent"]))))
    on = f", {record.workers} workers" if record.workers > 1 else ""
    return [f"{record.model} on {name}, strategy {record.strategy}{on}", table(None, ["", "value"], rows)]
