"""Options and arguments that several commands share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.process_lifetime import prefer_huge_pages
from gnnfleet.errors import ConfigError, StoreError


def check_is_directory(path: Path) -> Path:
    """Raise StoreError for a file: it is probably a table that was not imported yet."""
    if path.is_file():
        raise StoreError(f"{path} is a file, not a store: import it first (gnnfleet import --help)")
    return path


StoreArgument = Annotated[
    Path, typer.Argument(metavar="STORE", help="Directory of a store.", callback=check_is_directory)
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on standard output.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="Hide progress and notes.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a parameter. Repeatable.")]


def parse_settings(settings: Sequence[str] | None) -> dict[str, str]:
    """``["nodes=100", "seed=1"]`` as a dictionary; raises ConfigError for a setting without '='."""
    parsed = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, for example --set train.epochs=10; found {setting!r}")
        parsed[key] = value
    return parsed


def read_settings(config: Path | None, settings: Sequence[str] | None, **options: Any) -> dict[str, Any]:
    """Settings of a run: command-line ``options`` override ``--set``, which overrides the ``--config`` file.

    Options that are None are not set; ``model`` is a name.
    """
    from gnnfleet.config.resolve import merge_settings, parse_value, read_toml

    from_file = {} if config is None else read_toml(config)
    from_set = {key: parse_value(value) for key, value in parse_settings(settings).items()}
    from_options = {key: value for key, value in options.items() if value is not None}
    if "model" in from_options:
        from_options["model"] = {"name": from_options["model"]}
    return merge_settings(from_file, from_set, from_options)


def start_process() -> LaunchEnv | None:
    """Set up this process before torch is imported; returns its rank if torchrun started several."""
    prefer_huge_pages()
    launch_env = LaunchEnv.from_environment()
    if launch_env is None or launch_env.size == 1:
        return None
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # gnnfleet reports a dead peer once, by itself
    return launch_env


MODEL_PANEL, EXECUTION_PANEL, OUTPUT_PANEL = "Model and data", "Execution", "Output"


def _option(panel: str, metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, help=text)


_of_model, _of_execution = partial(_option, MODEL_PANEL), partial(_option, EXECUTION_PANEL)
ModelOption = _of_model(
    "NAME",
    "sage, gcn, gat, gatv2, gin, gcn2, res+, sign; several node or edge types: rgcn, sign, hetero-sage, "
    "hetero-gat, hetero-gatv2, hetero-gin, hgt; or file.py:factory for your own model. Default: chosen for the graph. "
    "For event streams: tgn (default), tgn-id, tgat.",
    "--model",
    "-m",
)
TaskOption = _of_model("TASK", "node: classify nodes (default); link: predict edges; edge: classify events.")
SplitOption = _of_model(
    "RULE",
    "Shares of train/val/test such as 0.6/0.2/0.2, or 20-per-class, or the number of a split in the store. Default 0.",
)
SettingsOption = _of_model(
    "KEY=VALUE", "Set one parameter, for example train.lr=0.01. Repeatable. All parameters: docs/defaults.md.", "--set"
)
ConfigOption = _of_model("FILE", "Read settings from a TOML file.", "--config", "-c")
NoCheckOption = typer.Option(
    "--no-check",
    rich_help_panel=EXECUTION_PANEL,
    help="Skip the self-check of a torch_geometric module. Wrong results are then possible.",
)
SeedOption = _of_model(
    "N", "Random seed. The same seed and number of threads give the same weights, bit for bit. Default 0."
)
StrategyOption = _of_execution(
    "NAME",
    "local: one process (default); sar: exact full batch over workers; macrobatch: sampled mini-batches over workers; "
    "tma: independent trainers, periodic model averaging; pipe: pipeline over layers and chunks of nodes; "
    "temporal: temporal GNNs on event streams; auto: the one that gnnfleet plan recommends.",
    "--strategy",
    "-s",
)
TrainWorkersOption = _of_execution(
    "N", "Worker processes on this machine. Default 1. For several machines see the examples.", "--workers", "-w"
)
RestartsOption = _of_execution(
    "N", "Restart all workers from the last checkpoint up to N times after a failure.", "--max-restarts"
)
LauncherOption = _of_execution(
    "NAME", "tma only: start trainers as local processes (process, default) or as Ray actors (ray).", "--launcher"
)
PartitionOption = _of_execution(
    "METHOD", "Partition method: mincut, super, random, stream or range. Default: chosen by the strategy."
)
TrainMemoryOption = _of_execution(
    "SIZE",
    "Memory budget per worker, for example 4GiB. sar keeps within it; with auto, plans that exceed it are rejected.",
)
ResumeOption = typer.Option(
    "--resume", rich_help_panel=OUTPUT_PANEL, help="Continue the run in --run-dir, or runs/last."
)
TraceOption = typer.Option(
    "--trace", rich_help_panel=OUTPUT_PANEL, help="Write trace.json, a timeline of all workers for Perfetto."
)
RunDirOption = _option(OUTPUT_PANEL, "DIR", "Directory of the run. Default runs/STORE-MODEL-N; runs/last points to it.")

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, for example runs/last.")]
MemoryOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory budget per worker, for example 4GiB. Default: as in training."),
]
StoreOption = Annotated[Path | None, typer.Option(metavar="STORE", help="Use this store instead of the run's own.")]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", "-w", metavar="N", help="Worker processes on this machine. Default: as in training."),
]
CheckpointChoice = StrEnum("CheckpointChoice", ["best", "last"])
CheckpointOption = Annotated[CheckpointChoice, typer.Option(help="Weights to use: best on val, or last.")]
