"""A trainer: trains on the subgraph of its nodes at its own pace, and exchanges weights with the coordinator in rounds.

A trainer that was late, paused, disconnected or restarted continues with the newest weights.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from gnnfleet.comm.message_store import RETRY_INTERVAL, MessageStore
from gnnfleet.errors import ExchangeError, RunError
from gnnfleet.graph.partition.node_assignment import NodeAssignment
from gnnfleet.io.atomic import write_atomically
from gnnfleet.report.memory import own_rss, peak_rss, rss
from gnnfleet.report.phase_timer import EXCHANGE, WAIT, PhaseTimer
from gnnfleet.strategies.protocol import StepRecord, Strategy
from gnnfleet.strategies.tma.averaging import FlatLayout, is_state_of
from gnnfleet.strategies.tma.config import TmaConfig
from gnnfleet.strategies.tma.protocol import (
    POLL_INTERVAL,
    CoordinatorClient,
    RoundStart,
    RunMessages,
    RunState,
    TrainerUpdate,
)

_MAX_IDLE_EPOCHS = 1000  # in a row, without items to train on


@dataclass(frozen=True, eq=False)
class LocalTraining:
    strategy: Strategy
    edges: int  # of the subgraph
    embeddings: dict[str, Tensor]  # {parameter name: [n] store ids of its first rows}; rows of remote nodes may follow
    set_remote_rows: Callable[[Tensor], None]  # rows of nodes of all partitions, as additional negatives
    count_items: Callable[[int], int]  # items to train on in an epoch
    learning_rate: Callable[[int], float]  # of a round


AssignmentKey = tuple[str, tuple[int, ...]]
"""An assignment of nodes: name of the clusters, trainers that share the nodes."""

Position = tuple[int, int]
"""The next (epoch, step)."""


class _Workload:
    """Training on the subgraph of one assignment."""

    def __init__(self, key: AssignmentKey, local: LocalTraining, dtype: torch.dtype, position: Position) -> None:
        self.key, self.local, self.position = key, local, position
        self.layout = FlatLayout.of_model(local.strategy.model, dtype, without=local.embeddings)
        self.has_rows = not local.embeddings  # embedding rows come from the coordinator
        self.records = self.stream()

    def stream(self) -> Generator[StepRecord]:
        """Take optimizer steps, epoch after epoch, without end. Stops only if there are no items to train on."""
        (epoch, first), idle = self.position, 0
        while idle < _MAX_IDLE_EPOCHS:
            idle += 1
            if self.local.count_items(epoch):
                with closing(self.local.strategy.train_epoch(epoch, first)) as records:
                    for record in records:
                        self.position, idle = (epoch, record.step + 1), 0
                        yield record
            epoch, first = epoch + 1, 0


class Trainer:
    """Trainer ``index`` of a run; ``build`` makes the training on nodes, given as store ids by type."""

    def __init__(
        self,
        config: TmaConfig,
        index: int,
        store: MessageStore,
        assignment: NodeAssignment,
        build: Callable[[dict[str, Tensor]], LocalTraining],
        *,
        dtype: torch.dtype,
        folder: Path | None = None,
        log_user: Callable[[str], None] = lambda text: None,
        clock: PhaseTimer | None = None,
    ) -> None:
        self._config, self._index, self._messages, self._assignment = config, index, RunMessages(store), assignment
        self._build, self._dtype, self._log_user = build, dtype, log_user
        self._folder = folder if config.steps else None  # timed rounds are not repeated exactly
        self._work: _Workload | None = None
        self._incarnation: int | None = None
        self._diverged = False  # its last update was not finite
        self._rss_after_build = 0
        self._clock = PhaseTimer() if clock is None else clock
        self._reported_seconds = self._clock.read()

    def run(self, on_lost: Callable[[str], None]) -> None:
        """Train until the run is over; ``on_lost`` is called when the coordinator is lost."""
        self._messages.clear_exit(self._index)
        with CoordinatorClient(
            self._messages.reconnect(), self._index, give_up=self._config.give_up, on_lost=on_lost
        ) as client:
            last: RunState | None = None
            while True:
                with self._clock.phase(WAIT, "weights"):
                    state = _wait_newer(client, last)
                if state is None:
                    self._log_user(f"Trainer {self._index} was replaced by another process. This one exits.")
                    break
                if state.done:
                    break
                try:
                    took_weights = self._run_round(state, client)
                except ExchangeError:  # the client ends the process when the coordinator is lost
                    self._messages = _reconnected(self._messages)
                    continue
                if took_weights or client.state != state:
                    last = state
                else:  # the server was slow to answer: these are still the newest weights
                    time.sleep(POLL_INTERVAL)
        if self._work is not None:
            self._work.records.close()

    def _run_round(self, state: RunState, client: CoordinatorClient) -> bool:
        """Train a round; False if its weights could not be read."""
        with self._clock.phase(EXCHANGE, "weights"):
            start = self._messages.read_round_start(state, self._dtype)
        if start is None:
            return False
        if self._index not in start.members:
            return True
        work = self._start_round(start)
        if not work.has_rows:  # an empty update, so that the missing rows come with the next round
            weights = work.layout.pack(work.local.strategy.state_dict()["model"])
            empty = TrainerUpdate(0, 0, 0.0, work.local.edges, weights)
            self._messages.write_update(state, self._index, empty)
            return True
        self._messages.write_ack(state, self._index)
        update = self._train(work, state, client)
        if update is not None:
            self._save_checkpoint(work, state.round + 1)
            with self._clock.phase(EXCHANGE, "weights"):
                self._submit(state, update, client)
            self._remove_checkpoints()
        return True

    def _submit(self, state: RunState, update: TrainerUpdate, client: CoordinatorClient) -> None:
        """Send an update, again after a lost connection, until the round is closed: its steps are not repeated."""
        while _is_current(state, client):
            try:
                self._messages.write_update(state, self._index, update)
            except ExchangeError:
                self._messages = _reconnected(self._messages)
            else:
                return

    def _start_round(self, start: RoundStart) -> _Workload:
        """Load the weights of a round. It can be trained if ``has_rows`` of the workload is set."""
        # Another coordinator may have resumed the run from an earlier round.
        repeats = bool(self._config.steps) and self._incarnation not in (None, start.state.incarnation)
        work = self._work
        if work is None or repeats or work.key != self._key_of(start):
            work = self._begin(start, repeats=repeats)
        self._incarnation = start.state.incarnation
        strategy = work.local.strategy
        model, optimizer = strategy.state_dict()["model"], dict(strategy.state_dict()["optimizer"])
        weights = {**model, **work.layout.unpack(start.weights)}
        received = self._messages.read_rows(start.state, self._index, self._dtype) if work.local.embeddings else None
        if received is not None:
            for name, rows in received.items():
                weights[name] = torch.cat([rows, model[name][len(rows) :]])
            work.has_rows = True
        if not work.has_rows:
            return work
        if self._config.optimizer == "reset" or self._diverged:
            optimizer = {}
        strategy.load_state_dict({"model": weights, "optimizer": optimizer})
        strategy.set_learning_rate(work.local.learning_rate(start.state.round))
        if start.remote is not None:  # prefetched batches have the rows of the previous round
            work.records.close()
            work.local.set_remote_rows(start.remote)
            work.records = work.stream()
        return work

    def _key_of(self, start: RoundStart) -> AssignmentKey:
        return self._assignment.name, start.members

    def _begin(self, start: RoundStart, *, repeats: bool) -> _Workload:
        """Build the training on newly assigned nodes, or resume from this trainer's checkpoint.

        Optimizer state of weights is kept, that of embedding rows only if the nodes are the same.
        """
        key, same_nodes, position = self._key_of(start), True, (0, 0)
        optimizer: dict[str, Tensor] = {}
        if self._work is not None:
            self._work.records.close()
        if self._work is not None and not repeats:
            optimizer, position = dict(self._work.local.strategy.state_dict()["optimizer"]), self._work.position
            same_nodes = False
        elif (saved := self._load_checkpoint(start.state.round)) is not None:
            optimizer, position, saved_key = saved
            same_nodes = saved_key == key
        elif start.state.round:
            position = start.state.round, 0  # not the batches of the first rounds again
            if self._config.steps:
                self._log_user(
                    f"Trainer {self._index} has no checkpoint for round {start.state.round + 1}. Its optimizer starts "
                    "anew, so the results differ from those of an uninterrupted run."
                )
        nodes = self._assignment.nodes_of(start.members.index(self._index), len(start.members))
        self._work = None  # frees the former subgraph before another one is built
        local = self._build(nodes)
        if not same_nodes:
            optimizer = {name: t for name, t in optimizer.items() if not is_state_of(name, local.embeddings)}
            position = position[0] + 1, 0
        local.strategy.load_state_dict({**local.strategy.state_dict(), "optimizer": optimizer})
        self._work = _Workload(key, local, self._dtype, position)
        self._rss_after_build = rss()
        return self._work

    def _train(self, work: _Workload, state: RunState, client: CoordinatorClient) -> TrainerUpdate | None:
        """Take the steps of a round; None if the round was closed meanwhile."""
        steps, count, loss = 0, 0, 0.0
        # In a timed round a trainer takes one step even if the round is over before it begins.
        required = self._config.steps or 1
        began = time.perf_counter()
        while _is_current(state, client) and (steps < required or self._is_open(state, client)):
            record = next(work.records, None)
            if record is None:
                if not self._is_open(state, client):
                    break
                time.sleep(POLL_INTERVAL)
                continue
            if not math.isfinite(record.loss):
                raise RunError(
                    f"the loss of trainer {self._index} is {record.loss} in round {state.round + 1}: try a smaller "
                    "train.lr, or train.clip=1"
                )
            self._clock.record(f"step {record.step + 1}", "step", began)
            began = time.perf_counter()
            steps, count, loss = steps + 1, count + record.count, loss + record.loss * record.count
            client.count_step()
        if not _is_current(state, client):
            return None
        model = work.local.strategy.state_dict()["model"]
        update = TrainerUpdate(
            steps=steps,
            count=count,
            loss=loss / count if count else 0.0,
            edges=work.local.edges,
            weights=work.layout.pack(model),
            rows={name: model[name][: len(ids)] for name, ids in work.local.embeddings.items()},
            memory={
                "peak_rss": peak_rss(),
                "rss_growth": max(0, peak_rss() - self._rss_after_build),
                "own_rss": own_rss(),
            },
            seconds=self._phase_seconds(),
        )
        self._diverged = not all(bool(torch.isfinite(t).all()) for t in (update.weights, *update.rows.values()))
        return update

    def _is_open(self, state: RunState, client: CoordinatorClient) -> bool:
        """True if the clock has not yet ended the round."""
        return not self._config.steps and client.collect_requested < state.round

    def _phase_seconds(self) -> dict[str, float]:
        """Seconds by phase since the last update."""
        before, self._reported_seconds = self._reported_seconds, self._clock.read()
        return {phase: seconds - before[phase] for phase, seconds in self._reported_seconds.items()}

    # -- checkpoints, with rounds of a fixed number of steps --

    def _save_checkpoint(self, work: _Workload, round: int) -> None:
        """Write the checkpoint from which round ``round`` can be repeated after a restart."""
        if self._folder is None:
            return
        fields = {"next": round, "place": work.position, "deal": work.key}
        optimizer = {name: t.contiguous() for name, t in work.local.strategy.state_dict()["optimizer"].items()}
        self._folder.mkdir(parents=True, exist_ok=True)
        content = tensors_to_bytes(optimizer, metadata={"trainer": json.dumps(fields)})
        write_atomically(_checkpoint_file(self._folder, round), content)

    def _remove_checkpoints(self) -> None:
        """Remove checkpoints of rounds before the newest checkpoint of the run."""
        if self._folder is None:
            return
        with suppress(ExchangeError):
            newest = self._messages.read_checkpointed() or 0
            for path in self._folder.glob("*.safetensors"):
                if path.stem.isdecimal() and int(path.stem) < newest:
                    path.unlink(missing_ok=True)

    def _load_checkpoint(self, round: int) -> tuple[dict[str, Tensor], Position, AssignmentKey] | None:
        """Read the checkpoint written before ``round``: (optimizer state, position, assignment); None without one."""
        if self._folder is None or not (path := _checkpoint_file(self._folder, round)).exists():
            return None
        with safe_open(path, framework="pt") as file:
            fields = json.loads(file.metadata()["trainer"])
            optimizer = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        (epoch, step), (name, members) = fields["place"], fields["deal"]
        return optimizer, (epoch, step), (name, tuple(members))


def _checkpoint_file(folder: Path, round: int) -> Path:
    return folder / f"{round}.safetensors"


def _is_current(state: RunState, client: CoordinatorClient) -> bool:
    return client.state == state and not client.replaced


def _reconnected(messages: RunMessages) -> RunMessages:
    """Replace a lost connection; retries without limit."""
    while True:
        time.sleep(RETRY_INTERVAL)
        with suppress(ExchangeError):
            return messages.reconnect()


def _wait_newer(client: CoordinatorClient, last: RunState | None) -> RunState | None:
    """Wait for the state after ``last``; None if another process has replaced this one."""
    while not client.replaced:
        state = client.state
        if state is not None and (state.done or last is None or state != replace(last, done=False)):
            return state
        time.sleep(POLL_INTERVAL / 4)
    return None
