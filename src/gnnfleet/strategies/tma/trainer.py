"""A trainer: the subgraph of its own nodes, trained at its own pace, weights given and taken round by round.

It may be late, paused, cut off or started anew: it then takes the newest weights and goes on with them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    CHECKPOINTED,
    POLL_INTERVAL,
    CoordinatorClient,
    RoundStart,
    RunState,
    TrainerUpdate,
    read_round_start,
    write_round_ack,
    write_update,
)

_IDLE = 1000  # epochs in a row without anything to train on


@dataclass(frozen=True, eq=False)
class LocalTraining:
    """What a trainer works on."""

    strategy: Strategy
    edges: int  # of its subgraph
    rows: dict[str, Tensor]  # {name of a parameter of learnt rows: [n] store ids}; perhaps rows of other nodes follow
    show: Callable[[Tensor], None]  # takes rows of nodes of all parts, as more negatives
    items: Callable[[int], int]  # how many there are to train on in an epoch


AssignmentKey = tuple[str, int, tuple[int, ...]]
"""A deal: how nodes are cut, its number, who shares them."""


@dataclass(frozen=True, eq=False)
class _TrainerCheckpoint:
    """What only a trainer knows: its optimizer's memory, the step that comes next, the deal it worked on."""

    tensors: dict[str, Tensor]
    place: tuple[int, int]
    held: AssignmentKey


class Trainer:
    """Number ``index`` of those that share the nodes. ``make`` builds what is trained on some of them."""

    def __init__(
        self,
        config: TmaConfig,
        index: int,
        post: MessageStore,
        deal: NodeAssignment,
        make: Callable[[dict[str, Tensor]], LocalTraining],
        *,
        dtype: torch.dtype,
        folder: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config, self._index, self._post, self._deal = config, index, post, deal
        self._make, self._dtype, self._folder = make, dtype, folder
        self._held: AssignmentKey | None = None  # the deal that is worked on
        self._incarnation: int | None = None
        self._local: LocalTraining | None = None
        self._layout: FlatLayout | None = None
        self._records: Generator[StepRecord] | None = None
        self._place = (0, 0)  # (epoch, step) that comes next
        self._knows_rows = False
        self._strayed = False  # whether what it gave last was not finite
        self._dropped = 0  # the round before which nothing of its own lies on disk
        self._say = say
        self._built = 0  # resident memory after building
        self.clock = PhaseTimer()
        self._given = self.clock.read()  # when it last gave

    def run(self, lost: Callable[[str], None]) -> None:
        """Until all is over; ``lost`` is told when the coordinator is out of reach for good."""
        self._post.remove(f"gone/{self._index}")
        with CoordinatorClient(self._post.reconnect(), self._index, give_up=self._config.give_up, lost=lost) as watch:
            last: RunState | None = None
            while True:
                with self.clock.phase(WAIT, "weights"):
                    now = _wait_newer(watch, last)
                if now is None:
                    self._say(f"trainer {self._index} was replaced by another process, so this one ends")
                    break
                if now.done:
                    break
                try:
                    took = self._round(now, watch)
                except ExchangeError:  # the watch ends the process when the coordinator is gone for good
                    self._post = _reconnected(self._post)
                    continue
                if took or watch.state != now:
                    last = now
                else:  # a server that is slow to answer: its weights are still there
                    time.sleep(POLL_INTERVAL)
        if self._records is not None:
            self._records.close()

    def _round(self, now: RunState, watch: CoordinatorClient) -> bool:
        """False where its weights could not be read."""
        with self.clock.phase(EXCHANGE, "weights"):
            take = read_round_start(self._post, now, self._dtype)
        if take is None:
            return False
        if self._index not in take.members:
            return True
        if not self._start_round(take):  # so that the next round comes with what is missing
            assert self._local is not None and self._layout is not None
            weights = self._layout.pack(self._local.strategy.state_dict()["model"])
            write_update(self._post, now, self._index, TrainerUpdate(0, 0, 0.0, self._local.edges, weights))
            return True
        write_round_ack(self._post, now, self._index)
        give = self._train(now, watch)
        if give is not None:
            self._checkpoint(now.round)
            with self.clock.phase(EXCHANGE, "weights"):
                self._submit(now, give, watch)
            self._drop()
        return True

    def _submit(self, now: RunState, give: TrainerUpdate, watch: CoordinatorClient) -> None:
        """Also after a connection was lost, for as long as the round is open: its steps are not made twice."""
        while watch.state == now and not watch.replaced:
            try:
                write_update(self._post, now, self._index, give)
            except ExchangeError:
                self._post = _reconnected(self._post)
            else:
                return

    def _start_round(self, take: RoundStart) -> bool:
        """Begin a round; False where the learnt rows of own nodes are not known here."""
        began = (
            self._incarnation is not None and self._incarnation != take.state.incarnation
        )  # a coordinator of another era, perhaps of the past
        fresh = self._held != (self._deal.name, take.assignment, take.members) or (began and bool(self._config.steps))
        if fresh:
            self._begin(take, anew=began and bool(self._config.steps))
        self._incarnation = take.state.incarnation
        assert self._local is not None and self._layout is not None
        strategy = self._local.strategy
        state = strategy.state_dict()
        weights = {**state["model"], **self._layout.unpack(take.weights)}
        letter = (
            self._post.read(f"rows/{take.state.incarnation}/{take.state.round}/{self._index}")
            if self._local.rows
            else None
        )
        self._knows_rows = letter is not None or (self._knows_rows and not fresh)
        if self._local.rows and not self._knows_rows:
            return False
        at = 0
        for name, ids in self._local.rows.items() if letter is not None else ():
            assert letter is not None
            rows = weights[name].clone()
            nbytes = len(ids) * rows.shape[1] * self._dtype.itemsize
            rows[: len(ids)] = letter.body[at : at + nbytes].clone().view(self._dtype).view(len(ids), rows.shape[1])
            weights[name], at = rows, at + nbytes
        kept = dict(state["optimizer"])
        if self._config.optimizer == "reset" or self._strayed:  # moments of steps that were no numbers
            kept = {}
        elif take.optimizer is not None and self._memory(kept).nbytes == take.optimizer.nbytes:
            kept |= self._memory(kept).unpack(take.optimizer)
        strategy.load_state_dict({"model": weights, "optimizer": kept})
        if take.remote is not None:
            if self._records is not None:  # batches that were made ahead have the rows before
                self._records.close()
            self._local.show(take.remote)
            self._records = self._stream(*self._place)
        return True

    def _begin(self, take: RoundStart, *, anew: bool) -> None:
        """Work on the nodes of another deal, or go on where another process, or this one with ``anew``, ended.

        What the optimizer remembers of weights stays; of learnt rows it does where the nodes are the same.
        """
        if self._records is not None:
            self._records.close()
        held, same = (self._deal.name, take.assignment, take.members), True
        kept: dict[str, Tensor] = {}
        place = (0, 0)
        if self._local is not None and not anew:
            kept, place, same = dict(self._local.strategy.state_dict()["optimizer"]), self._place, False
        elif (saved := self._saved(take.state.round)) is not None:
            kept, place, same = saved.tensors, saved.place, saved.held == held
        elif take.state.round:
            place = take.state.round, 0  # other batches than those of the beginning
            if self._config.steps:
                self._say(
                    f"trainer {self._index} finds nothing of its own before round {take.state.round + 1}: its "
                    "optimizer starts anew, so the numbers are not those of an uninterrupted run"
                )
        own = self._deal.nodes_of(take.members.index(self._index), len(take.members), take.assignment)
        self._local, self._knows_rows = None, False  # before another part is in memory
        self._local = self._make(own)
        strategy = self._local.strategy
        if not same:
            kept = {name: t for name, t in kept.items() if not is_state_of(name, self._local.rows)}
        strategy.load_state_dict({**strategy.state_dict(), "optimizer": kept})
        # A layer that is there twice has two names in a state; both are learnt.
        names = [name for name, _ in strategy.model.named_parameters(remove_duplicate=False)]
        model = strategy.state_dict()["model"]
        self._layout = FlatLayout.of(model, self._dtype, without=tuple(self._local.rows), parameters=names)
        self._place = place if same else (place[0] + 1, 0)
        self._records = self._stream(*self._place)
        self._held, self._built = held, rss()

    def _memory(self, tensors: dict[str, Tensor]) -> FlatLayout:
        assert self._local is not None
        return FlatLayout.of(tensors, self._dtype, without=tuple(self._local.rows))

    def _stream(self, epoch: int, first: int) -> Generator[StepRecord]:
        """Steps without end, epoch after epoch; none where there is nothing to train on."""
        alone, idle = self._local, 0
        assert alone is not None
        while idle < _IDLE:
            idle += 1
            if alone.items(epoch):
                with closing(alone.strategy.train_epoch(epoch, first)) as records:
                    for record in records:
                        self._place, idle = (epoch, record.step + 1), 0
                        yield record
            epoch, first = epoch + 1, 0

    def _train(self, now: RunState, watch: CoordinatorClient) -> TrainerUpdate | None:
        """Steps until they are asked for; None where the round was closed without them."""
        assert self._local is not None and self._records is not None and self._layout is not None
        steps, count, loss, wanted = 0, 0, 0.0, self._config.steps
        began = time.perf_counter()
        # By the clock a round has a step, too, for whoever is so slow to begin that it is over by then.
        while watch.state == now and not watch.replaced and (steps < (wanted or 1) or self._is_open(now, watch)):
            record = next(self._records, None)
            if record is None:
                if not self._is_open(now, watch):
                    break
                time.sleep(POLL_INTERVAL)
                continue
            if not math.isfinite(record.loss):
                raise RunError(
                    f"the loss of trainer {self._index} is {record.loss} in round {now.round + 1}: try a smaller "
                    "train.lr, or train.clip=1"
                )
            self.clock.record(f"step {record.step + 1}", "step", began)
            began = time.perf_counter()
            steps, count, loss = steps + 1, count + record.count, loss + record.loss * record.count
            watch.steps += 1
        if watch.state != now or watch.replaced:
            return None
        state = self._local.strategy.state_dict()
        kept = state["optimizer"]
        optimizer = self._memory(kept).pack(kept) if self._config.optimizer == "average" and kept else None
        rows = {name: state["model"][name][: len(ids)] for name, ids in self._local.rows.items()}
        mean = loss / count if count else 0.0
        memory = {"peak_rss": peak_rss(), "rss_growth": max(0, peak_rss() - self._built), "own_rss": own_rss()}
        weights = self._layout.pack(state["model"])
        self._strayed = not all(bool(torch.isfinite(tensor).all()) for tensor in (weights, *rows.values()))
        return TrainerUpdate(
            steps, count, mean, self._local.edges, weights, optimizer, rows, memory, self._phase_seconds()
        )

    def _is_open(self, now: RunState, watch: CoordinatorClient) -> bool:
        """Whether the clock asks for more steps."""
        return not self._config.steps and watch.collect_requested < now.round

    def _phase_seconds(self) -> dict[str, float]:
        """Seconds by phase since it last gave."""
        before, self._given = self._given, self.clock.read()
        return {phase: seconds - before[phase] for phase, seconds in self._given.items()}

    # -- going on where another process ended, with rounds of so many steps --

    def _checkpoint(self, number: int) -> None:
        """Write what only this trainer knows after a round: the coordinator may begin again with a checkpoint of
        before."""
        if self._folder is None or not self._config.steps:
            return
        assert self._local is not None and self._held is not None
        words = {"next": number + 1, "place": self._place, "deal": self._held}
        tensors = {name: t.contiguous() for name, t in self._local.strategy.state_dict()["optimizer"].items()}
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file(number + 1), tensors_to_bytes(tensors, metadata={"trainer": json.dumps(words)}))

    def _drop(self) -> None:
        """Remove what belongs to rounds before the newest checkpoint."""
        if self._folder is None or not self._config.steps:
            return
        with suppress(ExchangeError):
            letter = self._post.read(CHECKPOINTED)
            if letter is None or letter.fields["round"] == self._dropped:
                return
            self._dropped = int(letter.fields["round"])
            for path in self._folder.glob("*.safetensors"):
                if path.stem.isdecimal() and int(path.stem) < self._dropped:
                    path.unlink(missing_ok=True)

    def _saved(self, number: int) -> _TrainerCheckpoint | None:
        """What was written before this round, if it was."""
        path = self._file(number)
        if self._folder is None or not self._config.steps or not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            words = json.loads(file.metadata()["trainer"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if words["next"] != number:
            return None
        return _TrainerCheckpoint(tensors, (words["place"][0], words["place"][1]), _assignment_key(words["deal"]))

    def _file(self, number: int) -> Path:
        return (self._folder or Path(os.devnull)) / f"{number}.safetensors"


def _assignment_key(words: Sequence[Any]) -> AssignmentKey:
    name, number, among = words
    return name, number, tuple(among)


def _reconnected(post: MessageStore) -> MessageStore:
    """A connection in place of one that was lost, whenever it can be made."""
    while True:
        time.sleep(RETRY_INTERVAL)
        try:
            return post.reconnect()
        except ExchangeError:
            continue


def _wait_newer(watch: CoordinatorClient, last: RunState | None) -> RunState | None:
    """The state after ``last``, whenever it comes, None for who was replaced; the watch ends the process when nothing
    does."""
    while not watch.replaced:
        now = watch.state
        if now is not None and (now.done or last is None or replace(now, done=False) != replace(last, done=False)):
            return now
        time.sleep(POLL_INTERVAL / 4)
    return None
