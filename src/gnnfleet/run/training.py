"""One run from words to record, here or on workers, and a trained run opened again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError, RunError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.store import save_store
from gnnfleet.nn.own import naming_line
from gnnfleet.report.progress import Progress, Silent, show
from gnnfleet.report.record import RunRecord
from gnnfleet.run.build import Built, build, rebuild, rebuild_links
from gnnfleet.run.checkpoint import Position
from gnnfleet.run.config import RunConfig, resolve
from gnnfleet.run.console import remark
from gnnfleet.run.course import Start, find_start, run_course
from gnnfleet.run.directory import RunDirectory
from gnnfleet.run.launch import launch
from gnnfleet.run.output import Output
from gnnfleet.run.prepare import Place, choose, prepared, settle
from gnnfleet.run.rank import run_spec
from gnnfleet.strategies.base import State
from gnnfleet.strategies.local.config import LocalConfig


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished run."""

    record: RunRecord
    config: RunConfig
    reopen: Callable[[], Built]

    @cached_property
    def built(self) -> Built:
        """With the best weights; after training on workers, in this process alone."""
        return self.reopen()

    @property
    def stopped_early(self) -> bool:
        return self.record.epochs < self.config.train.epochs


def run_training(
    graph: Graph, words: Mapping[str, Any], *, place: Place, quiet: bool = True, restarts: int = 0
) -> Trained:
    """Train as ``words`` say; raises a GnnfleetError with one message for whatever is wrong."""
    config, directory = settle(graph, words, place)
    if restarts and config.workers == 1:
        raise ConfigError(f"--max-restarts {restarts} is for several workers, found --workers 1: use --resume")
    if config.strategy.uses_parts:
        return _on_parts(graph, config, directory, place=place, quiet=quiet, restarts=restarts)
    with ExitStack() as stack:
        stack.enter_context(naming_line(config.model.file))
        with show(quiet) as progress:
            built = build(graph, config, progress=progress)
        stack.callback(built.strategy.close)
        for text in built.remarks:
            remark(text, quiet=quiet)
        if directory is None and (place.run_dir is not None or place.keep):
            directory = choose(place, graph, model=config.model.label)
        start = Start(Position())
        if directory is not None:
            directory.seed = config.seed
            directory.lock()
            stack.callback(directory.close)
            start = find_start(directory, World())
            directory.begin(config, graph, built.output)
        record = run_course(built, config, directory, start=start, quiet=quiet)
    return Trained(record, config, lambda: built)


def _on_parts(
    graph: Graph, config: RunConfig, directory: RunDirectory | None, *, place: Place, quiet: bool, restarts: int
) -> Trained:
    """On workers, each with a part of the graph; a single one is this process."""
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="gnnfleet-"))
        kept = place.keep or place.run_dir is not None
        if not kept:
            place = replace(place, run_dir=Path(scratch) / "run")
        stored = graph if graph.store is not None else save_store(graph, Path(scratch) / "store")
        spec, found = stack.enter_context(prepared(stored, config, directory, place=place, quiet=quiet, known_as=graph))
        if config.workers == 1:
            record = run_spec(spec, World())
        else:
            launch(spec, workers=config.workers, restarts=restarts)
            record = found.record()
        output = None if config.task == "link" else found.output()
        state, _, _ = _weights(found, "best")

    def reopen() -> Built:
        built = _rebuilt(graph, config, output)
        built.strategy.load_state_dict(state)
        return built

    return Trained(record if kept else replace(record, run_dir=None), config, reopen)


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
    state, position, name = _weights(directory, checkpoint)
    output = None if config.task == "link" else directory.output()
    with show(quiet) as progress:
        built = _rebuilt(graph, config, output, split=split, progress=progress)
    try:
        built.strategy.load_state_dict(state)
    except RuntimeError as error:
        raise RunError(
            f"checkpoint {name} of {path} does not fit this store: {str(error).splitlines()[-1].strip()}"
        ) from error
    return built, position, name


def _weights(directory: RunDirectory, checkpoint: str) -> tuple[State, Position, str]:
    """Weights, where they stand, the checkpoint's name; a run without val nodes keeps no best, its last stands in."""
    found, name = directory.load(checkpoint), checkpoint
    if found is None and checkpoint == "best":
        found, name = directory.load("last"), "last"
    if found is None:
        raise RunError(f"{directory.path} has no checkpoint {checkpoint}: train it first, or go on with --resume")
    return {"model": found[0]["model"]}, found[1], name


def _rebuilt(
    graph: Graph, config: RunConfig, output: Output | None, *, split: str | None = None, progress: Progress = Silent()
) -> Built:
    """A run in this process alone, whatever it was trained on: exact rows do not depend on the strategy."""
    if config.strategy.uses_parts:
        config = config.model_copy(update={"strategy": LocalConfig(), "workers": 1, "partition": None})
    if output is not None:
        return rebuild(graph, config, output, split=split, progress=progress)
    if split == "all":
        raise ConfigError("links are evaluated on train, val or test, found --split all")
    return rebuild_links(graph, config, progress=progress)
