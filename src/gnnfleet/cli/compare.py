"""``gnnfleet compare``: several strategies on one store, one table, one page."""

from __future__ import annotations

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli.options import (
    ConfigOption,
    JsonFlag,
    ModelOption,
    QuietFlag,
    SeedOption,
    SettingsOption,
    SplitOption,
    StoreArgument,
    TaskOption,
    parse_settings,
)
from gnnfleet.cli.output import print_result
from gnnfleet.cli.report import summary_table
from gnnfleet.errors import ConfigError, GnnfleetError
from gnnfleet.report.remarks import print_note

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gnnfleet.analysis.compare import EqualityCheck
    from gnnfleet.report.run_reader import Run

COMPARE_EXAMPLES = """\
gnnfleet compare shop/ --strategies local,sar,macrobatch,tma,pipe --workers 2 --set train.epochs=30

gnnfleet compare shop/ --strategies sar,pipe --workers 4 --model gcn2 --set model.layers=16 --set pipe.graph_parallel=2

                                                                               a word of one strategy by its name
"""
PAGE, RUNS, MARK = "page.html", "strategies", ".compared"
"""What is in the directory: a page, a run by name of each strategy, a mark that all of it may be replaced."""


def compare(
    store: StoreArgument,
    strategies: Annotated[
        str, typer.Option(metavar="NAMES", help="Which, with commas between.")
    ] = "local,sar,macrobatch,tma,pipe",
    workers: Annotated[
        int | None, typer.Option("--workers", "-w", metavar="N", min=1, help="Of each but local. Default 2.")
    ] = None,
    model: Annotated[str | None, ModelOption] = None,
    task: Annotated[str | None, TaskOption] = None,
    split: Annotated[str | None, SplitOption] = None,
    settings: Annotated[list[str] | None, SettingsOption] = None,
    config: Annotated[Path | None, ConfigOption] = None,
    seed: Annotated[int | None, SeedOption] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where runs and page go.")] = Path(
        "compared"
    ),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier one left there.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Measure whether strategies equal local, in two more epochs each."),
    ] = True,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Train the same model with several strategies, one after the other, and put them side by side.

    Model, seed and epochs are the same for all; local runs in one process. A round of tma is one pass over the training
    nodes unless you say (tma.steps, tma.interval). A strategy that cannot be trained so is left out, and says why.
    """
    from gnnfleet.analysis.compare import (
        Comparison,
        check_all,
        one_epoch_steps,
        parse_strategies,
        split_settings,
        train_all,
    )
    from gnnfleet.config.resolve import overlay, parse_value, read_toml, unflatten
    from gnnfleet.graph.store import open_store
    from gnnfleet.report.progress import make_progress

    names = parse_strategies(strategies)
    common, own = split_settings({key: parse_value(value) for key, value in parse_settings(settings).items()})
    words = overlay({} if config is None else read_toml(config), unflatten(common))
    options = {"model": None if model is None else {"name": model}, "task": task, "split": split, "seed": seed}
    words = overlay(words, {key: value for key, value in options.items() if value is not None})
    words.pop("strategy", None)
    each = words.pop("workers", 2) if workers is None else workers
    contest = Comparison(store, output / RUNS, names, each, words, own)
    graph = open_store(store)
    contest.require_strategies()  # what is wrong for all is said once
    if "tma" in names:
        with suppress(GnnfleetError):  # said when its turn comes
            own.setdefault("tma", {}).update(one_epoch_steps(graph, contest.config("tma")))
    prepare_folder(output, overwrite=overwrite)
    with make_progress(quiet) as progress:
        done = train_all(contest, progress=progress, say=partial(print_note, quiet=quiet))
        verdicts = check_all(contest, done, progress=progress) if check else {}
    runs = read_all({name: contest.run_dir(name) for name in done})
    title = f"{', '.join(done)} on {store.resolve().name}"
    write_page(output / PAGE, runs, title=title, verdicts=verdicts)
    show_runs(runs, verdicts, output / PAGE, as_json=as_json, quiet=quiet)


def prepare_folder(folder: Path, *, overwrite: bool, beside: Sequence[str] = ()) -> None:
    """An empty place for runs, a page and what is named; raises ConfigError where something else is there.

    Only what was made here is replaced: a mark says so, and nothing may have come to it since.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        own = {RUNS, PAGE, MARK, *beside}
        ours = folder.is_dir() and (folder / MARK).is_file() and all(path.name in own for path in folder.iterdir())
        if not overwrite or not ours:
            way = "" if overwrite else ", or --overwrite what was compared there"
            raise ConfigError(f"{folder} is not empty: choose another --output{way}")
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}: choose another --output") from error


def read_all(places: Mapping[str, Path]) -> list[Run]:
    from gnnfleet.report.run_reader import read_run

    return [read_run(path, name) for name, path in places.items()]


def write_page(
    path: Path,
    runs: Sequence[Run],
    *,
    title: str,
    verdicts: Mapping[str, EqualityCheck],
    partitions: Sequence[Mapping[str, Any]] = (),
) -> None:
    from gnnfleet.io.atomic import write_atomically
    from gnnfleet.report.page import page_data, render_page

    equals = {name: str(verdict) for name, verdict in verdicts.items() if name != "local"}
    write_atomically(path, render_page(page_data(runs, title=title, equals=equals, partitions=partitions)).encode())


def show_runs(
    runs: Sequence[Run], verdicts: Mapping[str, EqualityCheck], page: Path, *, as_json: bool, quiet: bool
) -> None:
    """The table, or the same as one JSON object."""
    from gnnfleet.report.run_reader import summarize

    results = []
    for run in runs:
        verdict = verdicts.get(run["name"])
        told = {} if verdict is None else verdict.as_json()
        results.append(
            {"run": run["name"], "strategy": run["strategy"], "workers": run["workers"], **summarize(run), **told}
        )
    equals = {name: "" if name == "local" else str(verdict) for name, verdict in verdicts.items()}
    human = [summary_table(list(runs), equals if verdicts else None)]
    print_result({"page": str(page), "runs": results}, as_json=as_json, human=human)
    print_note(f"the page is {page}", quiet=quiet or as_json)
