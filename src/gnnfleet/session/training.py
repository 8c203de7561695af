"""One run from its settings to its record, in this process or on workers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gnnfleet.analysis.partition_diagnosis import choose_clusters
from gnnfleet.comm.world import World
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.store import save_store
from gnnfleet.inference.query import read_finished_run
from gnnfleet.launch.live_module import share_module
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
from gnnfleet.training.run_dir import RunDirectory
from gnnfleet.training.run_session import find_resume_point, run_session
from gnnfleet.training.trace_files import collect_spans


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """A finished run; ``reopen`` builds it with its best weights, in this process."""

    record: RunRecord
    config: RunConfig
    reopen: Callable[[], BuiltRun]


def run_training(
    graph: Graph, settings: Mapping[str, Any], *, location: RunLocation, quiet: bool = True, restarts: int = 0
) -> TrainingResult:
    """Train a run; raises a GnnfleetError with one message for any mistake or failure."""
    planned = is_auto_strategy(settings)
    if planned:
        settings = _with_strategy(graph, settings, location, quiet=quiet)
    config, directory = resolve_run(graph, settings, location, quiet=quiet)
    if restarts and config.workers == 1 and config.spec.execution != "supervised":
        if not planned:
            raise ConfigError(f"--max-restarts {restarts} is for several workers, found --workers 1: use --resume")
        print_note("the plan selected one process, so --max-restarts has no effect: use --resume", quiet=quiet)
    if config.spec.placement != "none" or config.workers > 1:
        return _train_on_workers(graph, config, directory, location=location, quiet=quiet, restarts=restarts)
    with ExitStack() as stack:
        stack.enter_context(annotate_model_errors(config.model.file))
        with make_progress(quiet) as progress:
            built = build(graph, config, context=RankContext(progress=progress))
        stack.callback(built.strategy.close)
        for text in built.remarks:
            print_note(text, quiet=quiet)
        if directory is None and (location.run_dir is not None or location.keep):
            directory = choose_run_dir(location, graph, model=config.model.label)
        if directory is not None:
            directory.seed = config.seed
            directory.lock()
            stack.callback(directory.close)
        start = find_resume_point(directory, World())
        if directory is not None:
            directory.initialize(config, graph, built.output)
            stack.enter_context(directory.open_for_resume(quiet=quiet))
        record = run_session(built, config, directory, start=start, quiet=quiet)
    return TrainingResult(record, config, lambda: built)


def _with_strategy(
    graph: Graph, settings: Mapping[str, Any], location: RunLocation, *, quiet: bool
) -> Mapping[str, Any]:
    """The settings with a planned strategy; a resumed run keeps its own."""
    if location.resume and choose_run_dir(location, graph, model="").is_initialized:
        return {key: value for key, value in settings.items() if key not in ("strategy", "workers")}
    settings, plan = choose_strategy(graph, settings, quiet=quiet)
    print_note("\n  ".join([f"strategy auto: {plan.reasons[0]}", *plan.reasons[1:]]), quiet=quiet)
    return settings


def _train_on_workers(
    graph: Graph,
    config: RunConfig,
    directory: RunDirectory | None,
    *,
    location: RunLocation,
    quiet: bool,
    restarts: int,
) -> TrainingResult:
    """Train on worker processes, or on one part in this process."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gnnfleet-")))
        is_saved = location.keep or location.run_dir is not None
        if not is_saved:
            location = replace(location, run_dir=scratch / "run")
        stored = graph if graph.store is not None else save_store(graph, scratch / "store")
        config = choose_clusters(stored, config, quiet=quiet)
        in_process = config.workers == 1 and config.spec.execution != "supervised"
        is_shared = config.model.is_live and not in_process
        module_fd = stack.enter_context(share_module(config)) if is_shared else None
        spec, directory = stack.enter_context(
            prepare_run(stored, config, directory, location=location, quiet=quiet, original=graph)
        )
        spec = replace(spec, module_fd=module_fd)
        if is_saved:
            stack.enter_context(directory.open_for_resume(quiet=quiet))
        folder = directory.path / ".launch"  # files for workers
        if config.spec.execution == "supervised":
            log = partial(directory.log, quiet=quiet)
            fields = launch_supervised(spec, folder=folder, workers=config.workers, restarts=restarts, log_user=log)
            record = RunRecord(**fields)
            if record.lost:
                directory.finish(record.as_json())
            collect_spans(directory.path)
            remove_trainer_checkpoints(directory.path, record.epochs)
        elif in_process:
            record = run_spec(spec, World())
        else:
            record = RunRecord(**launch(spec, folder=folder, workers=config.workers, restarts=restarts))
        reopen = read_finished_run(graph, config, directory)
    record = record if is_saved else replace(record, run_dir=None)
    return TrainingResult(record, config, reopen)
