"""``torchrun … -m gnnfleet train …``: this process is one rank among those that a launcher of the user's started.

The first rank prepares what the launcher of ``gnnfleet train --workers N`` would, while the others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.process_lifetime import die_with_parent
from gnnfleet.comm.rendezvous import Rendezvous
from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import DEFAULT_SILENCE_LIMIT, RunConfig
from gnnfleet.errors import ConfigError, GnnfleetError
from gnnfleet.graph.store import open_store
from gnnfleet.launch.rank_main import run_rank, run_spec
from gnnfleet.launch.spec import RunSpec
from gnnfleet.launch.torchrun import broadcast_spec
from gnnfleet.report.run_record import RunRecord
from gnnfleet.session.prepare import RunLocation, prepare_run, resolve_run
from gnnfleet.training.run_dir import RunDirectory

OnRecord = Callable[[RunRecord, RunConfig], None]


def train_as_rank(
    seat: LaunchEnv, store: Path, words: Mapping[str, Any], *, place: RunLocation, quiet: bool, show: OnRecord
) -> NoReturn:
    """Train as one of several ranks and end the process; the first calls ``show`` with the record."""
    if seat.agent:
        die_with_parent()

    def work(world: World, meeting: Rendezvous) -> None:
        with ExitStack() as stack:

            def prepare() -> RunSpec:
                spec = _prepare(stack, seat, store, words, _resumed_location(meeting, place), quiet)
                meeting.raw_store.set("run_dir", spec.run_dir)
                return spec

            spec = broadcast_spec(world, meeting, prepare, lambda: _local_model_files(words, place))
            record = run_spec(spec, world, store=store)
            if world.is_first:
                show(record, resolve(spec.config))

    run_rank(seat, work, print_errors=True, silence_limit=_silence_limit(words, place))


def _silence_limit(words: Mapping[str, Any], place: RunLocation) -> float:
    """The limit that this rank's options set, or else the run it resumes."""
    try:
        *_, config = [resolve(words)] if "silence_limit" in words else _local_configs(words, place)
    except GnnfleetError:  # rank 0 reports it to all ranks
        return DEFAULT_SILENCE_LIMIT
    return config.silence_limit


def _local_model_files(words: Mapping[str, Any], place: RunLocation) -> frozenset[Path]:
    """The model files that this rank's command line names, and the run directory it resumes."""
    return frozenset(config.model.file for config in _local_configs(words, place) if config.model.file is not None)


def _local_configs(words: Mapping[str, Any], place: RunLocation) -> list[RunConfig]:
    """The config of this rank's options, and that of the run it resumes."""
    configs = [resolve(words)]
    if place.resume and place.run_dir is not None and (directory := RunDirectory(place.run_dir)).is_initialized:
        configs.append(directory.config())
    return configs


def _prepare(
    stack: ExitStack, seat: LaunchEnv, store: Path, words: Mapping[str, Any], place: RunLocation, quiet: bool
) -> RunSpec:
    asked = words.get("workers", seat.size)
    if asked != seat.size:
        raise ConfigError(f"torchrun started {seat.size} workers, found --workers {asked}: leave it out")
    graph = open_store(store)
    config, directory = resolve_run(graph, {**words, "workers": seat.size}, place)
    if config.spec.execution == "single":
        raise ConfigError(f"strategy {config.strategy.name} runs in one process, found {seat.size} ranks")
    if config.spec.execution == "supervised":
        raise ConfigError(
            f"strategy {config.strategy.name} does not run under torchrun. On the first machine: gnnfleet train STORE "
            "--strategy tma --workers N --set strategy.local_trainers=K --set strategy.listen=HOST:PORT. On others: "
            "gnnfleet join HOST:PORT STORE"
        )
    spec, _ = stack.enter_context(prepare_run(graph, config, directory, place=place, quiet=quiet, apart=True))
    return spec


def _resumed_location(meeting: Rendezvous, place: RunLocation) -> RunLocation:
    """Where an attempt after the first goes on. The launcher's store remembers; its count of attempts may not."""
    if not meeting.raw_store.check(["run_dir"]):
        return place
    return replace(place, run_dir=Path(meeting.raw_store.get("run_dir").decode()), resume=True)
