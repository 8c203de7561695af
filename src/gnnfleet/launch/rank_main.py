"""One rank of a run: takes its seat, lives as long as the others, trains, and ends in a way that says why.

``serve`` never returns: it skips Python's own way of ending, in which threads inside the network code would abort.
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
from gnnfleet.comm.heartbeat import Liveness
from gnnfleet.comm.launch_env import Seat
from gnnfleet.comm.process_lifetime import end_soon_after_signals
from gnnfleet.comm.rendezvous import Meeting, meet
from gnnfleet.comm.world import World, beside, join
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import StoreError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.chunk_layout import open_layouts
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.graph.store import open_store
from gnnfleet.graph.validate import open_sound_part
from gnnfleet.launch.spec import Spec
from gnnfleet.nn.custom_model import naming_line
from gnnfleet.nn.embedding import rows_by_owner
from gnnfleet.report.progress import show
from gnnfleet.report.remarks import remark
from gnnfleet.report.run_record import RunRecord
from gnnfleet.training.build import Here, build
from gnnfleet.training.resume import find_start
from gnnfleet.training.run_dir import RunDirectory
from gnnfleet.training.run_session import run_course


def run_spec(spec: Spec, world: World, *, store: Path | None = None) -> RunRecord:
    """Train this rank's part; the first rank writes checkpoints and the record. ``store`` is where it lies here."""
    config = resolve(spec.config)
    quiet = spec.quiet or not world.is_first
    directory = RunDirectory(Path(spec.run_dir), seed=config.seed, world=beside(world))
    with naming_line(config.model.file):
        with show(quiet) as progress:
            graph = open_same(spec, world, store=store)
            assert graph.store is not None
            say = partial(directory.say, quiet=quiet) if world.is_first else (lambda text: None)
            here = with_cut(Here(world, progress=progress, say=say), config, graph.store.path / spec.partition)
            built = build(graph, config, here=here)
        start = find_start(directory, beside(world), rows_by_owner(built.strategy.model))
        record = run_course(built, config, directory, start=start, quiet=quiet)
        built.strategy.close()
    return record


def with_cut(here: Here, config: RunConfig, cut: Path | None) -> Here:
    """With what a strategy needs of a cut: its part, or all layouts of chunks."""
    if cut is None or config.strategy.cut == "none":
        return here
    if config.strategy.cut == "chunks":
        return replace(here, layouts=open_layouts(cut))
    return replace(here, shard=open_sound_part(cut, here.world.rank))


def open_own(spec: Spec, world: World) -> tuple[Graph, Shard]:
    """The store of a spec and this rank's part of it."""
    graph = open_same(spec, world)
    assert graph.store is not None
    return graph, open_sound_part(graph.store.path / spec.partition, world.rank)


def open_same(spec: Spec, world: World, *, store: Path | None = None) -> Graph:
    """The store of a spec; raises StoreError when it is another one than on the first rank."""
    graph = open_store(store or Path(spec.store))
    assert graph.store is not None
    if graph.store.digest != spec.digest:
        raise StoreError(
            f"{graph.store.path} on rank {world.rank} is another store than on rank 0: all machines need the same one"
        )
    return graph


def serve(seat: Seat, work: Callable[[World, Meeting], object], *, speaks: bool) -> NoReturn:
    """Do ``work`` as a rank and end the process; with ``speaks`` it says on standard error why it failed.

    Without, whoever launched it reads that from the file that torchrun's environment names.
    """

    def report(failure: Failure) -> None:
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            with suppress(OSError):
                failure.write(Path(path))
        if speaks:
            remark(failure.trace, quiet=not failure.trace)
            ends = "" if seat.rank in failure.ranks else f"rank {seat.rank} ends: "
            remark(f"error: {ends}{failure.text}")

    watch: list[Liveness] = []
    end_soon_after_signals(lambda: watch[0].stopping() if watch else None)
    try:
        try:
            with meet(seat) as meeting:
                watch.append(Liveness(meeting, report))
                with watch[0], join(meeting) as world:
                    work(world, meeting)
        except Exception as error:
            if watch:
                watch[0].fail(error)
            failure = Failure.of(error, seat.rank)
            report(failure)
            _leave(failure.exit_code)
    except KeyboardInterrupt as stop:
        _leave(128 + int(stop.args[0]) if stop.args else 130)
    _leave(0)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
