"""The launcher of a tma run: it starts, watches and restarts a coordinator and trainers.

It serves the message store, which outlives them. No process and no port outlives the launcher.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from json import loads
from pathlib import Path
from typing import Any, NoReturn, Protocol

from gnnfleet.comm.failure import Failure
from gnnfleet.comm.message_store import Address, HeartbeatReader, MessageStore
from gnnfleet.errors import ConfigError, ExchangeError, first_line
from gnnfleet.graph.validate import open_validated_store
from gnnfleet.launch.confirmed_model import confirm_model_file, read_model_file
from gnnfleet.launch.local_launcher import SHUTDOWN_SECONDS, failure_error, threads_per_worker, worker_environment
from gnnfleet.launch.spec import RunSpec
from gnnfleet.launch.tma_process import COORDINATOR, TRAINERS_DIR, process_name
from gnnfleet.strategies.tma.protocol import RunMessages

_POLL = 0.05


class WorkerHandle(Protocol):
    """The coordinator or a trainer, which may be restarted."""

    role: str  # the coordinator, or a trainer's number
    failure: Failure | None

    @property
    def is_running(self) -> bool: ...

    def exit_status(self) -> str | None:
        """Describe its end; None while it runs and after success."""

    def restart(self) -> bool:
        """Start it again; False if no restarts are left."""


@dataclass(eq=False)
class LocalProcess:
    """The coordinator or a trainer as a process of this machine."""

    role: str  # the coordinator, or a trainer's number
    command: list[str]
    folder: Path
    restarts: int
    fds: Sequence[int] = ()  # that the process inherits
    failure: Failure | None = None
    kill_reason: str = ""  # set if the launcher killed it

    def __post_init__(self) -> None:
        # Ctrl-C goes to the launcher, which ends the processes in order.
        self.process = subprocess.Popen(self.command, start_new_session=True, pass_fds=self.fds)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def exit_status(self) -> str | None:
        code = self.process.poll()
        if not code:
            return None
        name = f"{process_name(self.role)} (pid {self.process.pid})"
        if self.kill_reason:
            return f"{name} was killed: {self.kill_reason}"
        self.failure = Failure.read(self.folder / f"{self.role}.error")
        if self.failure is not None:
            return f"{name} failed: {self.failure.text}"
        if code < 0:
            hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
            return f"{name} was killed by {signal.Signals(-code).name}{hint}"
        return f"{name} exited with code {code}"

    def kill(self, reason: str) -> None:
        self.kill_reason = reason
        self.process.kill()
        self.process.wait()

    def restart(self) -> bool:
        if not self.restarts:
            return False
        self.restarts -= 1
        (self.folder / f"{self.role}.error").unlink(missing_ok=True)
        self.kill_reason = ""
        self.__post_init__()
        return True


@worker_environment()
def launch_supervised(
    spec: RunSpec, *, folder: Path, workers: int, restarts: int, log_user: Callable[[str], None]
) -> dict[str, Any]:
    """Run a spec with a coordinator and trainers; returns the answer of the coordinator.

    A lost trainer is restarted up to ``restarts`` times, and so is the coordinator. The run continues without a
    trainer that has no restarts left. Raises the error that ended the run.
    """
    settings = spec.config["strategy"]
    try:
        listen = Address.parse(settings["listen"]) if settings.get("listen") else Address("127.0.0.1", 0)
        store = MessageStore.serve(listen.host, listen.port)
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(f"strategy.listen: {first_line(error)}") from error
    messages = RunMessages(store)
    num_local = workers if settings.get("local_trainers") is None else int(settings["local_trainers"])
    fds = () if spec.module_fd is None else (spec.module_fd,)
    if fds and (num_local < workers or settings.get("launcher") == "ray"):
        raise ConfigError("a live module reaches trainers of this machine only: use model='file.py:factory'")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    answer = folder / "answer.json"
    spec = replace(spec, parent=os.getpid(), threads=threads_per_worker(max(1, num_local)), answer=str(answer))
    (folder / "SPEC.json").write_text(spec.as_json())
    model_source = read_model_file(spec.config)
    messages.publish_run(spec.as_json(), model_source)
    if num_local < workers:
        confirm = f" --model-sha256 {hashlib.sha256(model_source).hexdigest()}" if model_source else ""
        numbers = f"{num_local}-{workers - 1}"
        log_user(f"Waiting for trainers {numbers}: gnnfleet join {store.address} STORE --trainers {numbers}{confirm}")
    (coordinator,) = start_processes(folder, reachable_address(store.address), [COORDINATOR], restarts, fds)
    trainers: Sequence[WorkerHandle] = []
    try:
        trainers = _start_trainers(spec, folder, store.address, num_local, restarts)
        lost = _supervise(coordinator, trainers, messages, settings["give_up"], log_user)
        return {**loads(answer.read_bytes()), "lost": [lost[role] for role in sorted(lost, key=int)]}
    finally:
        with suppress(ExchangeError):  # trainers on other machines need not wait for a missing heartbeat
            if not answer.exists():
                messages.mark_failed()
            messages.mark_done()
            if num_local < workers:
                time.sleep(1.0)  # the server ends with this process
        end_processes([coordinator, *(trainer for trainer in trainers if isinstance(trainer, LocalProcess))])
        if settings.get("launcher") == "ray":
            from gnnfleet.launch.tma_ray import end_actors

            end_actors(trainers)
        shutil.rmtree(folder, ignore_errors=True)


def _supervise(
    coordinator: LocalProcess,
    trainers: Sequence[WorkerHandle],
    messages: RunMessages,
    give_up: float,
    log_user: Callable[[str], None],
) -> dict[str, str]:
    """Restart processes until the coordinator has finished; returns {number: exit status} of lost trainers."""
    watchdog, lost = _CoordinatorWatchdog(messages, give_up), dict[str, str]()
    while coordinator.process.poll() is None or coordinator.process.returncode:
        status = coordinator.exit_status()
        if status is not None:
            if not coordinator.restart():
                _raise_run_error(coordinator, status, trainers)
            log_user(f"{status}. It is restarted and resumes from the newest checkpoint.")
            watchdog.begin()
        lost |= restart_failed([trainer for trainer in trainers if trainer.role not in lost], messages, log_user)
        if (silent := watchdog.overdue_seconds()) is not None:
            coordinator.kill(f"no heartbeat for {silent:.0f} s")
        time.sleep(_POLL)
    return lost


class _CoordinatorWatchdog:
    """Checks the heartbeat of the coordinator.

    While a restarted coordinator loads the graph, the launcher sends heartbeats in its place: trainers would give up.
    """

    def __init__(self, messages: RunMessages, give_up: float) -> None:
        self._messages, self._give_up = messages, give_up
        self._reader, self._silent = HeartbeatReader(), 0.0
        self._restarted: float | None = None
        self._last_beat = 0.0

    def begin(self) -> None:
        """Start again after a restart of the coordinator."""
        self._silent, self._restarted = 0.0, time.monotonic()
        self._beat_on_behalf()

    def overdue_seconds(self) -> float | None:
        """Seconds without a heartbeat, if the coordinator has to be killed for it."""
        before, now = self._silent, time.monotonic()
        self._silent = self._reader.silent_seconds(self._messages.heartbeats())
        if self._restarted is not None and not self._reader.has_moved:
            if now - self._restarted > 2 * self._give_up:
                return now - self._restarted
            if now - self._last_beat > 1.0:
                self._beat_on_behalf()
        # Half of the time after which trainers give up: another coordinator has to start before that.
        return self._silent if min(before, self._silent) > self._give_up / 2 else None

    def _beat_on_behalf(self) -> None:
        self._reader, self._last_beat = HeartbeatReader(after=self._messages.beat()), time.monotonic()


def restart_failed(
    trainers: Sequence[WorkerHandle], messages: RunMessages, log_user: Callable[[str], None]
) -> dict[str, str]:
    """Restart trainers that have failed; returns {number: exit status} of those without restarts left."""
    lost: dict[str, str] = {}
    for trainer in trainers:
        status = trainer.exit_status()
        if status is None:
            continue
        restarted = trainer.restart()
        if not restarted:
            lost[trainer.role] = status
            with suppress(ExchangeError):
                messages.write_exit(int(trainer.role), failed=trainer.failure is not None)
        log_user(f"{status}. {'It is restarted.' if restarted else 'Training continues without it.'}")
        if trainer.failure is not None and trainer.failure.trace:
            log_user(trainer.failure.trace.rstrip())
    return lost


@worker_environment()
def join_supervised(
    address: str,
    store: Path,
    trainers: Sequence[int],
    *,
    restarts: int,
    log_user: Callable[[str], None],
    model: str | None = None,
    model_sha256: str | None = None,
) -> None:
    """Run trainers on this machine for a coordinator on another one, until the run is over.

    A model file is executed only if it is ``model``, of this machine, or the coordinator's copy with ``model_sha256``.
    """
    try:
        server = Address.parse(address)
    except ValueError as error:
        raise ConfigError(f"{error}") from error
    if not server.port:
        raise ConfigError(f"the address {address} has port 0: use the port of strategy.listen on the first machine")
    open_validated_store(store)
    messages = RunMessages(MessageStore.connect(server))
    published = messages.read_run()
    if published is None:
        raise ExchangeError(f"there is no run at {address}: start gnnfleet train --strategy tma there first")
    spec_json, model_source = published
    try:
        spec = RunSpec.from_json(spec_json)
        workers = int(spec.config["workers"])
        is_outside = not (store / spec.partition).resolve().is_relative_to(store.resolve())
    except (TypeError, ValueError, KeyError) as error:
        raise ExchangeError(
            f"the run at {address} is not of this version of gnnfleet: install the same version on all machines"
        ) from error
    if is_outside:
        raise ExchangeError(f"the server at {address} names a partition outside of {store}: {spec.partition}")
    with tempfile.TemporaryDirectory(prefix="gnnfleet-") as scratch:
        folder = Path(scratch)
        config = confirm_model_file(spec.config, model_source, model=model, sha256=model_sha256, folder=folder)
        spec = replace(
            spec,
            config=config,
            store=str(store.resolve()),
            run_dir=str(folder / "run"),
            parent=os.getpid(),
            threads=threads_per_worker(len(trainers)),
            module_fd=None,
        )
        check_trainers_free(messages, trainers, workers)
        (folder / "SPEC.json").write_text(spec.as_json())
        processes = start_processes(folder, address, [str(number) for number in trainers], restarts)
        lost: dict[str, str] = {}
        run_failed = False
        try:
            while unfinished := [p for p in processes if p.role not in lost and not exited_cleanly(p)]:
                lost |= restart_failed(unfinished, messages, log_user)
                with suppress(ExchangeError):
                    run_failed = run_failed or messages.has_failed()
                time.sleep(_POLL)
        finally:
            end_processes(processes)
        if lost:
            raise ExchangeError("; ".join(lost.values()))
        if run_failed:
            raise ExchangeError(f"the run at {address} has failed: see the error on the first machine")


def exited_cleanly(worker: WorkerHandle) -> bool:
    return not worker.is_running and worker.exit_status() is None


def check_trainers_free(messages: RunMessages, trainers: Sequence[int], workers: int) -> None:
    """Raise ConfigError for a number that the run does not have, or that another process uses."""
    if max(trainers) >= workers:
        raise ConfigError(f"trainer {max(trainers)} does not exist: the run has trainers 0 to {workers - 1}")
    before = [messages.heartbeats(i) for i in trainers]
    time.sleep(2.0)  # heartbeats come every half second
    for i, beats in zip(trainers, before, strict=True):
        if messages.heartbeats(i) != beats:
            raise ConfigError(f"trainer {i} is already running: choose another number")


def _start_trainers(spec: RunSpec, folder: Path, address: Address, count: int, restarts: int) -> Sequence[WorkerHandle]:
    roles = [str(number) for number in range(count)]
    if spec.config["strategy"].get("launcher") == "ray":
        from gnnfleet.launch.tma_ray import count_machines, open_ray, start_actors

        machine = open_ray()
        if is_loopback(address.host) and (machines := count_machines()) > 1:
            raise ConfigError(
                f"the Ray cluster has {machines} machines, and trainers on the others cannot reach {address.host}: "
                "set strategy.listen=0.0.0.0:29500, on a network that you trust"
            )
        return start_actors(spec, reachable_address(address, machine), roles, restarts)  # they may be on any node
    fds = () if spec.module_fd is None else (spec.module_fd,)
    return start_processes(folder, reachable_address(address), roles, restarts, fds)


def start_processes(
    folder: Path, address: str, roles: Sequence[str], restarts: int, fds: Sequence[int] = ()
) -> list[LocalProcess]:
    command = [sys.executable, "-m", "gnnfleet.launch.tma_process", str(folder / "SPEC.json"), address]
    processes: list[LocalProcess] = []
    try:
        processes.extend(LocalProcess(role, [*command, role], folder, restarts, fds) for role in roles)
    except BaseException:  # no memory for another process, or Ctrl-C
        end_processes(processes)
        raise
    return processes


def end_processes(workers: Sequence[LocalProcess]) -> None:
    """Terminate running processes, and kill those that do not end."""
    running = [worker.process for worker in workers if worker.is_running]
    deadline = time.monotonic() + 1.0  # trainers end by themselves when the run is over
    while any(process.poll() is None for process in running) and time.monotonic() < deadline:
        time.sleep(_POLL)
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    for process in running:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def remove_trainer_checkpoints(run: Path, rounds: int) -> None:
    """Remove the trainers' checkpoints of a finished run, except those from which more rounds would start."""
    for path in (run / TRAINERS_DIR).glob("*/*.safetensors"):
        if path.stem != str(rounds):
            path.unlink(missing_ok=True)


def reachable_address(address: Address, machine: str = "127.0.0.1") -> str:
    """HOST:PORT of a server of this machine, which others reach as ``machine``."""
    host = machine if address.host in ("0.0.0.0", "::", "") else address.host
    return f"{host}:{address.port}"


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _raise_run_error(coordinator: WorkerHandle, status: str, trainers: Sequence[WorkerHandle]) -> NoReturn:
    """Raise the error that ended the run: if all trainers failed by errors of their own, the first of these."""
    for trainer in trainers:
        trainer.exit_status()  # reads its failure
    failures = [trainer.failure for trainer in trainers if trainer.failure is not None]
    if coordinator.failure is None:
        raise ExchangeError(f"{status}; continue with --resume")
    if failures and len(failures) == len(trainers):
        raise failure_error(failures[0])
    raise failure_error(coordinator.failure)
