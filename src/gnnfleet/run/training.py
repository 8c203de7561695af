"""One run from words to record: resolve, build, find or make its directory, train, measure.

Everything a user can get wrong is found before the directory is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gnnfleet.errors import ConfigError, RunError
from gnnfleet.graph.graph import Graph
from gnnfleet.nn.own import naming_line
from gnnfleet.ops.buffers import unpooled
from gnnfleet.report.epochs import show_epochs
from gnnfleet.report.memory import own_rss, peak_rss, peak_tensors, rss
from gnnfleet.report.metrics import MetricsFile, Sink, TensorBoard, check_tensorboard
from gnnfleet.report.progress import show
from gnnfleet.report.record import RunRecord, versions
from gnnfleet.run.build import Built, build, rebuild, rebuild_links
from gnnfleet.run.checkpoint import Position
from gnnfleet.run.config import RunConfig, check_continues, overlay, resolve
from gnnfleet.run.console import remark
from gnnfleet.run.directory import RunDirectory, choose_directory
from gnnfleet.run.loop import KeepNothing, Outcome, Plan, fit
from gnnfleet.strategies.base import State, Strategy


@dataclass(frozen=True)
class Place:
    """Where a run is kept. Without ``run_dir`` nowhere, or with ``keep`` in a new directory below runs/."""

    run_dir: Path | None = None
    keep: bool = False
    resume: bool = False


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished run; the strategy holds the best weights."""

    record: RunRecord
    built: Built
    config: RunConfig
    stopped_early: bool


@dataclass(frozen=True)
class _Start:
    """Where a run begins: at the beginning, or at a checkpoint."""

    position: Position
    state: State | None = None
    best: dict[str, Tensor] | None = None


def run_training(graph: Graph, words: Mapping[str, Any], *, place: Place, quiet: bool = True) -> Trained:
    """Train as ``words`` say; raises a GnnfleetError with one message for whatever is wrong."""
    directory: RunDirectory | None = None
    with ExitStack() as stack:
        if place.resume:
            directory = _choose(place, graph, model="")
            config = _continued(directory, graph, words)
        else:
            config = resolve(words)
        if config.report.tensorboard:
            check_tensorboard()
        stack.enter_context(naming_line(config.model.file))
        with show(quiet) as progress:
            built = build(graph, config, progress=progress)
        stack.callback(built.strategy.close)
        for text in built.remarks:
            remark(text, quiet=quiet)
        after_build = rss()
        if directory is None and (place.run_dir is not None or place.keep):
            directory = _choose(place, graph, model=config.model.label)
        start = _Start(Position())
        if directory is not None:
            directory.seed = config.seed
            directory.lock()
            stack.callback(directory.close)
            start = _start(directory)
            directory.begin(config, graph, built.output)
        if start.state is not None:
            built.strategy.load_state_dict(start.state)
        outcome, rows = _fit(built, config, directory, start, quiet=quiet)
        record = _record(built, config, outcome, rows, after_build=after_build, directory=directory)
        if directory is not None:
            directory.finish(record.as_json())
    return Trained(record, built, config, outcome.stopped_early)


def _choose(place: Place, graph: Graph, *, model: str) -> RunDirectory:
    name = graph.name if graph.store is None else graph.store.path.resolve().name
    return choose_directory(place.run_dir, resume=place.resume, store=name, model=model)


def _continued(directory: RunDirectory, graph: Graph, words: Mapping[str, Any]) -> RunConfig:
    """The saved config with what is said anew; a run that was killed before it was saved begins."""
    if not directory.is_begun:
        return resolve(words)
    directory.check_graph(graph)
    directory.check_model_file()
    config = resolve(overlay(directory.about()["config"], words))
    check_continues(directory.config(), config)
    return config


def _start(directory: RunDirectory) -> _Start:
    last = directory.load("last")
    if last is None:
        return _Start(Position())
    state, position = last
    best = directory.load("best")
    # A kill between the two leaves a best from later than last: training finds it again.
    fits = best is not None and best[1].best_epoch == position.best_epoch
    return _Start(position, state, best[0]["model"] if best is not None and fits else None)


def _fit(
    built: Built, config: RunConfig, directory: RunDirectory | None, start: _Start, *, quiet: bool
) -> tuple[Outcome, list[dict[str, Any]]]:
    """The outcome, and the rows of all epochs of the run."""
    sinks: list[Sink] = []
    earlier: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if directory is not None:
            if config.report.tensorboard:
                sinks.append(TensorBoard(directory.path / "tensorboard"))
            file = MetricsFile(directory.metrics, epochs=start.position.epoch)
            earlier = file.rows
            sinks.append(file)
        for sink in sinks:
            stack.callback(sink.close)
        plan = Plan(
            train=config.train,
            metric=built.task.metric,
            validates=built.has("val"),
            keeper=directory or KeepNothing(),
            sinks=sinks,
            display=stack.enter_context(show_epochs(config.train.epochs, quiet=quiet)),
        )
        outcome = fit(built.strategy, plan, start=start.position, best=start.best)
    return outcome, [*earlier, *outcome.rows]


def _record(
    built: Built,
    config: RunConfig,
    outcome: Outcome,
    rows: list[dict[str, Any]],
    *,
    after_build: int,
    directory: RunDirectory | None,
) -> RunRecord:
    scores = {split: _score(built, split) for split in ("val", "test")}
    memory = {"peak_rss": [peak_rss()], "rss_growth": [max(0, peak_rss() - after_build)], "own_rss": [own_rss()]}
    if config.report.memory:
        memory["peak_tensors"] = [_peak(built.strategy, config.train.epochs)]
    return RunRecord(
        strategy=config.strategy.name,
        workers=config.workers,
        model=config.model.label,
        seed=config.seed,
        epochs=outcome.position.epoch,
        steps=outcome.position.step,
        seconds_per_epoch=[row["seconds"] for row in rows],
        metrics={
            "train_loss": rows[-1]["train_loss"] if rows else None,
            **scores,
            "name": built.task.metric,
            "best_epoch": outcome.position.best_epoch,
        },
        memory=memory,
        run_dir=None if directory is None else str(directory.path),
        versions=versions(),
    )


def _score(built: Built, split: str) -> float | None:
    """The metric of a split; None where it has no nodes or the metric no value."""
    value = built.strategy.evaluate(split)[built.task.metric] if built.has(split) else math.nan
    return None if math.isnan(value) else value


def _peak(strategy: Strategy, epoch: int) -> int:
    """Highest tensor memory of one more epoch, whose effect is taken back."""
    before = {
        part: {name: t.detach().clone() for name, t in tensors.items()}
        for part, tensors in strategy.state_dict().items()
    }
    with unpooled():
        highest = peak_tensors(lambda: list(strategy.steps(epoch)))
    strategy.load_state_dict(before)
    return highest


def open_run(
    path: Path,
    graph: Graph,
    *,
    checkpoint: str = "best",
    split: str | None = None,
    memory: str | int | None = None,
    quiet: bool = True,
) -> tuple[Built, Position, str]:
    """A trained run on a graph: what was built, where the checkpoint stands, its name. Raises RunError without one.

    ``split`` is what is to be evaluated; predictions need none. ``memory`` takes the place of the run's own.
    """
    directory = RunDirectory(path)
    config = directory.config()
    if memory is not None:
        config = resolve({**config.model_dump(mode="json"), "memory": memory})
    directory.seed = config.seed
    directory.check_model_file()
    name = checkpoint
    found = directory.load(name)
    if found is None and checkpoint == "best":  # a run without val nodes keeps no best
        name = "last"
        found = directory.load(name)
    if found is None:
        raise RunError(f"{path} has no checkpoint {checkpoint}: train it first, or go on with --resume")
    with show(quiet) as progress:
        if config.task == "link":
            if split == "all":
                raise ConfigError("links are evaluated on train, val or test, found --split all")
            built = rebuild_links(graph, config, progress=progress)
        else:
            built = rebuild(graph, config, directory.output(), split=split, progress=progress)
    try:
        built.strategy.load_state_dict({"model": found[0]["model"]})
    except RuntimeError as error:
        raise RunError(
            f"checkpoint {name} of {path} does not fit this store: {str(error).splitlines()[-1].strip()}"
        ) from error
    return built, found[1], name
