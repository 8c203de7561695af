"""Interfaces between a strategy and its callers: training, reporting, prediction.

The loop requests steps, evaluations and state. The strategy owns the model and the optimizer, and decides when
parameters change. Files, launching and early stopping belong to the loop.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.tasks.base import RowLookup, Scores
from gnnfleet.tasks.event import EventTask

State = dict[str, dict[str, Tensor]]
"""Everything that training changes: {"model": {name: tensor}, "optimizer": {name: tensor}}, equal on all ranks. A
strategy may add parts of its own, ``SHARDED`` and ``RANK_LOCAL``."""

SHARDED = "own"
"""The part of a state that is sharded over ranks: {parameter name: rows, name + IDS_SUFFIX: their store ids,
name/key: their optimizer state}."""

IDS_SUFFIX = "/ids"

RANK_LOCAL = "private"
"""The part of a state that belongs to one rank of a world of this size, {name: tensor}; optional to load."""

RAW_WEIGHTS = "trained"
"""The part of a state with the trained weights, where "model" is an average of them."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step: ``loss`` is the mean over the ``count`` items of the step, of all ranks together."""

    epoch: int
    step: int
    loss: float
    count: int
    seconds: float
    steps: int = 1  # more if workers take steps independently


@dataclass(frozen=True, eq=False)
class Prediction:
    """Rows of the labelled node type: logits [n, C], and the input of the last layer [n, hidden]."""

    logits: Tensor
    embeddings: Tensor | None = None


class Reporting(Protocol):
    """Reports of a strategy besides losses, by default only evaluations; the learning rate."""

    _optimizer: torch.optim.Optimizer

    @property
    def steps_per_epoch(self) -> int:
        return 1

    def set_learning_rate(self, lr: float) -> None:
        """Set the rate of the next steps."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def evaluate(self, split: str) -> Scores:
        """The scores of the task, exact: full neighbourhoods, no dropout."""

    def validate(self) -> Scores:
        """Metrics that epochs are compared by; a strategy may return a cheaper estimate."""
        return self.evaluate("val")

    @property
    def has_newer_weights(self) -> bool:
        """True if newer weights are available; the loop may skip this evaluation."""
        return False

    @property
    def external_workers(self) -> Sequence[Mapping[str, float]]:
        """Statistics of workers that are not ranks of this world: bytes_sent, rounds, peak_rss, seconds by phase, …"""
        return ()

    def epoch_metrics(self) -> dict[str, float]:
        """Statistics of the last epoch, for its row in the metrics."""
        return {}

    def artifacts(self) -> dict[str, str]:
        """Collective. Files that describe the last epoch, {name: text}; the first rank keeps them."""
        return {}


class Strategy(Reporting, Protocol):
    """One way to train. Epochs count from 0: the number is part of the key of every draw."""

    @property
    def model(self) -> torch.nn.Module: ...

    def train_epoch(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        """Train one epoch, or the rest of it from step ``first`` on; yields a record after each optimizer step."""

    def state_dict(self) -> State:
        """The live tensors, not copies."""

    def load_state_dict(self, state: State) -> None:
        """Load a state; without "optimizer" only the weights."""

    def close(self) -> None:
        """Release resources outside this process's memory."""


@runtime_checkable
class NodePredictor(Protocol):
    """Exact output rows of nodes at the current weights."""

    def predict(self, *, embeddings: bool = False) -> Prediction:
        """Collective. Predictions for all nodes in store order on the first rank, no rows on the others."""

    def predict_nodes(self, ids: Tensor, *, embeddings: bool = False) -> Prediction:
        """Collective. Predictions for the given store ids, which may be empty on some ranks."""

    def exact_lookup(self) -> RowLookup:
        """Collective. Lookup of output rows by node type and store id; each call of it is collective too."""


class NodeStrategy(Strategy, NodePredictor, Protocol):
    """A strategy on a graph that also predicts."""


@runtime_checkable
class EventPredictor(Protocol):
    """Scores of new events, in temporal order."""

    @property
    def relation(self) -> str:
        """The edge type whose events are predicted; empty if only one has times."""

    @property
    def task(self) -> EventTask:
        """The task with all known events, including those scored since training."""

    def score(self, events: EventStream) -> Tensor:
        """[n] probabilities, or [n, C] of classes. The events are part of the stream afterwards."""


@runtime_checkable
class GradientSource(Protocol):
    """Gradients at fixed weights."""

    def gradients(self, epoch: int, max_batches: int | None = None) -> tuple[float, int, dict[str, Tensor]]:
        """(mean loss, items, {parameter: gradient of that mean}) over the first batches of an epoch."""
