"""``torchrun … -m gnnfleet train …``: this process is one of the ranks that torchrun started.

The first rank prepares the run while the others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.rendezvous import Rendezvous
from gnnfleet.comm.world import World
from gnnfleet.config.resolve import named_group, resolve
from gnnfleet.config.schema import DEFAULT_SILENCE_LIMIT, RunConfig
from gnnfleet.errors import ConfigError, GnnfleetError
from gnnfleet.graph.store import open_store
from gnnfleet.launch.rank_main import broadcast_spec, run_rank, run_spec
from gnnfleet.launch.spec import RunSpec
from gnnfleet.nn.config import make_config
from gnnfleet.report.run_record import RunRecord
from gnnfleet.session.prepare import RunLocation, prepare_run, resolve_run
from gnnfleet.training.run_dir import RunDirectory


def train_as_rank(
    env: LaunchEnv,
    store: Path,
    settings: Mapping[str, Any],
    *,
    location: RunLocation,
    quiet: bool,
    show: Callable[[RunRecord, RunConfig], None],
) -> NoReturn:
    """Train as one of several ranks and end the process; the first rank calls ``show`` with the record."""

    def work(world: World, rendezvous: Rendezvous) -> None:
        with ExitStack() as stack:

            def prepare() -> RunSpec:
                spec = _prepare(stack, env, store, settings, _resumed_location(rendezvous, location), quiet)
                rendezvous.raw_store.set("run_dir", spec.run_dir)
                return spec

            spec = broadcast_spec(world, rendezvous, prepare, lambda: _local_model_files(settings, location))
            record = run_spec(spec, world, store=store)
            if world.is_first:
                show(record, resolve(spec.config))

    run_rank(env, work, print_errors=True, silence_limit=_silence_limit(settings, location))


def _silence_limit(settings: Mapping[str, Any], location: RunLocation) -> float:
    """The limit that this rank's options set, or else the run it resumes."""
    try:
        if "silence_limit" in settings:
            return resolve({"silence_limit": settings["silence_limit"]}).silence_limit
        resumed = _resumed_config(location)
    except GnnfleetError:  # rank 0 reports it to all ranks
        return DEFAULT_SILENCE_LIMIT
    return DEFAULT_SILENCE_LIMIT if resumed is None else resumed.silence_limit


def _local_model_files(settings: Mapping[str, Any], location: RunLocation) -> frozenset[Path]:
    """The model files that this rank's command line names, and the run directory it resumes."""
    group, resumed = named_group("model", settings.get("model", {})), _resumed_config(location)
    models = [make_config(str(group["name"]))] if "name" in group else []
    models += [resumed.model] if resumed is not None else []
    return frozenset(model.file for model in models if model.file is not None)


def _resumed_config(location: RunLocation) -> RunConfig | None:
    """The config of the run that this rank's options resume, if its directory is on this machine."""
    if not location.resume or location.run_dir is None:
        return None
    directory = RunDirectory(location.run_dir)
    return directory.config() if directory.is_initialized else None


def _prepare(
    stack: ExitStack, env: LaunchEnv, store: Path, settings: Mapping[str, Any], location: RunLocation, quiet: bool
) -> RunSpec:
    workers = settings.get("workers", env.size)
    if workers != env.size:
        raise ConfigError(f"torchrun started {env.size} workers, found --workers {workers}: leave it out")
    graph = open_store(store)
    config, directory = resolve_run(graph, {**settings, "workers": env.size}, location, quiet=quiet)
    if config.spec.execution == "supervised":
        raise ConfigError(
            f"strategy {config.strategy.name} does not run under torchrun. On the first machine: gnnfleet train STORE "
            "--strategy tma --workers N --set strategy.local_trainers=K --set strategy.listen=HOST:PORT. On others: "
            "gnnfleet join HOST:PORT STORE"
        )
    prepared = prepare_run(graph, config, directory, location=location, quiet=quiet, in_subprocess=True)
    return stack.enter_context(prepared)[0]


def _resumed_location(rendezvous: Rendezvous, location: RunLocation) -> RunLocation:
    """The directory in which a restarted attempt resumes. The store keeps it; the count of attempts may be lost."""
    if not rendezvous.raw_store.check(["run_dir"]):
        return location
    return replace(location, run_dir=Path(rendezvous.raw_store.get("run_dir").decode()), resume=True)
