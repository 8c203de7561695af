"""The training loop: epochs, evaluations, early stopping, checkpoints. It names no strategy.

Epochs are counted from 1 in everything that is written or shown ("epochs done"); strategies count from 0. The best
epoch is the one with the highest val metric, of equals the one with the lower val loss, of equals the first. Every
rank runs the loop; what depends on a clock or on numbers that might differ in rounding is decided by the first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from gnnfleet.errors import RunError
from gnnfleet.report.epochs import EpochDisplay, NoDisplay
from gnnfleet.report.metrics import Sink
from gnnfleet.run.checkpoint import Position
from gnnfleet.strategies.base import OWN, State, Strategy, TrainConfig


class Keeper(Protocol):
    """Where checkpoints go."""

    def save(self, name: str, state: State, position: Position) -> None: ...


class KeepNothing:
    """A run without a directory."""

    def save(self, name: str, state: State, position: Position) -> None:
        return None


Agree = Callable[[dict[str, Any]], dict[str, Any]]
"""What the first rank says in place of what this one would; plain words and numbers."""


@dataclass(frozen=True)
class Plan:
    """What the loop needs to know besides the strategy."""

    train: TrainConfig
    metric: str
    validates: bool  # there are val nodes
    keeper: Keeper = field(default_factory=KeepNothing)
    sinks: Sequence[Sink] = ()
    display: EpochDisplay = field(default_factory=NoDisplay)
    agree: Agree = lambda word: word


@dataclass(frozen=True)
class Outcome:
    """Where a run ended; the strategy then holds the weights of ``position.best_epoch``."""

    position: Position
    rows: list[dict[str, Any]]  # of the epochs run in this call
    stopped_early: bool


class _Best:
    """The best weights so far, copied when they were found and written when it is time."""

    def __init__(self, state: State | None) -> None:
        self.state = state
        self.unsaved: Position | None = None  # where the run stood when they were found

    def take(self, strategy: Strategy, position: Position) -> None:
        self.state = {
            part: {name: tensor.detach().clone() for name, tensor in tensors.items()}
            for part, tensors in strategy.state_dict().items()
            if part in ("model", OWN)
        }
        self.unsaved = position


def fit(strategy: Strategy, plan: Plan, *, start: Position | None = None, best: State | None = None) -> Outcome:
    """Train from ``start`` on; ends with the best weights loaded. Raises RunError when the loss is no number."""
    position = start or Position()
    kept = _Best(best)
    rows: list[dict[str, Any]] = []
    saved_at, saved_epoch = time.monotonic(), position.epoch
    while position.epoch < plan.train.epochs and not _exhausted(position, plan):
        row = _epoch(strategy, position, plan.train)
        position = replace(position, epoch=position.epoch + 1, step=position.step + row.pop("steps"))
        found = _validate(strategy, plan, position, row)
        overdue = time.monotonic() - saved_at >= plan.train.checkpoint_seconds
        word = plan.agree({"found": found, "save": overdue})
        if word["found"] is not None and _is_better(word["found"], plan.metric, position):
            position = _better(word["found"], plan.metric, position)
            kept.take(strategy, position)
        rows.append(row)
        for sink in plan.sinks:
            sink.write(row)
        plan.display.show(row)
        if word["save"]:
            _save(strategy, plan, position, kept)
            saved_at, saved_epoch = time.monotonic(), position.epoch
    if saved_epoch < position.epoch:
        _save(strategy, plan, position, kept)
    if kept.state is not None and position.best_epoch != position.epoch:
        strategy.load_state_dict(kept.state)
    if not plan.validates:
        position = replace(position, best_epoch=position.epoch)
    return Outcome(position, rows, stopped_early=position.epoch < plan.train.epochs)


def _epoch(strategy: Strategy, position: Position, train: TrainConfig) -> dict[str, Any]:
    started = time.perf_counter()
    loss, count, steps = 0.0, 0, 0
    for record in strategy.steps(position.epoch):
        if not math.isfinite(record.loss):
            raise RunError(
                f"the loss is {record.loss} in epoch {position.epoch + 1}, step {record.step}: try a smaller train.lr "
                f"(now {train.lr:g}), train.clip=1, or --precision float32; checkpoints from before are kept"
            )
        loss += record.loss * record.count
        count += record.count
        steps += 1
    seconds = time.perf_counter() - started
    return {"epoch": position.epoch + 1, "train_loss": loss / max(count, 1), "seconds": seconds, "steps": steps}


def _validate(strategy: Strategy, plan: Plan, position: Position, row: dict[str, Any]) -> dict[str, float] | None:
    """What val gives in this epoch, added to the row; None where it is not asked."""
    due = position.epoch % plan.train.eval_every == 0 or position.epoch == plan.train.epochs
    if not plan.validates or not due:
        return None
    started = time.perf_counter()
    found = strategy.evaluate("val")
    row |= {"val": found[plan.metric], "val_loss": found["loss"], "eval_seconds": time.perf_counter() - started}
    return found


def _better(found: Mapping[str, float], metric: str, position: Position) -> Position:
    return replace(position, best_epoch=position.epoch, best_metric=found[metric], best_loss=found["loss"])


def _is_better(found: Mapping[str, float], metric: str, position: Position) -> bool:
    if position.best_metric is None or position.best_loss is None:
        return True
    if math.isnan(found[metric]):
        return False
    return math.isnan(position.best_metric) or (found[metric], -found["loss"]) > (
        position.best_metric,
        -position.best_loss,
    )


def _exhausted(position: Position, plan: Plan) -> bool:
    return bool(plan.train.patience) and position.epoch - position.best_epoch >= plan.train.patience


def _save(strategy: Strategy, plan: Plan, position: Position, kept: _Best) -> None:
    """Best before last: a kill in between leaves a last from which the same best is found again."""
    if kept.unsaved is not None and kept.state is not None:
        plan.keeper.save("best", kept.state, kept.unsaved)
        kept.unsaved = None
    plan.keeper.save("last", strategy.state_dict(), position)
