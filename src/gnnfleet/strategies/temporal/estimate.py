"""What an epoch of ``temporal`` takes: some iterations from the middle of the stream, done by as many as will train.

Every arrangement of trainers is tried as it will be trained, on the whole stream, so bytes, rounds and memory are those
of real iterations. Weights are thrown away; rows of nodes that would be learnt beforehand are zeros.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import torch

from gnnfleet.comm.collectives import all_gather_numbers
from gnnfleet.errors import ConfigError
from gnnfleet.report.memory import peak_rss
from gnnfleet.strategies.estimates import CostEstimate
from gnnfleet.strategies.job import PRECISIONS, EventJob
from gnnfleet.strategies.temporal.batch_step import last_events
from gnnfleet.strategies.temporal.config import TemporalConfig
from gnnfleet.strategies.temporal.layout_planner import all_layouts
from gnnfleet.strategies.temporal.memory import MemoryUpdate
from gnnfleet.strategies.temporal.schedule import ParallelLayout
from gnnfleet.strategies.temporal.strategy import STATIC_TABLE, TemporalStrategy

_WARM, _TIMED = 3, 12
"""Iterations before those that are timed, and these."""


@dataclass(frozen=True, kw_only=True)
class EventTrialResult:
    """What an arrangement takes: bytes of all ranks, rounds and memory of the one with the most."""

    iterations: int = 0  # of an epoch
    batch: int = 0
    seconds: float = 0.0  # of an iteration
    bytes: float = 0.0  # of an iteration
    rounds: float = 0.0  # of an iteration
    begin: tuple[float, float] = (0.0, 0.0)  # bytes and rounds before the first
    weights: int = 0  # bytes
    memory: float = 0.0
    refused: str = ""


@dataclass(frozen=True)
class EventPlanningContext:
    """What the strategy is told to foresee an epoch; ``bandwidth`` where every worker has a machine of its own."""

    workers: int
    trial_results: Callable[[int, Sequence[ParallelLayout]], Sequence[EventTrialResult]]  # by so many workers, here
    bandwidth: float | None = None
    latency: float = 0.0


def estimate(config: TemporalConfig, outlook: EventPlanningContext) -> list[CostEstimate]:
    """One trainer, and every arrangement of several."""
    (alone,) = outlook.trial_results(1, [ParallelLayout()])
    found = [_forecast(config, ParallelLayout(), alone)]
    wanted = [shape for shape in all_layouts(outlook.workers) if _is_asked_for(config.requested_layout, shape)]
    if outlook.workers == 1 or not wanted:
        return found
    if outlook.bandwidth is None:
        each = outlook.trial_results(outlook.workers, wanted)
        return found + [_forecast(config, *pair) for pair in zip(wanted, each, strict=True)]
    return found + [_forecast(config, shape, _apart(alone, shape, outlook)) for shape in wanted]


def _is_asked_for(given: ParallelLayout, shape: ParallelLayout) -> bool:
    return all(wanted in (0, size) for wanted, size in zip(vars(given).values(), vars(shape).values(), strict=True))


def _apart(alone: EventTrialResult, shape: ParallelLayout, outlook: EventPlanningContext) -> EventTrialResult:
    """One of several machines: only copies of the memory are of different ones, and gradients travel."""
    assert outlook.bandwidth is not None
    if shape.memory_parallel < shape.workers:
        return EventTrialResult(
            refused="trainers of one memory share it, so they are of one machine: strategy.memory_parallel"
        )
    sums = 2 * alone.weights / outlook.bandwidth + 2 * outlook.latency
    return replace(
        alone,
        iterations=alone.iterations // shape.memory_parallel,
        seconds=alone.seconds + sums,
        bytes=float(shape.workers * alone.weights),
        rounds=1.0,
    )


def _forecast(config: TemporalConfig, shape: ParallelLayout, took: EventTrialResult) -> CostEstimate:
    words = {**config.model_dump(exclude_defaults=True), "name": "temporal", **vars(shape)}
    if config.batch == "auto" and took.batch:
        words["batch"] = took.batch
    exact = shape.epoch_parallel == shape.memory_parallel == 1
    reasons = [f"{took.iterations} steps of {took.seconds:.2g} s on batches of {took.batch} events"]
    if not exact:
        reasons.append(
            f"a step is a mean over {shape.epoch_parallel * shape.memory_parallel} batches: fewer and larger steps"
        )
    return CostEstimate(
        words=words,
        kind="exact" if exact else "approximate",
        workers=shape.workers,
        memory=took.memory,
        bytes=took.begin[0] + took.iterations * took.bytes,
        rounds=took.begin[1] + took.iterations * took.rounds,
        seconds=took.iterations * took.seconds,
        steps=took.iterations,
        reasons=tuple(reasons),
        refused=took.refused,
    )


def run_event_trials(config: TemporalConfig, job: EventJob, shapes: Sequence[ParallelLayout]) -> list[EventTrialResult]:
    """All ranks of the job call it together; every one gets the same."""
    found = []
    for shape in shapes:
        try:
            found.append(_try(config.model_copy(update=vars(shape)), job))
        except ConfigError as error:  # the same on all ranks
            found.append(EventTrialResult(refused=str(error)))
    most = max(row[0] for row in _gathered(job, [float(peak_rss())]))
    return [each if each.refused else replace(each, memory=most) for each in found]


def _try(config: TemporalConfig, job: EventJob) -> EventTrialResult:
    """Some iterations of an arrangement, and a batch of an evaluation for its memory."""
    task, world = job.task, job.world.uncounted()
    # From the first event on: nothing has to be walked through before it is measured.
    short = {**task.parts, "val": task.stream.slice(0, min(config.eval_batch, len(task.stream)))}
    strategy = TemporalStrategy(config, replace(job, world=world, task=replace(task, parts=short)))
    _skip_learning(config, strategy, job)
    schedule = strategy.scheduler.schedule
    count, lanes = schedule.start(1), schedule.layout.epoch_parallel
    warm, timed = _WARM + lanes, -(-_TIMED // lanes) * lanes
    if not count:
        raise ConfigError(
            f"{schedule.batches} batches are too few for {schedule.layout.workers} trainers: smaller ones"
        )
    first = max(0, min(count // 2, count - warm - timed))
    _fill(strategy, job, strategy.scheduler.bounds[schedule.batches // 2])
    seconds, traffic = [], [(world.traffic.bytes_sent, world.traffic.rounds)]
    with closing(strategy.train_epoch(0, first)) as steps:
        for record in islice(steps, warm + timed):
            seconds.append(record.seconds)
            traffic.append((world.traffic.bytes_sent, world.traffic.rounds))
    if len(strategy.task.items("val")):
        strategy.evaluate("val")
    strategy.close()
    warm = min(warm, len(seconds) - 1)
    (some, met), (begun, before) = traffic[-1], traffic[warm]
    made = len(seconds) - warm
    first_one = traffic[1][0] - traffic[0][0], traffic[1][1] - traffic[0][1]
    own = [_typical(seconds[warm:], lanes), (some - begun) / made, (met - before) / made, *map(float, first_one)]
    every = torch.tensor(_gathered(job, own), dtype=torch.float64)
    bytes_, sent_first = every[:, 1].sum().item(), every[:, 3].sum().item()
    rounds, met_first = every[:, 2].max().item(), every[:, 4].max().item()
    return EventTrialResult(
        iterations=count,
        batch=max(high - low for low, high in pairwise(strategy.scheduler.bounds)),
        seconds=every[:, 0].max().item(),
        bytes=bytes_,
        rounds=rounds,
        begin=(max(0.0, sent_first - bytes_), max(0.0, met_first - rounds)),
        weights=sum(each.nbytes for each in strategy.model.parameters()),
    )


def _typical(seconds: Sequence[float], lanes: int) -> float:
    """Of an iteration; a lane looks up all uses of a batch in the first of them."""
    groups = [sum(seconds[at : at + lanes]) / lanes for at in range(0, len(seconds) - lanes + 1, lanes)]
    return statistics.median(groups or seconds)


def _skip_learning(config: TemporalConfig, strategy: TemporalStrategy, job: EventJob) -> None:
    """Zeros in place of rows that are learnt before the first epoch."""
    if config.learns_static(job.features is not None):
        table = torch.zeros(job.task.stream.num_nodes, job.model.width, dtype=PRECISIONS[job.precision])
        strategy.load_state_dict({"model": {**strategy.model.state_dict(), STATIC_TABLE: table}})


def _fill(strategy: TemporalStrategy, job: EventJob, events: int) -> None:
    """Every node that has met others by then has a mail."""
    shared = strategy.scheduler.shared
    if strategy.model.has_memory and shared.trainers.is_first:
        ids, event, _ = last_events(job.task.stream, 0, events)
        width = shared.memory.tables["memory"].shape[1]
        rows = torch.zeros(len(ids), 3 * width, dtype=PRECISIONS[job.precision])
        shared.memory.write(MemoryUpdate(ids, rows[:, :width], rows[:, width:], event))


def _gathered(job: EventJob, own: Sequence[float]) -> list[list[float]]:
    return all_gather_numbers(job.world.uncounted(), own)
