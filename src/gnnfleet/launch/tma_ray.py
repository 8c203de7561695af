"""Trainers as Ray actors anywhere in a cluster; the coordinator and the message store stay with the launcher.

An actor runs the same trainer as a process does, so results are the same. RAY_ADDRESS names a cluster; without it one
is started on this machine and shut down with the run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gnnfleet
from gnnfleet.comm.failure import Failure
from gnnfleet.errors import ConfigError, first_line
from gnnfleet.launch.spec import RunSpec
from gnnfleet.launch.tma_process import process_failure


class _RayTrainer:
    """An actor, in a process that Ray starts."""

    def train(self, spec: str, address: str, index: int) -> None:
        from gnnfleet.comm.message_store import Address, MessageStore
        from gnnfleet.launch.tma_process import run_trainer

        run_trainer(RunSpec.from_json(spec), MessageStore.connect(Address.parse(address)), index)


@dataclass(eq=False)
class RayWorker:
    """The launcher's handle of an actor."""

    role: str
    spec: RunSpec
    address: str
    restarts: int
    failure: Failure | None = None

    def __post_init__(self) -> None:
        package_root = str(Path(gnnfleet.__file__).parents[1])
        python_path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        threads = str(self.spec.threads or 1)
        variables = {"PYTHONPATH": python_path, "OMP_NUM_THREADS": threads, "RES_OPTIONS": "timeout:1"}
        options = {"num_cpus": 0, "max_restarts": 0, "runtime_env": {"env_vars": variables}}
        self.actor = _ray().remote(_RayTrainer).options(**options).remote()
        self.outcome = self.actor.train.remote(self.spec.as_json(), self.address, int(self.role))

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
        except ray.exceptions.RayError as error:  # it could not be started
            return f"trainer {self.role} was lost: {type(error).__name__}: {first_line(error)}"
        return None

    def restart(self) -> bool:
        if not self.restarts:
            return False
        self.restarts -= 1
        self.__post_init__()
        return True


def open_ray() -> str:
    """Join the cluster or start one; returns this machine's address in it."""
    ray = _ray()
    if not ray.is_initialized():
        local = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": os.cpu_count(), "include_dashboard": False}
        ray.init(log_to_driver=False, logging_level="error", **local)
        _ray_started.append(True)
    return str(ray.util.get_node_ip_address())


def count_machines() -> int:
    return len({node["NodeManagerAddress"] for node in _ray().nodes() if node["Alive"]})


def start_actors(spec: RunSpec, address: str, roles: Sequence[str], restarts: int) -> list[RayWorker]:
    """Start trainers that connect to ``address`` from any machine of the cluster."""
    spec = replace(spec, parent=None)  # actors are children of Ray's
    return [RayWorker(role, spec, address, restarts) for role in roles]


def end_actors(workers: Sequence[Any]) -> None:
    ray = _ray()
    for worker in workers:
        if worker.is_running:
            ray.kill(worker.actor)
    if _ray_started:
        _ray_started.clear()
        ray.shutdown()


_ray_started: list[bool] = []  # not empty if Ray was started here, not by the user


def _ray() -> Any:
    """Import Ray; raises ConfigError where it is not installed."""
    try:
        import ray  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ConfigError(
            "strategy.launcher=ray needs Ray, which is not installed: pip install 'gnnfleet[ray]'"
        ) from error
    return ray
