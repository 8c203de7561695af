"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from gnnfleet.errors import ConfigError, StoreError


def check_is_directory(path: Path) -> Path:
    """Of a word that names a store: a file is data that was not imported yet."""
    if path.is_file():
        raise StoreError(f"{path} is a file, not a store: import it first (gnnfleet import --help)")
    return path


StoreArgument = Annotated[
    Path, typer.Argument(metavar="STORE", help="The store to train on.", callback=check_is_directory)
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, for machines.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no remarks.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a parameter; repeatable.")]


def parse_settings(settings: Sequence[str] | None) -> dict[str, str]:
    """``["nodes=100", "seed=1"]`` as a dictionary; raises ConfigError for a word without '='."""
    parsed = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, found {setting!r}")
        parsed[key] = value
    return parsed


_WHAT, _HOW, _WHERE = "What is trained", "How it runs", "What is kept"


def _option(panel: str, metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, help=text)


ModelOption = _option(
    _WHAT,
    "NAME",
    "sage, gcn, gat, gatv2, gin, rgcn, gcn2, res+, or file.py:factory for your own. Default sage. "
    "Of events: tgn, tgn-id, tgat. Default tgn.",
    "--model",
    "-m",
)
TaskOption = _option(_WHAT, "TASK", "node: classify nodes, the default; link: predict edges; edge: classify events.")
SplitOption = _option(
    _WHAT,
    "RULE",
    "0.6/0.2/0.2 (train/val/test) of nodes or edges, 20-per-class, or the number of a split of the store. Default 0.",
)
SettingsOption = _option(_WHAT, "KEY=VALUE", "One word of the config, as train.lr=0.01; repeatable.", "--set")
ConfigOption = _option(_WHAT, "FILE", "A TOML file with the words of a run.", "--config", "-c")
SeedOption = _option(_WHAT, "N", "The same seed gives the same weights, bit for bit. Default 0.")
StrategyOption = _option(
    _HOW,
    "NAME",
    "local: one process, the default; sar: exact full batch on several workers; macrobatch: sampled mini-batches; "
    "tma: independent trainers whose weights are averaged on a clock; pipe: layers in stages, chunks streamed through; "
    "temporal: events in the order of time; "
    "auto: what gnnfleet plan recommends.",
    "--strategy",
    "-s",
)
TrainWorkersOption = _option(
    _HOW, "N", "Processes on this machine. Default 1; of several machines see below.", "--workers", "-w"
)
RestartsOption = _option(
    _HOW, "N", "How often workers may be started again when one is lost. Default 0.", "--max-restarts"
)
LauncherOption = _option(_HOW, "NAME", "tma: how trainers are started: process, the default, or ray.", "--launcher")
PartitionOption = _option(
    _HOW, "METHOD", "How nodes are dealt to workers: mincut, super, random, stream, range. local has no parts."
)
TrainMemoryOption = _option(
    _HOW,
    "SIZE",
    "As 500MB. local, tma: what an evaluation may hold of activations; a larger one goes in chunks; default 4GiB. "
    "sar: what each worker may hold in all; it chooses how to train within it, or refuses. macrobatch: decides whether "
    "features and their aggregate stay in memory; default a worker's share of what there is. temporal: what copies of "
    "the memory may take on a machine; default half of it. auto: what each worker may hold in all. pipe: "
    "nothing.",
)
RunDirOption = _option(_WHERE, "DIR", "Where the run goes. Default runs/STORE-MODEL-N, which runs/last points to.")


RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run, as runs/last.")]
MemoryOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Bytes of activations to hold at a time, as 4GiB or 500MB. Default the run's."),
]
StoreOption = Annotated[Path | None, typer.Option(help="Another store than the one the run was trained on.")]


WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers", "-w", metavar="N", help="Processes on this machine, each with a part. Default the run's."
    ),
]


class CheckpointChoice(StrEnum):
    best = "best"
    last = "last"
