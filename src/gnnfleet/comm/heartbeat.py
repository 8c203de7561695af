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

from gnnfleet.comm.failure import Failure, Kind
from gnnfleet.comm.rendezvous import Meeting, Member, born
from gnnfleet.errors import ExchangeError

DONE, STOPPED = b"done", b"stopped"


@dataclass(frozen=True)
class Pace:
    """Seconds between beats; of silence that mean death; of silence that explain an error that has happened."""

    beat: float = 1.0
    dead: float = 10.0
    suspect: float = 3.0


class Liveness:
    """The heartbeat of this rank and its watch over the others.

    ``report`` is called once, in whichever thread finds that this process ends, just before it does.
    """

    def __init__(
        self,
        meeting: Meeting,
        report: Callable[[Failure], None],
        *,
        pace: Pace | None = None,
        leave: Callable[[int], NoReturn] = os._exit,
    ) -> None:
        self._meeting, self._report, self._leave = meeting, report, leave
        self.pace = pace or Pace()
        self.rank, self.size = meeting.seat.rank, meeting.seat.size
        self._peers = [rank for rank in range(self.size) if rank != self.rank]
        self._stop, self._ending, self._speaking = threading.Event(), threading.Lock(), threading.Lock()
        self._table = threading.Lock()  # over all that follows
        self._last_word: bytes | None = None
        self._contact = 0.0  # when the store last answered
        self._beats = dict.fromkeys(self._peers, b"")
        self._changed = dict.fromkeys(self._peers, 0.0)
        self._told: Failure | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        if self.size > 1:
            self._contact = time.monotonic()
            self._changed = dict.fromkeys(self._peers, self._contact)
            for work in (self._talk, self._judge):
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
        self._say(DONE)
        for thread in self._threads:
            thread.join(self.pace.beat)

    def stopping(self) -> None:
        """This rank was told to end: others need not look for a fault here."""
        self._say(STOPPED)

    def fail(self, error: BaseException) -> NoReturn:
        """End because of an exception: tell the others, or find which of them is behind it."""
        failure = Failure.of(error, self.rank)
        if failure.kind is Kind.lost and self.size > 1:
            failure = self._explain(failure)
        self._end(failure)

    def _say(self, word: bytes) -> None:
        """Put a last word in the place of the beat; no beat follows it."""
        if self.size == 1:
            return
        self._last_word = word
        held = self._speaking.acquire(timeout=1.0)  # a beat under way would undo it; one that hangs will not arrive
        self._within(1.0, lambda line: line.set(f"beat/{self.rank}", word.decode()))
        if held:
            self._speaking.release()

    def _talk(self) -> None:
        line: Store | None = self._meeting.lines[0]
        keys, count = [f"beat/{rank}" for rank in range(self.size)], 0
        while not self._stop.is_set():
            try:
                line = line or self._meeting.line(self.pace.dead)
                count += 1
                with self._speaking:
                    if self._last_word is None:
                        line.set(keys[self.rank], str(count))
                if line.check(keys):
                    self._hear(line.multi_get(keys))
                if line.check(["told"]):
                    self._told = Failure.from_json(line.get("told"))
                with self._table:
                    self._contact = time.monotonic()
            except (RuntimeError, ConnectionError, ExchangeError):
                line = None  # once broken it stays so: the next round tries another
            except (ValueError, KeyError, TypeError):  # of Failure.from_json
                seat = self._meeting.seat
                where = f"{seat.host}:{seat.port}"
                text = f"the store at {where} holds a message that gnnfleet did not write: rank {self.rank} ends"
                self._end(self._failure(Kind.cut_off, (self.rank,), text))
            self._stop.wait(self.pace.beat)

    def _hear(self, beats: list[bytes]) -> None:
        now = time.monotonic()
        with self._table:
            stall = now - self._contact
            for rank in self._peers:
                if stall > self.pace.dead / 2:  # the store answered nobody: others could not beat either
                    self._changed[rank] += stall
                if self._beats[rank] != beats[rank]:
                    self._beats[rank], self._changed[rank] = beats[rank], now

    def _judge(self) -> None:
        tick = self.pace.beat / 4
        last = time.monotonic()
        while not self._stop.wait(tick):
            now = time.monotonic()
            if now - last > self.pace.dead / 2:
                self._skip(now - last)  # this process itself was paused: nobody was watched meanwhile
            last = now
            failure = self._verdict(now)
            if failure is not None:
                self._end(failure)

    def _skip(self, seconds: float) -> None:
        with self._table:
            self._contact += seconds
            for rank in self._peers:
                self._changed[rank] += seconds

    def _verdict(self, now: float) -> Failure | None:
        """Why this process must end now, if it must."""
        if self._told is not None and self._told.found_by != self.rank:
            return self._follow(self._told)
        if silent := self._silent(self.pace.dead):
            return self._accuse(silent, self.pace.dead)
        if now - self._contact > self.pace.dead:
            seat = self._meeting.seat
            keeper = "the launcher" if seat.hosted else self._meeting.name(0)
            return self._failure(
                Kind.cut_off,
                (self.rank,),
                f"rank {self.rank} has not reached the store at {seat.host}:{seat.port} for {self.pace.dead:.0f} s: "
                f"{keeper}, its machine or the network is gone",
            )
        return None

    def _silent(self, seconds: float) -> tuple[int, ...]:
        """Who has not been heard of for so long, while the store answered; last words are not silence."""
        with self._table:
            return tuple(
                rank
                for rank in self._peers
                if self._contact - self._changed[rank] > seconds and self._beats[rank] not in (DONE, STOPPED)
            )

    def _accuse(self, ranks: tuple[int, ...], seconds: float, doing: str = "") -> Failure:
        names = ", ".join(self._meeting.name(rank) for rank in ranks)
        verb = "has" if len(ranks) == 1 else "have"
        text = f"{names} {verb} given no sign of life for {seconds:.0f} s: killed, paused or cut off{doing}"
        return self._failure(Kind.silent, ranks, text)

    def _follow(self, told: Failure) -> Failure:
        if self.rank in told.ranks and told.kind is Kind.silent:
            text = f"rank {self.rank} was silent for so long that the others gave it up: it was paused or cut off"
            return self._failure(Kind.cut_off, (self.rank,), text)
        return changed(told, found_by=self.rank, trace="")

    def _explain(self, failure: Failure) -> Failure:
        """Who is behind a failed exchange: a peer that ended just now is known by its silence or its last word."""
        # The last beat of one that died may be heard of a little later.
        then = time.monotonic() + 2 * self.pace.beat
        deadline = then + self.pace.dead
        settled: set[int] = set()
        stopped: tuple[int, ...] = ()
        while time.monotonic() < deadline and settled != set(self._peers):
            time.sleep(self.pace.beat / 10)
            if self._told is not None:
                return self._follow(self._told)
            if silent := self._silent(self.pace.suspect):
                return self._accuse(silent, self.pace.suspect, f" ({failure.text})")
            with self._table:
                settled |= {rank for rank in self._peers if self._beats[rank] in (DONE, STOPPED)}
                settled |= {rank for rank in self._peers if self._changed[rank] > then}
                stopped = tuple(rank for rank in self._peers if self._beats[rank] == STOPPED)
        if stopped:
            names = ", ".join(self._meeting.name(rank) for rank in stopped)
            return self._failure(Kind.stopped, stopped, f"{names} stopped: told to by a signal")
        # All of them live: the fault is in what was exchanged.
        return failure

    def _failure(self, kind: Kind, ranks: tuple[int, ...], text: str) -> Failure:
        return Failure(kind=kind, ranks=ranks, found_by=self.rank, text=text)

    def _end(self, failure: Failure) -> NoReturn:
        self._ending.acquire()  # never given back: the first to come here ends the process
        try:
            if failure.kind is not Kind.cut_off:
                self._within(2.0, lambda line: line.compare_set("told", "", failure.as_json()))
            if failure.kind is Kind.silent:
                self._fence(failure.ranks)
            self._report(failure)
            if self._meeting.seat.keeps_store and failure.found_by == self.rank:
                time.sleep(2.5 * self.pace.beat)  # the others hear of it in the store, which ends with this process
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
        finally:
            self._leave(failure.exit_code)

    def _fence(self, ranks: tuple[int, ...]) -> None:
        """End dead peers of this machine for good: a paused one must not come back, nor hold up the launcher."""
        own = self._meeting.members[self.rank]
        for rank in ranks:
            member: Member = self._meeting.members[rank]
            same = (member.machine, member.pids) == (own.machine, own.pids) and member.pid != own.pid
            if same and member.born and born(member.pid) == member.born:
                with contextlib.suppress(OSError):
                    os.kill(member.pid, signal.SIGKILL)

    def _within(self, seconds: float, call: Callable[[Store], object]) -> None:
        """Try something with the store that must not hold up the end of this process."""

        def attempt() -> None:
            with contextlib.suppress(RuntimeError, ConnectionError):
                call(self._meeting.lines[1])

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(seconds)
