"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from gnnfleet.errors import ConfigError, StoreError


def check_is_directory(path: Path) -> Path:
    """Refuse a file where a store is expected: it is data that was not imported yet."""
    if path.is_file():
        raise StoreError(f"{path} is a file, not a store: import it first (gnnfleet import --help)")
    return path


StoreArgument = Annotated[
    Path, typer.Argument(metavar="STORE", help="The store to train on.", callback=check_is_directory)
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on standard output.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no remarks.")]
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
    """The configuration of a run: command-line ``options`` win over ``--set``, which wins over the ``--config`` file.

    Options that are None were not given; ``model`` is a name.
    """
    from gnnfleet.config.resolve import merge_settings, parse_value, read_toml

    from_file = {} if config is None else read_toml(config)
    from_set = {key: parse_value(value) for key, value in parse_settings(settings).items()}
    given = {key: value for key, value in options.items() if value is not None}
    if "model" in given:
        given["model"] = {"name": given["model"]}
    return merge_settings(from_file, from_set, given)


MODEL_PANEL, EXECUTION_PANEL, OUTPUT_PANEL = "Model and data", "Execution", "Output"


def _option(panel: str, metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, help=text)


ModelOption = _option(
    MODEL_PANEL,
    "NAME",
    "sage (default), gcn, gat, gatv2, gin, rgcn, gcn2, res+, or file.py:factory for your own model. "
    "For event streams: tgn (default), tgn-id, tgat.",
    "--model",
    "-m",
)
TaskOption = _option(MODEL_PANEL, "TASK", "node: classify nodes (default); link: predict edges; edge: classify events.")
SplitOption = _option(
    MODEL_PANEL,
    "RULE",
    "Shares for train/val/test such as 0.6/0.2/0.2, or 20-per-class, or the number of a split in the store. Default 0.",
)
SettingsOption = _option(
    MODEL_PANEL,
    "KEY=VALUE",
    "Set one option, for example train.lr=0.01. Repeatable. All options: docs/defaults.md.",
    "--set",
)
ConfigOption = _option(MODEL_PANEL, "FILE", "Read options from a TOML file.", "--config", "-c")
SeedOption = _option(
    MODEL_PANEL, "N", "Random seed. The same seed and number of threads give the same weights, bit for bit. Default 0."
)
StrategyOption = _option(
    EXECUTION_PANEL,
    "NAME",
    "local: one process (default); sar: exact full batch over workers; macrobatch: sampled mini-batches over workers; "
    "tma: independent trainers, periodic model averaging; pipe: pipeline over layers and chunks of nodes; "
    "temporal: temporal GNNs on event streams; auto: the one that gnnfleet plan recommends.",
    "--strategy",
    "-s",
)
TrainWorkersOption = _option(
    EXECUTION_PANEL,
    "N",
    "Number of worker processes on this machine. Default 1. For several machines see the examples.",
    "--workers",
    "-w",
)
RestartsOption = _option(
    EXECUTION_PANEL,
    "N",
    "Restart all workers from the last checkpoint up to N times after a failure.",
    "--max-restarts",
)
LauncherOption = _option(
    EXECUTION_PANEL,
    "NAME",
    "tma only: start trainers as local processes (process, default) or as Ray actors (ray).",
    "--launcher",
)
PartitionOption = _option(
    EXECUTION_PANEL,
    "METHOD",
    "Partition method: mincut, super, random, stream or range. The default depends on the strategy.",
)
TrainMemoryOption = _option(
    EXECUTION_PANEL,
    "SIZE",
    "As 500MB. local, tma: what an evaluation may hold of activations; a larger one goes in chunks; default 4GiB. "
    "sar: what each worker may hold in all; it chooses how to train within it, or refuses. macrobatch: decides whether "
    "features and their aggregate stay in memory; default a worker's share of what there is. temporal: what copies of "
    "the memory may take on a machine; default half of it. auto: what each worker may hold in all. pipe: "
    "nothing.",
)
RunDirOption = _option(OUTPUT_PANEL, "DIR", "Directory of the run. Default runs/STORE-MODEL-N; runs/last points to it.")


RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, for example runs/last.")]
MemoryOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Bytes of activations to hold at a time, as 4GiB or 500MB. Default the run's."),
]
StoreOption = Annotated[Path | None, typer.Option(help="Use this store instead of the one the run was trained on.")]


WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers", "-w", metavar="N", help="Number of worker processes on this machine. Default: as in training."
    ),
]


class CheckpointChoice(StrEnum):
    best = "best"
    last = "last"
