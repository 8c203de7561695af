"""Messages between the launcher, the coordinator and the trainers of a run: every key and every layout.

incarnation                        number of coordinators started so far; messages of former ones are ignored
state                              {incarnation, round, done}: the newest weights; done: the run is over
collect/INCARNATION                {round}: updates of this round are due (only timed rounds)
weights/INCARNATION/ROUND          weights at the start of a round, {members, …}
rows/INCARNATION/ROUND/TRAINER     embedding rows of a trainer's nodes, if the trainer does not have them
ack/TRAINER                        {incarnation, round}: the round that a trainer works on
update/INCARNATION/ROUND/TRAINER   weights after a round, {steps, loss, …}
heartbeat/ROLE                     a counter of heartbeats of a trainer or the coordinator
steps/TRAINER                      a counter of optimizer steps
lease/TRAINER                      {token}: the process with this trainer's number; the last to take the lease
exited/TRAINER                     {failed}: written by the launcher when a trainer has ended, perhaps by its own error
checkpointed                       {round}: the round of the newest checkpoint
spec, failed                       the run, for trainers that join; a mark that it failed
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gnnfleet.comm.message_store import RETRY_INTERVAL, HeartbeatReader, MessageStore
from gnnfleet.errors import ExchangeError

HEARTBEAT_SECONDS = 0.5
POLL_INTERVAL = 0.02


@dataclass(frozen=True)
class RunState:
    """Progress of the run: ``round`` is the one whose weights are newest."""

    incarnation: int
    round: int
    done: bool = False

    @property
    def path(self) -> str:
        return f"{self.incarnation}/{self.round}"


@dataclass(frozen=True, eq=False)
class RoundStart:
    """Weights at the start of a round, and the trainers that share the nodes."""

    state: RunState
    weights: Tensor
    remote: Tensor | None  # [G, ·] rows of nodes of all partitions
    members: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TrainerUpdate:
    steps: int
    count: int  # items
    loss: float  # mean over them
    edges: int
    weights: Tensor
    rows: Mapping[str, Tensor] = field(default_factory=dict)  # embedding rows of its nodes, by parameter name
    memory: Mapping[str, int] = field(default_factory=dict)  # memory of the trainer, for the record
    seconds: Mapping[str, float] = field(default_factory=dict)  # seconds by phase since its last update

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + sum(rows.nbytes for rows in self.rows.values())


class RunMessages:
    """Typed access to the messages of a run, for one thread."""

    def __init__(self, store: MessageStore) -> None:
        self.store = store

    def reconnect(self, *, retry_seconds: float = 0.0) -> RunMessages:
        return RunMessages(self.store.reconnect(retry_seconds=retry_seconds))

    # -- the run --

    def publish_run(self, spec: str, model_source: bytes) -> None:
        """Publish a run for trainers on other machines: its spec as JSON, and the source of its model file."""
        source = torch.frombuffer(bytearray(model_source), dtype=torch.uint8) if model_source else None
        self.store.write("spec", {"spec": spec}, source)

    def read_run(self) -> tuple[str, bytes] | None:
        """Read the spec and the source of the model file."""
        message = self.store.read("spec")
        return None if message is None else (message.fields["spec"], message.body.numpy().tobytes())

    def mark_failed(self) -> None:
        self.store.write("failed", {})

    def has_failed(self) -> bool:
        return self.store.has("failed")

    def begin_incarnation(self) -> int:
        return self.store.count("incarnation")

    def write_state(self, state: RunState) -> None:
        self.store.write("state", {"incarnation": state.incarnation, "round": state.round, "done": state.done})

    def read_state(self) -> RunState | None:
        message = self.store.read("state")
        return None if message is None else RunState(**message.fields)

    def mark_done(self) -> None:
        """Mark the run as over, if it has begun."""
        if (state := self.read_state()) is not None:
            self.write_state(replace(state, done=True))

    def write_checkpointed(self, round: int) -> None:
        self.store.write("checkpointed", {"round": round})

    def read_checkpointed(self) -> int | None:
        """Read the round of the newest checkpoint: trainers keep nothing of rounds before it."""
        message = self.store.read("checkpointed")
        return None if message is None else int(message.fields["round"])

    # -- rounds --

    def write_round_start(self, start: RoundStart) -> int:
        """Publish the weights of a round and make it the newest; returns the bytes of the message."""
        shapes, body = _pack({"weights": start.weights, "remote": start.remote})
        fields = {"members": start.members, "shapes": shapes}
        self.store.write(f"weights/{start.state.path}", fields, body)
        self.write_state(start.state)
        return len(body)

    def read_round_start(self, state: RunState, dtype: torch.dtype) -> RoundStart | None:
        message = self.store.read(f"weights/{state.path}")
        if message is None:
            return None
        fields, tensors = message.fields, _unpack(message.fields["shapes"], message.body, dtype)
        return RoundStart(state, tensors["weights"], tensors.get("remote"), tuple(fields["members"]))

    def write_rows(self, state: RunState, trainer: int, rows: Mapping[str, Tensor]) -> int:
        """Send a trainer the embedding rows of its nodes; returns the bytes of the message."""
        shapes, body = _pack(rows)
        self.store.write(f"rows/{state.path}/{trainer}", {"shapes": shapes}, body)
        return len(body)

    def read_rows(self, state: RunState, trainer: int, dtype: torch.dtype) -> dict[str, Tensor] | None:
        message = self.store.read(f"rows/{state.path}/{trainer}")
        return None if message is None else _unpack(message.fields["shapes"], message.body, dtype)

    def request_collect(self, state: RunState) -> None:
        self.store.write(f"collect/{state.incarnation}", {"round": state.round})

    def collect_requested(self, incarnation: int) -> int:
        """Read the last round whose updates are due; −1 before the first."""
        message = self.store.read(f"collect/{incarnation}")
        return -1 if message is None else int(message.fields["round"])

    def write_ack(self, state: RunState, trainer: int) -> None:
        self.store.write(f"ack/{trainer}", {"incarnation": state.incarnation, "round": state.round})

    def has_acked(self, state: RunState, trainer: int) -> bool:
        """True if a trainer has begun this round and no later one."""
        message = self.store.read(f"ack/{trainer}")
        return message is not None and RunState(**message.fields) == state

    def write_update(self, state: RunState, trainer: int, update: TrainerUpdate) -> int:
        """Send the update of a round; returns the bytes of the message."""
        rows = {f"rows/{name}": rows for name, rows in update.rows.items()}
        shapes, body = _pack({"weights": update.weights, **rows})
        fields = {
            "figures": [update.steps, update.count, update.loss, update.edges],
            "memory": dict(update.memory),
            "seconds": dict(update.seconds),
            "shapes": shapes,
        }
        self.store.write(f"update/{state.path}/{trainer}", fields, body)
        return len(body)

    def read_update(self, state: RunState, trainer: int, dtype: torch.dtype) -> TrainerUpdate | None:
        message = self.store.read(f"update/{state.path}/{trainer}")
        if message is None:
            return None
        fields, tensors = message.fields, _unpack(message.fields["shapes"], message.body, dtype)
        weights = tensors.pop("weights")
        rows = {name.removeprefix("rows/"): rows for name, rows in tensors.items()}
        steps, count, loss, edges = fields["figures"]
        report = fields["memory"], fields["seconds"]
        return TrainerUpdate(steps, count, loss, edges, weights, rows, *report)

    def has_update(self, state: RunState, trainer: int) -> bool:
        return self.store.has(f"update/{state.path}/{trainer}")

    def remove_updates(self, state: RunState) -> None:
        self.store.remove_where(lambda key: key.startswith(f"update/{state.path}/"))

    def remove_round(self, state: RunState) -> None:
        """Remove all messages of a round."""
        self.store.remove_where(lambda key: f"{key}/".partition("/")[2].startswith(f"{state.path}/"))

    def remove_former(self, state: RunState) -> None:
        """Remove all messages of incarnations before that of ``state``."""

        def is_former(key: str) -> bool:
            kind, *path = key.split("/")
            return kind in ("collect", "weights", "rows", "update") and int(path[0]) < state.incarnation

        self.store.remove_where(is_former)

    # -- liveness --

    def beat(self, role: int | str = "coordinator") -> int:
        """Add a heartbeat of a trainer or the coordinator; returns their number."""
        return self.store.count(f"heartbeat/{role}")

    def heartbeats(self, role: int | str = "coordinator") -> int:
        return self.store.count(f"heartbeat/{role}", 0)

    def add_steps(self, trainer: int, steps: int) -> None:
        self.store.count(f"steps/{trainer}", steps)

    def steps(self, trainer: int) -> int:
        return self.store.count(f"steps/{trainer}", 0)

    def take_lease(self, trainer: int, token: str) -> None:
        self.store.write(f"lease/{trainer}", {"token": token})

    def holds_lease(self, trainer: int, token: str) -> bool:
        """False once another process has taken this trainer's number."""
        message = self.store.read(f"lease/{trainer}")
        return message is None or message.fields["token"] == token

    def write_exit(self, trainer: int, *, failed: bool = False) -> None:
        self.store.write(f"exited/{trainer}", {"failed": failed})

    def read_exit(self, trainer: int) -> bool | None:
        """True if a trainer has ended by its own error, False if by another cause; None if it has not ended."""
        message = self.store.read(f"exited/{trainer}")
        return None if message is None else bool(message.fields["failed"])

    def clear_exit(self, trainer: int) -> None:
        """Remove the notice that a former process of this trainer has ended."""
        if self.store.has(key := f"exited/{trainer}"):
            self.store.remove(key)


def _pack(tensors: Mapping[str, Tensor | None]) -> tuple[dict[str, list[int]], Tensor]:
    """Pack tensors of one dtype into the body of a message: ({name: shape}, bytes)."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    flat = [t.detach().contiguous().view(-1).view(torch.uint8) for t in present.values() if t.numel()]
    body = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
    return {name: list(tensor.shape) for name, tensor in present.items()}, body


def _unpack(shapes: Mapping[str, list[int]], body: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Undo ``_pack``."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in shapes.values()]
    pieces = torch.split(body, sizes)
    return {
        name: piece.clone().view(dtype).view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }


class CoordinatorClient:
    """Sends a trainer's heartbeats and polls the state of the run.

    ``on_lost`` is called in another thread after ``give_up`` seconds without a heartbeat of the coordinator. Answers of
    the message store do not count: it belongs to the launcher. ``replaced`` is set if another process has taken this
    trainer's number while this one was silent.
    """

    def __init__(self, messages: RunMessages, trainer: int, *, give_up: float, on_lost: Callable[[str], None]) -> None:
        self.state: RunState | None = None
        self.replaced = False
        self.collect_requested = -1  # the last round of this incarnation whose updates are due
        self._token = secrets.token_hex(8)
        self._steps = 0
        self._messages, self._trainer = messages, trainer
        self._give_up, self._on_lost = give_up, on_lost
        self._stop = threading.Event()
        self._last_heard = time.monotonic()
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._poll_loop, self._guard_loop)]

    def __enter__(self) -> CoordinatorClient:
        self._messages.take_lease(self._trainer, self._token)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._threads[0].join(5)

    def count_step(self) -> None:
        """Count an optimizer step, which the next heartbeat reports."""
        self._steps += 1

    def _poll_loop(self) -> None:
        messages, last_beat, reported_steps, reader = self._messages, 0.0, 0, HeartbeatReader()
        while not self._stop.is_set():
            try:
                if time.monotonic() - last_beat >= HEARTBEAT_SECONDS:
                    if not messages.holds_lease(self._trainer, self._token):
                        self.replaced = True
                        return
                    messages.beat(self._trainer)
                    if (new_steps := self._steps - reported_steps) > 0:
                        messages.add_steps(self._trainer, new_steps)
                        reported_steps += new_steps
                    messages.clear_exit(self._trainer)
                    last_beat = time.monotonic()
                    self._last_heard = last_beat - reader.silent_seconds(messages.heartbeats())
                state = messages.read_state()
                if state is not None:
                    self.collect_requested = messages.collect_requested(state.incarnation)
                    self.state = state
            except ExchangeError:
                self._stop.wait(RETRY_INTERVAL)
                try:
                    messages = self._messages.reconnect()
                except ExchangeError:
                    continue
            self._stop.wait(POLL_INTERVAL)

    def _guard_loop(self) -> None:
        before = 0.0  # a process that was paused looks silent until it has polled again
        while not self._stop.wait(1.0) and not self.replaced:
            silent, last = time.monotonic() - self._last_heard, before
            before = silent
            if last > self._give_up and silent > self._give_up + 3:
                self._on_lost(
                    f"trainer {self._trainer} has received no heartbeat of the coordinator for {silent:.0f} s and exits"
                )
                return
