"""Epochs that are short are tried before they are planned with: by as many processes as would train, on the real parts.

A rehearsal times layers and links one by one; what they take from each other in an epoch, only an epoch tells. Of every
strategy the fastest settings are tried, the others follow their mean.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from statistics import mean, median
from typing import Any

from gnnfleet.comm.collectives import barrier
from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.launch.rank_main import with_placement
from gnnfleet.strategies.estimates import CostEstimate
from gnnfleet.strategies.protocol import Strategy
from gnnfleet.training.build import RankContext, build

MAX_TRIALS = 3
"""Settings of a strategy that are tried."""

MIN_TIMED_SECONDS, MAX_TRIAL_SECONDS = 1.5, 6.0
"""Seconds that are timed, and that a trial may take with what comes before them."""

EPOCHS, WARMUP_STEPS = 3, 4
"""At most so many whole epochs; steps that are not timed, where an epoch has many."""


@dataclass(frozen=True)
class TrialRun:
    """One setting: how many steps of an epoch are timed after how many others, or whole epochs where ``warm`` is 0."""

    config: Mapping[str, Any]  # of the run
    cut: str | None  # what the strategy needs of the kind, below the store
    steps: int  # of an epoch
    warm: int
    timed: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def trial_length(forecast: CostEstimate) -> tuple[int, int] | None:
    """(steps before, steps timed) of a trial, (0, epochs) where an epoch has too few; None where it would take long."""
    each, relay = forecast.seconds / forecast.steps, forecast.relay
    warm = relay * -(-WARMUP_STEPS // relay)
    timed = relay * max(1, int(MIN_TIMED_SECONDS / max(each * relay, 1e-9)))
    timed = min(timed, (forecast.steps - warm) // relay * relay)
    if timed > 0:
        return (warm, timed) if (warm + timed) * each <= MAX_TRIAL_SECONDS else None
    epochs = max(1, min(EPOCHS, int(MIN_TIMED_SECONDS / max(forecast.seconds, 1e-9))))
    return (0, epochs) if (1 + epochs) * forecast.seconds <= MAX_TRIAL_SECONDS else None


def trial_candidates(every: Sequence[CostEstimate], most: Mapping[int, float]) -> list[CostEstimate]:
    """The fastest of every strategy; ``most`` is the memory that a worker of so many may take."""
    found: dict[str, list[CostEstimate]] = {}
    for each in sorted(every, key=lambda each: each.seconds):
        fits = not each.refused and each.memory <= most.get(each.workers, 0.0)
        if (
            fits
            and each.is_walk
            and trial_length(each) is not None
            and len(found.setdefault(each.name, [])) < MAX_TRIALS
        ):
            found[each.name].append(each)
    return [each for some in found.values() for each in some]


TrialOutcome = float | str
"""Seconds of an epoch, or why it cannot be trained after all."""


def apply_trials(every: Sequence[CostEstimate], tried: Mapping[int, TrialOutcome]) -> list[CostEstimate]:
    """Forecasts with the seconds that were found (by id of a forecast), those of a strategy's others in proportion."""
    ratios: dict[str, list[float]] = {}
    for each in every:
        took = tried.get(id(each))
        if isinstance(took, float):
            ratios.setdefault(each.name, []).append(took / max(each.seconds, 1e-9))
    made = []
    for each in every:
        took = tried.get(id(each))
        if isinstance(took, str):
            each = replace(each, refused=took)
        elif took is not None:
            reason = f"an epoch was tried: {took:.2g} s; foreseen were {each.seconds:.2g} s"
            each = replace(each, seconds=took, reasons=(*each.reasons, reason))
        elif each.name in ratios and not each.refused and each.is_walk:
            each = replace(each, seconds=each.seconds * mean(ratios[each.name]))
        made.append(each)
    return made


def run_trial(graph: Graph, trial: TrialRun, world: World | None = None) -> TrialOutcome:
    """All ranks call it together."""
    try:
        return _seconds(graph, trial, world)
    except ConfigError as error:
        return str(error)


def _seconds(graph: Graph, trial: TrialRun, world: World | None) -> float:
    aside = (world or World()).uncounted()
    config = resolve(dict(trial.config))
    assert graph.store is not None
    cut = None if trial.cut is None else graph.store.path / trial.cut
    strategy = build(graph, config, here=with_placement(RankContext(aside), config, cut)).strategy
    try:
        return _window(strategy, trial, aside) if trial.warm else _epochs(strategy, trial, aside)
    finally:
        strategy.close()


def _window(strategy: Strategy, trial: TrialRun, world: World) -> float:
    walk = strategy.train_epoch(0)
    try:
        for _ in islice(walk, trial.warm):
            pass
        barrier(world)
        started = time.perf_counter()
        for _ in islice(walk, trial.timed):
            pass
        took = time.perf_counter() - started
    finally:
        walk.close()
    return took * trial.steps / trial.timed


def _epochs(strategy: Strategy, trial: TrialRun, world: World) -> float:
    found = []
    for epoch in range(1 + trial.timed):
        barrier(world)
        started = time.perf_counter()
        for _ in strategy.train_epoch(epoch):
            pass
        found.append(time.perf_counter() - started)
    return median(found[1:])
