"""Rendezvous: the ranks of one attempt find each other in a store, before they connect to each other.

A restarted run uses the store of the previous attempt, whose keys are still there, and launchers on several machines
count attempts independently. So rank 0 draws a token, hands it to every rank that asks now, and prefixes every key of
the attempt with it.
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
"""Ranks start at different times: imports from a cold disk, machines that come up one after another."""

LEAVE_TIMEOUT = 10.0
"""How long rank 0, if it hosts the store, waits for the others to leave."""

SPARE_CONNECTIONS = 2
POLL_INTERVAL = 0.02


@dataclass(frozen=True)
class ProcessInfo:
    """The process of a rank."""

    host: str
    machine: str  # processes with the same value reach each other on loopback
    pid: int
    pids: str  # the namespace of the pid
    born: str  # start time: distinguishes a later process with the same pid

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
    """All ranks of an attempt. ``store`` has the keys of this attempt alone, ``raw_store`` those of all attempts.

    ``spare_connections`` go to the same store: a call that hangs on one does not hold up the others. They were opened
    before the ranks met, because a store answers nobody while it resolves the name of a new client.
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
        """Open a connection that replaces a broken one."""
        return PrefixStore(self.token, _join_store(self.env, seconds))

    def name(self, rank: int) -> str:
        """A rank as users read it: ``rank 1 (pid 4711 on host a)``."""
        member = self.members[rank]
        return f"rank {rank} (pid {member.pid} on {member.host})"


@contextmanager
def rendezvous(env: LaunchEnv, *, seconds: float = RENDEZVOUS_TIMEOUT) -> Iterator[Rendezvous]:
    """Collective. Wait for all ranks; raises ExchangeError with the missing ones after ``seconds``."""
    if env.size == 1:
        local = HashStore()
        yield Rendezvous(env, secrets.token_hex(6), (ProcessInfo.current(),), local, local)
        return
    store = _host_store(env) if env.hosts_store else _join_store(env, seconds)
    spare = [_join_store(env, seconds) for _ in range(SPARE_CONNECTIONS)]
    with _store_errors(env):
        token, members = (_join if env.rank else _host)(store, env, seconds)
    prefixed, *spare_prefixed = (PrefixStore(token, connection) for connection in (store, *spare))
    joined = Rendezvous(env, token, members, prefixed, store, tuple(spare_prefixed))
    yield joined
    with _store_errors(env):
        _leave(joined)


@contextmanager
def _store_errors(env: LaunchEnv) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        raise ExchangeError(f"the store at {env.host}:{env.port} does not answer: {first_line(error)}") from error
    except (ValueError, TypeError) as error:
        raise ExchangeError(
            f"the store at {env.host}:{env.port} holds a message that gnnfleet did not write"
        ) from error


def _host_store(env: LaunchEnv) -> TCPStore:
    try:
        if env.host.startswith("127."):  # not "localhost": a first machine may use it as its own address
            return serve_store(env.host, env.port, seconds=RENDEZVOUS_TIMEOUT)[0]
        return TCPStore(
            env.host, env.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT)
        )
    except (RuntimeError, OSError) as error:
        raise ExchangeError(
            f"cannot host the store at {env.host}:{env.port}: {first_line(error)}. Choose another MASTER_PORT"
        ) from error


def _join_store(env: LaunchEnv, seconds: float) -> TCPStore:
    try:
        return TCPStore(env.host, env.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    except (RuntimeError, ConnectionError) as error:
        raise ExchangeError(
            f"cannot reach the store at {env.host}:{env.port}: {first_line(error)}. "
            "Check that the first machine is up and that all machines reach it at MASTER_ADDR"
        ) from error


def _host(store: Store, env: LaunchEnv, seconds: float) -> tuple[str, tuple[ProcessInfo, ...]]:
    """Rank 0: send the token to every new rank until all have registered under it."""
    token = f"{env.attempt}.{secrets.token_hex(6)}"
    members = {0: ProcessInfo.current()}
    answered: dict[int, bytes] = {}
    deadline = time.monotonic() + seconds
    while len(members) < env.size:
        for rank in sorted(set(range(env.size)) - members.keys()):
            if store.check([f"{token}/here/{rank}"]):
                members[rank] = ProcessInfo(**json.loads(store.get(f"{token}/here/{rank}")))
            elif store.check([f"hello/{rank}"]) and (nonce := store.get(f"hello/{rank}")) != answered.get(rank):
                store.set(f"welcome/{nonce.decode()}", token)
                answered[rank] = nonce  # a key of an earlier attempt, perhaps: then a new one follows
        if time.monotonic() > deadline:
            missing = ", ".join(str(rank) for rank in range(env.size) if rank not in members)
            raise ExchangeError(
                f"missing rank {missing} of {env.size} after {seconds:.0f} s. Look at its output on its machine"
            )
        time.sleep(POLL_INTERVAL)
    by_rank = tuple(members[rank] for rank in range(env.size))
    store.set(f"{token}/members", json.dumps([asdict(member) for member in by_rank]))
    return token, by_rank


def _join(store: Store, env: LaunchEnv, seconds: float) -> tuple[str, tuple[ProcessInfo, ...]]:
    nonce = secrets.token_hex(8)
    store.set(f"hello/{env.rank}", nonce)
    try:
        store.wait([f"welcome/{nonce}"], timedelta(seconds=seconds))
        token = store.get(f"welcome/{nonce}").decode()
        store.set(f"{token}/here/{env.rank}", json.dumps(asdict(ProcessInfo.current())))
        store.wait([f"{token}/members"], timedelta(seconds=seconds))
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {env.rank} waited {seconds:.0f} s for rank 0 and the others at {env.host}:{env.port}: "
            f"{first_line(error)}"
        ) from error
    members = json.loads(store.get(f"{token}/members"))
    return token, tuple(ProcessInfo(**member) for member in members)


def _leave(joined: Rendezvous) -> None:
    """The host of the store leaves last: the others would take its end for a failure."""
    env = joined.env
    if not env.hosts_store:
        joined.store.set(f"left/{env.rank}", "1")
        return
    deadline = time.monotonic() + LEAVE_TIMEOUT
    left = [f"left/{rank}" for rank in range(1, env.size)]
    while not joined.store.check(left) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)


def process_start_time(pid: int) -> str:
    """Start time of a process in clock ticks; empty if there is no such process or the system does not report it."""
    # The program's name is in brackets and may contain spaces; the start time is the 20th field after it.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


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
