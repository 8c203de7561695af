"""Trainers as Ray actors, wherever the cluster has room; the coordinator and the post stay with the launcher.

An actor runs the same trainer as a process does, so results are the same. RAY_ADDRESS names a cluster; without it one
is started on this machine and ended with the run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gnnfleet
from gnnfleet.comm.failure import Failure
from gnnfleet.errors import ConfigError, first_line
from gnnfleet.launch.spec import RunSpec
from gnnfleet.launch.tma_process import process_failure


class _RayTrainer:
    """Runs in a process of Ray's."""

    def train(self, spec: str, address: str, index: int) -> None:
        from gnnfleet.comm.message_store import Address, MessageStore
        from gnnfleet.launch.tma_process import run_trainer

        run_trainer(RunSpec.from_json(spec), MessageStore.connect(Address.parse(address)), index)


@dataclass(eq=False)
class RayWorker:
    """A trainer as an actor."""

    role: str
    spec: RunSpec
    address: str
    restarts: int
    failure: Failure | None = None
    handle: Any = field(init=False, default=None)
    outcome: Any = field(init=False, default=None)

    def start(self) -> None:
        ray = _ray()
        home = str(Path(gnnfleet.__file__).parents[1])
        path = os.pathsep.join(word for word in (home, os.environ.get("PYTHONPATH")) if word)
        variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(self.spec.threads or 1), "RES_OPTIONS": "timeout:1"}
        made = ray.remote(_RayTrainer).options(num_cpus=0, max_restarts=0, runtime_env={"env_vars": variables})
        self.handle = made.remote()
        self.outcome = self.handle.train.remote(self.spec.as_json(), self.address, int(self.role))

    @property
    def is_running(self) -> bool:
        return not _ray().wait([self.outcome], timeout=0)[0]

    def exit_status(self) -> str | None:
        ray = _ray()
        if self.is_running:
            return None
        try:
            ray.get(self.outcome)
        except ray.exceptions.RayActorError:
            return f"trainer {self.role} was lost with its actor"
        except ray.exceptions.RayTaskError as error:
            self.failure = process_failure(error.cause or error, self.role)
            return f"trainer {self.role} failed: {self.failure.text}"
        except ray.exceptions.RayError as error:  # no room for it, or nowhere to start it
            return f"trainer {self.role} was lost: {type(error).__name__}: {first_line(error)}"
        return None

    def restart(self) -> bool:
        if not self.restarts:
            return False
        self.restarts -= 1
        self.start()
        return True


def open_ray() -> str:
    """Join the cluster or start one; this machine's address in it. Raises ConfigError where Ray is not installed."""
    ray = _ray()
    if not ray.is_initialized():
        where = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": os.cpu_count(), "include_dashboard": False}
        ray.init(log_to_driver=False, logging_level="error", **where)
        _ray_started.append(True)
    return str(ray.util.get_node_ip_address())


def count_machines() -> int:
    """Of the cluster that was joined."""
    return len({node["NodeManagerAddress"] for node in _ray().nodes() if node["Alive"]})


def start_actors(spec: RunSpec, address: str, roles: Sequence[str], restarts: int) -> list[RayWorker]:
    """Trainers that find the post at ``address``, from wherever they are."""
    spec = replace(spec, parent=None)  # actors are children of Ray's
    actors = [RayWorker(role, spec, address, restarts) for role in roles]
    for actor in actors:
        actor.start()
    return actors


def end_actors(actors: Sequence[Any]) -> None:
    ray = _ray()
    for actor in actors:
        if actor.is_running:
            ray.kill(actor.handle)
    if _ray_started:
        _ray_started.clear()
        ray.shutdown()


_ray_started: list[bool] = []  # whether Ray was started here, and not by the user


def _ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ConfigError(
            "strategy.launcher=ray needs Ray, which is not installed: pip install 'gnnfleet[ray]'"
        ) from error
    return ray
