"""Heartbeats of ranks and detection of failed ones.

Every rank increments a counter in the store once a second. A rank whose counter stands still for the silence limit
ends the run on all ranks; a slow exchange alone never does. The age of a counter is measured with the observer's own
clock, so clocks of machines are never compared. One thread talks to the store and may hang with the network. Another
judges the peers and ends the process, whatever the main thread is waiting for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn, Self

from torch._C._distributed_c10d import Store

from gnnfleet.comm.failure import Failure, FailureKind
from gnnfleet.comm.rendezvous import Rendezvous, process_start_time
from gnnfleet.errors import ExchangeError

DONE, STOPPED = b"done", b"stopped"
FAILURE_KEY = "told"


def _heartbeat_key(rank: int) -> str:
    return f"beat/{rank}"


@dataclass(frozen=True)
class HeartbeatConfig:
    """Times in seconds."""

    interval: float = 1.0
    timeout: float = 10.0  # silence after which a rank counts as dead
    suspect_timeout: float = 3.0  # silence that explains an exchange that has already failed


class FailureDetector:
    """Send the heartbeat of this rank and watch those of the others.

    ``report`` is called once, in the thread that ends this process, just before it ends.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        report: Callable[[Failure], None],
        *,
        config: HeartbeatConfig | None = None,
        exit_process: Callable[[int], NoReturn] = os._exit,
    ) -> None:
        self._rendezvous, self._report, self._exit = rendezvous, report, exit_process
        self.config = config or HeartbeatConfig()
        self.rank, self.size = rendezvous.env.rank, rendezvous.env.size
        self._peers = [rank for rank in range(self.size) if rank != self.rank]
        self._stop, self._ending, self._heartbeating = threading.Event(), threading.Lock(), threading.Lock()
        self._lock = threading.Lock()  # guards the fields below
        self._final_status: bytes | None = None
        self._contact = 0.0  # when the store last answered
        self._beats = dict.fromkeys(self._peers, b"")
        self._changed = dict.fromkeys(self._peers, 0.0)
        self._reported: Failure | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        if self.size > 1:
            self._contact = time.monotonic()
            self._changed = dict.fromkeys(self._peers, self._contact)
            for loop in (self._heartbeat_loop, self._watch_loop):
                thread = threading.Thread(target=self._run_loop, args=(loop,), name=loop.__name__, daemon=True)
                self._threads.append(thread)
                thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an error heartbeats continue until its cause is known
            self.close()

    def close(self) -> None:
        """End this rank cleanly: the others stop waiting for its heartbeats."""
        self._stop.set()
        self._publish_status(DONE)
        for thread in self._threads:
            thread.join(self.config.interval)

    def stopping(self) -> None:
        """Tell the others that this rank ends because of a signal, so that they look for no fault here."""
        self._publish_status(STOPPED)

    def fail(self, error: BaseException) -> NoReturn:
        """End this process because of an exception: tell the others, or find the peer that caused it."""
        failure = Failure.from_error(error, self.rank)
        if failure.kind is FailureKind.lost and self.size > 1:
            failure = self._diagnose(failure)
        self._end_process(failure)

    def _publish_status(self, status: bytes) -> None:
        """Write a final status in place of the heartbeat; no heartbeat follows it."""
        if self.size == 1:
            return
        self._final_status = status
        locked = self._heartbeating.acquire(timeout=1.0)  # a heartbeat being written would overwrite the status
        self._with_timeout(1.0, lambda store: store.set(_heartbeat_key(self.rank), status.decode()))
        if locked:
            self._heartbeating.release()

    def _run_loop(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:  # without its threads this rank would look dead, or be deaf, for no stated reason
            self._end_process(Failure.from_error(error, self.rank))

    def _heartbeat_loop(self) -> None:
        store: Store | None = self._rendezvous.spare_connections[0]
        keys, count = [_heartbeat_key(rank) for rank in range(self.size)], 0
        while not self._stop.is_set():
            try:
                store = store or self._rendezvous.connection(self.config.timeout)
                count += 1
                with self._heartbeating:
                    if self._final_status is None:
                        store.set(keys[self.rank], str(count))
                if store.check(keys):
                    self._read_peers(store.multi_get(keys))
                if store.check([FAILURE_KEY]):
                    self._reported = Failure.from_json(store.get(FAILURE_KEY))
                with self._lock:
                    self._contact = time.monotonic()
            except (RuntimeError, ConnectionError, ExchangeError):
                store = None  # a broken connection stays broken: reconnect in the next round
            except (ValueError, KeyError, TypeError):  # of Failure.from_json
                text = f"{self._store_name} holds a message that gnnfleet did not write: rank {self.rank} ends"
                self._end_process(self._failure(FailureKind.cut_off, (self.rank,), text))
            self._stop.wait(self.config.interval)

    @property
    def _store_name(self) -> str:
        return f"the store at {self._rendezvous.env.host}:{self._rendezvous.env.port}"

    def _read_peers(self, beats: list[bytes]) -> None:
        now = time.monotonic()
        with self._lock:
            stall = now - self._contact
            for rank in self._peers:
                if stall > self.config.timeout / 2:  # the store answered nobody: peers could not write either
                    self._changed[rank] += stall
                if self._beats[rank] != beats[rank]:
                    self._beats[rank], self._changed[rank] = beats[rank], now

    def _watch_loop(self) -> None:
        tick = self.config.interval / 4
        last = time.monotonic()
        while not self._stop.wait(tick):
            now = time.monotonic()
            if now - last > self.config.timeout / 2:
                self._forgive_pause(now - last)  # this process itself was paused and could not watch
            last = now
            failure = self._check(now)
            if failure is not None:
                self._end_process(failure)

    def _forgive_pause(self, seconds: float) -> None:
        with self._lock:
            self._contact += seconds
            for rank in self._peers:
                self._changed[rank] += seconds

    def _check(self, now: float) -> Failure | None:
        """The failure for which this process must end now, if there is one."""
        if self._reported is not None and self._reported.found_by != self.rank:
            return self._adopt(self._reported)
        if silent := self._silent_ranks(self.config.timeout):
            return self._report_silent(silent, self.config.timeout)
        if now - self._contact > self.config.timeout:
            host = "the launcher" if self._rendezvous.env.external_store else self._rendezvous.name(0)
            return self._failure(
                FailureKind.cut_off,
                (self.rank,),
                f"rank {self.rank} has not reached {self._store_name} for {self.config.timeout:.0f} s: "
                f"{host}, its machine or the network is gone",
            )
        return None

    def _silent_ranks(self, seconds: float) -> tuple[int, ...]:
        """Peers without a new heartbeat for so long while the store answered; a final status is not silence."""
        with self._lock:
            return tuple(
                rank
                for rank in self._peers
                if self._contact - self._changed[rank] > seconds and self._beats[rank] not in (DONE, STOPPED)
            )

    def _report_silent(self, ranks: tuple[int, ...], seconds: float, context: str = "") -> Failure:
        names = ", ".join(self._rendezvous.name(rank) for rank in ranks)
        text = f"{names} sent no heartbeat for {seconds:.0f} s: killed, paused or cut off{context}"
        return self._failure(FailureKind.silent, ranks, text)

    def _adopt(self, reported: Failure) -> Failure:
        if self.rank in reported.ranks and reported.kind is FailureKind.silent:
            text = f"rank {self.rank} was silent for too long, so the others gave it up: it was paused or cut off"
            return self._failure(FailureKind.cut_off, (self.rank,), text)
        return replace(reported, found_by=self.rank, trace="")

    def _diagnose(self, failure: Failure) -> Failure:
        """Find the peer behind a failed exchange: its silence or its final status shows that it ended just now."""
        # The last heartbeat of a dead peer may still be read a little later.
        start = time.monotonic() + 2 * self.config.interval
        deadline = start + self.config.timeout
        settled: set[int] = set()
        stopped: tuple[int, ...] = ()
        while time.monotonic() < deadline and settled != set(self._peers):
            time.sleep(self.config.interval / 10)
            if self._reported is not None:
                return self._adopt(self._reported)
            if silent := self._silent_ranks(self.config.suspect_timeout):
                return self._report_silent(silent, self.config.suspect_timeout, f" ({failure.text})")
            with self._lock:
                settled |= {rank for rank in self._peers if self._beats[rank] in (DONE, STOPPED)}
                settled |= {rank for rank in self._peers if self._changed[rank] > start}
                stopped = tuple(rank for rank in self._peers if self._beats[rank] == STOPPED)
        if stopped:
            names = ", ".join(self._rendezvous.name(rank) for rank in stopped)
            return self._failure(FailureKind.stopped, stopped, f"{names} stopped because of a signal")
        # All peers are alive: the fault is in what was exchanged.
        return failure

    def _failure(self, kind: FailureKind, ranks: tuple[int, ...], text: str) -> Failure:
        return Failure(kind=kind, ranks=ranks, found_by=self.rank, text=text)

    def _end_process(self, failure: Failure) -> NoReturn:
        self._ending.acquire()  # never released: the first thread here ends the process
        try:
            if failure.kind is not FailureKind.cut_off:
                self._with_timeout(2.0, lambda store: store.compare_set(FAILURE_KEY, "", failure.as_json()))
            if failure.kind is FailureKind.silent:
                self._kill_local(failure.ranks)
            self._report(failure)
            if self._rendezvous.env.hosts_store and failure.found_by == self.rank:
                # The others read the failure in the store, which ends with this process.
                time.sleep(2.5 * self.config.interval)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
        finally:
            self._exit(failure.exit_code)

    def _kill_local(self, ranks: tuple[int, ...]) -> None:
        """Kill silent peers of this machine: a paused one must not come back, nor hold up the launcher."""
        own = self._rendezvous.members[self.rank]
        for rank in ranks:
            peer = self._rendezvous.members[rank]
            is_local = (peer.machine, peer.pids) == (own.machine, own.pids) and peer.pid != own.pid
            if is_local and peer.born and process_start_time(peer.pid) == peer.born:
                with contextlib.suppress(OSError):
                    os.kill(peer.pid, signal.SIGKILL)

    def _with_timeout(self, seconds: float, call: Callable[[Store], object]) -> None:
        """Use the store without holding up the end of this process."""

        def attempt() -> None:
            with contextlib.suppress(RuntimeError, ConnectionError):
                call(self._rendezvous.spare_connections[1])

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(seconds)
