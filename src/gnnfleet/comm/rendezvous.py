"""Meeting: the ranks of one attempt find each other in a store, before any of them talks to another.

A restarted run meets in the store of the attempt before, whose keys are still there, and launchers on several machines
count attempts each for itself. So rank 0 draws a token, gives it to whoever says hello now, and every key of the
attempt lies below it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.store_server import serve_store
from gnnfleet.errors import ExchangeError, first_line

RENDEZVOUS_TIMEOUT = 300.0
"""What ranks may differ in starting: imports from a cold disk, machines that come up one after another."""

LEAVE_TIMEOUT = 10.0
"""How long rank 0, where it keeps the store, waits for the others to be done."""

SPARE_CONNECTIONS = 2
POLL_INTERVAL = 0.02


@dataclass(frozen=True)
class ProcessInfo:
    """The process behind a rank."""

    host: str
    machine: str  # processes of one machine can reach each other on its loopback
    pid: int
    pids: str  # in which namespace the pid is meant
    born: str  # tells the process from a later one with the same pid

    @classmethod
    def current(cls) -> ProcessInfo:
        boot = _read("/proc/sys/kernel/random/boot_id") or socket.gethostname()
        return cls(
            host=socket.gethostname(),
            machine=f"{boot} {_link('/proc/self/ns/net')}",
            pid=os.getpid(),
            pids=f"{boot} {_link('/proc/self/ns/pid')}",
            born=process_start_time(os.getpid()),
        )


@dataclass(frozen=True, eq=False)
class Rendezvous:
    """All ranks of an attempt, present at once. ``store`` holds nothing of other attempts, ``raw_store`` what all leave.

    ``spare_connections`` are further connections to it: a call that hangs on one does not hold up the others. They were made
    before the ranks met, since a store looks up the name of whoever connects and answers nobody meanwhile.
    """

    env: LaunchEnv
    token: str
    members: tuple[ProcessInfo, ...]
    store: Store
    raw_store: Store
    spare_connections: tuple[Store, ...] = ()

    @property
    def on_one_machine(self) -> bool:
        return len({member.machine for member in self.members}) == 1

    def connection(self, seconds: float = RENDEZVOUS_TIMEOUT) -> Store:
        """One more connection, in place of one that broke."""
        return PrefixStore(self.token, _join_store(self.env, seconds))

    def name(self, rank: int) -> str:
        """A rank for people: ``rank 1 (pid 4711 on host a)``."""
        member = self.members[rank]
        return f"rank {rank} (pid {member.pid} on {member.host})"


@contextmanager
def rendezvous(seat: LaunchEnv, *, seconds: float = RENDEZVOUS_TIMEOUT) -> Iterator[Rendezvous]:
    """Wait until all ranks are here. Raises ExchangeError naming who is not after ``seconds``."""
    if seat.size == 1:
        alone = HashStore()
        yield Rendezvous(seat, secrets.token_hex(6), (ProcessInfo.current(),), alone, alone)
        return
    store = _host_store(seat) if seat.hosts_store else _join_store(seat, seconds)
    lines = [_join_store(seat, seconds) for _ in range(SPARE_CONNECTIONS)]
    with _connect(seat):
        token, members = (_join if seat.rank else _host)(store, seat, seconds)
    own, *more = (PrefixStore(token, line) for line in (store, *lines))
    meeting = Rendezvous(seat, token, members, own, store, tuple(more))
    yield meeting
    with _connect(seat):
        _leave(meeting)


@contextmanager
def _connect(seat: LaunchEnv) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        raise ExchangeError(f"the store at {seat.host}:{seat.port} does not answer: {first_line(error)}") from error
    except (ValueError, TypeError) as error:
        raise ExchangeError(
            f"the store at {seat.host}:{seat.port} holds a message that gnnfleet did not write"
        ) from error


def _host_store(seat: LaunchEnv) -> TCPStore:
    try:
        if seat.host.startswith("127."):  # "localhost" may be what a first machine is told to call itself
            return serve_store(seat.host, seat.port, seconds=RENDEZVOUS_TIMEOUT)[0]
        return TCPStore(
            seat.host, seat.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT)
        )
    except (RuntimeError, OSError) as error:
        raise ExchangeError(
            f"cannot keep a store at {seat.host}:{seat.port}: {first_line(error)}. Choose another MASTER_PORT"
        ) from error


def _join_store(seat: LaunchEnv, seconds: float) -> TCPStore:
    try:
        return TCPStore(
            seat.host, seat.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds)
        )
    except (RuntimeError, ConnectionError) as error:
        raise ExchangeError(
            f"cannot reach the store at {seat.host}:{seat.port}: {first_line(error)}. "
            "Is the first machine up, and MASTER_ADDR an address that all machines know it by?"
        ) from error


def _host(store: Store, seat: LaunchEnv, seconds: float) -> tuple[str, tuple[ProcessInfo, ...]]:
    """Rank 0: give the token to every newcomer until all have answered with it."""
    token = f"{seat.attempt}.{secrets.token_hex(6)}"
    members = {0: ProcessInfo.current()}
    greeted: dict[int, bytes] = {}
    deadline = time.monotonic() + seconds
    while len(members) < seat.size:
        for rank in sorted(set(range(seat.size)) - members.keys()):
            if store.check([f"{token}/here/{rank}"]):
                members[rank] = ProcessInfo(**json.loads(store.get(f"{token}/here/{rank}")))
            elif store.check([f"hello/{rank}"]) and (nonce := store.get(f"hello/{rank}")) != greeted.get(rank):
                store.set(f"welcome/{nonce.decode()}", token)
                greeted[rank] = nonce  # perhaps left by an attempt that ended: then another follows
        if time.monotonic() > deadline:
            missing = ", ".join(str(rank) for rank in range(seat.size) if rank not in members)
            raise ExchangeError(
                f"waited {seconds:.0f} s for {seat.size} workers, missing: rank {missing}. "
                "Look at what they say on their machines"
            )
        time.sleep(POLL_INTERVAL)
    known = tuple(members[rank] for rank in range(seat.size))
    store.set(f"{token}/members", json.dumps([asdict(member) for member in known]))
    return token, known


def _join(store: Store, seat: LaunchEnv, seconds: float) -> tuple[str, tuple[ProcessInfo, ...]]:
    nonce = secrets.token_hex(8)
    store.set(f"hello/{seat.rank}", nonce)
    try:
        store.wait([f"welcome/{nonce}"], timedelta(seconds=seconds))
        token = store.get(f"welcome/{nonce}").decode()
        store.set(f"{token}/here/{seat.rank}", json.dumps(asdict(ProcessInfo.current())))
        store.wait([f"{token}/members"], timedelta(seconds=seconds))
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {seat.rank} waited {seconds:.0f} s for rank 0 and the others at {seat.host}:{seat.port}: "
            f"{first_line(error)}"
        ) from error
    members = json.loads(store.get(f"{token}/members"))
    return token, tuple(ProcessInfo(**member) for member in members)


def _leave(meeting: Rendezvous) -> None:
    """Who keeps the store leaves last: others would take its end for a death."""
    seat = meeting.env
    if not seat.hosts_store:
        meeting.store.set(f"left/{seat.rank}", "1")
        return
    deadline = time.monotonic() + LEAVE_TIMEOUT
    left = [f"left/{rank}" for rank in range(1, seat.size)]
    while not meeting.store.check(left) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)


def process_start_time(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty where nobody says or there is none."""
    # The name of the program stands in brackets and may hold spaces; the start is the 20th word behind it.
    words = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return words[19] if len(words) > 19 else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
