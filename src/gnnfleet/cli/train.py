"""``gnnfleet train``: train a model on a store into a run directory; ``join``: run trainers of a tma run elsewhere."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli import options
from gnnfleet.cli.output import format_bytes, print_result, table
from gnnfleet.errors import ConfigError, RunError
from gnnfleet.report.remarks import print_note

if TYPE_CHECKING:
    from gnnfleet.config.schema import RunConfig
    from gnnfleet.report.run_record import RunRecord

TRAIN_EXAMPLES = """\
gnnfleet train shop/ --model gcn --set model.hidden=64 --set train.lr=0.01 --split 20-per-class

gnnfleet train shop/ --model my_model.py:factory --set model.settings.depth=4  # your own model, docs/models.md

gnnfleet train shop/ --config run.toml --seed 1 --run-dir runs/first --resume

gnnfleet train shop/ --strategy sar --workers 4 --max-restarts 3  # four processes on this machine

gnnfleet train shop/ --strategy macrobatch --workers 4 --set 'strategy.fanouts=[15,10,5]'

gnnfleet train shop/ --strategy tma --workers 3 --set strategy.interval=10  # three independent trainers

gnnfleet train events/ --strategy temporal --model tgn  # an event stream

torchrun --nnodes 4 --node-rank I --rdzv-backend static --master-addr HOST --master-port 29400 \\
  -m gnnfleet train shop/ --strategy sar  # four machines, docs/two-machines.md
"""
PrecisionChoice = StrEnum("PrecisionChoice", ["float32", "bf16", "float64"])


def train(
    store: options.StoreArgument,
    model: Annotated[str | None, options.ModelOption] = None,
    task: Annotated[str | None, options.TaskOption] = None,
    split: Annotated[str | None, options.SplitOption] = None,
    settings: Annotated[list[str] | None, options.SettingsOption] = None,
    config: Annotated[Path | None, options.ConfigOption] = None,
    seed: Annotated[int | None, options.SeedOption] = None,
    strategy: Annotated[str | None, options.StrategyOption] = None,
    workers: Annotated[int | None, options.TrainWorkersOption] = None,
    max_restarts: Annotated[int, options.RestartsOption] = 0,
    launcher: Annotated[str | None, options.LauncherOption] = None,
    partition: Annotated[str | None, options.PartitionOption] = None,
    precision: Annotated[
        PrecisionChoice | None,
        typer.Option(
            rich_help_panel=options.EXECUTION_PANEL,
            help="float32 (default), float64, or bf16: dense products in bfloat16, weights and sums in float32.",
        ),
    ] = None,
    memory: Annotated[str | None, options.TrainMemoryOption] = None,
    run_dir: Annotated[Path | None, options.RunDirOption] = None,
    resume: Annotated[bool, options.ResumeOption] = False,
    trace: Annotated[bool, options.TraceOption] = False,
    no_check: Annotated[bool, options.NoCheckOption] = False,
    as_json: options.JsonFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Train a model and evaluate the weights of the best epoch, by validation metric, on the test split.

    An interrupted run continues with --resume and ends with the same weights. Command-line options override --set,
    which overrides --config. What is left open is chosen for the graph, and printed. Common parameters:

    model.hidden  model.layers  model.dropout  model.norm  model.input_norm
    train.epochs  train.lr  train.patience  train.schedule  train.metric

    All parameters and defaults: docs/defaults.md. Models: docs/models.md. Search for better values: gnnfleet tune.
    """
    launch_env = options.start_process()
    from gnnfleet.graph.store import open_store
    from gnnfleet.session.prepare import RunLocation
    from gnnfleet.session.training import run_training

    strategy_settings = {"name": strategy, "launcher": launcher}
    strategy_settings = {key: value for key, value in strategy_settings.items() if value is not None}
    run_options: dict[str, Any] = {"workers": workers, "model": model, "task": task, "seed": seed, "split": split}
    run_options |= {"partition": partition, "memory": memory, "precision": precision and str(precision)}
    run_options |= {"report": {"trace": True} if trace else None, "check": False if no_check else None}
    tree = options.read_settings(config, settings, strategy=strategy_settings or None, **run_options)
    location = RunLocation(run_dir, keep=True, resume=resume)

    def show(record: RunRecord, resolved: RunConfig) -> None:
        print_result(record.as_json(), as_json=as_json, human=_summary(store.resolve().name, record))
        if record.epochs < resolved.train.epochs:
            waited = record.epochs - record.metrics["best_epoch"]
            print_note(f"stopped early at epoch {record.epochs}: no better val metric for {waited} epochs", quiet=quiet)
        print_note(f"saved to {record.run_dir}", quiet=quiet)
        if record.failure:
            raise RunError(record.failure)

    if launch_env is not None:
        from gnnfleet.session.torchrun import train_as_rank

        if max_restarts:
            raise ConfigError("torchrun restarts its own workers: put --max-restarts before -m gnnfleet")
        train_as_rank(launch_env, store, tree, location=location, quiet=quiet, show=show)
    graph = open_store(store)
    if resume and run_dir is not None and not (run_dir / "config.json").exists():
        print_note(f"no run in {run_dir} to resume: starting a new one", quiet=quiet)
    trained = run_training(graph, tree, location=location, quiet=quiet, restarts=max_restarts)
    show(trained.record, trained.config)


def _summary(name: str, record: RunRecord) -> list[Any]:
    suffix = " (largest worker)" if record.workers > 1 else ""
    rows = [
        ("epochs", record.epochs),
        ("best epoch", record.metrics["best_epoch"]),
        ("train loss", record.metrics["train_loss"]),
        *((f"{split} {record.metrics['name']}", record.metrics[split]) for split in ("val", "test")),
        *(
            (f"{split} {name}", value)
            for split, metrics in record.metrics.get("beside", {}).items()
            for name, value in metrics.items()
        ),
        ("seconds per epoch (median)", median(record.seconds_per_epoch) if record.seconds_per_epoch else None),
        ("peak memory" + suffix, format_bytes(max(record.memory["peak_rss"]))),
    ]
    if record.workers > 1:
        rows.append(("sent by all workers", format_bytes(sum(record.traffic["bytes_sent"]))))
    workers = f", {record.workers} workers" if record.workers > 1 else ""
    return [f"{record.model} on {name}, strategy {record.strategy}{workers}", table(None, ["", "value"], rows)]


MAX_TRAINERS = 1024
JOIN_EXAMPLES = """\
gnnfleet train /data/shop --strategy tma --workers 8 --set strategy.listen=0.0.0.0:29500 --set strategy.local_trainers=4

gnnfleet join first-machine:29500 /data/shop --trainers 4-7  # on the second machine
"""


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the coordinator.")],
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Path of the same store on this machine.")],
    trainers: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Trainers to run on this machine, for example 4-7 or 4,6.")
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FACTORY", help="Your copy of the run's model file. Needed if it uses one."),
    ] = None,
    model_sha256: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Instead of --model: run the coordinator's copy if it has this SHA-256."),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="N", help="Restart each trainer up to N times after a failure.")
    ] = 0,
    quiet: options.QuietFlag = False,
) -> None:
    """Run some trainers of a tma run on this machine until the run ends.

    A trainer that starts late or restarts continues with the newest weights.
    A model file runs here only if you pass it (--model) or confirm its SHA-256 (--model-sha256).
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # gnnfleet reports an unreachable coordinator once, by itself
    from gnnfleet.launch.tma_supervisor import join_supervised

    join_supervised(
        address,
        store,
        parse_numbers(trainers),
        restarts=max_restarts,
        log_user=partial(print_note, quiet=quiet),
        model=model,
        model_sha256=model_sha256,
    )


def parse_numbers(text: str) -> list[int]:
    """Parse ``4-7`` or ``4,6``; raises ConfigError."""
    numbers: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if span is None:
            raise ConfigError(f"--trainers takes numbers, for example 4-7 or 4,6; found {text!r}")
        low, high = int(span[1]), int(span[2] or span[1])
        if high - low >= MAX_TRAINERS:
            raise ConfigError(f"--trainers takes at most {MAX_TRAINERS} numbers, found {text!r}")
        numbers += range(low, high + 1)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ConfigError(f"--trainers takes different numbers, for example 4-7 or 4,6; found {text!r}")
    return numbers
