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

from gnnfleet.comm.launch_env import Seat
from gnnfleet.comm.store_server import serve_store
from gnnfleet.errors import ExchangeError

MEET_SECONDS = 300.0
"""What ranks may differ in starting: imports from a cold disk, machines that come up one after another."""

LEAVE_SECONDS = 10.0
"""How long rank 0, where it keeps the store, waits for the others to be done."""

LINES = 2
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Member:
    """The process behind a rank."""

    host: str
    machine: str  # processes of one machine can reach each other on its loopback
    pid: int
    pids: str  # in which namespace the pid is meant
    born: str  # tells the process from a later one with the same pid

    @classmethod
    def myself(cls) -> Member:
        boot = _read("/proc/sys/kernel/random/boot_id") or socket.gethostname()
        return cls(
            host=socket.gethostname(),
            machine=f"{boot} {_link('/proc/self/ns/net')}",
            pid=os.getpid(),
            pids=f"{boot} {_link('/proc/self/ns/pid')}",
            born=born(os.getpid()),
        )


@dataclass(frozen=True, eq=False)
class Meeting:
    """All ranks of an attempt, present at once. ``store`` holds nothing of other attempts, ``ground`` what all leave.

    ``lines`` are further connections to it: a call that hangs on one does not hold up the others. They were made
    before the ranks met, since a store looks up the name of whoever connects and answers nobody meanwhile.
    """

    seat: Seat
    token: str
    members: tuple[Member, ...]
    store: Store
    ground: Store
    lines: tuple[Store, ...] = ()

    @property
    def on_one_machine(self) -> bool:
        return len({member.machine for member in self.members}) == 1

    def line(self, seconds: float = MEET_SECONDS) -> Store:
        """One more connection, in place of one that broke."""
        return PrefixStore(self.token, _client(self.seat, seconds))

    def name(self, rank: int) -> str:
        """A rank for people: ``rank 1 (pid 4711 on host a)``."""
        member = self.members[rank]
        return f"rank {rank} (pid {member.pid} on {member.host})"


@contextmanager
def meet(seat: Seat, *, seconds: float = MEET_SECONDS) -> Iterator[Meeting]:
    """Wait until all ranks are here. Raises ExchangeError naming who is not after ``seconds``."""
    if seat.size == 1:
        alone = HashStore()
        yield Meeting(seat, secrets.token_hex(6), (Member.myself(),), alone, alone)
        return
    store = _server(seat) if seat.keeps_store else _client(seat, seconds)
    lines = [_client(seat, seconds) for _ in range(LINES)]
    with _answering(seat):
        token, members = (_introduce if seat.rank else _greet)(store, seat, seconds)
    own, *more = (PrefixStore(token, line) for line in (store, *lines))
    meeting = Meeting(seat, token, members, own, store, tuple(more))
    yield meeting
    with _answering(seat):
        _leave(meeting)


@contextmanager
def _answering(seat: Seat) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        raise ExchangeError(f"the store at {seat.host}:{seat.port} does not answer: {_first_line(error)}") from error
    except (ValueError, TypeError) as error:
        raise ExchangeError(
            f"the store at {seat.host}:{seat.port} holds a message that gnnfleet did not write"
        ) from error


def _server(seat: Seat) -> TCPStore:
    try:
        if seat.host.startswith("127."):  # "localhost" may be what a first machine is told to call itself
            return serve_store(seat.host, seat.port, seconds=MEET_SECONDS)[0]
        return TCPStore(
            seat.host, seat.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=MEET_SECONDS)
        )
    except (RuntimeError, OSError) as error:
        raise ExchangeError(
            f"cannot keep a store at {seat.host}:{seat.port}: {_first_line(error)}. Choose another MASTER_PORT"
        ) from error


def _client(seat: Seat, seconds: float) -> TCPStore:
    try:
        return TCPStore(
            seat.host, seat.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds)
        )
    except (RuntimeError, ConnectionError) as error:
        raise ExchangeError(
            f"cannot reach the store at {seat.host}:{seat.port}: {_first_line(error)}. "
            "Is the first machine up, and MASTER_ADDR an address that all machines know it by?"
        ) from error


def _greet(store: Store, seat: Seat, seconds: float) -> tuple[str, tuple[Member, ...]]:
    """Rank 0: give the token to every newcomer until all have answered with it."""
    token = f"{seat.attempt}.{secrets.token_hex(6)}"
    members = {0: Member.myself()}
    greeted: dict[int, bytes] = {}
    deadline = time.monotonic() + seconds
    while len(members) < seat.size:
        for rank in sorted(set(range(seat.size)) - members.keys()):
            if store.check([f"{token}/here/{rank}"]):
                members[rank] = Member(**json.loads(store.get(f"{token}/here/{rank}")))
            elif store.check([f"hello/{rank}"]) and (nonce := store.get(f"hello/{rank}")) != greeted.get(rank):
                store.set(f"welcome/{nonce.decode()}", token)
                greeted[rank] = nonce  # perhaps left by an attempt that ended: then another follows
        if time.monotonic() > deadline:
            missing = ", ".join(str(rank) for rank in range(seat.size) if rank not in members)
            raise ExchangeError(
                f"waited {seconds:.0f} s for {seat.size} workers, missing: rank {missing}. "
                "Look at what they say on their machines"
            )
        time.sleep(POLL_SECONDS)
    known = tuple(members[rank] for rank in range(seat.size))
    store.set(f"{token}/members", json.dumps([asdict(member) for member in known]))
    return token, known


def _introduce(store: Store, seat: Seat, seconds: float) -> tuple[str, tuple[Member, ...]]:
    nonce = secrets.token_hex(8)
    store.set(f"hello/{seat.rank}", nonce)
    try:
        store.wait([f"welcome/{nonce}"], timedelta(seconds=seconds))
        token = store.get(f"welcome/{nonce}").decode()
        store.set(f"{token}/here/{seat.rank}", json.dumps(asdict(Member.myself())))
        store.wait([f"{token}/members"], timedelta(seconds=seconds))
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {seat.rank} waited {seconds:.0f} s for rank 0 and the others at {seat.host}:{seat.port}: "
            f"{_first_line(error)}"
        ) from error
    members = json.loads(store.get(f"{token}/members"))
    return token, tuple(Member(**member) for member in members)


def _leave(meeting: Meeting) -> None:
    """Who keeps the store leaves last: others would take its end for a death."""
    seat = meeting.seat
    if not seat.keeps_store:
        meeting.store.set(f"left/{seat.rank}", "1")
        return
    deadline = time.monotonic() + LEAVE_SECONDS
    left = [f"left/{rank}" for rank in range(1, seat.size)]
    while not meeting.store.check(left) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def born(pid: int) -> str:
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


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
