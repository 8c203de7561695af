"""The coordinator's desk, in a thread of its own: rounds are opened, collected, averaged and published on time,
whatever else the coordinator is busy with.

A round is closed with those who are there: a trainer that is gone, silent or late is left out, and said so. Nothing is
counted twice or in another round than its own: letters name the era and the round they are for.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from gnnfleet.comm.message_store import MessageStore
from gnnfleet.errors import ExchangeError
from gnnfleet.graph.partition.node_assignment import NodeAssignment
from gnnfleet.strategies.tma.averaging import FlatLayout, OuterOptimizer, medoid_weights, weighted_mean
from gnnfleet.strategies.tma.config import TmaConfig
from gnnfleet.strategies.tma.protocol import (
    COORDINATOR_HEARTBEAT,
    HEARTBEAT_SECONDS,
    POLL_INTERVAL,
    RoundStart,
    RunState,
    TrainerUpdate,
    format_trainers,
    read_round_ack,
    read_update,
    tensor_bytes,
    write_round_start,
)

AHEAD = 4
"""Rounds of so many steps that may be closed before the loop has looked at them."""

_POLL, _HEAR = 0.005, 0.1  # seconds between looks at letters that are about to come, and at beats
_REMIND_SECONDS = 20  # rounds without somebody after which that is said again


@dataclass(frozen=True, eq=False)
class RoundResult:
    """A round that is over, with the state after it; by the clock, where others are over too, after the last of them,
    so that what is learnt of nodes is there once however long the loop looks elsewhere."""

    round: int
    state: int  # the round whose state this is
    weights: Tensor
    velocity: Tensor | None
    rows: Mapping[str, Tensor]  # all learnt rows of nodes, by name of the parameter
    trainers: tuple[int, ...]
    steps: int
    count: int
    loss: float
    bytes_kept: int  # edges that were trained on
    up: int  # bytes of weights that came
    down: int  # bytes of weights that each trainer takes
    external_workers: int  # bytes of learnt rows, optimizers and other parts' rows, both ways
    correction: Mapping[str, Tensor]  # what the coordinator's own optimizer remembers
    optimizer: Tensor | None  # the average of what the trainers' optimizers remember
    contributors: Mapping[
        int, Mapping[str, float]
    ]  # by trainer, bytes it has sent in this round, what it holds, its seconds
    seconds: float


class Correction(Protocol):
    """Steps on the whole graph after each round."""

    def apply(self, weights: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """The weights after them; ``rows`` are learnt ones of all nodes."""

    def memory(self) -> dict[str, Tensor]:
        """A copy of what its optimizer remembers."""


@dataclass(eq=False)
class EmbeddingTable:
    """Learnt rows of all nodes: a parameter, the type of its nodes, its rows."""

    kind: str
    rows: Tensor


@dataclass(eq=False)
class _TrainerStatus:
    """What is known of a trainer."""

    heartbeat: int = 0
    last_heard: float | None = None  # when a beat was last new
    steps: int = 0
    moved: float = 0.0  # when a step was last new
    missing: int | None = None  # the round that was last said to be closed without it
    late: bool = False  # it beats, but a round waited for it in vain


@dataclass(eq=False)
class Coordinator:
    """Runs rounds ``first`` to ``last`` − 1 from ``weights`` on."""

    config: TmaConfig
    trainers: int
    store: MessageStore
    layout: FlatLayout
    weights: Tensor
    first: int
    last: int
    assignment: NodeAssignment
    outer: OuterOptimizer
    optimizer: Tensor | None = None
    tables: Mapping[str, EmbeddingTable] = field(default_factory=dict)
    correction: Correction | None = None
    remote_rows: Callable[[int, Mapping[str, EmbeddingTable]], Tensor] | None = (
        None  # rows of nodes of all parts, for a round
    )
    log_user: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self._closed: queue.Queue[RoundResult | BaseException] = queue.Queue()
        self._room = threading.Semaphore(AHEAD)
        self._stop = threading.Event()
        self._known = [_TrainerStatus() for _ in range(self.trainers)]
        self._number, self._members = 0, tuple(range(self.trainers))
        self._own: dict[int, dict[str, Tensor]] = {}
        self._last = self._begun = time.monotonic()
        self._heard = 0.0
        self._was_reassigned = True  # trainers make what they work on before they begin
        self._newest: RoundResult | None = None
        self._thread = threading.Thread(target=self._run, name="tma-desk", daemon=True)
        self.newest = self.first - 1
        threading.Thread(target=self._heartbeat_loop, name="tma-beat", daemon=True).start()
        self._thread.start()

    # -- for the loop --

    def wait_round(self) -> RoundResult:
        """The next closed round; raises what went wrong at the desk."""
        while True:
            try:
                found = self._closed.get(timeout=0.5)
            except queue.Empty:
                if not self._thread.is_alive() and self._closed.empty():
                    raise ExchangeError("the desk of the coordinator ended without a word") from None
                continue
            if isinstance(found, BaseException):
                raise found
            self._room.release()
            newest = self._newest
            if self.config.steps or newest is None:
                return found
            state = ("state", "weights", "velocity", "rows", "correction", "optimizer")
            return replace(found, **{name: getattr(newest, name) for name in state})

    def close(self) -> bool:
        """Trainers hear that all is over; False where the desk is still busy with a correction."""
        self._stop.set()
        self._thread.join(10)
        return not self._thread.is_alive()

    # -- the desk itself --

    def _heartbeat_loop(self) -> None:
        """Also while the desk corrects or the loop evaluates."""
        post: MessageStore | None = None
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                post = post or self.store.reconnect()
                post.count(COORDINATOR_HEARTBEAT)
            except ExchangeError:
                post = None

    def _run(self) -> None:
        now = RunState(0, self.first)
        try:
            now = RunState(self.store.count("era"), self.first)
            self._assignment_for(self.first, {i for i in range(self.trainers) if not self._has_exited(i)})
            beside = self._publish(now, every=True)
            for number in range(self.first, self.last):
                now = RunState(now.incarnation, number)
                gives = self._collect(now)
                if gives is None:
                    break
                closed, beside = self._close_round(now, gives, beside)
                self.newest = number
                while self.config.steps and not self._room.acquire(timeout=0.5):  # a clock does not wait
                    if self._stop.is_set():
                        break
                if not self.config.steps:  # the loop may be far behind: only the newest has tables of all nodes
                    self._newest = closed
                    closed = replace(closed, rows={}, correction={}, optimizer=None)
                self._closed.put(closed)
                if self._stop.is_set():
                    break
            self._stop.wait()  # until all is kept: a coordinator that is started again needs trainers
        except BaseException as error:  # trainers wait: another coordinator may go on
            self._closed.put(error)
        else:
            with suppress(ExchangeError):  # then trainers find out by themselves
                self.store.write("now", {"era": now.incarnation, "round": now.round, "done": True})

    def _close_round(self, now: RunState, gives: dict[int, TrainerUpdate], beside: int) -> tuple[RoundResult, int]:
        """(what it came to, bytes that go beside the weights of the next)."""
        lost = [i for i, give in gives.items() if not all(map(_is_finite, (give.weights, *give.rows.values())))]
        for i in lost:
            self.log_user(f"round {now.round + 1}: the weights of trainer {i} are not finite, so they are not counted")
            del gives[i]
        worked = {i: give for i, give in sorted(gives.items()) if give.steps}
        up = sum(give.weights.nbytes for give in gives.values())
        for i, give in gives.items():
            beside += 0 if give.optimizer is None else give.optimizer.nbytes
            for name, rows in give.rows.items():
                self.tables[name].rows[self._ids(i)[self.tables[name].kind]] = rows
                beside += rows.nbytes
        if worked:
            self._average(list(worked.values()))
        if self.correction is not None:  # in every round, so that its place follows from their number
            self.weights = self.correction.apply(
                self.weights, {name: table.rows for name, table in self.tables.items()}
            )
        changed = self._assignment_for(
            now.round + 1, {i for i in range(self.trainers) if i in gives or not self._is_lost(i)}
        )
        self._was_reassigned = changed
        after = RunState(now.incarnation, now.round + 1)
        for i in range(self.trainers):
            for number in (now.round - 1, now.round):  # some come after their round is closed
                self.store.remove(f"give/{now.incarnation}/{number}/{i}")
        # Who came back in this round does not have its rows yet.
        absent = [i for i in range(self.trainers) if i not in gives or not gives[i].rows]
        more = 0
        if after.round < self.last:
            more = self._publish(after, every=changed, absent=absent)
        else:  # nobody has anything more to do
            write_round_start(self.store, RoundStart(after, self.weights[:0], None, None, self._number, ()))
        self.store.remove(f"take/{now.incarnation}/{now.round - 1}")
        count = sum(give.count for give in worked.values())
        closed = RoundResult(
            round=now.round,
            state=now.round,
            weights=self.weights,
            velocity=self.outer.velocity,
            rows={name: table.rows.clone() for name, table in self.tables.items()},
            trainers=tuple(sorted(gives)),
            steps=sum(give.steps for give in worked.values()),
            count=count,
            loss=sum(give.loss * give.count for give in worked.values()) / max(count, 1),
            bytes_kept=sum(give.edges for give in gives.values()),
            up=up,
            down=self.weights.nbytes,
            external_workers=beside,
            correction={} if self.correction is None else self.correction.memory(),
            optimizer=self.optimizer,
            contributors={i: {"bytes_sent": give.nbytes, **give.memory, **give.seconds} for i, give in gives.items()},
            seconds=time.monotonic() - self._last,
        )
        self._last = time.monotonic()
        return closed, more

    def _average(self, gives: Sequence[TrainerUpdate]) -> None:
        config = self.config
        rows = [give.weights for give in gives]
        weights = [
            float(give.edges if config.weighting == "edges" else give.steps if config.weighting == "steps" else 1)
            for give in gives
        ]
        if not sum(weights):
            weights = [1.0] * len(gives)
        if config.combine == "soft_medoid":
            weights = medoid_weights([row[: self.layout.embedding_names] for row in rows], weights, config.temperature)
        mean = weighted_mean(rows, weights)
        cut = self.layout.embedding_names
        if cut < len(mean):  # statistics are of rows that were seen, so they go by their number
            counts = [float(give.count) for give in gives]
            mean[cut:] = weighted_mean([row[cut:] for row in rows], counts if sum(counts) else weights)
        self.weights = self.outer.step(self.weights, mean, cut)
        known = [(give.optimizer, weight) for give, weight in zip(gives, weights, strict=True)]
        moments = [(row, weight) for row, weight in known if row is not None]
        if moments and len({len(row) for row, _ in moments}) == 1:
            self.optimizer = weighted_mean(*map(list, zip(*moments, strict=True)))

    def _publish(self, now: RunState, *, every: bool, absent: Sequence[int] = ()) -> int:
        """Bytes that go beside the weights."""
        remote = None if self.remote_rows is None else self.remote_rows(now.round, self.tables).to(self.layout.dtype)
        beside = 0
        for i in self._members if every else absent:
            if self.tables and i in self._members:
                rows = [table.rows[self._ids(i)[table.kind]] for table in self.tables.values()]
                body = tensor_bytes(rows)
                self.store.write(f"rows/{now.incarnation}/{now.round}/{i}", {}, body)
                beside += len(body)
        for i in range(self.trainers) if self.tables else ():
            self.store.remove(f"rows/{now.incarnation}/{now.round - 2}/{i}")
        take = RoundStart(now, self.weights, self.optimizer, remote, self._number, self._members)
        sent = write_round_start(self.store, take)
        return beside + (sent - self.weights.nbytes) * len(self._members)

    def _ids(self, trainer: int) -> dict[str, Tensor]:
        if trainer not in self._own:
            place = self._members.index(trainer)
            self._own[trainer] = self.assignment.nodes_of(place, len(self._members), self._number)
        return self._own[trainer]

    def _assignment_for(self, number: int, living: set[int] | None = None) -> bool:
        """Decide who has which nodes in a round; whether that changed."""
        before = self._number, self._members
        if self.config.repartition_every:
            self._number = number // self.config.repartition_every
        if self.config.on_trainer_loss == "reassign" and living:
            self._members = tuple(sorted(living))
        changed = (self._number, self._members) != before
        if changed:
            self._own.clear()
            if self._members != before[1]:
                self.log_user(f"round {number + 1}: nodes are dealt among {format_trainers(self._members)}")
        return changed

    def _collect(self, now: RunState) -> dict[int, TrainerUpdate] | None:
        """What trainers give for a round, by number; None when all is to end."""
        config = self.config
        if not config.steps:
            if self._stop.wait(max(0.0, self._round_starts(now) + config.interval - time.monotonic())):
                return None
            self.store.write(f"call/{now.incarnation}", {"round": now.round})
        gives: dict[int, TrainerUpdate] = {}
        called = first = short = time.monotonic()

        def is_late(i: int) -> bool:
            """After the call, or the first of those that make so many steps, for as long as it makes none."""
            since = max(first, self._known[i].moved) if config.steps else called
            return time.monotonic() - since > config.deadline

        while not self._stop.wait(POLL_INTERVAL if config.steps else _POLL):
            self._read_heartbeats()
            for i in self._members:
                if i not in gives and (give := read_update(self.store, now, i, self.layout.dtype)) is not None:
                    first = time.monotonic() if not gives else first
                    gives[i] = give
                    self._known[i].missing, self._known[i].late = None, False
            waiting = [i for i in self._members if i not in gives and self._is_alive(i) and self._is_active(now, i)]
            enough = len(gives) >= config.quorum
            if enough and all(map(is_late, waiting)):
                for i in waiting:
                    self._known[i].late = True
                self._report_missing(now, gives)
                return gives
            if not enough and not waiting:
                self._fail_early(now, gives)
                if any(i not in self._members and self._is_alive(i) for i in range(self.trainers)):
                    return {}  # somebody came back who has no nodes: they are dealt anew
            if len(gives) + len(waiting) >= config.quorum:  # they may take their time
                short = time.monotonic()
            if time.monotonic() - short > config.give_up:
                self._fail(now, gives, f"for {config.give_up:g} s")
        return None

    def _round_starts(self, now: RunState) -> float:
        """When a round by the clock begins: after the one before, or, where nodes were dealt anew, when all that are
        waited for have made what they work on. Those who have train meanwhile."""
        if self._was_reassigned:
            until = time.monotonic() + self.config.deadline
            while time.monotonic() < until and not self._stop.wait(POLL_INTERVAL):
                self._read_heartbeats()
                if not any(self._is_alive(i) and not self._has_begun(now, i) for i in self._members):
                    break
            if now.round == self.first:  # processes have started: that is no part of a round
                self._last = time.monotonic()
            return time.monotonic()
        return self._last

    def _has_begun(self, now: RunState, i: int) -> bool:
        return read_round_ack(self.store, i) == now or self.store.has(f"give/{now.incarnation}/{now.round}/{i}")

    def _read_heartbeats(self) -> None:
        """Beats and steps, not more often than they come."""
        if time.monotonic() - self._heard < _HEAR:
            return
        self._heard = time.monotonic()
        for i, trainer in enumerate(self._known):
            beats = self.store.count(f"beat/{i}", 0)
            if beats != trainer.heartbeat:
                trainer.heartbeat, trainer.last_heard = beats, time.monotonic()
                steps = self.store.count(f"steps/{i}", 0)
                if steps != trainer.steps:
                    trainer.steps, trainer.moved = steps, time.monotonic()

    def _is_alive(self, i: int) -> bool:
        """Whether a round waits for it; at the beginning also for one that has not said anything yet."""
        if self.store.has(f"gone/{i}"):
            return False
        heard = self._known[i].last_heard
        patience = self.config.silence if heard is not None else self.config.deadline
        return time.monotonic() - (self._begun if heard is None else heard) < patience

    def _is_lost(self, i: int) -> bool:
        """Whether others take over its nodes: it has ended for good, or was not heard for as long as a run waits."""
        heard = self._known[i].last_heard
        silent = time.monotonic() - (self._begun if heard is None else heard)
        return self._has_exited(i) if self.store.has(f"gone/{i}") else silent > self.config.give_up

    def _has_exited(self, i: int) -> bool:
        """Not by an error of its own, which its nodes might bring upon whoever takes them over."""
        letter = self.store.read(f"gone/{i}")
        return letter is not None and not letter.fields.get("raised")

    def _is_active(self, now: RunState, i: int) -> bool:
        """Who was waited for in vain, though it lives, may hang: it is not again until it has begun the round."""
        return not self._known[i].late or read_round_ack(self.store, i) == now

    def _report_missing(self, now: RunState, gives: Mapping[int, TrainerUpdate]) -> None:
        known = self._known
        without = [i for i in self._members if i not in gives]
        new = [i for i in without if (last := known[i].missing) is None or now.round - last >= _REMIND_SECONDS]
        for i in new:
            known[i].missing = now.round
        if new:
            why = {i: "has ended" if self.store.has(f"gone/{i}") else "is silent or late" for i in new}
            said = ", ".join(f"trainer {i} {why[i]}" for i in new)
            self.log_user(f"round {now.round + 1} is closed without {format_trainers(new)}: {said}; the run goes on")

    def _fail_early(self, now: RunState, gives: Mapping[int, TrainerUpdate]) -> None:
        """Those who are gone for good cannot make up a quorum."""
        gone = [i for i in range(self.trainers) if self.store.has(f"gone/{i}")]
        if self.trainers - len(gone) < self.config.quorum:
            self._fail(now, gives, "and the others have ended")

    def _fail(self, now: RunState, gives: Mapping[int, TrainerUpdate], why: str) -> None:
        missing = [i for i in range(self.trainers) if i not in gives]
        raise ExchangeError(
            f"round {now.round + 1} has {len(gives)} of the {self.config.quorum} trainers it needs {why}: "
            f"{format_trainers(missing)} {'is' if len(missing) == 1 else 'are'} missing; go on with --resume"
        )


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
