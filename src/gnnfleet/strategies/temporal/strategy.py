"""Memory-based training on events in the order of time, by one trainer or several (DistTGL).

A step reads memories and mails of the nodes it queries, applies the mails, writes the nodes of the batch, then computes
embeddings, loss and gradients, which are summed over trainers. A sweep over the training events starts with an empty
memory. An epoch uses as many events as there are; for one trainer it is a sweep.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from functools import cached_property

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
from gnnfleet.strategies.job import EventJob, autocast
from gnnfleet.strategies.optim import WeightEMA, load_optimizer, make_optimizer, optimizer_tensors
from gnnfleet.strategies.protocol import RANK_LOCAL, RAW_WEIGHTS, Reporting, State, StepRecord
from gnnfleet.strategies.temporal.batch_step import (
    EventBatch,
    NeighborhoodBuilder,
    embed,
    train_static_embedding,
    update_memory,
)
from gnnfleet.strategies.temporal.config import TemporalConfig
from gnnfleet.strategies.temporal.evaluation import EventEvaluator
from gnnfleet.strategies.temporal.layout_planner import (
    PRODUCT,
    CaptureCurve,
    LrSchedule,
    TrainerResources,
    choose_layout,
)
from gnnfleet.strategies.temporal.memory import NodeMemory
from gnnfleet.strategies.temporal.memory_access import MemoryScheduler, WorkItem
from gnnfleet.strategies.temporal.schedule import Schedule
from gnnfleet.tasks.event import EventTask

STATIC_TABLE = "static.table"
"""Key of the static embedding table, next to the weights in a state."""

MAX_ITERATIONS_SHOWN = 60
"""Number of iterations in the timeline of an epoch."""


class TemporalStrategy(Reporting):
    """Temporal training; with one trainer it is the reference of the parallel layouts."""

    def __init__(self, config: TemporalConfig, job: EventJob) -> None:
        self.model: TemporalModel = job.model
        if config.batch == "auto":
            curve = CaptureCurve.of(job.task.parts["train"])
            job.log_user(f"Batch size {curve.batch}. Share of node updates kept by batch size: {curve}.")
            config = config.model_copy(update={"batch": curve.batch})
        self._config, self._job = config, job
        self._uncounted = job.world.uncounted()
        self._optimizer = make_optimizer(self.model, job.train, fused=True)
        stream, dtype = job.task.stream, job.dtype
        self._builder = NeighborhoodBuilder(
            stream,
            stream.temporal_neighbors(),
            self.model.neighbours,
            self.model.num_hops,
            dtype,
            config.queries,
            job.task.mean_gap if self.model.uses_pair_features else 0.0,
            job.seed if config.events == "drawn" else None,
        )
        self.scheduler = self._choose_layout()
        layout = self.scheduler.schedule.layout
        self._batches_per_step = layout.epoch_parallel * layout.memory_parallel
        self._lr_schedule = self._make_lr_schedule()
        self._ema = WeightEMA(self.model, config.average**self._batches_per_step)
        self._last_epoch = 0
        self._static_table: Tensor | None = None  # trained when it is first needed
        self._replayed: tuple[int, NodeMemory] | None = None  # number of events, memory after them with these weights
        self._evaluator = self._make_evaluator(job.task, self._builder)
        self._scorer = self._evaluator  # its stream has the events scored since training, too

    @property
    def task(self) -> EventTask:
        """Task with all known events, including those scored since training."""
        return self._scorer.task

    @property
    def relation(self) -> str:
        return self._config.relation

    @cached_property
    def steps_per_epoch(self) -> int:
        return max(1, self.scheduler.schedule.start(1) - self.scheduler.schedule.start(0))

    def set_learning_rate(self, lr: float) -> None:
        self._lr_schedule = replace(self._lr_schedule, lr=lr)

    def train_epoch(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        self._replayed, self._last_epoch = None, epoch
        static, schedule = self._static_rows(), self.scheduler.schedule
        start, end = schedule.start(epoch), schedule.start(epoch + 1)
        self.scheduler.begin(start + first)
        started = time.perf_counter()
        depth = self._config.prefetch
        if depth == "auto":  # 0 if the thread would not have a core to itself
            depth = auto_depth(0, processes=self._trainers_on_host)
        with closing(prefetch_items(self.scheduler.items(start + first, end), depth)) as items:
            for work in items:
                loss, count = self._step(work, static)
                yield StepRecord(epoch, work.iteration - start, loss, count, time.perf_counter() - started)
                started = time.perf_counter()

    def _step(self, work: WorkItem, static: Tensor | None) -> tuple[float, int]:
        """Take an optimizer step; return (mean loss, number of events) of all trainers."""
        self._optimizer.zero_grad(set_to_none=True)
        loss, local_count = self._loss(work, static)
        if local_count:
            loss.backward()  # type: ignore[no-untyped-call]
        totals = torch.stack([loss.detach(), loss.new_tensor(local_count)])
        sum_gradients(self._job.world, self.model.parameters(), extra=totals)
        total, count = totals.tolist()
        if count:
            grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            torch._foreach_div_(grads, count)
            if self._job.train.clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._job.train.clip)
            for group in self._optimizer.param_groups:
                group["lr"] = self._lr_schedule.at(work.iteration)
            self._optimizer.step()
            self._ema.update()
        return total / max(count, 1), int(count)

    def _loss(self, work: WorkItem, static: Tensor | None) -> tuple[Tensor, int]:
        """Return (sum over this trainer's events, number of events); their first use advances the memory."""
        self.model.train()
        job, batch, rows = self._job, work.batch, self.scheduler.read(work)
        if batch is None or rows is None:
            self.scheduler.write(work, None)
            return torch.zeros((), dtype=job.dtype), 0
        with autocast(job.precision):
            memory, update = update_memory(self.model, job.task.stream, batch, rows)
            self.scheduler.write(work, update)
            z = embed(self.model, batch, memory, static, DrawKey(job.seed, work.plan.pass_number, 0))
            return job.task.loss(self.model, z, torch.arange(batch.first, batch.end), batch.pairs)

    def _choose_layout(self) -> MemoryScheduler:
        """Collective. Choose the layout and set up this trainer's schedule and memory."""
        job, config = self._job, self._config
        nodes, width, dtype = self._memory_shape
        memory = config.memory_budget or job.memory or memory_limit() // 2
        hosts = ranks_by_host(self._uncounted)
        self._trainers_on_host = next(len(ranks) for ranks in hosts if job.world.rank in ranks)
        resources = TrainerResources(
            trainers_by_host=tuple(map(len, hosts)),
            copy_bytes=nodes * (3 * width * dtype.itemsize + 16),
            memory_limit=int(min_over_ranks(self._uncounted, memory)),
        )
        layout, reason = choose_layout(resources, config.batch_size, config.requested_layout)
        if job.world.size > 1:
            job.log_user(reason)
        bounds = job.task.parts["train"].batches(config.batch_size)
        tables = NodeMemory.layout(nodes, width, dtype)
        schedule = Schedule(layout, len(bounds) - 1)
        return MemoryScheduler(job.world, schedule, bounds, self._build_batch, tables, job.task.stream)

    def _make_lr_schedule(self) -> LrSchedule:
        config, batches = self._config, self._batches_per_step
        factor = {"linear": float(batches), "sqrt": batches**0.5, "none": 1.0}[config.lr_scale]
        epoch = max(self.scheduler.schedule.sweep / batches, 1.0)
        warmup = round(config.warmup * epoch) if factor > 1 else 0
        decay = config.lr_decay if self._job.train.schedule == "constant" else 0.0
        return LrSchedule(self._job.train.lr, factor, warmup, decay, epoch)

    def _build_batch(self, low: int, high: int, pass_number: int, global_batch: tuple[int, int]) -> EventBatch:
        negatives = self._job.task.sample_negatives(torch.arange(low, high), sweep=pass_number)
        return self._builder.batch(low, high, negatives, sweep=pass_number, global_batch=global_batch)

    def artifacts(self) -> dict[str, str]:
        """Timeline of batches and trainers in the first iterations of the last epoch."""
        schedule = self.scheduler.schedule
        layout, start = schedule.layout, schedule.start(self._last_epoch)
        end = min(schedule.start(self._last_epoch + 1), start + MAX_ITERATIONS_SHOWN)
        rows = []
        for rank in range(layout.workers):
            coordinates = coordinates_of_rank(rank, layout.axes)
            name = ", ".join(f"{axis} {coordinates[axis] + 1}" for axis, size in layout.axes.items() if size > 1)
            plans = [schedule.iteration_plan(rank, iteration) for iteration in range(start, end)]
            rows.append((name or "trainer", plans))
        title = f"{PRODUCT} = {layout}, {schedule.batches} batches: from iteration {start} on"
        return {"lanes.svg": draw_batch_lanes(rows, title=title, batches=schedule.batches, first=start)}

    def validate(self) -> dict[str, float]:
        """Collective. Evaluate val among sampled negatives."""
        return self._measure("val", full=False)

    def evaluate(self, split: str) -> dict[str, float]:
        if not len(self._job.task.items(split)):
            raise ConfigError(f"the {split} split is empty: choose another --split")
        if split == "train":
            raise ConfigError("events are evaluated on val or test, found --split train: choose one of them")
        return self._measure(split, full=True)

    def _measure(self, split: str, *, full: bool) -> dict[str, float]:
        part, static = self._job.task.parts[split], self._static_rows()
        with self._ema.applied():
            memory = self._memory_after(part.first)
            metrics = self._evaluator.measure(memory, static, split, full=full)
        self._replayed = part.first + len(part), memory
        return metrics

    def score(self, events: EventStream) -> Tensor:
        """[n] probabilities of new events, or [n, C] of their classes, given all events before each batch.

        Events must not be earlier than the last one of the stream. They are appended to it for the next call.
        """
        first, static = len(self.task.stream), self._static_rows()
        task = replace(self.task, stream=self.task.stream.concat(events))
        bounds = events.batches(self._config.eval_batch, keep_ties=False)
        with self._ema.applied():
            memory = self._memory_after(first)
            self._builder.history.append(events.src, events.dst, events.t)
            self._scorer = self._make_evaluator(task, replace(self._builder, stream=task.stream))
            probabilities = [
                self._scorer.probabilities(memory, static, first + low, first + high)
                for low, high in itertools.pairwise(bounds)
            ]
        self._replayed = first + len(events), memory
        return torch.cat(probabilities) if probabilities else torch.empty(0)

    def _memory_after(self, count: int) -> NodeMemory:
        """Node memory of these weights after the first ``count`` events, replayed from the start if necessary.

        Training events are replayed in the batches of training, later ones in those of evaluations.
        """
        train, replayed = self.scheduler.bounds, self._replayed
        self._replayed = None  # the caller advances the memory
        if replayed is not None and train[-1] <= replayed[0] <= count:
            start, memory = replayed
        else:
            memory, start = NodeMemory.empty(*self._memory_shape), 0
            if count:  # only the end of training and later positions are asked for, or 0
                self._scorer.replay(memory, train)
                start = train[-1]
        self._scorer.replay(memory, [*range(start, count, self._config.eval_batch), count])
        return memory

    @property
    def _memory_shape(self) -> tuple[int, int, torch.dtype]:
        width = self.model.width if self.model.has_memory else 0
        return self._job.task.stream.num_nodes, width, self._job.dtype

    def _static_rows(self) -> Tensor | None:
        """[V, S] features and static table of the nodes; trains the table on the first call."""
        features = self._job.features
        if self._config.learns_static(features is not None) and self._static_table is None:
            self._static_table = self._train_static_table()
        columns = [rows for rows in (features, self._static_table) if rows is not None]
        return None if not columns else columns[0] if len(columns) == 1 else torch.cat(columns, 1)

    def _train_static_table(self) -> Tensor:
        """Collective. Train the table on rank 0 and broadcast it."""
        world, payload = self._uncounted, None
        if world.is_first:
            payload = tensors_to_bytes({STATIC_TABLE: train_static_embedding(self._config, self._job, self._builder)})
        return tensors_from_bytes(broadcast_bytes(world, payload))[STATIC_TABLE]

    def _make_evaluator(self, task: EventTask, builder: NeighborhoodBuilder) -> EventEvaluator:
        config = self._config
        return EventEvaluator(
            self.model, task, builder, config.eval_batch, config.eval_negatives, self._job.precision, self._uncounted
        )

    def state_dict(self) -> State:
        self._static_rows()
        table = {} if self._static_table is None else {STATIC_TABLE: self._static_table}
        with self._ema.applied():
            model = {**self.model.state_dict(), **table}
        raw_weights = self._ema.state()
        return {
            "model": model,
            "optimizer": optimizer_tensors(self.model, self._optimizer),
            RANK_LOCAL: self.scheduler.state(),
            **({RAW_WEIGHTS: raw_weights} if raw_weights else {}),
        }

    def load_state_dict(self, state: State) -> None:
        self._replayed = None
        weights = dict(state["model"])
        if STATIC_TABLE in weights:
            self._static_table = weights.pop(STATIC_TABLE).clone()
        self.model.load_state_dict(weights)
        self._ema.load(state.get(RAW_WEIGHTS, {}))
        if "optimizer" in state:
            load_optimizer(self.model, self._optimizer, state["optimizer"])
        if RANK_LOCAL in state:
            self.scheduler.load(state[RANK_LOCAL])

    def close(self) -> None:
        self._replayed = None
