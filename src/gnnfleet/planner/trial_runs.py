"""Trials: short real epochs, run by as many processes as would train, on the real parts.

The fastest candidates of every strategy are tried, as far as their epochs are short. Their measured seconds replace the
estimates; the estimates of the strategy's other candidates are scaled by the mean ratio.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

from gnnfleet.comm.collectives import barrier, max_over_ranks
from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.launch.live_module import share_module
from gnnfleet.launch.local_launcher import launch
from gnnfleet.launch.rank_main import open_same_store, with_placement
from gnnfleet.launch.spec import RunSpec
from gnnfleet.nn.custom_model import annotate_model_errors
from gnnfleet.report.memory import peak_rss
from gnnfleet.strategies.estimates import CostEstimate, TrialTiming
from gnnfleet.strategies.protocol import Strategy
from gnnfleet.training.build import RankContext, build

MAX_TRIALS = 3
"""Candidates of a strategy that are tried."""

MIN_TIMED_SECONDS, MAX_TRIAL_SECONDS = 1.5, 6.0
"""Seconds that are timed, and seconds of a whole trial, warm-up included."""

MAX_EPOCHS, WARMUP_STEPS = 3, 4
"""Whole epochs that are timed at most; steps before the timed ones, if an epoch has many."""


@dataclass(frozen=True)
class TrialRun:
    """One candidate: ``timed_steps`` after ``warmup_steps``, or ``timed_epochs`` after one if ``timed_steps`` is 0."""

    config: Mapping[str, Any]  # of the run
    placement: str | None  # path of the partition, clusters or chunk layouts
    epoch_steps: int
    first_step: int = 0
    warmup_steps: int = 0
    timed_steps: int = 0
    timed_epochs: int = 0


def trial_length(estimate: CostEstimate) -> dict[str, int] | None:
    """The number of warm-up and timed steps or epochs of a trial; None if it would take too long."""
    step_seconds, fetch = estimate.seconds / estimate.steps, estimate.batches_per_fetch
    warmup = fetch * -(-WARMUP_STEPS // fetch)
    timed = fetch * max(1, int(MIN_TIMED_SECONDS / max(step_seconds * fetch, 1e-9)))
    timed = min(timed, (estimate.steps - warmup) // fetch * fetch)
    if timed > 0:
        seconds = (warmup + timed) * step_seconds
        return {"warmup_steps": warmup, "timed_steps": timed} if seconds <= MAX_TRIAL_SECONDS else None
    epochs = max(1, min(MAX_EPOCHS, int(MIN_TIMED_SECONDS / max(estimate.seconds, 1e-9))))
    return {"timed_epochs": epochs} if (1 + epochs) * estimate.seconds <= MAX_TRIAL_SECONDS else None


def trial_candidates(estimates: Sequence[CostEstimate], memory_limits: Mapping[int, float]) -> list[CostEstimate]:
    """The fastest candidates of every strategy; ``memory_limits`` of a worker, by the number of workers."""
    candidates: dict[str, list[CostEstimate]] = {}
    for estimate in sorted(estimates, key=lambda estimate: estimate.seconds):
        fits = not estimate.refused and estimate.memory <= memory_limits.get(estimate.workers, 0.0)
        chosen = candidates.setdefault(estimate.name, [])
        if fits and estimate.is_synchronous and len(chosen) < MAX_TRIALS and trial_length(estimate) is not None:
            chosen.append(estimate)
    return [estimate for chosen in candidates.values() for estimate in chosen]


def apply_trials(estimates: Sequence[CostEstimate], timings: Mapping[int, TrialTiming]) -> list[CostEstimate]:
    """The estimates with measured seconds (by id of an estimate); those of untried candidates are scaled."""
    ratios: dict[str, list[float]] = {}
    for estimate in estimates:
        timing = timings.get(id(estimate))
        if timing is not None and not timing.refused:
            ratios.setdefault(estimate.name, []).append(timing.seconds / max(estimate.seconds, 1e-9))
    return [_corrected(estimate, timings.get(id(estimate)), ratios.get(estimate.name)) for estimate in estimates]


def _corrected(estimate: CostEstimate, timing: TrialTiming | None, ratios: Sequence[float] | None) -> CostEstimate:
    if timing is not None and timing.refused:
        return replace(estimate, refused=timing.refused)
    if timing is not None:
        reason = f"trial epoch: {timing.seconds:.2g} s (estimate: {estimate.seconds:.2g} s)"
        return replace(estimate, seconds=timing.seconds, reasons=(*estimate.reasons, reason))
    if ratios and not estimate.refused and estimate.is_synchronous:
        return replace(estimate, seconds=estimate.seconds * mean(ratios))
    return estimate


def launch_trials(graph: Graph, config: RunConfig, trials: Sequence[TrialRun], *, scratch: Path) -> list[TrialTiming]:
    """Run trials one after the other by ``config.workers`` processes of one launch."""
    with share_module(config) if config.model.is_live else nullcontext() as fd:
        timings = launch(
            RunSpec.of(graph, config, scratch, None, trials=[asdict(trial) for trial in trials], module_fd=fd),
            folder=scratch / "launch",
            workers=config.workers,
            advice="try again",
            function=f"{__name__}:run_trial_spec",
        )
    return [TrialTiming(**timing) for timing in timings["timings"]]


def run_trial_spec(spec: RunSpec, world: World) -> dict[str, Any]:
    """Collective. Run the trials of a spec on this rank."""
    graph = open_same_store(spec, world)
    with annotate_model_errors(resolve(spec.config).model.file):
        return {"timings": [asdict(run_trial(graph, TrialRun(**trial), world)) for trial in spec.trials or ()]}


def run_trial(graph: Graph, trial: TrialRun, world: World | None = None) -> TrialTiming:
    """Collective. Time one candidate; a ConfigError becomes the reason of its refusal."""
    world = (world or World()).uncounted()
    config = resolve(dict(trial.config))
    placement = None if trial.placement is None else Path(trial.placement)
    try:
        strategy = build(graph, config, context=with_placement(RankContext(world), config, placement)).strategy
        try:
            seconds = _time_steps(strategy, trial, world) if trial.timed_steps else _time_epochs(strategy, trial, world)
        finally:
            strategy.close()
    except ConfigError as error:
        return TrialTiming(refused=str(error))
    return TrialTiming(seconds, max_over_ranks(world, float(peak_rss())))


def _time_steps(strategy: Strategy, trial: TrialRun, world: World) -> float:
    """Seconds of an epoch, from some of its steps."""
    steps = strategy.train_epoch(0, trial.first_step)
    try:
        for _ in islice(steps, trial.warmup_steps):
            pass
        barrier(world)
        started = time.perf_counter()
        timed = sum(1 for _ in islice(steps, trial.timed_steps))
        seconds = time.perf_counter() - started
    finally:
        steps.close()
    return seconds * trial.epoch_steps / max(1, timed)


def _time_epochs(strategy: Strategy, trial: TrialRun, world: World) -> float:
    seconds = []
    for epoch in range(1 + trial.timed_epochs):
        barrier(world)
        started = time.perf_counter()
        for _ in strategy.train_epoch(epoch):
            pass
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])
