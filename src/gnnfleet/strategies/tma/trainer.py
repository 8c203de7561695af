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

from gnnfleet.comm.message_store import AGAIN_SECONDS, Post
from gnnfleet.errors import ExchangeError, RunError
from gnnfleet.graph.partition.node_assignment import Deal
from gnnfleet.io.atomic import write_atomically
from gnnfleet.report.memory import own_rss, peak_rss, rss
from gnnfleet.report.phase_timer import EXCHANGE, WAIT, Clock
from gnnfleet.strategies.protocol import StepRecord, Strategy
from gnnfleet.strategies.tma.averaging import Layout
from gnnfleet.strategies.tma.config import TmaConfig
from gnnfleet.strategies.tma.protocol import (
    KEPT,
    LOOK_SECONDS,
    Give,
    Now,
    Take,
    Watch,
    read_take,
    write_give,
    write_took,
)

_IDLE = 1000  # epochs in a row without anything to train on


@dataclass(frozen=True, eq=False)
class Alone:
    """What a trainer works on."""

    strategy: Strategy
    edges: int  # of its subgraph
    rows: dict[str, Tensor]  # {name of a parameter of learnt rows: [n] store ids}; perhaps rows of other nodes follow
    show: Callable[[Tensor], None]  # takes rows of nodes of all parts, as more negatives
    items: Callable[[int], int]  # how many there are to train on in an epoch


Held = tuple[str, int, tuple[int, ...]]
"""A deal: how nodes are cut, its number, who shares them."""


@dataclass(frozen=True, eq=False)
class _Saved:
    """What only a trainer knows: its optimizer's memory, the step that comes next, the deal it worked on."""

    tensors: dict[str, Tensor]
    place: tuple[int, int]
    held: Held


class Trainer:
    """Number ``index`` of those that share the nodes. ``make`` builds what is trained on some of them."""

    def __init__(
        self,
        config: TmaConfig,
        index: int,
        post: Post,
        deal: Deal,
        make: Callable[[dict[str, Tensor]], Alone],
        *,
        dtype: torch.dtype,
        folder: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config, self._index, self._post, self._deal = config, index, post, deal
        self._make, self._dtype, self._folder = make, dtype, folder
        self._held: Held | None = None  # the deal that is worked on
        self._era: int | None = None
        self._alone: Alone | None = None
        self._layout: Layout | None = None
        self._records: Generator[StepRecord] | None = None
        self._place = (0, 0)  # (epoch, step) that comes next
        self._knows_rows = False
        self._strayed = False  # whether what it gave last was not finite
        self._dropped = 0  # the round before which nothing of its own lies on disk
        self._say = say
        self._built = 0  # resident memory after building
        self.clock = Clock()
        self._given = self.clock.read()  # when it last gave

    def run(self, lost: Callable[[str], None]) -> None:
        """Until all is over; ``lost`` is told when the coordinator is out of reach for good."""
        self._post.remove(f"gone/{self._index}")
        with Watch(self._post.another(), self._index, give_up=self._config.give_up, lost=lost) as watch:
            last: Now | None = None
            while True:
                with self.clock.during(WAIT, "weights"):
                    now = _newer(watch, last)
                if now is None:
                    self._say(f"trainer {self._index} was replaced by another process, so this one ends")
                    break
                if now.done:
                    break
                try:
                    took = self._round(now, watch)
                except ExchangeError:  # the watch ends the process when the coordinator is gone for good
                    self._post = _again(self._post)
                    continue
                if took or watch.now != now:
                    last = now
                else:  # a server that is slow to answer: its weights are still there
                    time.sleep(LOOK_SECONDS)
        if self._records is not None:
            self._records.close()

    def _round(self, now: Now, watch: Watch) -> bool:
        """False where its weights could not be read."""
        with self.clock.during(EXCHANGE, "weights"):
            take = read_take(self._post, now, self._dtype)
        if take is None:
            return False
        if self._index not in take.among:
            return True
        if not self._take_over(take):  # so that the next round comes with what is missing
            assert self._alone is not None and self._layout is not None
            weights = self._layout.pack(self._alone.strategy.state_dict()["model"])
            write_give(self._post, now, self._index, Give(0, 0, 0.0, self._alone.edges, weights))
            return True
        write_took(self._post, now, self._index)
        give = self._train(now, watch)
        if give is not None:
            self._keep(now.round)
            with self.clock.during(EXCHANGE, "weights"):
                self._hand_over(now, give, watch)
            self._drop()
        return True

    def _hand_over(self, now: Now, give: Give, watch: Watch) -> None:
        """Also after a connection was lost, for as long as the round is open: its steps are not made twice."""
        while watch.now == now and not watch.replaced:
            try:
                write_give(self._post, now, self._index, give)
            except ExchangeError:
                self._post = _again(self._post)
            else:
                return

    def _take_over(self, take: Take) -> bool:
        """Begin a round; False where the learnt rows of own nodes are not known here."""
        began = self._era is not None and self._era != take.now.era  # a coordinator of another era, perhaps of the past
        fresh = self._held != (self._deal.name, take.deal, take.among) or (began and bool(self._config.steps))
        if fresh:
            self._begin(take, anew=began and bool(self._config.steps))
        self._era = take.now.era
        assert self._alone is not None and self._layout is not None
        strategy = self._alone.strategy
        state = strategy.state_dict()
        weights = {**state["model"], **self._layout.unpack(take.weights)}
        letter = self._post.read(f"rows/{take.now.era}/{take.now.round}/{self._index}") if self._alone.rows else None
        self._knows_rows = letter is not None or (self._knows_rows and not fresh)
        if self._alone.rows and not self._knows_rows:
            return False
        at = 0
        for name, ids in self._alone.rows.items() if letter is not None else ():
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
            self._alone.show(take.remote)
            self._records = self._stream(*self._place)
        return True

    def _begin(self, take: Take, *, anew: bool) -> None:
        """Work on the nodes of another deal, or go on where another process, or this one with ``anew``, ended.

        What the optimizer remembers of weights stays; of learnt rows it does where the nodes are the same.
        """
        if self._records is not None:
            self._records.close()
        held, same = (self._deal.name, take.deal, take.among), True
        kept: dict[str, Tensor] = {}
        place = (0, 0)
        if self._alone is not None and not anew:
            kept, place, same = dict(self._alone.strategy.state_dict()["optimizer"]), self._place, False
        elif (saved := self._saved(take.now.round)) is not None:
            kept, place, same = saved.tensors, saved.place, saved.held == held
        elif take.now.round:
            place = take.now.round, 0  # other batches than those of the beginning
            if self._config.steps:
                self._say(
                    f"trainer {self._index} finds nothing of its own before round {take.now.round + 1}: its "
                    "optimizer starts anew, so the numbers are not those of an uninterrupted run"
                )
        own = self._deal.own(take.among.index(self._index), len(take.among), take.deal)
        self._alone, self._knows_rows = None, False  # before another part is in memory
        self._alone = self._make(own)
        strategy = self._alone.strategy
        if not same:
            kept = {name: t for name, t in kept.items() if not name.startswith(tuple(self._alone.rows))}
        strategy.load_state_dict({**strategy.state_dict(), "optimizer": kept})
        # A layer that is there twice has two names in a state; both are learnt.
        names = [name for name, _ in strategy.model.named_parameters(remove_duplicate=False)]
        model = strategy.state_dict()["model"]
        self._layout = Layout.of(model, self._dtype, without=tuple(self._alone.rows), parameters=names)
        self._place = place if same else (place[0] + 1, 0)
        self._records = self._stream(*self._place)
        self._held, self._built = held, rss()

    def _memory(self, tensors: dict[str, Tensor]) -> Layout:
        assert self._alone is not None
        return Layout.of(tensors, self._dtype, without=tuple(self._alone.rows))

    def _stream(self, epoch: int, first: int) -> Generator[StepRecord]:
        """Steps without end, epoch after epoch; none where there is nothing to train on."""
        alone, idle = self._alone, 0
        assert alone is not None
        while idle < _IDLE:
            idle += 1
            if alone.items(epoch):
                with closing(alone.strategy.steps(epoch, first)) as records:
                    for record in records:
                        self._place, idle = (epoch, record.step + 1), 0
                        yield record
            epoch, first = epoch + 1, 0

    def _train(self, now: Now, watch: Watch) -> Give | None:
        """Steps until they are asked for; None where the round was closed without them."""
        assert self._alone is not None and self._records is not None and self._layout is not None
        steps, count, loss, wanted = 0, 0, 0.0, self._config.steps
        began = time.perf_counter()
        # By the clock a round has a step, too, for whoever is so slow to begin that it is over by then.
        while watch.now == now and not watch.replaced and (steps < (wanted or 1) or self._is_open(now, watch)):
            record = next(self._records, None)
            if record is None:
                if not self._is_open(now, watch):
                    break
                time.sleep(LOOK_SECONDS)
                continue
            if not math.isfinite(record.loss):
                raise RunError(
                    f"the loss of trainer {self._index} is {record.loss} in round {now.round + 1}: try a smaller "
                    "train.lr, or train.clip=1"
                )
            self.clock.note(f"step {record.step + 1}", "step", began)
            began = time.perf_counter()
            steps, count, loss = steps + 1, count + record.count, loss + record.loss * record.count
            watch.steps += 1
        if watch.now != now or watch.replaced:
            return None
        state = self._alone.strategy.state_dict()
        kept = state["optimizer"]
        optimizer = self._memory(kept).pack(kept) if self._config.optimizer == "average" and kept else None
        rows = {name: state["model"][name][: len(ids)] for name, ids in self._alone.rows.items()}
        mean = loss / count if count else 0.0
        memory = {"peak_rss": peak_rss(), "rss_growth": max(0, peak_rss() - self._built), "own_rss": own_rss()}
        weights = self._layout.pack(state["model"])
        self._strayed = not all(bool(torch.isfinite(tensor).all()) for tensor in (weights, *rows.values()))
        return Give(steps, count, mean, self._alone.edges, weights, optimizer, rows, memory, self._spent())

    def _is_open(self, now: Now, watch: Watch) -> bool:
        """Whether the clock asks for more steps."""
        return not self._config.steps and watch.called < now.round

    def _spent(self) -> dict[str, float]:
        """Seconds by phase since it last gave."""
        before, self._given = self._given, self.clock.read()
        return {phase: seconds - before[phase] for phase, seconds in self._given.items()}

    # -- going on where another process ended, with rounds of so many steps --

    def _keep(self, number: int) -> None:
        """Write what only this trainer knows after a round: the coordinator may begin again with a checkpoint of
        before."""
        if self._folder is None or not self._config.steps:
            return
        assert self._alone is not None and self._held is not None
        words = {"next": number + 1, "place": self._place, "deal": self._held}
        tensors = {name: t.contiguous() for name, t in self._alone.strategy.state_dict()["optimizer"].items()}
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file(number + 1), tensors_to_bytes(tensors, metadata={"trainer": json.dumps(words)}))

    def _drop(self) -> None:
        """Remove what belongs to rounds before the newest checkpoint."""
        if self._folder is None or not self._config.steps:
            return
        with suppress(ExchangeError):
            letter = self._post.read(KEPT)
            if letter is None or letter.words["round"] == self._dropped:
                return
            self._dropped = int(letter.words["round"])
            for path in self._folder.glob("*.safetensors"):
                if path.stem.isdecimal() and int(path.stem) < self._dropped:
                    path.unlink(missing_ok=True)

    def _saved(self, number: int) -> _Saved | None:
        """What was written before this round, if it was."""
        path = self._file(number)
        if self._folder is None or not self._config.steps or not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            words = json.loads(file.metadata()["trainer"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if words["next"] != number:
            return None
        return _Saved(tensors, (words["place"][0], words["place"][1]), _held(words["deal"]))

    def _file(self, number: int) -> Path:
        return (self._folder or Path(os.devnull)) / f"{number}.safetensors"


def _held(words: Sequence[Any]) -> Held:
    name, number, among = words
    return name, number, tuple(among)


def _again(post: Post) -> Post:
    """A connection in place of one that was lost, whenever it can be made."""
    while True:
        time.sleep(AGAIN_SECONDS)
        try:
            return post.another()
        except ExchangeError:
            continue


def _newer(watch: Watch, last: Now | None) -> Now | None:
    """The state after ``last``, whenever it comes, None for who was replaced; the watch ends the process when nothing
    does."""
    while not watch.replaced:
        now = watch.now
        if now is not None and (now.done or last is None or replace(now, done=False) != replace(last, done=False)):
            return now
        time.sleep(LOOK_SECONDS / 4)
    return None
