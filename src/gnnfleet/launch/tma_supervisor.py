"""A coordinator and trainers as processes of their own: one that ends does not end the others.

The server of their post is here, so that it outlives each of them. Nothing outlives a fleet: no process, no port.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gnnfleet.comm.failure import Failure
from gnnfleet.errors import ConfigError, ExchangeError, first_line
from gnnfleet.launch.local_launcher import SHUTDOWN_SECONDS, failure_error, threads_per_worker, worker_environment
from gnnfleet.launch.spec import RunSpec
from gnnfleet.launch.tma_process import COORDINATOR, TRAINERS_DIR, process_name

if TYPE_CHECKING:
    from gnnfleet.comm.message_store import Address, HeartbeatReader, MessageStore

_POLL = 0.05

FAILED = "failed"
"""The letter that a run leaves when it ends without a result."""


class WorkerHandle(Protocol):
    """The coordinator or a trainer, perhaps started several times."""

    role: str  # the coordinator, or a trainer's number
    failure: Failure | None

    @property
    def is_running(self) -> bool: ...

    def exit_status(self) -> str | None:
        """How it ended, if it did and should not have."""

    def restart(self) -> bool:
        """Start it again where it may be."""


@dataclass(eq=False)
class LocalProcess:
    """A member as a process on this machine."""

    role: str  # the coordinator, or a trainer's number
    command: list[str]
    folder: Path
    restarts: int
    process: subprocess.Popen[bytes] = field(init=False)
    failure: Failure | None = None
    why: str = ""  # it was killed here

    def start(self) -> None:
        self.why = ""
        # Ctrl-C is for the launcher, which ends the others in order.
        self.process = subprocess.Popen(self.command, start_new_session=True)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def exit_status(self) -> str | None:
        code = self.process.poll()
        if not code:
            return None
        who = f"{process_name(self.role)} (pid {self.process.pid})"
        if self.why:
            return f"{who} was ended: {self.why}"
        self.failure = Failure.read(self.folder / f"{self.role}.error")
        if self.failure is not None:
            return f"{who} failed: {self.failure.text}"
        if code < 0:
            why = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
            return f"{who} was killed by {signal.Signals(-code).name}{why}"
        return f"{who} ended with exit code {code}"

    def restart(self) -> bool:
        if not self.restarts:
            return False
        self.restarts -= 1
        (self.folder / f"{self.role}.error").unlink(missing_ok=True)
        self.start()
        return True


@worker_environment()
def launch_supervised(
    spec: RunSpec, *, folder: Path, workers: int, restarts: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run a spec with a coordinator and trainers; what the coordinator answers.

    Trainers that are lost are started again up to ``restarts`` times each, and so is the coordinator; without, the run
    goes on without a trainer. Raises the error of whoever ended the run.
    """
    import torch

    from gnnfleet.comm.message_store import Address, MessageStore
    from gnnfleet.launch.confirmed_model import read_model_file

    words = spec.config["strategy"]
    try:
        listen = Address.parse(words["listen"]) if words.get("listen") else Address("127.0.0.1", 0)
        post = MessageStore.serve(listen.host, listen.port)
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(f"strategy.listen: {first_line(error)}") from error
    here = workers if words.get("local_trainers") is None else int(words["local_trainers"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    answer = folder / "answer.json"
    spec = replace(spec, parent=os.getpid(), threads=threads_per_worker(max(1, here)), answer=str(answer))
    (folder / "SPEC.json").write_text(spec.as_json())
    source = read_model_file(spec.config)
    post.write(
        "spec", {"spec": spec.as_json()}, torch.frombuffer(bytearray(source), dtype=torch.uint8) if source else None
    )
    if here < workers:
        confirm = "" if not source else f" --model-sha256 {hashlib.sha256(source).hexdigest()}"
        numbers = f"{here}-{workers - 1}"
        say(f"Waiting for trainers {numbers}: gnnfleet join {post.address} STORE --trainers {numbers}{confirm}")
    (coordinator,) = start_processes(folder, reachable_address(post.address), [COORDINATOR], restarts)
    trainers: Sequence[WorkerHandle] = []
    vigil = _CoordinatorWatchdog(post, words["give_up"])
    lost: dict[str, str] = {}  # how trainers ended, by number, that nobody starts again
    try:
        trainers = _start_trainers(spec, folder, post.address, here, restarts)
        while coordinator.process.poll() is None or coordinator.process.returncode:
            how = coordinator.exit_status()
            if how is not None:
                if not coordinator.restart():
                    _raise_run_error(coordinator, how, trainers)
                say(f"{how}; it is started again and goes on from the last closed round that was kept")
                vigil.begin()
            lost |= restart_failed([trainer for trainer in trainers if trainer.role not in lost], post, say)
            if (silent := vigil.is_overdue()) is not None:
                coordinator.why = f"nothing was heard of it for {silent:.0f} s"
                coordinator.process.kill()
                coordinator.process.wait()
            time.sleep(_POLL)
        return {**loads(answer.read_bytes()), "lost": [lost[role] for role in sorted(lost, key=int)]}
    finally:
        with suppress(ExchangeError):  # trainers elsewhere need not find out by themselves
            if not answer.exists():
                post.write(FAILED, {})
            if (letter := post.read("now")) is not None:
                post.write("now", {**letter.fields, "done": True})
            if here < workers:
                time.sleep(1.0)  # the server ends with this process
        end_processes([coordinator, *(one for one in trainers if isinstance(one, LocalProcess))])
        if words.get("launcher") == "ray":
            from gnnfleet.launch.tma_ray import end_actors

            end_actors(trainers)
        shutil.rmtree(folder, ignore_errors=True)


class _CoordinatorWatchdog:
    """Whether the coordinator lives, by its beats. While another one starts, which may take long, the launcher beats in
    its place: trainers would give up."""

    def __init__(self, post: MessageStore, give_up: float) -> None:
        self._post, self._give_up = post, give_up
        self._pulse, self._silent = _pulse(0), 0.0
        self._started: float | None = None  # when another one was
        self._beat = 0.0

    def begin(self) -> None:
        """It is started again."""
        self._silent, self._started = 0.0, time.monotonic()
        self._beat_on_behalf()

    def is_overdue(self) -> float | None:
        """The seconds for which nothing was heard of it, where it has to be ended."""
        before, self._silent, now = self._silent, self._pulse.silent_seconds(self._post), time.monotonic()
        if self._started is not None and not self._pulse.has_moved:
            if now - self._started > 2 * self._give_up:
                return now - self._started
            if now - self._beat > 1.0:
                self._beat_on_behalf()
        # Half of the time after which trainers give up: another one has to begin before that.
        return self._silent if min(before, self._silent) > self._give_up / 2 else None

    def _beat_on_behalf(self) -> None:
        from gnnfleet.strategies.tma.protocol import COORDINATOR_HEARTBEAT

        self._pulse, self._beat = _pulse(self._post.count(COORDINATOR_HEARTBEAT)), time.monotonic()


def _pulse(after: int) -> HeartbeatReader:
    from gnnfleet.comm.message_store import HeartbeatReader
    from gnnfleet.strategies.tma.protocol import COORDINATOR_HEARTBEAT

    return HeartbeatReader(COORDINATOR_HEARTBEAT, after=after)


def restart_failed(members: Sequence[WorkerHandle], post: MessageStore, say: Callable[[str], None]) -> dict[str, str]:
    """Start trainers again that have ended and may be; {number: how it ended} of the others, which are told to all."""
    lost: dict[str, str] = {}
    for member in members:
        how = member.exit_status()
        if how is None:
            continue
        again = member.restart()
        if not again:
            lost[member.role] = how
            with suppress(ExchangeError):
                post.write(f"gone/{member.role}", {"raised": member.failure is not None})
        say(f"{how}; {'it is started again' if again else 'the run goes on without it'}")
        if member.failure is not None and member.failure.trace:
            say(member.failure.trace.rstrip())
    return lost


@worker_environment()
def join_supervised(
    address: str,
    store: Path,
    trainers: Sequence[int],
    *,
    restarts: int,
    say: Callable[[str], None],
    model: str | None = None,
    model_sha256: str | None = None,
) -> None:
    """Trainers on this machine for a fleet whose coordinator is elsewhere; until all is over.

    A model file runs here only as ``model``, this machine's own, or as the coordinator's copy with ``model_sha256``.
    """
    import tempfile

    from gnnfleet.comm.message_store import Address, MessageStore
    from gnnfleet.graph.validate import open_validated_store
    from gnnfleet.launch.confirmed_model import confirm_model_file

    try:
        place = Address.parse(address)
    except ValueError as error:
        raise ConfigError(f"{error}") from error
    if not place.port:
        raise ConfigError(f"nobody listens at port 0, found {address}: name the port that strategy.listen has there")
    open_validated_store(store)
    post = MessageStore.connect(place)
    letter = post.read("spec")
    if letter is None:
        raise ExchangeError(f"there is no run at {address}: start gnnfleet train --strategy tma there first")
    try:
        spec = RunSpec.from_json(letter.fields["spec"])
        workers = int(spec.config["workers"])
        outside = not (store / spec.partition).resolve().is_relative_to(store.resolve())
    except (TypeError, ValueError, KeyError) as error:
        raise ExchangeError(f"the server at {address} describes no run of this version of gnnfleet") from error
    if outside:
        raise ExchangeError(f"the server at {address} names a partition outside of {store}: {spec.partition}")
    with tempfile.TemporaryDirectory(prefix="gnnfleet-") as scratch:
        folder = Path(scratch)
        source = letter.body.numpy().tobytes()
        spec = replace(
            spec,
            config=confirm_model_file(spec.config, source, model=model, sha256=model_sha256, folder=folder),
            store=str(store.resolve()),
            run_dir=str(folder / "run"),
            parent=os.getpid(),
            threads=threads_per_worker(len(trainers)),
        )
        check_trainers_free(post, trainers, workers)
        (folder / "SPEC.json").write_text(spec.as_json())
        members = start_processes(folder, address, [str(number) for number in trainers], restarts)
        lost: dict[str, str] = {}
        failed = False
        try:
            while left := [each for each in members if each.role not in lost and not exited_cleanly(each)]:
                lost |= restart_failed(left, post, say)
                with suppress(ExchangeError):
                    failed = failed or post.has(FAILED)
                time.sleep(_POLL)
        finally:
            end_processes(members)
        if lost:
            raise ExchangeError("; ".join(lost.values()))
        if failed:
            raise ExchangeError(f"the run at {address} has failed; what went wrong is said there")


def exited_cleanly(member: WorkerHandle) -> bool:
    return not member.is_running and member.exit_status() is None


def check_trainers_free(post: MessageStore, trainers: Sequence[int], workers: int) -> None:
    """Raise ConfigError for numbers that the run does not have, or that somebody else is."""
    if wrong := [i for i in trainers if i >= workers]:
        raise ConfigError(f"the run has trainers 0 to {workers - 1}, found --trainers {wrong[0]}")
    before = [post.count(f"beat/{i}", 0) for i in trainers]
    time.sleep(2.0)  # beats come every half second
    for i, beats in zip(trainers, before, strict=True):
        if post.count(f"beat/{i}", 0) != beats:
            raise ConfigError(f"trainer {i} runs already: choose another number")


def _start_trainers(spec: RunSpec, folder: Path, address: Address, here: int, restarts: int) -> Sequence[WorkerHandle]:
    roles = [str(number) for number in range(here)]
    if spec.config["strategy"].get("launcher") == "ray":
        from gnnfleet.launch.tma_ray import count_machines, open_ray, start_actors

        machine = open_ray()
        if is_loopback(address.host) and (machines := count_machines()) > 1:
            raise ConfigError(
                f"trainers may run on any of the {machines} machines of the Ray cluster and would not reach "
                f"{address.host}: set strategy.listen=0.0.0.0:29500, on a network that you trust"
            )
        return start_actors(spec, reachable_address(address, machine), roles, restarts)  # they may be on any node
    return start_processes(folder, reachable_address(address), roles, restarts)


def start_processes(folder: Path, address: str, roles: Sequence[str], restarts: int) -> list[LocalProcess]:
    line = [sys.executable, "-m", "gnnfleet.launch.tma_process", str(folder / "SPEC.json"), address]
    members = [LocalProcess(role, [*line, role], folder, restarts) for role in roles]
    started: list[LocalProcess] = []
    try:
        for member in members:
            member.start()
            started.append(member)
    except BaseException:  # the machine has no room for another process, or Ctrl-C
        end_processes(started)
        raise
    return members


def end_processes(members: Sequence[LocalProcess]) -> None:
    """Ask those that are left to end, then make them."""
    left = [member.process for member in members if member.process.poll() is None]
    deadline = time.monotonic() + 1.0  # trainers end by themselves when all is over
    while any(process.poll() is None for process in left) and time.monotonic() < deadline:
        time.sleep(_POLL)
    for process in left:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    for process in left:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def remove_trainer_checkpoints(run: Path, rounds: int) -> None:
    """Of what trainers have kept below a run that is over, all but what it would go on with."""
    for path in (run / TRAINERS_DIR).glob("*/*.safetensors"):
        if path.stem != str(rounds):
            path.unlink(missing_ok=True)


def reachable_address(address: Address, machine: str = "127.0.0.1") -> str:
    """Where to connect to a server of this machine; ``machine`` is what one that listens on every interface is called
    by whoever connects."""
    host = machine if address.host in ("0.0.0.0", "::", "") else address.host
    return f"{host}:{address.port}"


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _raise_run_error(coordinator: WorkerHandle, how: str, trainers: Sequence[WorkerHandle]) -> None:
    """The error that ended the run: where trainers failed of themselves, theirs."""
    for trainer in trainers:
        _ = trainer.exit_status()
    told = [trainer.failure for trainer in trainers if trainer.failure is not None]
    if coordinator.failure is None:
        raise ExchangeError(f"{how}; go on with --resume")
    if len(told) == len(trainers) and told:
        raise failure_error(told[0])
    raise failure_error(coordinator.failure)
