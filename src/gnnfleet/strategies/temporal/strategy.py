"""Events in the order of time, one batch after the other on one memory, or on several by several trainers.

A step reads memories and mails of all nodes it looks at, takes the mails in, writes the rows of the batch's own nodes,
then computes embeddings, loss and gradients, which are summed over trainers. A sweep over the training events begins
with nothing. An epoch has as many uses of events as there are; of one trainer it is a sweep.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from gnnfleet.comm.collectives import broadcast_bytes, min_over_ranks, sum_gradients
from gnnfleet.comm.mesh import coordinates_of_rank
from gnnfleet.comm.shared_memory import ranks_by_host
from gnnfleet.errors import ConfigError
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.graph.sampling.prefetch import auto_depth, prefetch_items
from gnnfleet.nn.temporal.model import TemporalModel
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.memory import memory_limit
from gnnfleet.report.timeline_svg import draw_batch_lanes
from gnnfleet.strategies.job import PRECISIONS, EventJob, autocast
from gnnfleet.strategies.optim import load_optimizer, make_optimizer, optimizer_tensors
from gnnfleet.strategies.protocol import RANK_LOCAL, RAW_WEIGHTS, Reporting, State, StepRecord
from gnnfleet.strategies.temporal.batch_step import EventBatch, NeighborhoodBuilder, embed, update_memory
from gnnfleet.strategies.temporal.config import TemporalConfig
from gnnfleet.strategies.temporal.ema import WeightEMA
from gnnfleet.strategies.temporal.evaluation import EventEvaluator
from gnnfleet.strategies.temporal.layout_planner import CaptureCurve, LrSchedule, TrainerResources, choose_layout
from gnnfleet.strategies.temporal.memory import NodeMemory
from gnnfleet.strategies.temporal.memory_access import MemoryScheduler, WorkItem
from gnnfleet.strategies.temporal.schedule import Schedule
from gnnfleet.strategies.temporal.static_embedding import train_static_embedding
from gnnfleet.tasks.event import EventTask

STATIC_TABLE = "static.table"
"""The name of what was learnt of nodes, beside the weights in a state."""

MAX_ITERATIONS_SHOWN = 60
"""Iterations in the picture of an epoch."""


class TemporalStrategy(Reporting):
    """The oracle of temporal training."""

    def __init__(self, config: TemporalConfig, job: EventJob) -> None:
        self.model: TemporalModel = job.model
        if config.batch == "auto":
            curve = CaptureCurve.of(job.task.parts["train"])
            job.log_user(f"plan: batches of {curve.batch}; of all ends of events a batch leaves a mail to {curve}")
            config = config.model_copy(update={"batch": curve.batch})
        self._config, self._job = config, job
        self._aside = job.world.uncounted()  # for what is no part of training
        self._optimizer = make_optimizer(self.model, job.train, fused=True)
        stream, dtype = job.task.stream, PRECISIONS[job.precision]
        self._lookout = NeighborhoodBuilder(
            stream,
            stream.neighbours(),
            self.model.neighbours,
            self.model.num_hops,
            dtype,
            config.queries,
            job.task.mean_gap if self.model.uses_pair_features else 0.0,
            job.seed if config.events == "drawn" else None,
        )
        self.scheduler = self._choose_layout()
        self._together = (
            self.scheduler.schedule.layout.epoch_parallel * self.scheduler.schedule.layout.memory_parallel
        )  # batches of a step
        self._pace = self._paced()
        self._average = WeightEMA(self.model, config.average**self._together)
        self._tally = torch.nn.Parameter(torch.zeros(2, dtype=dtype))  # loss and count, summed as gradients are
        self._shown = 0  # the epoch that was trained last
        self._table: Tensor | None = None  # learnt of nodes; made when it is first needed
        self._known: tuple[int, NodeMemory] | None = None  # the state of the present weights after so many events
        self._evaluator = self._evaluating(job.task, self._lookout)
        self._walker = self._evaluator  # with the events scored since training, too

    @property
    def task(self) -> EventTask:
        """With all events that are known, those scored since training included."""
        return self._walker.task

    @property
    def relation(self) -> str:
        return self._config.relation

    def train_epoch(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        self._known, self._shown = None, epoch
        static, schedule = self._static(), self.scheduler.schedule
        start, end = schedule.start(epoch), schedule.start(epoch + 1)
        self.scheduler.begin(start + first)
        started = time.perf_counter()
        with closing(prefetch_items(self.scheduler.items(start + first, end), self._ahead)) as made:
            for work in made:
                loss, count = self._step(work, static)
                yield StepRecord(epoch, work.iteration - start, loss, count, time.perf_counter() - started)
                started = time.perf_counter()

    def _step(self, work: WorkItem, static: Tensor | None) -> tuple[float, int]:
        """(mean loss, events that count), of all trainers."""
        self._optimizer.zero_grad(set_to_none=True)
        loss, own = self._loss(work, static)
        if own:
            loss.backward()  # type: ignore[no-untyped-call]
        self._tally.grad = torch.stack([loss.detach(), loss.new_tensor(own)])
        sum_gradients(self._job.world, [*self.model.parameters(), self._tally])
        total, count = self._tally.grad.tolist()
        if count:
            grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            torch._foreach_div_(grads, count)
            if self._job.train.clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._job.train.clip)
            for group in self._optimizer.param_groups:
                group["lr"] = self._pace.at(work.iteration)
            self._optimizer.step()
            self._average.update()
        return total / max(count, 1), int(count)

    def _loss(self, work: WorkItem, static: Tensor | None) -> tuple[Tensor, int]:
        """(the sum over this trainer's events, how many count); the state has moved past them at their first use."""
        self.model.train()
        job, batch, rows = self._job, work.batch, self.scheduler.read(work)
        if batch is None or rows is None:
            self.scheduler.write(work, None)
            return torch.zeros((), dtype=PRECISIONS[job.precision]), 0
        with autocast(job.precision):
            memory, writes = update_memory(self.model, job.task.stream, batch, rows)
            self.scheduler.write(work, writes)
            z = embed(self.model, batch, memory, static, DrawKey(job.seed, work.plan.number, 0))
            return job.task.loss(self.model, z, batch.first, batch.end, batch.pairs)

    def _choose_layout(self) -> MemoryScheduler:
        """How trainers are arranged, and this one's place."""
        job, config = self._job, self._config
        nodes, width, dtype = self._sizes
        room = memory_limit() // 2 if job.memory is None else job.memory
        each = ranks_by_host(self._aside)
        self._here = next(len(ranks) for ranks in each if job.world.rank in ranks)  # trainers that share the cores
        trainers = TrainerResources(
            trainers_by_host=tuple(map(len, each)),
            copy_bytes=nodes * (3 * width * dtype.itemsize + 16),
            memory_limit=int(min_over_ranks(self._aside, room)),
        )
        shape, why = choose_layout(trainers, config.batch_size, config.requested_layout)
        if job.world.size > 1:
            job.log_user(why)
        bounds = self._bounds()
        layout = NodeMemory.layout(nodes, width, dtype)
        schedule = Schedule(shape, len(bounds) - 1)
        return MemoryScheduler(job.world, schedule, bounds, self._look_up, layout, job.task.stream)

    def _bounds(self) -> list[int]:
        """Of the batches that are trained on."""
        train, size, lost = self._job.task.parts["train"], self._config.batch_size, self._config.max_lost_updates
        if lost == 1:
            return train.batches(size)
        bounds = train.bounded_loss_batches(lost, most=size)
        mean = len(train) / max(len(bounds) - 1, 1)
        self._job.log_user(
            f"plan: batches of {mean:.0f} events on average, at most {size}, that lose {lost:.0%} of updates"
        )
        return bounds

    def _paced(self) -> LrSchedule:
        """How fast trainers learn together."""
        config, together = self._config, self._together
        factor = {"linear": float(together), "sqrt": together**0.5, "none": 1.0}[config.lr_scale]
        epoch = max(self.scheduler.schedule.sweep / together, 1.0)
        warmup = round(config.warmup * epoch) if factor > 1 else 0
        return LrSchedule(self._job.train.lr, factor, warmup, config.lr_decay, epoch)

    @property
    def _ahead(self) -> int:
        """Batches looked up ahead: none where the thread would have no core of its own."""
        if self._config.prefetch != "auto":
            return self._config.prefetch
        return auto_depth(0, processes=self._here)

    def _look_up(self, low: int, high: int, number: int, *, whole: tuple[int, int]) -> EventBatch:
        drawn = self._job.task.sample_negatives(low, high, sweep=number)
        return self._lookout.batch(low, high, drawn, sweep=number, whole=whole)

    def artifacts(self) -> dict[str, str]:
        """Who used which batch when in the last epoch, as far as it fits."""
        schedule = self.scheduler.schedule
        start = schedule.start(self._shown)
        end = min(schedule.start(self._shown + 1), start + MAX_ITERATIONS_SHOWN)
        rows = []
        for rank in range(schedule.layout.workers):
            place = coordinates_of_rank(rank, schedule.layout.axes)
            name = ", ".join(f"{axis} {place[axis] + 1}" for axis, size in schedule.layout.axes.items() if size > 1)
            rows.append(
                (name or "trainer", [schedule.iteration_plan(rank, iteration) for iteration in range(start, end)])
            )
        title = f"share × lanes × copies = {schedule.layout}, {schedule.batches} batches: from iteration {start} on"
        return {"lanes.svg": draw_batch_lanes(rows, title=title, batches=schedule.batches, first=start)}

    def validate(self) -> dict[str, float]:
        """On val with few negatives, after the state that the present weights are in."""
        return self._measure("val", full=False)

    def evaluate(self, split: str) -> dict[str, float]:
        if not len(self._job.task.items(split)):
            raise ConfigError(f"the {split} split is empty: choose another --split")
        if split == "train":
            raise ConfigError("events are evaluated on val or test, found --split train")
        return self._measure(split, full=True)

    def _measure(self, split: str, *, full: bool) -> dict[str, float]:
        part, static = self._job.task.parts[split], self._static()
        with self._average.applied():
            memory = self._after(part.first)
            found = self._evaluator.measure(memory, static, split, full=full)
        self._known = part.first + len(part), memory
        return found

    def score(self, events: EventStream) -> Tensor:
        """[n] probabilities of new events, or [n, C] of their classes; each batch knows all events before it.

        They follow the stream: none may be earlier than its last one. The state moves on and the stream grows, so the
        next call goes on behind them.
        """
        first, static = len(self.task.stream), self._static()
        task = replace(self.task, stream=self.task.stream.concat(events))
        bounds = events.batches(self._config.eval_batch, keep_ties=False)
        with self._average.applied():
            memory = self._after(first)
            self._lookout.history.append(events.src, events.dst, events.t)
            self._walker = self._evaluating(task, replace(self._lookout, stream=task.stream))
            found = [
                self._walker.probabilities(memory, static, first + low, first + high)
                for low, high in itertools.pairwise(bounds)
            ]
        self._known = first + len(events), memory
        return torch.cat(found) if found else torch.empty(0)

    def _after(self, count: int) -> NodeMemory:
        """The state that the present weights are in after the first events: walked through from the start, training
        events in batches as they were trained on, the others as they are evaluated."""
        train, known = self.scheduler.bounds, self._known
        self._known = None  # the state is given away
        if known is None or not train[-1] <= known[0] <= count:
            memory, at = NodeMemory.empty(*self._sizes), 0
            if count:  # nobody asks for a state within training, but for the empty one
                self._walker.replay(memory, train)
                at = train[-1]
        else:
            at, memory = known
        self._walker.replay(memory, [*range(at, count, self._config.eval_batch), count])
        return memory

    @property
    def _sizes(self) -> tuple[int, int, torch.dtype]:
        width = self.model.width if self.model.has_memory else 0
        return self._job.task.stream.num_nodes, width, PRECISIONS[self._job.precision]

    def _static(self) -> Tensor | None:
        """[V, S] all that is known of nodes at any time."""
        features = self._job.features
        if self._config.learns_static(features is not None) and self._table is None:
            self._table = self._learnt()
        parts = [part for part in (features, self._table) if part is not None]
        return None if not parts else parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _learnt(self) -> Tensor:
        """By the first trainer, for all."""
        world, told = self._aside, None
        if world.is_first:
            told = tensors_to_bytes({STATIC_TABLE: train_static_embedding(self._config, self._job, self._lookout)})
        return tensors_from_bytes(broadcast_bytes(world, told))[STATIC_TABLE]

    def _evaluating(self, task: EventTask, lookout: NeighborhoodBuilder) -> EventEvaluator:
        config = self._config
        return EventEvaluator(
            self.model, task, lookout, config.eval_batch, config.eval_negatives, self._job.precision, self._aside
        )

    def state_dict(self) -> State:
        self._static()
        table = {} if self._table is None else {STATIC_TABLE: self._table}
        with self._average.applied():
            model = {**self.model.state_dict(), **table}
        trained = self._average.state()
        return {
            "model": model,
            "optimizer": optimizer_tensors(self.model, self._optimizer),
            RANK_LOCAL: self.scheduler.state(),
            **({RAW_WEIGHTS: trained} if trained else {}),
        }

    def load_state_dict(self, state: State) -> None:
        self._known = None
        weights = dict(state["model"])
        if STATIC_TABLE in weights:
            self._table = weights.pop(STATIC_TABLE).clone()
        self.model.load_state_dict(weights)
        self._average.load(state.get(RAW_WEIGHTS, {}))
        if "optimizer" in state:
            load_optimizer(self.model, self._optimizer, state["optimizer"])
        if RANK_LOCAL in state:
            self.scheduler.load(state[RANK_LOCAL])

    def close(self) -> None:
        self._known = None
