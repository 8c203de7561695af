"""One run from words to record, here or on workers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from gnnfleet.analysis.cluster_count import choose_clusters
from gnnfleet.comm.world import World
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.store import save_store
from gnnfleet.inference.query import best_weights, reopen_run
from gnnfleet.launch.local_launcher import launch
from gnnfleet.launch.rank_main import run_spec
from gnnfleet.launch.tma_supervisor import launch_supervised, remove_trainer_checkpoints
from gnnfleet.nn.custom_model import annotate_model_errors
from gnnfleet.planner.planner import choose_strategy, is_auto_strategy
from gnnfleet.report.progress import make_progress
from gnnfleet.report.remarks import print_note
from gnnfleet.report.run_record import RunRecord
from gnnfleet.session.prepare import RunLocation, choose_run_dir, prepare_run, resolve_run
from gnnfleet.training.build import BuiltRun, RankContext, build
from gnnfleet.training.checkpoint import TrainState
from gnnfleet.training.resume import ResumePoint, find_resume_point
from gnnfleet.training.run_dir import RunDirectory
from gnnfleet.training.run_session import run_session
from gnnfleet.training.trace_files import collect_spans

LAUNCH_DIR = ".launch"
"""Where workers find their spec, below the run."""


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """A finished run."""

    record: RunRecord
    config: RunConfig
    reopen: Callable[[], BuiltRun]

    @cached_property
    def built(self) -> BuiltRun:
        """With the best weights; after training on workers, in this process alone."""
        return self.reopen()

    @property
    def stopped_early(self) -> bool:
        return self.record.epochs < self.config.train.epochs


def run_training(
    graph: Graph, words: Mapping[str, Any], *, place: RunLocation, quiet: bool = True, restarts: int = 0
) -> TrainingResult:
    """Train as ``words`` say; raises a GnnfleetError with one message for whatever is wrong."""
    planned = is_auto_strategy(words)
    if planned:
        words = _with_strategy(graph, words, place, quiet=quiet)
    config, directory = resolve_run(graph, words, place)
    if restarts and config.workers == 1 and config.spec.execution != "supervised":
        if not planned:
            raise ConfigError(f"--max-restarts {restarts} is for several workers, found --workers 1: use --resume")
        print_note("one process was chosen, which nobody starts again: go on with --resume if it is lost", quiet=quiet)
    if config.spec.placement != "none" or config.workers > 1:
        return _on_workers(graph, config, directory, place=place, quiet=quiet, restarts=restarts)
    with ExitStack() as stack:
        stack.enter_context(annotate_model_errors(config.model.file))
        with make_progress(quiet) as progress:
            built = build(graph, config, context=RankContext(progress=progress))
        stack.callback(built.strategy.close)
        for text in built.remarks:
            print_note(text, quiet=quiet)
        if directory is None and (place.run_dir is not None or place.keep):
            directory = choose_run_dir(place, graph, model=config.model.label)
        start = ResumePoint(TrainState())
        if directory is not None:
            directory.seed = config.seed
            directory.lock()
            stack.callback(directory.close)
            start = find_resume_point(directory, World())
            directory.initialize(config, graph, built.output)
            stack.enter_context(directory.open_for_resume(quiet=quiet))
        record = run_session(built, config, directory, start=start, quiet=quiet)
    return TrainingResult(record, config, lambda: built)


def _with_strategy(graph: Graph, words: Mapping[str, Any], place: RunLocation, *, quiet: bool) -> Mapping[str, Any]:
    """The words with a strategy that has a name; a run that is there already goes on with its own."""
    if place.resume and choose_run_dir(place, graph, model="").is_initialized:
        return {key: value for key, value in words.items() if key not in ("strategy", "workers")}
    settled, plan = choose_strategy(graph, words, quiet=quiet)
    print_note(f"strategy auto: {plan.why[0]}", quiet=quiet)
    for text in plan.why[1:]:
        print_note(f"  {text}", quiet=quiet)
    return settled


def _on_workers(
    graph: Graph, config: RunConfig, directory: RunDirectory | None, *, place: RunLocation, quiet: bool, restarts: int
) -> TrainingResult:
    """On workers, where there are parts each with one; a single worker is this process."""
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="gnnfleet-"))
        kept = place.keep or place.run_dir is not None
        if not kept:
            place = replace(place, run_dir=Path(scratch) / "run")
        stored = graph if graph.store is not None else save_store(graph, Path(scratch) / "store")
        config = choose_clusters(stored, config, quiet=quiet)
        spec, found = stack.enter_context(
            prepare_run(stored, config, directory, place=place, quiet=quiet, known_as=graph)
        )
        if kept:
            stack.enter_context(found.open_for_resume(quiet=quiet))
        if config.spec.execution == "supervised":
            say = partial(found.log, quiet=quiet)
            told = launch_supervised(
                spec, folder=found.path / LAUNCH_DIR, workers=config.workers, restarts=restarts, log_user=say
            )
            record = RunRecord(**told)
            if record.lost:
                found.finish(record.as_json())
            collect_spans(found.path)
            remove_trainer_checkpoints(found.path, record.epochs)
        elif config.workers == 1:
            record = run_spec(spec, World())
        else:
            told = launch(spec, folder=found.path / LAUNCH_DIR, workers=config.workers, restarts=restarts)
            record = RunRecord(**told)
        output = found.output() if config.task == "node" else None
        state = best_weights(found)
    record = record if kept else replace(record, run_dir=None)
    return TrainingResult(record, config, lambda: reopen_run(graph, config, output, state))
