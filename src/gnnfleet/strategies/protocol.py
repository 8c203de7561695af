"""What the training loop and a strategy say to each other.

The loop asks for steps, evaluations and state; the strategy owns the model, the optimizer and when parameters change.
Files, launching and early stopping are the loop's business. Whatever two strategies share moves here or further down.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gnnfleet.tasks.base import RowLookup

State = dict[str, dict[str, Tensor]]
"""Everything that training changes: {"model": {name: tensor}, "optimizer": {name: tensor}, perhaps parts of a
strategy's own}, equal on all ranks, and perhaps ``SHARDED`` and ``RANK_LOCAL``."""

SHARDED = "own"
"""The part of a state that differs from rank to rank: {parameter name: rows, name + IDS: their ids, name/word: what the
optimizer remembers of them}."""

IDS_SUFFIX = "/ids"

RANK_LOCAL = "private"
"""What of a state belongs to a rank of exactly this world, {name: tensor}; others do without it."""

RAW_WEIGHTS = "trained"
"""The part of a state with the weights that are trained, where its model is an average of them."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step: ``loss`` is the mean over the ``count`` items of the step, of all ranks together."""

    epoch: int
    step: int
    loss: float
    count: int
    seconds: float
    steps: int = 1  # more where several workers made steps of their own


@dataclass(frozen=True, eq=False)
class Prediction:
    """Rows of the labelled node type: logits [n, C], and what the last layer read [n, hidden]."""

    logits: Tensor
    embeddings: Tensor | None = None


@runtime_checkable
class GradientSource(Protocol):
    """A strategy whose gradients can be read without training."""

    def gradients(self, epoch: int, most: int | None = None) -> tuple[float, int, dict[str, Tensor]]:
        """(mean loss, items, {parameter: gradient of that mean}) over the first ``most`` batches of an epoch."""


class Strategy(Protocol):
    """One way to train. Epochs count from 0 here: the number is part of the key of every draw."""

    @property
    def model(self) -> torch.nn.Module: ...

    def train_epoch(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        """Run one epoch, or the rest of it from step ``first`` on; a record after each optimizer step."""

    def epoch_metrics(self) -> dict[str, float]:
        """What the last epoch took besides time, for its row in the metrics; {} where there is nothing to tell."""

    def artifacts(self) -> dict[str, str]:
        """Files that show how the last epoch went, {name: text}; all ranks call it, the first keeps them."""

    @property
    def has_newer_weights(self) -> bool:
        """Whether newer weights are there already, so that measuring the present ones may be left out."""

    @property
    def external_workers(self) -> Sequence[Mapping[str, float]]:
        """Of workers that are no ranks of this world, what each says of itself until now: bytes_sent, rounds,
        peak_rss, seconds by phase, …"""

    def evaluate(self, split: str) -> dict[str, float]:
        """{"loss", "count", the task's metric}, exact: full neighbourhoods, no dropout."""

    def validate(self) -> dict[str, float]:
        """What an epoch is judged by: ``evaluate("val")``, or less where that takes long."""

    def predict(self, *, embeddings: bool = False) -> Prediction:
        """Every node in store order, exact like evaluate; of several ranks the first gets them, the others no rows."""

    def predict_nodes(self, ids: Tensor, *, embeddings: bool = False) -> Prediction:
        """Some nodes by store id, so that all of them need not be in one place. All ranks call it, each with ids of its
        own or with none."""

    def exact_lookup(self) -> RowLookup:
        """A way to take exact output rows of the present weights, by node type and store id; used by all ranks
        together, each with ids of its own or with none."""

    def state_dict(self) -> State:
        """The live tensors, not copies."""

    def load_state_dict(self, state: State) -> None:
        """Take over a state; without "optimizer" only the weights."""

    def close(self) -> None:
        """Give back what is held outside this process's memory."""
