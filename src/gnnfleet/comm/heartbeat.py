"""Liveness: every rank beats once a second in the store; whoever is silent for ten ends the run for all.

A slow rank is healthy, however long an exchange takes. Beats are counters, and their age is the time since this process
saw them change, so clocks of machines are never compared. Two threads: one talks to the store and may hang when the
network does, the other judges and ends the process, whatever the main thread is waiting for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import NoReturn, Self

from torch._C._distributed_c10d import Store

from gnnfleet.comm.failure import Failure, FailureKind
from gnnfleet.comm.rendezvous import ProcessInfo, Rendezvous, process_start_time
from gnnfleet.errors import ExchangeError

DONE, STOPPED = b"done", b"stopped"


@dataclass(frozen=True)
class HeartbeatConfig:
    """Seconds between beats; of silence that mean death; of silence that explain an error that has happened."""

    interval: float = 1.0
    timeout: float = 10.0
    suspect_timeout: float = 3.0


class FailureDetector:
    """The heartbeat of this rank and its watch over the others.

    ``report`` is called once, in whichever thread finds that this process ends, just before it does.
    """

    def __init__(
        self,
        meeting: Rendezvous,
        report: Callable[[Failure], None],
        *,
        pace: HeartbeatConfig | None = None,
        leave: Callable[[int], NoReturn] = os._exit,
    ) -> None:
        self._rendezvous, self._report, self._exit = meeting, report, leave
        self.heartbeat = pace or HeartbeatConfig()
        self.rank, self.size = meeting.env.rank, meeting.env.size
        self._peers = [rank for rank in range(self.size) if rank != self.rank]
        self._stop, self._ending, self._heartbeating = threading.Event(), threading.Lock(), threading.Lock()
        self._table = threading.Lock()  # over all that follows
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
            for work in (self._heartbeat_loop, self._watch_loop):
                thread = threading.Thread(target=work, name=f"liveness {work.__name__}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # otherwise beats go on until it is known why this rank ends
            self.close()

    def close(self) -> None:
        """The clean end of this rank: others no longer wait for its beats."""
        self._stop.set()
        self._publish_status(DONE)
        for thread in self._threads:
            thread.join(self.heartbeat.interval)

    def stopping(self) -> None:
        """This rank was told to end: others need not look for a fault here."""
        self._publish_status(STOPPED)

    def fail(self, error: BaseException) -> NoReturn:
        """End because of an exception: tell the others, or find which of them is behind it."""
        failure = Failure.from_error(error, self.rank)
        if failure.kind is FailureKind.lost and self.size > 1:
            failure = self._diagnose(failure)
        self._end_process(failure)

    def _publish_status(self, word: bytes) -> None:
        """Put a last word in the place of the beat; no beat follows it."""
        if self.size == 1:
            return
        self._final_status = word
        held = self._heartbeating.acquire(timeout=1.0)  # a beat under way would undo it; one that hangs will not arrive
        self._with_timeout(1.0, lambda line: line.set(f"beat/{self.rank}", word.decode()))
        if held:
            self._heartbeating.release()

    def _heartbeat_loop(self) -> None:
        line: Store | None = self._rendezvous.spare_connections[0]
        keys, count = [f"beat/{rank}" for rank in range(self.size)], 0
        while not self._stop.is_set():
            try:
                line = line or self._rendezvous.connection(self.heartbeat.timeout)
                count += 1
                with self._heartbeating:
                    if self._final_status is None:
                        line.set(keys[self.rank], str(count))
                if line.check(keys):
                    self._read_peers(line.multi_get(keys))
                if line.check(["told"]):
                    self._reported = Failure.from_json(line.get("told"))
                with self._table:
                    self._contact = time.monotonic()
            except (RuntimeError, ConnectionError, ExchangeError):
                line = None  # once broken it stays so: the next round tries another
            except (ValueError, KeyError, TypeError):  # of Failure.from_json
                seat = self._rendezvous.env
                where = f"{seat.host}:{seat.port}"
                text = f"the store at {where} holds a message that gnnfleet did not write: rank {self.rank} ends"
                self._end_process(self._failure(FailureKind.cut_off, (self.rank,), text))
            self._stop.wait(self.heartbeat.interval)

    def _read_peers(self, beats: list[bytes]) -> None:
        now = time.monotonic()
        with self._table:
            stall = now - self._contact
            for rank in self._peers:
                if stall > self.heartbeat.timeout / 2:  # the store answered nobody: others could not beat either
                    self._changed[rank] += stall
                if self._beats[rank] != beats[rank]:
                    self._beats[rank], self._changed[rank] = beats[rank], now

    def _watch_loop(self) -> None:
        tick = self.heartbeat.interval / 4
        last = time.monotonic()
        while not self._stop.wait(tick):
            now = time.monotonic()
            if now - last > self.heartbeat.timeout / 2:
                self._forgive_pause(now - last)  # this process itself was paused: nobody was watched meanwhile
            last = now
            failure = self._check(now)
            if failure is not None:
                self._end_process(failure)

    def _forgive_pause(self, seconds: float) -> None:
        with self._table:
            self._contact += seconds
            for rank in self._peers:
                self._changed[rank] += seconds

    def _check(self, now: float) -> Failure | None:
        """Why this process must end now, if it must."""
        if self._reported is not None and self._reported.found_by != self.rank:
            return self._adopt(self._reported)
        if silent := self._silent_ranks(self.heartbeat.timeout):
            return self._report_silent(silent, self.heartbeat.timeout)
        if now - self._contact > self.heartbeat.timeout:
            seat = self._rendezvous.env
            keeper = "the launcher" if seat.external_store else self._rendezvous.name(0)
            return self._failure(
                FailureKind.cut_off,
                (self.rank,),
                f"rank {self.rank} has not reached the store at {seat.host}:{seat.port} for {self.heartbeat.timeout:.0f} s: "
                f"{keeper}, its machine or the network is gone",
            )
        return None

    def _silent_ranks(self, seconds: float) -> tuple[int, ...]:
        """Who has not been heard of for so long, while the store answered; last words are not silence."""
        with self._table:
            return tuple(
                rank
                for rank in self._peers
                if self._contact - self._changed[rank] > seconds and self._beats[rank] not in (DONE, STOPPED)
            )

    def _report_silent(self, ranks: tuple[int, ...], seconds: float, doing: str = "") -> Failure:
        names = ", ".join(self._rendezvous.name(rank) for rank in ranks)
        verb = "has" if len(ranks) == 1 else "have"
        text = f"{names} {verb} given no sign of life for {seconds:.0f} s: killed, paused or cut off{doing}"
        return self._failure(FailureKind.silent, ranks, text)

    def _adopt(self, told: Failure) -> Failure:
        if self.rank in told.ranks and told.kind is FailureKind.silent:
            text = f"rank {self.rank} was silent for so long that the others gave it up: it was paused or cut off"
            return self._failure(FailureKind.cut_off, (self.rank,), text)
        return changed(told, found_by=self.rank, trace="")

    def _diagnose(self, failure: Failure) -> Failure:
        """Who is behind a failed exchange: a peer that ended just now is known by its silence or its last word."""
        # The last beat of one that died may be heard of a little later.
        then = time.monotonic() + 2 * self.heartbeat.interval
        deadline = then + self.heartbeat.timeout
        settled: set[int] = set()
        stopped: tuple[int, ...] = ()
        while time.monotonic() < deadline and settled != set(self._peers):
            time.sleep(self.heartbeat.interval / 10)
            if self._reported is not None:
                return self._adopt(self._reported)
            if silent := self._silent_ranks(self.heartbeat.suspect_timeout):
                return self._report_silent(silent, self.heartbeat.suspect_timeout, f" ({failure.text})")
            with self._table:
                settled |= {rank for rank in self._peers if self._beats[rank] in (DONE, STOPPED)}
                settled |= {rank for rank in self._peers if self._changed[rank] > then}
                stopped = tuple(rank for rank in self._peers if self._beats[rank] == STOPPED)
        if stopped:
            names = ", ".join(self._rendezvous.name(rank) for rank in stopped)
            return self._failure(FailureKind.stopped, stopped, f"{names} stopped: told to by a signal")
        # All of them live: the fault is in what was exchanged.
        return failure

    def _failure(self, kind: FailureKind, ranks: tuple[int, ...], text: str) -> Failure:
        return Failure(kind=kind, ranks=ranks, found_by=self.rank, text=text)

    def _end_process(self, failure: Failure) -> NoReturn:
        self._ending.acquire()  # never given back: the first to come here ends the process
        try:
            if failure.kind is not FailureKind.cut_off:
                self._with_timeout(2.0, lambda line: line.compare_set("told", "", failure.as_json()))
            if failure.kind is FailureKind.silent:
                self._kill_local(failure.ranks)
            self._report(failure)
            if self._rendezvous.env.hosts_store and failure.found_by == self.rank:
                time.sleep(
                    2.5 * self.heartbeat.interval
                )  # the others hear of it in the store, which ends with this process
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
        finally:
            self._exit(failure.exit_code)

    def _kill_local(self, ranks: tuple[int, ...]) -> None:
        """End dead peers of this machine for good: a paused one must not come back, nor hold up the launcher."""
        own = self._rendezvous.members[self.rank]
        for rank in ranks:
            member: ProcessInfo = self._rendezvous.members[rank]
            same = (member.machine, member.pids) == (own.machine, own.pids) and member.pid != own.pid
            if same and member.born and process_start_time(member.pid) == member.born:
                with contextlib.suppress(OSError):
                    os.kill(member.pid, signal.SIGKILL)

    def _with_timeout(self, seconds: float, call: Callable[[Store], object]) -> None:
        """Try something with the store that must not hold up the end of this process."""

        def attempt() -> None:
            with contextlib.suppress(RuntimeError, ConnectionError):
                call(self._rendezvous.spare_connections[1])

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(seconds)
