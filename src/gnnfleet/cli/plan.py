"""``gnnfleet plan``: what every strategy would take on a store, and which one to use."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli.options import (
    ConfigOption,
    JsonFlag,
    ModelOption,
    PartitionOption,
    QuietFlag,
    SeedOption,
    SettingsOption,
    SplitOption,
    StoreArgument,
    TaskOption,
    parse_settings,
)
from gnnfleet.cli.output import format_bytes, print_result, table
from gnnfleet.comm.process_lifetime import prefer_huge_pages
from gnnfleet.errors import ConfigError

if TYPE_CHECKING:
    from gnnfleet.planner.planner import StrategyPlan
    from gnnfleet.strategies.estimates import CostEstimate

PLAN_EXAMPLES = """\
gnnfleet plan shop/ --workers 4                                     four processes on this machine

gnnfleet plan shop/ --model gat --workers 8 --memory 4GiB --bandwidth 1Gbit     eight machines like this one

gnnfleet plan shop/ --workers 4 --goal sampled --set 'strategy.fanouts=[15,10,5]'

gnnfleet plan shop/ --workers 4 --strategies sar,pipe --json

gnnfleet train shop/ --strategy auto --workers 4                    train what the plan recommends
"""


class GoalChoice(StrEnum):
    exact = "exact"
    sampled = "sampled"
    any = "any"


def plan(
    store: StoreArgument,
    model: Annotated[str | None, ModelOption] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-w", metavar="N", help="Processes that would train. Default 1.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What each worker may hold in all, as 4GiB; more is refused.")
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="As 1Gbit or 125MB, per second: every worker has a machine like this one, linked so. Without it all "
            "workers run here, and what is between them is measured.",
        ),
    ] = None,
    goal: Annotated[
        GoalChoice | None,
        typer.Option(help="What is recommended: the fastest exact full batch, sampled batches, or any. Default exact."),
    ] = None,
    strategies: Annotated[str | None, typer.Option(metavar="NAMES", help="Only these, as sar,pipe.")] = None,
    task: Annotated[str | None, TaskOption] = None,
    split: Annotated[str | None, SplitOption] = None,
    settings: Annotated[list[str] | None, SettingsOption] = None,
    config: Annotated[Path | None, ConfigOption] = None,
    partition: Annotated[str | None, PartitionOption] = None,
    seed: Annotated[int | None, SeedOption] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Predict memory, bytes, rounds and seconds per epoch of every strategy, and recommend one.

    The graph is cut as train would cut it; layers are timed on a piece of it, so are links between workers, and what is
    foreseen to take a few seconds is tried. Words of strategies (--set 'strategy.fanouts=[10,5]') go to all that know
    them.
    """
    prefer_huge_pages()
    from gnnfleet.config.resolve import merge_settings, parse_value, read_toml
    from gnnfleet.graph.store import open_store
    from gnnfleet.planner.planner import make_plan
    from gnnfleet.strategies.registry import AUTO
    from gnnfleet.units import parse_rate

    words = {} if config is None else read_toml(config)
    given = {key: parse_value(value) for key, value in parse_settings(settings).items()}
    strategy: dict[str, Any] = {"name": AUTO, **({} if goal is None else {"goal": str(goal)})}
    options = {
        "model": None if model is None else {"name": model},
        "strategy": strategy,
        "workers": workers,
        "task": task,
        "seed": seed,
        "split": split,
        "partition": partition,
        "memory": memory,
    }
    words = merge_settings(words, given, {key: value for key, value in options.items() if value is not None})
    rate = None if bandwidth is None else parse_rate(bandwidth)
    only = [] if strategies is None else [name.strip() for name in strategies.split(",")]
    found = make_plan(open_store(store), words, bandwidth=rate, only=only, quiet=quiet)
    print_result(found.as_json(), as_json=as_json, human=_shown(found))
    if found.best is None:
        raise ConfigError("; ".join(found.why))


def _shown(found: StrategyPlan) -> list[Any]:
    columns = ["strategy", "learns", "workers", "memory each", "sent per epoch", "rounds", "seconds per epoch"]
    rows = [_row(each, recommended=each is found.best) for each in found.fits]
    shown: list[Any] = [table(None, columns, rows)] if rows else []
    if found.refused:
        shown.append(
            table("does not fit", ["strategy", "why"], [(_label(each), each.refused) for each in found.refused])
        )
    if found.best is None:  # why is the error
        return shown
    return [*shown, f"recommended: {found.why[0]}", *(f"  {text}" for text in found.why[1:])]


def _row(each: CostEstimate, *, recommended: bool) -> tuple[Any, ...]:
    sent = format_bytes(each.bytes) if each.bytes else "none"
    seconds = f"{each.seconds_per_pass:.3g}" + ("" if each.passes == 1 else f" (a round of {each.seconds:.3g})")
    name = ("→ " if recommended else "") + _label(each)
    return name, each.kind, each.workers, format_bytes(each.memory), sent, f"{each.rounds:.0f}", seconds


def _label(each: CostEstimate) -> str:
    from gnnfleet.planner.planner import estimate_label

    return estimate_label(each)
