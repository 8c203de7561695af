"""One run from words to record, here or on workers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from gnnfleet.analysis.cluster_count import settle_clusters
from gnnfleet.comm.world import World
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.store import save_store
from gnnfleet.inference.query import best_weights, reopen
from gnnfleet.launch.local_launcher import launch
from gnnfleet.launch.rank_main import run_spec
from gnnfleet.launch.tma_supervisor import forget_rounds, launch_fleet
from gnnfleet.nn.custom_model import naming_line
from gnnfleet.planner.planner import is_auto, settle_auto
from gnnfleet.report.progress import show
from gnnfleet.report.remarks import remark
from gnnfleet.report.run_record import RunRecord
from gnnfleet.session.prepare import Place, choose, prepared, settle
from gnnfleet.training.build import Built, build
from gnnfleet.training.checkpoint import Position
from gnnfleet.training.resume import Start, find_start
from gnnfleet.training.run_dir import RunDirectory
from gnnfleet.training.run_session import run_course
from gnnfleet.training.trace_files import collect_spans

LAUNCH = ".launch"
"""Where workers find their spec, below the run."""


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
    planned = is_auto(words)
    if planned:
        words = _planned(graph, words, place, quiet=quiet)
    config, directory = settle(graph, words, place)
    if restarts and config.workers == 1 and not config.strategy.comes_and_goes:
        if not planned:
            raise ConfigError(f"--max-restarts {restarts} is for several workers, found --workers 1: use --resume")
        remark("one process was chosen, which nobody starts again: go on with --resume if it is lost", quiet=quiet)
    if config.strategy.uses_parts or config.workers > 1:
        return _on_workers(graph, config, directory, place=place, quiet=quiet, restarts=restarts)
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
            stack.enter_context(directory.resumable(quiet=quiet))
        record = run_course(built, config, directory, start=start, quiet=quiet)
    return Trained(record, config, lambda: built)


def _planned(graph: Graph, words: Mapping[str, Any], place: Place, *, quiet: bool) -> Mapping[str, Any]:
    """The words with a strategy that has a name; a run that is there already goes on with its own."""
    if place.resume and choose(place, graph, model="").is_begun:
        return {key: value for key, value in words.items() if key not in ("strategy", "workers")}
    settled, plan = settle_auto(graph, words, quiet=quiet)
    remark(f"strategy auto: {plan.why[0]}", quiet=quiet)
    for text in plan.why[1:]:
        remark(f"  {text}", quiet=quiet)
    return settled


def _on_workers(
    graph: Graph, config: RunConfig, directory: RunDirectory | None, *, place: Place, quiet: bool, restarts: int
) -> Trained:
    """On workers, where there are parts each with one; a single worker is this process."""
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="gnnfleet-"))
        kept = place.keep or place.run_dir is not None
        if not kept:
            place = replace(place, run_dir=Path(scratch) / "run")
        stored = graph if graph.store is not None else save_store(graph, Path(scratch) / "store")
        config = settle_clusters(stored, config, quiet=quiet)
        spec, found = stack.enter_context(prepared(stored, config, directory, place=place, quiet=quiet, known_as=graph))
        if kept:
            stack.enter_context(found.resumable(quiet=quiet))
        if config.strategy.comes_and_goes:
            say = partial(found.say, quiet=quiet)
            told = launch_fleet(spec, folder=found.path / LAUNCH, workers=config.workers, restarts=restarts, say=say)
            record = RunRecord(**told)
            if record.lost:
                found.finish(record.as_json())
            collect_spans(found.path)
            forget_rounds(found.path, record.epochs)
        elif config.workers == 1:
            record = run_spec(spec, World())
        else:
            told = launch(spec, folder=found.path / LAUNCH, workers=config.workers, restarts=restarts)
            record = RunRecord(**told)
        output = found.output() if config.task == "node" else None
        state = best_weights(found)
    record = record if kept else replace(record, run_dir=None)
    return Trained(record, config, lambda: reopen(graph, config, output, state))
