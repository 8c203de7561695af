"""What trainers and the coordinator write to each other.

era                      a number: how often a coordinator has begun; letters of former ones count for nothing
now                      {era, round, done}: the newest weights, and whether all is over
call/ERA                 {round}: trainers are to give what they have (only where a clock says when)
take/ERA/ROUND           weights before a round, {deal, …}
rows/ERA/ROUND/TRAINER   learnt rows of a trainer's nodes, for one that does not have them
took/TRAINER             {era, round}: what the trainer works on
give/ERA/ROUND/TRAINER   weights after a round, {steps, loss, …}
beat/TRAINER             a number that grows while the trainer lives
beat/coordinator         the same of the coordinator
seat/TRAINER             {token}: which process is this trainer; the last that sat down
gone/TRAINER             {raised}: left by whoever saw it end, perhaps with an error of its own
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnfleet.comm.message_store import RETRY_INTERVAL, HeartbeatReader, MessageStore, StoredMessage
from gnnfleet.errors import ExchangeError

COORDINATOR_HEARTBEAT = "beat/coordinator"
HEARTBEAT_SECONDS = 0.5
POLL_INTERVAL = 0.02


def tensor_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one dtype as bytes, one after the other."""
    flat = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors if t.numel()]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class RunState:
    """Where the run stands: ``round`` is the one whose weights are newest."""

    incarnation: int
    round: int
    done: bool = False


@dataclass(frozen=True, eq=False)
class RoundStart:
    """Weights to begin a round with."""

    state: RunState
    weights: Tensor
    optimizer: Tensor | None
    remote: Tensor | None  # [G, ·] rows of nodes of all parts
    assignment: int
    members: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TrainerUpdate:
    """What a trainer made of a round."""

    steps: int
    count: int  # items
    loss: float  # mean over them
    edges: int
    weights: Tensor
    optimizer: Tensor | None = None
    rows: Mapping[str, Tensor] = field(default_factory=dict)  # learnt rows of own nodes, by name of the parameter
    memory: Mapping[str, int] = field(default_factory=dict)  # what the trainer holds, for the record
    seconds: Mapping[str, float] = field(default_factory=dict)  # what it did with its time since it last gave

    @property
    def nbytes(self) -> int:
        more = sum(rows.nbytes for rows in self.rows.values())
        return self.weights.nbytes + more + (0 if self.optimizer is None else self.optimizer.nbytes)


def write_round_start(post: MessageStore, take: RoundStart) -> int:
    """Publish; bytes of it."""
    extra = [t for t in (take.optimizer, take.remote) if t is not None]
    words = {
        "deal": take.assignment,
        "among": take.members,
        "weights": take.weights.nbytes,
        "optimizer": None if take.optimizer is None else take.optimizer.nbytes,
        "remote": None if take.remote is None else list(take.remote.shape),
    }
    body = tensor_bytes([take.weights, *extra])
    post.write(f"take/{take.state.incarnation}/{take.state.round}", words, body)
    post.write("now", {"era": take.state.incarnation, "round": take.state.round, "done": take.state.done})
    return len(body)


def read_round_start(post: MessageStore, now: RunState, dtype: torch.dtype) -> RoundStart | None:
    letter = post.read(f"take/{now.incarnation}/{now.round}")
    if letter is None:
        return None
    words, parts = letter.fields, _BodyReader(letter)
    weights = parts.next(words["weights"], dtype)
    optimizer = None if words["optimizer"] is None else parts.next(words["optimizer"], dtype)
    remote = None
    if words["remote"] is not None:
        shape = words["remote"]
        remote = parts.next(shape[0] * shape[1] * dtype.itemsize, dtype).view(shape)
    return RoundStart(now, weights, optimizer, remote, words["deal"], tuple(words["among"]))


CHECKPOINTED = "kept"
"""The letter that says which round has the newest checkpoint: what trainers remember of rounds before it can go."""


def write_round_ack(post: MessageStore, now: RunState, trainer: int) -> None:
    post.write(f"took/{trainer}", {"era": now.incarnation, "round": now.round})


def read_round_ack(post: MessageStore, trainer: int) -> RunState | None:
    """The round that a trainer has begun last."""
    letter = post.read(f"took/{trainer}")
    return None if letter is None else RunState(letter.fields["era"], letter.fields["round"])


def write_update(post: MessageStore, now: RunState, trainer: int, give: TrainerUpdate) -> int:
    """Hand over a round; bytes of it."""
    extra = [] if give.optimizer is None else [give.optimizer]
    words = {
        "steps": give.steps,
        "count": give.count,
        "loss": give.loss,
        "edges": give.edges,
        "memory": dict(give.memory),
        "seconds": dict(give.seconds),
        "weights": give.weights.nbytes,
        "optimizer": None if give.optimizer is None else give.optimizer.nbytes,
        "rows": {name: list(rows.shape) for name, rows in give.rows.items()},
    }
    body = tensor_bytes([give.weights, *extra, *give.rows.values()])
    post.write(f"give/{now.incarnation}/{now.round}/{trainer}", words, body)
    return len(body)


def read_update(post: MessageStore, now: RunState, trainer: int, dtype: torch.dtype) -> TrainerUpdate | None:
    letter = post.read(f"give/{now.incarnation}/{now.round}/{trainer}")
    if letter is None:
        return None
    words, parts = letter.fields, _BodyReader(letter)
    weights = parts.next(words["weights"], dtype)
    optimizer = None if words["optimizer"] is None else parts.next(words["optimizer"], dtype)
    rows = {}
    for name, shape in words["rows"].items():
        rows[name] = parts.next(shape[0] * shape[1] * dtype.itemsize, dtype).view(shape)
    numbers = words["steps"], words["count"], words["loss"], words["edges"]
    return TrainerUpdate(*numbers, weights, optimizer, rows, words["memory"], words["seconds"])


class _BodyReader:
    """The body of a letter, piece by piece."""

    def __init__(self, letter: StoredMessage) -> None:
        self._body, self._at = letter.body, 0

    def next(self, nbytes: int, dtype: torch.dtype) -> Tensor:
        piece = self._body[self._at : self._at + nbytes].clone().view(dtype)
        self._at += nbytes
        return piece


class CoordinatorClient:
    """A trainer's eye on the coordinator, in a thread of its own: beats, and knows the newest state and call.

    ``lost`` is called, in that thread, when nothing was heard of the coordinator for ``give_up`` seconds: the server of
    the post is not its own, and answers when it is paused. Whoever sits down
    takes the trainer's number over: a process that was silent and replaced finds ``replaced`` when it is back.
    """

    def __init__(self, post: MessageStore, trainer: int, *, give_up: float, lost: Callable[[str], None]) -> None:
        self.state: RunState | None = None
        self.replaced = False
        self._token = secrets.token_hex(8)
        self.collect_requested = -1  # the round that is asked for, in the present era
        self.steps = 0  # that the trainer has made; told with the next beat
        self._post, self._trainer = post, trainer
        self._give_up, self._lost = give_up, lost
        self._stop = threading.Event()
        self._seen = time.monotonic()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._look, self._guard)]

    def __enter__(self) -> CoordinatorClient:
        self._post.write(f"seat/{self._trainer}", {"token": self._token})
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._threads[0].join(5)

    def _look(self) -> None:
        post, beat, told, pulse = self._post, 0.0, 0, HeartbeatReader(COORDINATOR_HEARTBEAT)
        while not self._stop.is_set():
            try:
                if time.monotonic() - beat >= HEARTBEAT_SECONDS:
                    seat = post.read(f"seat/{self._trainer}")
                    if seat is not None and seat.fields["token"] != self._token:
                        self.replaced = True
                        return
                    post.count(f"beat/{self._trainer}")
                    if (more := self.steps - told) > 0:
                        post.count(f"steps/{self._trainer}", more)
                        told += more
                    if post.has(gone := f"gone/{self._trainer}"):  # of another process with this number
                        post.remove(gone)
                    beat = time.monotonic()
                    self._seen = beat - pulse.silent_seconds(post)
                letter = post.read("now")
                if letter is not None:
                    now = RunState(**letter.fields)
                    call = post.read(f"call/{now.incarnation}")
                    self.collect_requested = -1 if call is None else int(call.fields["round"])
                    self.state = now
            except ExchangeError:
                self._stop.wait(RETRY_INTERVAL)
                try:
                    post = self._post.reconnect()
                except ExchangeError:
                    continue
            self._stop.wait(POLL_INTERVAL)

    def _guard(self) -> None:
        before = 0.0  # a process that was paused looks silent until it has looked again
        while not self._stop.wait(1.0) and not self.replaced:
            silent, last = time.monotonic() - self._seen, before
            before = silent
            if last > self._give_up and silent > self._give_up + 3:
                self._lost(f"trainer {self._trainer} has not heard of the coordinator for {silent:.0f} s")
                return


def format_trainers(present: Sequence[int]) -> str:
    """Trainers by number, for people."""
    names = ", ".join(map(str, present))
    return f"trainer {names}" if len(present) == 1 else f"trainers {names}"
