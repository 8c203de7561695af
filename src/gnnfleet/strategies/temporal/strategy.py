"""One process: events in the order of time, one batch after the other on one memory.

A step reads memories and mails of all nodes it looks at, takes the mails in, writes the rows of the batch's own nodes,
then computes embeddings, loss and gradients. A sweep over the training events is an epoch; it begins with nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.events import EventStream
from gnnfleet.graph.prefetch import prefetched
from gnnfleet.nn.temporal.model import TemporalModel
from gnnfleet.ops.draws import DrawKey
from gnnfleet.strategies.base import (
    PRECISIONS,
    Prediction,
    State,
    StepRecord,
    load_optimizer,
    make_optimizer,
    optimizer_tensors,
    products,
)
from gnnfleet.strategies.task import Take
from gnnfleet.strategies.temporal.config import TemporalConfig
from gnnfleet.strategies.temporal.evaluation import Evaluator
from gnnfleet.strategies.temporal.memory import Memory
from gnnfleet.strategies.temporal.static import learn_static
from gnnfleet.strategies.temporal.step import Batch, Lookout, embed, remember
from gnnfleet.strategies.temporal.task import EventJob, EventTask

STATIC = "static.table"
"""The name of what was learnt of nodes, beside the weights in a state."""


class TemporalStrategy:
    """The oracle of temporal training."""

    is_behind = False
    elsewhere = ()

    def __init__(self, config: TemporalConfig, job: EventJob) -> None:
        self.model: TemporalModel = job.model
        self._config, self._job = config, job
        self._optimizer = make_optimizer(self.model, job.train)
        stream, dtype = job.task.stream, PRECISIONS[job.precision]
        self._lookout = Lookout(
            stream,
            stream.neighbours(),
            self.model.neighbours,
            self.model.num_hops,
            dtype,
            config.queries,
            job.task.mean_gap if self.model.config.pairs else 0.0,
        )
        self._memory = Memory.empty(*self._sizes)
        self._bounds = job.task.parts["train"].batches(config.batch)
        self._table: Tensor | None = None  # learnt of nodes; made when it is first needed
        self._known: tuple[int, Memory] | None = None  # the state of the present weights after so many events
        self._evaluator = self._evaluating(job.task, self._lookout)

    @property
    def task(self) -> EventTask:
        """With all events that are known, those scored since training included."""
        return self._evaluator.task

    @property
    def relation(self) -> str:
        return self._config.relation

    def steps(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        self._known = None
        if first == 0:
            self._memory.reset()
        static = self._static()
        started = time.perf_counter()
        with closing(prefetched(self._batches(epoch, first), self._config.prefetch)) as made:
            for step, batch in enumerate(made, first):
                loss, count = self._step(batch, static, DrawKey(self._job.seed, epoch, 0))
                yield StepRecord(epoch, step, loss, count, time.perf_counter() - started)
                started = time.perf_counter()

    def _batches(self, epoch: int, first: int) -> Generator[Batch]:
        for low, high in zip(self._bounds[first:-1], self._bounds[first + 1 :], strict=True):
            yield self._lookout.batch(low, high, self._job.task.drawn(low, high, sweep=epoch))

    def _step(self, batch: Batch, static: Tensor | None, key: DrawKey) -> tuple[float, int]:
        """(mean loss, events that count)."""
        loss, count = self._loss(batch, static, key)
        self._optimizer.zero_grad(set_to_none=True)
        mean = loss / max(count, 1)
        if count:
            mean.backward()  # type: ignore[no-untyped-call]
            if self._job.train.clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._job.train.clip)
            self._optimizer.step()
        return float(mean.detach()), count

    def _loss(self, batch: Batch, static: Tensor | None, key: DrawKey) -> tuple[Tensor, int]:
        """The sum over a batch; the state has moved past it."""
        self.model.train()
        job = self._job
        with products(job.precision):
            memory, writes = remember(self.model, job.task.stream, batch, self._memory.read(batch.block.nodes))
            if writes is not None:
                self._memory.write(writes)
            z = embed(self.model, batch, memory, static, key)
            return job.task.loss(self.model, z, batch.low, batch.high, batch.pairs)

    def counts(self) -> dict[str, float]:
        return {}

    def pages(self) -> dict[str, str]:
        return {}

    def validate(self) -> dict[str, float]:
        """On val with few negatives, going on from the state that training ended in."""
        return self._evaluator.measure(self._memory.copy(), self._static(), "val", full=False)

    def evaluate(self, split: str) -> dict[str, float]:
        if not len(self._job.task.items(split)):
            raise ConfigError(f"the {split} split is empty: choose another --split")
        if split == "train":
            raise ConfigError("events are evaluated on val or test, found --split train")
        part = self._job.task.parts[split]
        memory = self._after(part.first)
        found = self._evaluator.measure(memory, self._static(), split, full=True)
        self._known = part.first + len(part), memory
        return found

    def score(self, events: EventStream) -> Tensor:
        """[n] probabilities of new events, or [n, C] of their classes; each batch knows all events before it.

        They follow the stream: none may be earlier than its last one. The state moves on and the stream grows, so the
        next call goes on behind them.
        """
        first = len(self.task.stream)
        task = replace(self.task, stream=self.task.stream.followed_by(events))
        memory = self._after(first)
        self._lookout.recent.append(events.src, events.dst, events.t)
        self._evaluator = self._evaluating(task, replace(self._lookout, stream=task.stream))
        bounds = events.batches(self._config.eval_batch, keep_ties=False)
        found = [
            self._evaluator.probabilities(memory, self._static(), first + low, first + high)
            for low, high in itertools.pairwise(bounds)
        ]
        self._known = first + len(events), memory
        return torch.cat(found) if found else torch.empty(0)

    def _after(self, count: int) -> Memory:
        """The state that the present weights are in after the first events: walked through from the start, training
        events in batches as they were trained on, the others as they are evaluated."""
        known, memory = self._known or (0, Memory.empty(*self._sizes))
        if known > count:
            known, memory = 0, Memory.empty(*self._sizes)
        self._known = None  # the state is given away
        train = len(self._job.task.parts["train"])
        if known < train:
            self._evaluator.replay(memory, known, min(train, count), self._config.batch)
        self._evaluator.replay(memory, max(known, train), count, self._config.eval_batch, keep_ties=False)
        return memory

    @property
    def _sizes(self) -> tuple[int, int, torch.dtype]:
        width = self.model.width if self.model.remembers else 0
        return self._job.task.stream.num_nodes, width, PRECISIONS[self._job.precision]

    def _static(self) -> Tensor | None:
        """[V, S] all that is known of nodes at any time."""
        features = self._job.features
        if self._config.learns_static(features is not None) and self._table is None:
            self._table = learn_static(self._config, self._job, self._lookout)
        parts = [part for part in (features, self._table) if part is not None]
        return None if not parts else parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _evaluating(self, task: EventTask, lookout: Lookout) -> Evaluator:
        config = self._config
        return Evaluator(self.model, task, lookout, config.eval_batch, config.eval_negatives, self._job.precision)

    def predict(self, *, embeddings: bool = False) -> Prediction:
        self._no_nodes()

    def rows(self, ids: Tensor, *, embeddings: bool = False) -> Prediction:
        self._no_nodes()

    def exact(self) -> Take:
        self._no_nodes()

    def _no_nodes(self) -> NoReturn:
        raise ConfigError("a temporal run predicts events: gnnfleet predict RUN --events FILE, or record.score(events)")

    def state_dict(self) -> State:
        self._static()
        table = {} if self._table is None else {STATIC: self._table}
        return {
            "model": {**self.model.state_dict(), **table},
            "optimizer": optimizer_tensors(self.model, self._optimizer),
            "memory": self._memory.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self._known = None
        weights = dict(state["model"])
        if STATIC in weights:
            self._table = weights.pop(STATIC).clone()
        self.model.load_state_dict(weights)
        if "optimizer" in state:
            load_optimizer(self.model, self._optimizer, state["optimizer"])
        if "memory" in state:
            self._memory.load_state_dict(state["memory"])

    def close(self) -> None:
        self._known = None
