"""One rank of a run: takes its seat, lives as long as the others, trains, and ends in a way that says why.

``run_rank`` never returns: it skips Python's own way of ending, in which threads inside the network code would abort.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from gnnfleet.comm.failure import Failure
from gnnfleet.comm.heartbeat import FailureDetector, HeartbeatConfig
from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.process_lifetime import end_soon_after_signals
from gnnfleet.comm.rendezvous import Rendezvous, rendezvous
from gnnfleet.comm.world import World, init_world
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import DEFAULT_SILENCE_LIMIT, RunConfig
from gnnfleet.errors import StoreError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.chunk_layout import open_chunk_layouts
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.graph.store import open_store
from gnnfleet.graph.validate import open_validated_part
from gnnfleet.launch.spec import RunSpec
from gnnfleet.nn.custom_model import annotate_model_errors
from gnnfleet.nn.embedding import embedding_ids
from gnnfleet.report.progress import make_progress
from gnnfleet.report.remarks import print_note
from gnnfleet.report.run_record import RunRecord
from gnnfleet.training.build import RankContext, build
from gnnfleet.training.resume import find_resume_point
from gnnfleet.training.run_dir import RunDirectory
from gnnfleet.training.run_session import run_session


def run_spec(spec: RunSpec, world: World, *, store: Path | None = None) -> RunRecord:
    """Train this rank's part; the first rank writes checkpoints and the record. ``store`` is where it lies here."""
    config = resolve(spec.config)
    quiet = spec.quiet or not world.is_first
    directory = RunDirectory(Path(spec.run_dir), seed=config.seed, world=world.uncounted())
    with annotate_model_errors(config.model.file):
        with make_progress(quiet) as progress:
            graph = open_same_store(spec, world, store=store)
            assert graph.store is not None
            say = partial(directory.log, quiet=quiet) if world.is_first else (lambda text: None)
            here = with_placement(
                RankContext(world, progress=progress, log_user=say), config, graph.store.path / spec.partition
            )
            built = build(graph, config, here=here)
        start = find_resume_point(directory, world.uncounted(), embedding_ids(built.strategy.model))
        record = run_session(built, config, directory, start=start, quiet=quiet)
        built.strategy.close()
    return record


def with_placement(here: RankContext, config: RunConfig, cut: Path | None) -> RankContext:
    """With what a strategy needs of a cut: its part, or all layouts of chunks."""
    if cut is None or config.spec.placement == "none":
        return here
    if config.spec.placement == "chunks":
        return replace(here, layouts=open_chunk_layouts(cut))
    return replace(here, shard=open_validated_part(cut, here.world.rank))


def open_own_part(spec: RunSpec, world: World) -> tuple[Graph, Shard]:
    """The store of a spec and this rank's part of it."""
    graph = open_same_store(spec, world)
    assert graph.store is not None
    return graph, open_validated_part(graph.store.path / spec.partition, world.rank)


def open_same_store(spec: RunSpec, world: World, *, store: Path | None = None) -> Graph:
    """The store of a spec; raises StoreError when it is another one than on the first rank."""
    graph = open_store(store or Path(spec.store))
    assert graph.store is not None
    if graph.store.digest != spec.digest:
        raise StoreError(
            f"{graph.store.path} on rank {world.rank} is another store than on rank 0: all machines need the same one"
        )
    return graph


def run_rank(
    seat: LaunchEnv,
    work: Callable[[World, Rendezvous], object],
    *,
    speaks: bool,
    silence_limit: float = DEFAULT_SILENCE_LIMIT,
) -> NoReturn:
    """Do ``work`` as a rank and end the process; with ``speaks`` it says on standard error why it failed.

    Without, whoever launched it reads that from the file that torchrun's environment names.
    """

    def report(failure: Failure) -> None:
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            with suppress(OSError):
                failure.write(Path(path))
        if speaks:
            print_note(failure.trace, quiet=not failure.trace)
            ends = "" if seat.rank in failure.ranks else f"rank {seat.rank} ends: "
            print_note(f"error: {ends}{failure.text}")

    watch: list[FailureDetector] = []
    end_soon_after_signals(lambda: watch[0].stopping() if watch else None)
    try:
        try:
            with rendezvous(seat) as meeting:
                watch.append(FailureDetector(meeting, report, config=HeartbeatConfig(timeout=silence_limit)))
                with watch[0], init_world(meeting) as world:
                    work(world, meeting)
        except Exception as error:
            if watch:
                watch[0].fail(error)
            failure = Failure.from_error(error, seat.rank)
            report(failure)
            _exit(failure.exit_code)
    except KeyboardInterrupt as stop:
        _exit(128 + int(stop.args[0]) if stop.args else 130)
    _exit(0)


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
