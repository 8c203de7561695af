"""The training loop: epochs, evaluations, early stopping, checkpoints. It names no strategy.

Epochs are counted from 1 in everything that is written or shown ("epochs done"); strategies count from 0. The best
epoch is the one with the highest val metric, of equals the one with the lower val loss, of equals the first. Every
rank runs the loop; what depends on a clock or on numbers that might differ in rounding is decided by the first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from gnnfleet.errors import RunError
from gnnfleet.report.epochs import EpochDisplay, NoDisplay
from gnnfleet.report.metrics import MetricsSink
from gnnfleet.strategies.protocol import RAW_WEIGHTS, SHARDED, State, StepRecord, Strategy
from gnnfleet.tasks.train_options import TrainConfig
from gnnfleet.training.checkpoint import TrainState
from gnnfleet.training.phase_profiler import PhaseProfiler


class CheckpointSink(Protocol):
    """Where checkpoints go."""

    def save(self, name: str, state: State, position: TrainState) -> None: ...


class NoCheckpoints:
    """A run without a directory."""

    def save(self, name: str, state: State, position: TrainState) -> None:
        return None


BroadcastFromFirst = Callable[[dict[str, Any]], dict[str, Any]]
"""What the first rank says in place of what this one would; plain words and numbers."""


@dataclass(frozen=True)
class LoopConfig:
    """What the loop needs to know besides the strategy."""

    train: TrainConfig
    metric: str
    validates: bool  # there are val nodes
    checkpoints: CheckpointSink = field(default_factory=NoCheckpoints)
    sinks: Sequence[MetricsSink] = ()
    display: EpochDisplay = field(default_factory=NoDisplay)
    broadcast: BroadcastFromFirst = lambda word: word
    profiler: PhaseProfiler = field(default_factory=PhaseProfiler)


@dataclass(frozen=True)
class Outcome:
    """Where a run ended; the strategy then holds the weights of ``position.best_epoch``."""

    position: TrainState
    rows: list[dict[str, Any]]  # of the epochs run in this call
    stopped_early: bool


class _BestWeights:
    """The best weights so far, copied when they were found and written when it is time."""

    def __init__(self, state: State | None) -> None:
        self.state = state
        self.unsaved: TrainState | None = None  # where the run stood when they were found
        self.averaged = False  # whether they are others than those that were trained

    def take(self, strategy: Strategy, position: TrainState) -> None:
        state = strategy.state_dict()
        self.averaged = RAW_WEIGHTS in state
        self.state = {
            part: {name: tensor.detach().clone() for name, tensor in tensors.items()}
            for part, tensors in state.items()
            if part in ("model", SHARDED)
        }
        self.unsaved = position


class _CheckpointTimer:
    """When checkpoints are written, and writing them. Within an epoch the first rank says when to look again, so that
    ranks agree without a word after every step; not after the first, for most full batches have no other."""

    def __init__(self, plan: LoopConfig, kept: _BestWeights) -> None:
        self._plan, self._kept = plan, kept
        self._at = time.monotonic()
        self._wait, self._begun, self._done = _FIRST_LOOK, self._at, 0

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() - self._at >= self._plan.train.checkpoint_seconds

    def begin(self) -> None:
        """An epoch begins."""
        self._wait, self._begun, self._done = _FIRST_LOOK, time.monotonic(), 0

    def after_step(self, strategy: Strategy, position: TrainState) -> float:
        """Write a checkpoint if it is time; the seconds that took."""
        every = self._plan.train.checkpoint_seconds
        self._wait, self._done = self._wait - 1, self._done + 1
        if self._wait or not every:
            return 0.0
        each = (time.monotonic() - self._begun) / self._done
        word = self._plan.broadcast({"save": self.is_overdue, "wait": max(1, int(every / _LOOKS / max(each, 1e-9)))})
        self._wait = word["wait"]
        if not word["save"]:
            return 0.0
        started = time.monotonic()
        self.save(strategy, position)
        return time.monotonic() - started

    def save(self, strategy: Strategy, position: TrainState) -> None:
        """Best before last: a kill in between leaves a last from which a best is found again."""
        kept = self._kept
        if kept.unsaved is not None and kept.state is not None:
            self._plan.checkpoints.save("best", kept.state, kept.unsaved)
            kept.unsaved = None
        self._plan.checkpoints.save("last", strategy.state_dict(), position)
        self._at = time.monotonic()


_FIRST_LOOK = 2  # steps of an epoch before the first look at the clock
_LOOKS = 4  # looks at the clock between two checkpoints


def fit(strategy: Strategy, plan: LoopConfig, *, start: TrainState | None = None, best: State | None = None) -> Outcome:
    """Train from ``start`` on; ends with the best weights loaded. Raises RunError when the loss is no number."""
    position = start or TrainState()
    kept = _BestWeights(best)
    rows: list[dict[str, Any]] = []
    saved = _CheckpointTimer(plan, kept)
    last_saved = position.epoch
    while position.epoch < plan.train.epochs and not _exhausted(position, plan):
        position, row = _epoch(strategy, position, plan, saved)
        row |= strategy.epoch_metrics()
        found = _validate(strategy, plan, position, row)
        word = plan.broadcast({"found": found, "save": saved.is_overdue, "tell": plan.profiler.is_due})
        if word["found"] is not None:
            position = replace(position, evaluated=position.epoch)
            if _is_better(word["found"], plan.metric, position):
                position = _better(word["found"], plan.metric, position)
                kept.take(strategy, position)
        rows.append(row)
        for sink in plan.sinks:
            sink.write(row)
        plan.display.show(row)
        if word["tell"]:
            plan.profiler.report()
        if word["save"]:
            saved.save(strategy, position)
            last_saved = position.epoch
    if last_saved < position.epoch:
        saved.save(strategy, position)
    if kept.state is not None and (position.best_epoch != position.epoch or kept.averaged):
        strategy.load_state_dict(kept.state)
    if not plan.validates:
        position = replace(position, best_epoch=position.epoch)
    return Outcome(position, rows, stopped_early=position.epoch < plan.train.epochs)


def _epoch(
    strategy: Strategy, position: TrainState, plan: LoopConfig, saved: _CheckpointTimer
) -> tuple[TrainState, dict[str, Any]]:
    """(where the run stands after the epoch, its row); perhaps it was begun before."""
    started = time.perf_counter() - position.seconds
    saved.begin()
    plan.profiler.begin()
    with closing(strategy.train_epoch(position.epoch, position.within)) as records:
        for record in records:
            _check(record, position, plan.train)
            position = replace(
                position,
                step=position.step + record.steps,
                within=position.within + 1,
                loss=position.loss + record.loss * record.count,
                count=position.count + record.count,
                seconds=time.perf_counter() - started,
            )
            plan.profiler.after_step(record.step)
            with plan.profiler.pause("checkpoint"):
                started += saved.after_step(strategy, position)
    plan.profiler.end(position.epoch + 1)
    mean = position.loss / max(position.count, 1)
    row = {"epoch": position.epoch + 1, "step": position.step, "train_loss": mean}
    row |= {"seconds": time.perf_counter() - started}
    return replace(position, epoch=position.epoch + 1, within=0, loss=0.0, count=0, seconds=0.0), row


def _check(record: StepRecord, position: TrainState, train: TrainConfig) -> None:
    if not math.isfinite(record.loss):
        raise RunError(
            f"the loss is {record.loss} in epoch {position.epoch + 1}, step {record.step}: try a smaller train.lr "
            f"(now {train.lr:g}), train.clip=1, or --precision float32; checkpoints from before are kept"
        )


def _validate(
    strategy: Strategy, plan: LoopConfig, position: TrainState, row: dict[str, Any]
) -> dict[str, float] | None:
    """What val gives in this epoch, added to the row; None where it is not asked."""
    due = position.epoch % plan.train.eval_every == 0 and not strategy.has_newer_weights
    due = due or position.epoch == plan.train.epochs
    if not plan.validates or not due:
        return None
    started = time.perf_counter()
    with plan.profiler.pause("evaluation"):
        found = strategy.validate()
    row |= {"val": found[plan.metric], "val_loss": found["loss"], "eval_seconds": time.perf_counter() - started}
    return found


def _better(found: Mapping[str, float], metric: str, position: TrainState) -> TrainState:
    return replace(position, best_epoch=position.epoch, best_metric=found[metric], best_loss=found["loss"])


def _is_better(found: Mapping[str, float], metric: str, position: TrainState) -> bool:
    if position.best_metric is None or position.best_loss is None:
        return True
    if math.isnan(found[metric]):
        return False
    return math.isnan(position.best_metric) or (found[metric], -found["loss"]) > (
        position.best_metric,
        -position.best_loss,
    )


def _exhausted(position: TrainState, plan: LoopConfig) -> bool:
    """Patience counts epochs, but one that was not evaluated says nothing about it."""
    waited = position.epoch - position.best_epoch
    return position.evaluated == position.epoch and bool(plan.train.patience) and waited >= plan.train.patience
