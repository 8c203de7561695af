"""One rank of a run: it joins the others, trains, ends with them, and reports its failure.

``run_rank`` never returns: at a normal exit of Python, threads inside network code would abort.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from gnnfleet.comm.failure import Failure
from gnnfleet.comm.heartbeat import FailureDetector, HeartbeatConfig
from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.process_lifetime import die_with_parent, end_soon_after_signals, exit_process, interrupt_code
from gnnfleet.comm.rendezvous import Rendezvous, rendezvous
from gnnfleet.comm.world import World, init_world
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import DEFAULT_SILENCE_LIMIT, RunConfig
from gnnfleet.errors import ExchangeError, StoreError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.chunk_layout import open_chunk_layouts
from gnnfleet.graph.store import open_store
from gnnfleet.graph.validate import open_validated_part
from gnnfleet.launch.confirmed_model import check_model_path
from gnnfleet.launch.spec import RunSpec
from gnnfleet.nn.custom_model import annotate_model_errors
from gnnfleet.nn.embedding import embedding_ids
from gnnfleet.report.progress import make_progress
from gnnfleet.report.remarks import print_note
from gnnfleet.report.run_record import RunRecord
from gnnfleet.training.build import RankContext, build
from gnnfleet.training.run_dir import RunDirectory
from gnnfleet.training.run_session import find_resume_point, run_session

PREPARE_TIMEOUT = 24 * 3600.0
"""Seconds that other ranks wait for the first rank to partition the graph; heartbeats go on meanwhile."""


def run_spec(spec: RunSpec, world: World, *, store: Path | None = None) -> RunRecord:
    """Collective. Train a run; the first rank writes checkpoints and the record.

    ``store`` is the path of the store on this machine.
    """
    config = resolve(spec.config)
    quiet = spec.quiet or not world.is_first
    directory = RunDirectory(Path(spec.run_dir), seed=config.seed, world=world.uncounted())
    with annotate_model_errors(config.model.file):
        with make_progress(quiet) as progress:
            graph = open_same_store(spec, world, store=store)
            assert graph.store is not None
            log_user = partial(directory.log, quiet=quiet) if world.is_first else (lambda text: None)
            context = RankContext(world, progress=progress, log_user=log_user)
            context = with_placement(context, config, graph.store.path / spec.partition)
            built = build(graph, config, context=context)
        start = find_resume_point(directory, world.uncounted(), embedding_ids(built.strategy.model))
        record = run_session(built, config, directory, start=start, quiet=quiet)
        built.strategy.close()
    return record


def broadcast_spec(
    world: World,
    rendezvous: Rendezvous,
    prepare: Callable[[], RunSpec],
    local_model_files: Callable[[], frozenset[Path]],
) -> RunSpec:
    """Collective. The spec that the first rank prepares; other ranks execute no model file but their own."""
    if world.is_first:
        spec = prepare()
        rendezvous.store.set("spec", spec.as_json())
        return spec
    deadline = time.monotonic() + PREPARE_TIMEOUT
    while not rendezvous.store.check(["spec"]):  # a call that blocks would hang with the network
        if time.monotonic() > deadline:
            raise ExchangeError(f"rank 0 has not prepared the run within {PREPARE_TIMEOUT / 3600:.0f} hours")
        time.sleep(0.1)
    spec = RunSpec.from_json(rendezvous.store.get("spec"))
    check_model_path(spec.config, local_model_files())
    return spec


def train_rank(spec: RunSpec, world: World) -> dict[str, Any]:
    """Collective. ``run_spec`` for a worker on this machine; the record as JSON."""
    return run_spec(spec, world).as_json()


def with_placement(context: RankContext, config: RunConfig, placement: Path | None) -> RankContext:
    """Open the placement of a strategy: this rank's part, or all chunk layouts."""
    if placement is None or config.spec.placement == "none":
        return context
    if config.spec.placement == "chunks":
        return replace(context, layouts=open_chunk_layouts(placement))
    return replace(context, shard=open_validated_part(placement, context.world.rank))


def open_same_store(spec: RunSpec, world: World, *, store: Path | None = None) -> Graph:
    """Open the store of a spec; raises StoreError if it differs from the store on rank 0."""
    graph = open_store(store or Path(spec.store))
    assert graph.store is not None
    if graph.store.digest != spec.digest:
        raise StoreError(
            f"{graph.store.path} on rank {world.rank} differs from the store on rank 0: all machines need the same one"
        )
    return graph


def report_failure(env: LaunchEnv, failure: Failure, *, print_errors: bool) -> None:
    """Write the failure to the error file of torchrun, and with ``print_errors`` to standard error."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            failure.write(Path(path))
    if print_errors:
        print_note(failure.trace, quiet=not failure.trace)
        prefix = "" if env.rank in failure.ranks else f"rank {env.rank} exits: "
        print_note(f"error: {prefix}{failure.text}")


@contextmanager
def join_ranks(
    env: LaunchEnv, *, print_errors: bool, silence_limit: float
) -> Iterator[tuple[World, Rendezvous, FailureDetector]]:
    """Join the other ranks and watch them; an error inside ends this process.

    With ``print_errors`` a failure is printed. Otherwise the launcher reads it from the error file of torchrun.
    """
    if env.agent:
        die_with_parent()
    report = partial(report_failure, env, print_errors=print_errors)
    detectors: list[FailureDetector] = []  # one, once this rank has joined
    end_soon_after_signals(lambda: detectors[0].stopping() if detectors else None)
    try:
        with rendezvous(env) as joined:
            detectors.append(FailureDetector(joined, report, config=HeartbeatConfig(timeout=silence_limit)))
            with detectors[0], init_world(joined) as world:
                yield world, joined, detectors[0]
    except Exception as error:
        for detector in detectors:
            detector.fail(error)
        failure = Failure.from_error(error, env.rank)
        report(failure)
        exit_process(failure.exit_code)


def run_rank(
    env: LaunchEnv,
    work: Callable[[World, Rendezvous], object],
    *,
    print_errors: bool,
    silence_limit: float = DEFAULT_SILENCE_LIMIT,
) -> NoReturn:
    """Run ``work`` as a rank and end the process."""
    try:
        with join_ranks(env, print_errors=print_errors, silence_limit=silence_limit) as (world, joined, _):
            work(world, joined)
    except KeyboardInterrupt as stop:
        exit_process(interrupt_code(stop))
    exit_process(0)
