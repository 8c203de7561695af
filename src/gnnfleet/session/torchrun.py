"""``torchrun … -m gnnfleet train …``: this process is one rank among those that a launcher of the user's started.

The first rank prepares what the launcher of ``gnnfleet train --workers N`` would, while the others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from gnnfleet.comm.launch_env import Seat
from gnnfleet.comm.process_lifetime import die_with_parent
from gnnfleet.comm.rendezvous import Meeting
from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError
from gnnfleet.graph.store import open_store
from gnnfleet.launch.rank_main import run_spec, serve
from gnnfleet.launch.spec import Spec
from gnnfleet.launch.torchrun import shared_spec
from gnnfleet.report.run_record import RunRecord
from gnnfleet.session.prepare import Place, prepared, settle
from gnnfleet.strategies.local.config import LocalConfig
from gnnfleet.training.run_dir import RunDirectory

Show = Callable[[RunRecord, RunConfig], None]


def train_as_rank(
    seat: Seat, store: Path, words: Mapping[str, Any], *, place: Place, quiet: bool, show: Show
) -> NoReturn:
    """Train as one of several ranks and end the process; the first calls ``show`` with the record."""
    if seat.agent:
        die_with_parent()

    def work(world: World, meeting: Meeting) -> None:
        with ExitStack() as stack:

            def prepare() -> Spec:
                spec = _prepare(stack, seat, store, words, _again(meeting, place), quiet)
                meeting.ground.set("run_dir", spec.run_dir)
                return spec

            spec = shared_spec(world, meeting, prepare, lambda: _local_model_files(words, place))
            record = run_spec(spec, world, store=store)
            if world.is_first:
                show(record, resolve(spec.config))

    serve(seat, work, speaks=True)


def _local_model_files(words: Mapping[str, Any], place: Place) -> frozenset[Path]:
    """The model files that this rank's command line names, and the run directory it resumes."""
    configs = [resolve(words)]
    if place.resume and place.run_dir is not None and (directory := RunDirectory(place.run_dir)).is_begun:
        configs.append(directory.config())
    return frozenset(config.model.file for config in configs if config.model.file is not None)


def _prepare(stack: ExitStack, seat: Seat, store: Path, words: Mapping[str, Any], place: Place, quiet: bool) -> Spec:
    asked = words.get("workers", seat.size)
    if asked != seat.size:
        raise ConfigError(f"torchrun started {seat.size} workers, found --workers {asked}: leave it out")
    graph = open_store(store)
    config, directory = settle(graph, {**words, "workers": seat.size}, place)
    if isinstance(config.strategy, LocalConfig):
        raise ConfigError(f"strategy {config.strategy.name} runs in one process, found {seat.size} ranks")
    if config.strategy.comes_and_goes:
        raise ConfigError(
            f"the trainers of {config.strategy.name} come and go, ranks of torchrun do not: on one machine gnnfleet "
            "train STORE --strategy tma --workers N --set strategy.here=K --set strategy.listen=HOST:PORT, on the "
            "others gnnfleet join HOST:PORT STORE"
        )
    spec, _ = stack.enter_context(prepared(graph, config, directory, place=place, quiet=quiet, apart=True))
    return spec


def _again(meeting: Meeting, place: Place) -> Place:
    """Where an attempt after the first goes on. The launcher's store remembers; its count of attempts may not."""
    if not meeting.ground.check(["run_dir"]):
        return place
    return replace(place, run_dir=Path(meeting.ground.get("run_dir").decode()), resume=True)
