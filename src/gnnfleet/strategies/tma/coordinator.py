"""The coordinator of a run: in a thread, it collects and averages the updates of each round and publishes the weights.

A round is closed without trainers that have exited, are silent or late; they are reported. Messages name their
incarnation and round, so no update counts twice or in another round.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import NoReturn

import torch
from torch import Tensor

from gnnfleet.errors import ExchangeError, RunError
from gnnfleet.graph.partition.node_assignment import NodeAssignment
from gnnfleet.strategies.protocol import StepRecord, Strategy
from gnnfleet.strategies.tma.averaging import FlatLayout, weighted_mean
from gnnfleet.strategies.tma.config import TmaConfig
from gnnfleet.strategies.tma.protocol import (
    HEARTBEAT_SECONDS,
    POLL_INTERVAL,
    RoundStart,
    RunMessages,
    RunState,
    TrainerUpdate,
)

MAX_PENDING_ROUNDS = 4
"""Rounds of a fixed number of steps that may be closed before the training loop has taken the first of them."""

_UPDATE_POLL, _HEARTBEAT_POLL = 0.005, 0.1  # seconds between reads of updates that are due, and of heartbeats
_REMIND_ROUNDS = 20  # rounds without a trainer after which it is reported again


class TrainerState(Enum):
    """The coordinator's view of a trainer."""

    JOINING = auto()  # no heartbeat yet, but it may still be starting
    ACTIVE = auto()
    LATE = auto()  # it has heartbeats, but missed a deadline and has not begun the present round
    SILENT = auto()  # no heartbeat for too long
    EXITED = auto()  # the launcher saw it end

    @property
    def is_alive(self) -> bool:
        return self not in (TrainerState.SILENT, TrainerState.EXITED)

    @property
    def is_awaited(self) -> bool:
        return self in (TrainerState.JOINING, TrainerState.ACTIVE)


@dataclass(frozen=True, eq=False)
class RoundStats:
    round: int
    trainers: tuple[int, ...]
    steps: int
    count: int
    loss: float
    edges: int  # that were trained on
    upload_bytes: int  # weights that were received
    download_bytes: int  # weights that each trainer receives
    side_bytes: int  # embedding rows, optimizer state and remote rows, in both directions
    reports: Mapping[int, Mapping[str, float]]  # by trainer: bytes sent in this round, memory, seconds
    seconds: float


@dataclass(frozen=True, eq=False)
class ModelSnapshot:
    """The model after a round, with everything that a checkpoint needs."""

    round: int
    weights: Tensor
    rows: Mapping[str, Tensor]  # all embedding rows, by parameter name
    correction: Mapping[str, Tensor]  # state of the correction's optimizer


class Correction:
    """Steps of a strategy on the whole graph, on a copy of the model and in the coordinator's thread.

    ``start`` is the first (epoch, step).
    """

    def __init__(self, strategy: Strategy, layout: FlatLayout, steps: int, start: tuple[int, int]) -> None:
        self._strategy, self._layout, self._steps = strategy, layout, steps
        self._records = self._stream(*start)

    def apply(self, weights: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the corrected weights; ``rows`` are the embedding rows of all nodes, which only trainers change."""
        state = self._strategy.state_dict()
        model = {**state["model"], **self._layout.unpack(weights), **rows}
        self._strategy.load_state_dict({**state, "model": model})
        for record in islice(self._records, self._steps):
            if not math.isfinite(record.loss):
                raise RunError(f"the loss of the correction is {record.loss}: try a smaller strategy.correction_lr")
        return self._layout.pack(self._strategy.state_dict()["model"])

    def close(self) -> None:
        self._records.close()

    def memory(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._strategy.state_dict()["optimizer"].items()}

    def _stream(self, epoch: int, first: int) -> Generator[StepRecord]:
        while True:
            yield from self._strategy.train_epoch(epoch, first)
            epoch, first = epoch + 1, 0


@dataclass(eq=False)
class EmbeddingTable:
    kind: str
    rows: Tensor


@dataclass(eq=False)
class _TrainerRecord:
    last_heard: float  # when its heartbeat last moved, or the coordinator started
    heartbeats: int = 0
    steps: int = 0
    last_step: float = 0.0
    missed_deadline: bool = False  # without an update since
    reported_missing: int | None = None  # the round it was last reported missing from

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self.last_heard


@dataclass(eq=False)
class Coordinator:
    """Runs rounds ``first`` to ``last`` − 1, starting with ``weights``."""

    config: TmaConfig
    trainers: int
    messages: RunMessages
    layout: FlatLayout
    weights: Tensor
    first: int
    last: int
    assignment: NodeAssignment
    tables: Mapping[str, EmbeddingTable] = field(default_factory=dict)
    correction: Correction | None = None
    remote_rows: Callable[[int, Mapping[str, EmbeddingTable]], Tensor] | None = None  # of all partitions, for a round
    log_user: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        # With timed rounds the loop may be far behind: it gets only the newest snapshot, and the queue has none.
        self._results: queue.Queue[tuple[RoundStats, ModelSnapshot | None] | BaseException] = queue.Queue()
        self._newest: ModelSnapshot | None = None
        self._room = threading.Semaphore(MAX_PENDING_ROUNDS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tma-coordinator", daemon=True)
        self._beats = threading.Thread(target=self._heartbeat_loop, name="tma-heartbeat", daemon=True)
        self._round_began = time.monotonic()
        self._records = [_TrainerRecord(self._round_began) for _ in range(self.trainers)]
        self._heartbeats_read = 0.0
        self._members = tuple(range(self.trainers))
        self._was_reassigned = True  # trainers build their subgraphs before the first round
        self._nodes: dict[int, dict[str, Tensor]] = {}  # of trainers, in the present assignment

    # -- for the training loop --

    def start(self) -> Coordinator:
        self._beats.start()
        self._thread.start()
        return self

    @property
    def newest_round(self) -> int:
        """The last closed round, which the training loop may not have taken yet."""
        return self.first - 1 if self._newest is None else self._newest.round

    def wait_round(self) -> tuple[RoundStats, ModelSnapshot]:
        """Wait for the next closed round; with timed rounds its snapshot is that of the newest round.

        Raises the error that ended the coordinator.
        """
        closed = self._results.get()
        if isinstance(closed, BaseException):
            raise closed
        self._room.release()
        stats, snapshot = closed[0], closed[1] or self._newest
        assert snapshot is not None
        return stats, snapshot

    def close(self) -> bool:
        """Mark the run as done; False if a correction is still being computed."""
        self._stop.set()
        self._thread.join(10)
        return not self._thread.is_alive()

    # -- the thread --

    def _heartbeat_loop(self) -> None:
        """Send heartbeats, also during corrections and evaluations."""
        messages: RunMessages | None = None
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                messages = messages or self.messages.reconnect()
                messages.beat()
            except ExchangeError:
                messages = None

    def _run(self) -> None:
        try:
            self._run_rounds()
            self._stop.wait()  # until the last checkpoint is written: a restarted coordinator needs trainers
        except BaseException as error:  # the run is not done: another coordinator may resume it
            self._results.put(error)
        else:
            with suppress(ExchangeError):  # trainers then notice the missing heartbeats
                self.messages.mark_done()

    def _run_rounds(self) -> None:
        state = RunState(self.messages.begin_incarnation(), self.first)
        self._assign_nodes(self.first, {i for i in range(self.trainers) if not self._is_lost(i)})
        side_bytes = self._publish(state, recipients=self._members)
        for number in range(self.first, self.last):
            state = RunState(state.incarnation, number)
            updates = self._collect(state)
            if updates is None:
                return
            stats, snapshot, side_bytes = self._close_round(state, updates, side_bytes)
            if number == self.first:  # trainers have left the rounds of former coordinators by now
                self.messages.remove_former(state)
            while self.config.steps and not self._room.acquire(timeout=0.5):  # timed rounds never wait
                if self._stop.is_set():
                    break
            self._newest = snapshot
            self._results.put((stats, snapshot if self.config.steps else None))
            if self._stop.is_set():
                return

    def _close_round(
        self, state: RunState, updates: dict[int, TrainerUpdate], side_bytes: int
    ) -> tuple[RoundStats, ModelSnapshot, int]:
        """Average a round and publish the next: (statistics, snapshot, side bytes of the next round)."""
        self._drop_nonfinite(state, updates)
        upload_bytes = sum(update.weights.nbytes for update in updates.values())
        side_bytes += sum(update.nbytes for update in updates.values()) - upload_bytes
        for i, update in updates.items():
            for name, rows in update.rows.items():
                self.tables[name].rows[self._nodes_of(i)[self.tables[name].kind]] = rows
        trained = {i: update for i, update in sorted(updates.items()) if update.steps}
        if trained:
            self._average(list(trained.values()))
        if self.correction is not None:  # in every round, so that the next batches follow from the number of rounds
            all_rows = {name: table.rows for name, table in self.tables.items()}
            self.weights = self.correction.apply(self.weights, all_rows)
        next_side_bytes = self._open_next(state, updates)
        count = sum(update.count for update in trained.values())
        stats = RoundStats(
            round=state.round,
            trainers=tuple(sorted(updates)),
            steps=sum(update.steps for update in trained.values()),
            count=count,
            loss=sum(update.loss * update.count for update in trained.values()) / max(count, 1),
            edges=sum(update.edges for update in updates.values()),
            upload_bytes=upload_bytes,
            download_bytes=self.weights.nbytes,
            side_bytes=side_bytes,
            reports={i: {"bytes_sent": u.nbytes, **u.memory, **u.seconds} for i, u in updates.items()},
            seconds=time.monotonic() - self._round_began,
        )
        snapshot = ModelSnapshot(
            round=state.round,
            weights=self.weights,
            rows={name: table.rows.clone() for name, table in self.tables.items()},
            correction={} if self.correction is None else self.correction.memory(),
        )
        self._round_began = time.monotonic()
        return stats, snapshot, next_side_bytes

    def _drop_nonfinite(self, state: RunState, updates: dict[int, TrainerUpdate]) -> None:
        for i, update in list(updates.items()):
            if not all(bool(torch.isfinite(t).all()) for t in (update.weights, *update.rows.values())):
                self.log_user(
                    f"Round {state.round + 1}: the weights of trainer {i} are not finite. They are left out of the "
                    "average."
                )
                del updates[i]

    def _average(self, updates: Sequence[TrainerUpdate]) -> None:
        rows = [update.weights for update in updates]
        shares = {
            "uniform": [1.0] * len(updates),
            "edges": [float(update.edges) for update in updates],
            "steps": [float(update.steps) for update in updates],
        }
        chosen = shares[self.config.weighting]
        weights = chosen if sum(chosen) else shares["uniform"]
        learned = self.layout.num_learned
        self.weights = mean = weighted_mean(rows, weights)
        if learned < len(mean):  # running statistics are weighted by the items behind them
            counts = [float(update.count) for update in updates]
            mean[learned:] = weighted_mean([row[learned:] for row in rows], counts if sum(counts) else weights)

    def _open_next(self, state: RunState, updates: Mapping[int, TrainerUpdate]) -> int:
        """Publish the weights after a round and remove old messages; returns the side bytes."""
        after, before = RunState(state.incarnation, state.round + 1), RunState(state.incarnation, state.round - 1)
        self._was_reassigned = self._assign_nodes(
            after.round, {i for i in range(self.trainers) if i in updates or not self._is_lost(i)}
        )
        self.messages.remove_updates(state)
        side_bytes = 0
        if after.round < self.last:
            # A trainer that returned in this round does not have its embedding rows yet.
            without_rows = tuple(i for i in self._members if i not in updates or not updates[i].rows)
            side_bytes = self._publish(after, recipients=self._members if self._was_reassigned else without_rows)
        else:  # the last round
            start = RoundStart(after, self.weights[:0], None, ())
            self.messages.write_round_start(start)
        self.messages.remove_round(before)  # with updates that came after their round
        return side_bytes

    def _publish(self, state: RunState, *, recipients: Sequence[int]) -> int:
        """Publish the weights of a round, and to ``recipients`` their embedding rows; returns the side bytes."""
        remote = None if self.remote_rows is None else self.remote_rows(state.round, self.tables).to(self.layout.dtype)
        side_bytes = 0
        for i in recipients if self.tables else ():
            rows = {name: table.rows[self._nodes_of(i)[table.kind]] for name, table in self.tables.items()}
            side_bytes += self.messages.write_rows(state, i, rows)
        start = RoundStart(state, self.weights, remote, self._members)
        sent = self.messages.write_round_start(start)
        return side_bytes + (sent - self.weights.nbytes) * len(self._members)

    def _nodes_of(self, trainer: int) -> dict[str, Tensor]:
        if trainer not in self._nodes:
            index = self._members.index(trainer)
            self._nodes[trainer] = self.assignment.nodes_of(index, len(self._members))
        return self._nodes[trainer]

    def _assign_nodes(self, number: int, living: set[int]) -> bool:
        """Assign the nodes for a round; True if the assignment changed."""
        before = self._members
        if self.config.on_trainer_loss == "reassign" and living:
            self._members = tuple(sorted(living))
        if self._members == before:
            return False
        names = format_trainers(self._members)
        self.log_user(f"Round {number + 1}: the trainers have changed. All nodes are reassigned to {names}.")
        self._nodes.clear()
        return True

    # -- trainers --

    def _collect(self, state: RunState) -> dict[int, TrainerUpdate] | None:
        """Wait for the updates of a round, by trainer; None if the run is to end."""
        config = self.config
        if not config.steps:
            if self._stop.wait(max(0.0, self._wait_begin(state) + config.interval - time.monotonic())):
                return None
            self.messages.request_collect(state)
        updates: dict[int, TrainerUpdate] = {}
        requested = first_update = quorum_possible = time.monotonic()

        def is_overdue(i: int) -> bool:
            """True if the deadline has passed since the request or, with fixed steps, the last step."""
            since = max(first_update, self._records[i].last_step) if config.steps else requested
            return time.monotonic() - since > config.deadline

        while not self._stop.wait(POLL_INTERVAL if config.steps else _UPDATE_POLL):
            self._read_heartbeats()
            for i in self._members:
                if i not in updates and (update := self.messages.read_update(state, i, self.layout.dtype)) is not None:
                    first_update = time.monotonic() if not updates else first_update
                    updates[i] = update
                    self._records[i].reported_missing, self._records[i].missed_deadline = None, False
            awaited = [i for i in self._members if i not in updates and self._state_of(i, state).is_awaited]
            has_quorum = len(updates) >= config.quorum
            if has_quorum and all(map(is_overdue, awaited)):
                for i in awaited:
                    self._records[i].missed_deadline = True
                self._report_missing(state, updates)
                return updates
            if not has_quorum and not awaited:
                exited = sum(self._state_of(i, state) is TrainerState.EXITED for i in range(self.trainers))
                if self.trainers - exited < config.quorum:
                    self._fail(state, updates, "and no other trainer is left")
                others = (i for i in range(self.trainers) if i not in self._members)
                if any(self._state_of(i, state).is_alive for i in others):
                    return {}  # a trainer without nodes returned: the nodes are reassigned
            if len(updates) + len(awaited) >= config.quorum:
                quorum_possible = time.monotonic()
            if time.monotonic() - quorum_possible > config.give_up:
                self._fail(state, updates, f"for {config.give_up:g} s")
        return None

    def _wait_begin(self, state: RunState) -> float:
        """Wait until a timed round begins; returns its start.

        It begins at the end of the previous round or, after a reassignment, when all living trainers have built their
        subgraphs. Trainers that are ready earlier train meanwhile.
        """
        if not self._was_reassigned:
            return self._round_began
        deadline = time.monotonic() + self.config.deadline
        while time.monotonic() < deadline and not self._stop.wait(POLL_INTERVAL):
            self._read_heartbeats()
            alive = [i for i in self._members if self._state_of(i, state).is_alive]
            if all(self.messages.has_acked(state, i) or self.messages.has_update(state, i) for i in alive):
                break
        if state.round == self.first:  # the time to start processes is no part of a round
            self._round_began = time.monotonic()
        return time.monotonic()

    def _read_heartbeats(self) -> None:
        """Read heartbeats and steps, at most once per interval."""
        now = time.monotonic()
        if now - self._heartbeats_read < _HEARTBEAT_POLL:
            return
        self._heartbeats_read = now
        for i, record in enumerate(self._records):
            heartbeats = self.messages.heartbeats(i)
            if heartbeats != record.heartbeats:
                record.heartbeats, record.last_heard = heartbeats, time.monotonic()
                steps = self.messages.steps(i)
                if steps != record.steps:
                    record.steps, record.last_step = steps, time.monotonic()

    def _state_of(self, i: int, state: RunState) -> TrainerState:
        record = self._records[i]
        if self.messages.read_exit(i) is not None:
            return TrainerState.EXITED
        if record.silent_seconds >= (self.config.silence if record.heartbeats else self.config.deadline):
            return TrainerState.SILENT
        if record.missed_deadline and not self.messages.has_acked(state, i):  # it may hang
            return TrainerState.LATE
        return TrainerState.ACTIVE if record.heartbeats else TrainerState.JOINING

    def _is_lost(self, i: int) -> bool:
        """True if the nodes of a trainer should be reassigned: it has exited, or was silent for ``give_up``.

        A trainer that failed keeps its nodes: they might cause the same error in another trainer.
        """
        failed = self.messages.read_exit(i)
        return self._records[i].silent_seconds > self.config.give_up if failed is None else not failed

    def _report_missing(self, state: RunState, updates: Mapping[int, TrainerUpdate]) -> None:
        missing = []
        for i in self._members:
            record = self._records[i]
            last = record.reported_missing
            if i in updates or (last is not None and state.round - last < _REMIND_ROUNDS):
                continue
            record.reported_missing = state.round
            reasons = {
                TrainerState.EXITED: "exited",
                TrainerState.SILENT: f"no heartbeat for {record.silent_seconds:.0f} s",
            }
            reason = reasons.get(self._state_of(i, state), f"no update within {self.config.deadline:g} s")
            missing.append(f"trainer {i} ({reason})")
        if missing:
            self.log_user(f"Round {state.round + 1} finished without {', '.join(missing)}. Training continues.")

    def _fail(self, state: RunState, updates: Mapping[int, TrainerUpdate], reason: str) -> NoReturn:
        missing = format_trainers([i for i in range(self.trainers) if i not in updates])
        raise ExchangeError(
            f"round {state.round + 1} has updates of {len(updates)} of the {self.config.quorum} trainers it needs: "
            f"{missing} missing, {reason}; continue with --resume"
        )


def format_trainers(numbers: Sequence[int]) -> str:
    """Format numbers of trainers for messages, as in "trainers 0, 2 and 3"."""
    *others, last = map(str, numbers)
    return f"trainers {', '.join(others)} and {last}" if others else f"trainer {last}"
