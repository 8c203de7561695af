"""``gnnfleet plan``: estimate the cost of every strategy on a store and recommend one."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli import options
from gnnfleet.cli.output import format_bytes, print_result, table
from gnnfleet.comm.process_lifetime import prefer_huge_pages
from gnnfleet.errors import ConfigError
from gnnfleet.report.remarks import print_note

if TYPE_CHECKING:
    from gnnfleet.planner.planner import StrategyPlan
    from gnnfleet.strategies.estimates import CostEstimate

PLAN_EXAMPLES = """\
gnnfleet plan shop/ --workers 4  # four processes on this machine

gnnfleet plan shop/ --model gat --workers 8 --memory 4GiB --bandwidth 1Gbit  # eight such machines

gnnfleet plan shop/ --workers 4 --goal sampled --set 'strategy.fanouts=[15,10,5]'

gnnfleet plan shop/ --workers 4 --strategies sar,pipe --json

gnnfleet train shop/ --strategy auto --workers 4  # train what the plan recommends
"""
GoalChoice = StrEnum("GoalChoice", ["exact", "sampled", "any"])


def plan(
    store: options.StoreArgument,
    model: Annotated[str | None, options.ModelOption] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-w", metavar="N", help="Workers to plan for. Default 1.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory budget per worker, for example 4GiB. Strategies that exceed it are rejected."
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Plan for one worker per machine on a network of this bandwidth per second, for example 1Gbit or "
            "125MB. By default all workers run on this machine.",
        ),
    ] = None,
    goal: Annotated[
        GoalChoice | None,
        typer.Option(
            help="Recommend the fastest of: exact full batch (exact, default), sampled mini-batches (sampled), any."
        ),
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Plan only these strategies, for example sar,pipe.")
    ] = None,
    task: Annotated[str | None, options.TaskOption] = None,
    split: Annotated[str | None, options.SplitOption] = None,
    settings: Annotated[list[str] | None, options.SettingsOption] = None,
    config: Annotated[Path | None, options.ConfigOption] = None,
    partition: Annotated[str | None, options.PartitionOption] = None,
    seed: Annotated[int | None, options.SeedOption] = None,
    no_check: Annotated[bool, options.NoCheckOption] = False,
    as_json: options.JsonFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Estimate memory, traffic, rounds and seconds per epoch of every strategy, and recommend one.

    The graph is partitioned as in training. Parameters of strategies (--set 'strategy.fanouts=[10,5]') apply to all
    strategies that have them.
    """
    prefer_huge_pages()
    from gnnfleet.graph.store import open_store
    from gnnfleet.planner.planner import make_plan
    from gnnfleet.strategies.registry import AUTO
    from gnnfleet.units import parse_rate

    strategy = {"name": AUTO, **({} if goal is None else {"goal": str(goal)})}
    run_options: dict[str, Any] = {"model": model, "workers": workers, "task": task, "seed": seed, "split": split}
    run_options |= {"partition": partition, "memory": memory, "check": False if no_check else None}
    tree = options.read_settings(config, settings, strategy=strategy, **run_options)
    rate = None if bandwidth is None else parse_rate(bandwidth)
    only = [] if strategies is None else [name.strip() for name in strategies.split(",")]
    strategy_plan = make_plan(open_store(store), tree, bandwidth=rate, only=only, quiet=quiet)
    for text in strategy_plan.remarks:
        print_note(text, quiet=quiet)
    print_result(strategy_plan.as_json(), as_json=as_json, human=_tables(strategy_plan))
    if strategy_plan.best is None:
        raise ConfigError("; ".join(strategy_plan.reasons))


def _tables(strategy_plan: StrategyPlan) -> list[Any]:
    from gnnfleet.planner.planner import estimate_label

    columns = ["strategy", "training", "workers", "memory per worker", "sent per epoch", "rounds", "seconds per epoch"]
    best, reasons = strategy_plan.best, strategy_plan.reasons
    rows = [_row(fit, ("→ " if fit is best else "") + estimate_label(fit)) for fit in strategy_plan.fits]
    tables: list[Any] = [table(None, columns, rows)] if rows else []
    if strategy_plan.refused:
        rejected = [(estimate_label(estimate), estimate.refused) for estimate in strategy_plan.refused]
        tables.append(table("rejected", ["strategy", "reason"], rejected))
    if best is None:  # the reasons are in the error message
        return tables
    return [*tables, f"recommended: {reasons[0]}", *(f"  {text}" for text in reasons[1:])]


def _row(estimate: CostEstimate, label: str) -> tuple[Any, ...]:
    memory, sent = format_bytes(estimate.memory), format_bytes(estimate.bytes) if estimate.bytes else "none"
    seconds = f"{estimate.seconds_per_pass:.3g}"
    if estimate.passes != 1:
        seconds += f" (a round of {estimate.seconds:.3g})"
    return label, estimate.kind, estimate.workers, memory, sent, f"{estimate.rounds:.0f}", seconds
