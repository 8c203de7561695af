"""``gnnfleet tune``: search for good settings of model and training by validation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from gnnfleet.cli import options
from gnnfleet.cli.output import print_result, table
from gnnfleet.errors import ConfigError

TUNE_EXAMPLES = """\
gnnfleet tune shop/ --budget 10m && gnnfleet train shop/ --config tuned/best.toml

gnnfleet tune shop/ --budget 1h --model gat --strategy sar --workers 4
"""


def tune(
    store: options.StoreArgument,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Time to spend: 90s, 10m or 2h.")] = "10m",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Directory for runs and best.toml.")
    ] = Path("tuned"),
    model: Annotated[str | None, options.ModelOption] = None,
    split: Annotated[str | None, options.SplitOption] = None,
    settings: Annotated[list[str] | None, options.SettingsOption] = None,
    config: Annotated[Path | None, options.ConfigOption] = None,
    seed: Annotated[int | None, options.SeedOption] = None,
    strategy: Annotated[str | None, options.StrategyOption] = None,
    workers: Annotated[int | None, options.TrainWorkersOption] = None,
    as_json: options.JsonFlag = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Try up to 28 configurations of model and training, and write the best by validation to best.toml.

    All are trained for few epochs, the best third for more (successive halving). Parameters that are set stay fixed.
    A search that was interrupted continues if it is started again. The space: docs/tune.md.
    """
    options.start_process()
    from gnnfleet.graph.store import open_store
    from gnnfleet.report.progress import make_progress
    from gnnfleet.session.tune import tune as search_settings

    named = None if strategy is None else {"name": strategy}
    run_options = {"model": model, "split": split, "seed": seed, "workers": workers, "strategy": named}
    tree = options.read_settings(config, settings, **run_options)
    with make_progress(quiet) as progress:
        search = search_settings(
            open_store(store), tree, output, budget=parse_seconds(budget), progress=progress, quiet=quiet
        )
    rows = [
        (
            ", ".join(f"{key.partition('.')[2]}={value}" for key, value in trial.changes.items()) or "defaults",
            trial.epochs,
            trial.val,
            trial.error or ("" if trial.epochs else "no time left"),
        )
        for trial in search.trials
    ]
    columns = ["configuration", "epochs", f"val {search.metric}", ""]
    result = {
        "best": dict(search.settings),
        "file": str(search.best),
        "metric": search.metric,
        "trials": [dict(zip(("changes", "epochs", "val", "error"), row, strict=True)) for row in rows],
    }
    human = [table(None, columns, rows[:10]), f"best settings: {search.best}; use them with train --config"]
    print_result(result, as_json=as_json, human=human)


def parse_seconds(text: str) -> float:
    """Seconds of ``90s``, ``10m`` or ``2h``; raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if not seconds:
        raise ConfigError(f"--budget {text}: expected a time such as 90s, 10m or 2h")
    return seconds
