"""The training loop: epochs, evaluation, early stopping, checkpoints. It names no strategy.

Files and displays count epochs from 1, strategies from 0. The best epoch has the best val metric; ties go to the
lower val loss, then to the earlier epoch. Every rank runs the loop. Rank 0 decides whatever depends on a clock or could
differ by rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from gnnfleet.errors import RunError
from gnnfleet.nn.metrics import LOWER_IS_BETTER
from gnnfleet.report.metrics import MetricsSink
from gnnfleet.report.progress import OnEpoch
from gnnfleet.strategies.protocol import RAW_WEIGHTS, SHARDED, State, StepRecord, Strategy
from gnnfleet.tasks.learning_rate import learning_rate
from gnnfleet.tasks.train_options import TrainConfig
from gnnfleet.training.checkpoint import TrainState
from gnnfleet.training.phase_profiler import PhaseProfiler

BroadcastFromFirst = Callable[[dict[str, Any]], dict[str, Any]]
"""Collective. Returns rank 0's argument on every rank; JSON values."""

SaveCheckpoint = Callable[[str, State, TrainState], None]
"""Takes the checkpoint ``last`` or ``best``; without a directory it is dropped."""


@dataclass(frozen=True)
class LoopConfig:
    """Inputs of the loop besides the strategy."""

    train: TrainConfig
    metric: str
    validates: bool  # there are val nodes
    save: SaveCheckpoint = lambda name, state, position: None
    sinks: Sequence[MetricsSink] = ()
    display: OnEpoch = lambda row: None
    broadcast: BroadcastFromFirst = lambda message: message
    profiler: PhaseProfiler = field(default_factory=PhaseProfiler)
    other_metrics: Sequence[str] = ()  # of val, reported in each epoch


class _Checkpoints:
    """Copies the best weights so far, decides when checkpoints are written, and writes them.

    Within an epoch, rank 0 says after how many steps the ranks check the clock again, so steps need no message. The
    first check comes after the second step, because most full-batch epochs have only one.
    """

    def __init__(self, config: LoopConfig, best: State | None) -> None:
        self._config, self.best = config, best
        self._unsaved: TrainState | None = None  # position of a copy of the best weights that is not written yet
        self.averaged = False  # True if the copy is an average of the trained weights
        self._last_save = time.monotonic()
        self.begin_epoch()

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() - self._last_save >= self._config.train.checkpoint_seconds

    def copy_best(self, strategy: Strategy, position: TrainState) -> None:
        state = strategy.state_dict()
        self.averaged, self._unsaved = RAW_WEIGHTS in state, position
        self.best = {
            part: {name: tensor.detach().clone() for name, tensor in tensors.items()}
            for part, tensors in state.items()
            if part in ("model", SHARDED)
        }

    def begin_epoch(self) -> None:
        self._steps_to_check, self._epoch_start, self._steps = _FIRST_CHECK, time.monotonic(), 0

    def after_step(self, strategy: Strategy, position: TrainState) -> float:
        """Write a checkpoint if one is due; returns the seconds it took."""
        interval = self._config.train.checkpoint_seconds
        self._steps_to_check, self._steps = self._steps_to_check - 1, self._steps + 1
        if self._steps_to_check or not interval:
            return 0.0
        step_seconds = max((time.monotonic() - self._epoch_start) / self._steps, 1e-9)
        steps_to_check = max(1, int(interval / _CHECKS_PER_CHECKPOINT / step_seconds))
        decision = self._config.broadcast({"save": self.is_overdue, "steps_to_check": steps_to_check})
        self._steps_to_check = decision["steps_to_check"]
        if not decision["save"]:
            return 0.0
        started = time.monotonic()
        self.save(strategy, position)
        return time.monotonic() - started

    def save(self, strategy: Strategy, position: TrainState) -> None:
        """Write best before last: after a kill in between, training from last finds best again."""
        if self._unsaved is not None and self.best is not None:
            self._config.save("best", self.best, self._unsaved)
            self._unsaved = None
        self._config.save("last", strategy.state_dict(), position)
        self._last_save = time.monotonic()


_FIRST_CHECK = 2  # steps of an epoch before the first check of the clock
_CHECKS_PER_CHECKPOINT = 4


def fit(
    strategy: Strategy, config: LoopConfig, *, start: TrainState | None = None, best: State | None = None
) -> tuple[TrainState, list[dict[str, Any]]]:
    """Train from ``start``; returns the final position and the rows of metrics of the epochs run in this call.

    The strategy then holds the weights of ``position.best_epoch``. Raises RunError if the loss is not finite.
    """
    position = start or TrainState()
    rows: list[dict[str, Any]] = []
    checkpoints = _Checkpoints(config, best)
    last_saved = position.epoch
    while position.epoch < config.train.epochs and not _exhausted(position, config):
        position, row = _run_epoch(strategy, position, config, checkpoints)
        row |= strategy.epoch_metrics()
        scores = _validate(strategy, config, position, row)
        decision = config.broadcast(
            {"scores": scores, "save": checkpoints.is_overdue, "report": config.profiler.is_due}
        )
        if (scores := decision["scores"]) is not None:
            position = replace(position, evaluated=position.epoch)
            if _is_better(scores, config.metric, position):
                best_metric, best_loss = scores[config.metric], scores["loss"]
                position = replace(position, best_epoch=position.epoch, best_metric=best_metric, best_loss=best_loss)
                checkpoints.copy_best(strategy, position)
            position = _after_plateau(config.train, position)
        rows.append(row)
        for sink in config.sinks:
            sink.write(row)
        config.display(row)
        if decision["report"]:
            config.profiler.report()
        if decision["save"]:
            checkpoints.save(strategy, position)
            last_saved = position.epoch
    if last_saved < position.epoch:
        checkpoints.save(strategy, position)
    if checkpoints.best is not None and (position.best_epoch != position.epoch or checkpoints.averaged):
        strategy.load_state_dict(checkpoints.best)
    if not config.validates:
        position = replace(position, best_epoch=position.epoch)
    return position, rows


def _run_epoch(
    strategy: Strategy, position: TrainState, config: LoopConfig, checkpoints: _Checkpoints
) -> tuple[TrainState, dict[str, Any]]:
    """Train one epoch, or the rest of a resumed one; returns the new position and the epoch's row of metrics."""
    started = time.perf_counter() - position.seconds
    steps = strategy.steps_per_epoch
    lr = rate = _learning_rate(config.train, position, steps)
    strategy.set_learning_rate(rate)
    checkpoints.begin_epoch()
    config.profiler.begin()
    with closing(strategy.train_epoch(position.epoch, position.within)) as records:
        for record in records:
            _check_loss(record, position, config.train)
            position = replace(
                position,
                step=position.step + record.steps,
                within=position.within + 1,
                loss=position.loss + record.loss * record.count,
                count=position.count + record.count,
                seconds=time.perf_counter() - started,
            )
            lr, rate = rate, _learning_rate(config.train, position, steps)
            strategy.set_learning_rate(rate)  # of the next step
            config.profiler.after_step(record.step)
            with config.profiler.pause("checkpoint"):
                started += checkpoints.after_step(strategy, position)
    config.profiler.end(position.epoch + 1)
    mean = position.loss / max(position.count, 1)
    row = {"epoch": position.epoch + 1, "step": position.step, "train_loss": mean, "lr": lr}
    row |= {"seconds": time.perf_counter() - started}
    return replace(position, epoch=position.epoch + 1, within=0, loss=0.0, count=0, seconds=0.0), row


def _learning_rate(train: TrainConfig, position: TrainState, steps: int) -> float:
    step = position.epoch * steps + min(position.within, steps)
    return learning_rate(train, step, steps_per_epoch=steps, scale=position.lr_scale)


def _after_plateau(train: TrainConfig, position: TrainState) -> TrainState:
    """Reduce the rate if val has not improved for more than ``step_size`` epochs."""
    waited = position.epoch - max(position.best_epoch, position.lr_epoch)
    if train.schedule != "plateau" or waited <= train.step_size:
        return position
    return replace(position, lr_scale=position.lr_scale * train.gamma, lr_epoch=position.epoch)


def _check_loss(record: StepRecord, position: TrainState, train: TrainConfig) -> None:
    if not math.isfinite(record.loss):
        raise RunError(
            f"the loss is {record.loss} in epoch {position.epoch + 1}, step {record.step}: try a smaller train.lr "
            f"(now {train.lr:g}), train.clip=1, or --precision float32; earlier checkpoints are kept"
        )


def _validate(
    strategy: Strategy, config: LoopConfig, position: TrainState, row: dict[str, Any]
) -> dict[str, float] | None:
    """Evaluate on val if it is due, and add the scores to the row; None if it is not due."""
    due = position.epoch % config.train.eval_every == 0 and not strategy.has_newer_weights
    due = due or position.epoch == config.train.epochs
    if not config.validates or not due:
        return None
    started = time.perf_counter()
    with config.profiler.pause("evaluation"):
        scores = strategy.validate()
    scores = {name: score for name, score in scores.items() if isinstance(score, float)}
    row |= {"val": scores[config.metric], "val_loss": scores["loss"], "eval_seconds": time.perf_counter() - started}
    row |= {f"val_{name}": scores[name] for name in config.other_metrics}
    return scores


def _is_better(scores: Mapping[str, float], metric: str, position: TrainState) -> bool:
    if position.best_metric is None or position.best_loss is None:
        return True
    if math.isnan(scores[metric]):
        return False
    sign = -1 if metric in LOWER_IS_BETTER else 1
    best = (sign * position.best_metric, -position.best_loss)
    return math.isnan(position.best_metric) or (sign * scores[metric], -scores["loss"]) > best


def _exhausted(position: TrainState, config: LoopConfig) -> bool:
    """True if val has not improved for ``patience`` epochs. Only evaluated epochs end a run."""
    waited = position.epoch - position.best_epoch
    return position.evaluated == position.epoch and bool(config.train.patience) and waited >= config.train.patience
