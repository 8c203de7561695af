"""What the training loop and a strategy say to each other.

The loop asks for steps, evaluations and state; the strategy owns the model, the optimizer and when parameters change.
Files, launching and early stopping are the loop's business. Whatever two strategies share moves here or further down.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from gnnfleet.comm.message_store import Post
from gnnfleet.comm.world import World
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.chunk_layout import Layout
from gnnfleet.graph.partition.node_assignment import Deal
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.nn.base import Model
from gnnfleet.report.progress import Progress, Silent
from gnnfleet.strategies.estimates import Pace
from gnnfleet.tasks.base import Take, Task

State = dict[str, dict[str, Tensor]]
"""Everything that training changes: {"model": {name: tensor}, "optimizer": {name: tensor}, perhaps parts of a
strategy's own}, equal on all ranks, and perhaps ``OWN`` and ``PRIVATE``."""

OWN = "own"
"""The part of a state that differs from rank to rank: {parameter name: rows, name + IDS: their ids, name/word: what the
optimizer remembers of them}."""

IDS = "/ids"

PRIVATE = "private"
"""What of a state belongs to a rank of exactly this world, {name: tensor}; others do without it."""

TRAINED = "trained"
"""The part of a state with the weights that are trained, where its model is an average of them."""

PRECISIONS = {"float32": torch.float32, "bf16": torch.float32, "float64": torch.float64}
"""The dtype of weights and features; bf16 is for what dense products give, and read where the CPU multiplies it."""

MEMORY = 4 << 30
"""Bytes of activations an evaluation may hold at a time, unless a run says otherwise."""


class StrategyConfig(BaseModel, frozen=True, extra="forbid"):
    """What the configs of all strategies have: the name they are chosen by."""

    uses_parts: ClassVar[bool] = False  # whether a partition of the graph means anything to it
    comes_and_goes: ClassVar[bool] = (
        False  # whether workers are independent of each other, and may end or join any time
    )
    partitioner: ClassVar[str] = "mincut"  # how nodes are dealt to workers unless the user says
    # What is kept in the store for it: a part for every worker, clusters that are dealt, layouts of chunks, or nothing.
    cut: ClassVar[Literal["parts", "clusters", "chunks", "none"]] = "parts"

    name: str

    @property
    def batch_size(self) -> int:
        """Items of a step; 0 for all."""
        return 0

    @property
    def dealt_clusters(self) -> int:
        """In how many clusters nodes are dealt by ``super``; 0 leaves it to the partitioner."""
        return 0

    @property
    def samples(self) -> bool:
        """Whether a step walks sampled blocks, not the whole graph."""
        return False

    def candidates(self, workers: int, *, stays: bool = True) -> list[tuple[int, int]]:
        """(ways, chunks) of the layouts it may want; ``stays``: as of the task."""
        return []

    def check_workers(self, workers: int) -> None:
        """Raise ConfigError for a number of workers that does not fit."""

    def check(self, task: Task) -> None:
        """Raise ConfigError for a task that this strategy cannot learn."""


class TrainConfig(BaseModel, frozen=True, extra="forbid"):
    """What every strategy does with the weights, and how long."""

    epochs: int = Field(default=100, ge=0)
    lr: float = Field(default=0.01, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=5e-4, ge=0, allow_inf_nan=False)
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    momentum: float = Field(default=0.9, ge=0, lt=1)  # sgd only
    clip: float = Field(default=0.0, ge=0)  # the largest norm of all gradients together; 0 leaves them alone
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)  # share of the target spread over all classes
    patience: int = Field(default=0, ge=0)  # epochs without a better val metric before training stops; 0 never stops
    eval_every: int = Field(default=1, ge=1)  # epochs between evaluations on val
    checkpoint_seconds: float = Field(default=10.0, ge=0)  # between checkpoints; 0 writes one after every epoch
    metric: str = "auto"  # of nodes accuracy, roc_auc, micro_f1; of links mrr, hits@K


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


@dataclass(frozen=True, eq=False)
class Job:
    """What a strategy is built from; the graph has exactly the split that is trained on."""

    graph: Graph
    model: Model
    task: Task
    train: TrainConfig
    seed: int = 0
    precision: str = "float32"
    memory: int | None = None  # bytes; what it limits is the strategy's to say
    partition: str | None = None  # the partitioner that is asked for; None leaves it to the strategy
    progress: Progress = Silent()
    world: World = field(default_factory=World)
    shard: Shard | None = None  # this rank's part of the graph, for strategies that use parts
    workers: int = 1
    processes: int = 1  # that train beside each other on this machine, each in a world of its own
    post: Post | None = None  # how workers that come and go are reached
    deal: Deal | None = None  # who of them has which nodes
    layouts: Sequence[Layout] | None = None  # how nodes may be cut into chunks
    say: Callable[[str], None] = lambda text: None  # to the user, on the rank that speaks

    @property
    def evaluation_memory(self) -> int:
        """Bytes of activations an evaluation may hold at a time."""
        return MEMORY if self.memory is None else self.memory


@dataclass(frozen=True, eq=False)
class Outlook:
    """What a strategy is told to foresee an epoch. ``job`` has the graph, the model and the task of all workers."""

    job: Job
    alone: Pace  # one process by itself
    together: Pace  # all workers at once
    overlaps: bool  # whether rows travel while workers compute: not where these share processors
    parts: Callable[[], Sequence[Shard]]  # of ``partition``, or mincut; a part for every worker
    deal: Callable[[StrategyConfig], Deal]
    layouts: Callable[[StrategyConfig], Sequence[Layout]]
    # What workers say who try strategies together on this machine, one after the other; None where each has a machine.
    tried: Callable[[Sequence[StrategyConfig]], Sequence[Mapping[str, Any]]] | None = None
    known: dict[str, Any] = field(default_factory=dict)  # what several forecasts need, found once

    @property
    def workers(self) -> int:
        return self.job.workers

    def once(self, name: str, find: Callable[[], Any]) -> Any:
        if name not in self.known:
            self.known[name] = find()
        return self.known[name]


class Strategy(Protocol):
    """One way to train. Epochs count from 0 here: the number is part of the key of every draw."""

    @property
    def model(self) -> torch.nn.Module: ...

    def steps(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        """Run one epoch, or the rest of it from step ``first`` on; a record after each optimizer step."""

    def counts(self) -> dict[str, float]:
        """What the last epoch took besides time, for its row in the metrics; {} where there is nothing to tell."""

    def pages(self) -> dict[str, str]:
        """Files that show how the last epoch went, {name: text}; all ranks call it, the first keeps them."""

    @property
    def is_behind(self) -> bool:
        """Whether newer weights are there already, so that measuring the present ones may be left out."""

    @property
    def elsewhere(self) -> Sequence[Mapping[str, float]]:
        """Of workers that are no ranks of this world, what each says of itself until now: bytes_sent, rounds,
        peak_rss, seconds by phase, …"""

    def evaluate(self, split: str) -> dict[str, float]:
        """{"loss", "count", the task's metric}, exact: full neighbourhoods, no dropout."""

    def validate(self) -> dict[str, float]:
        """What an epoch is judged by: ``evaluate("val")``, or less where that takes long."""

    def predict(self, *, embeddings: bool = False) -> Prediction:
        """Every node in store order, exact like evaluate; of several ranks the first gets them, the others no rows."""

    def rows(self, ids: Tensor, *, embeddings: bool = False) -> Prediction:
        """Some nodes by store id, so that all of them need not be in one place. All ranks call it, each with ids of its
        own or with none."""

    def exact(self) -> Take:
        """A way to take exact output rows of the present weights, by node type and store id; used by all ranks
        together, each with ids of its own or with none."""

    def state_dict(self) -> State:
        """The live tensors, not copies."""

    def load_state_dict(self, state: State) -> None:
        """Take over a state; without "optimizer" only the weights."""

    def close(self) -> None:
        """Give back what is held outside this process's memory."""


def products(precision: str) -> AbstractContextManager[Any]:
    """Where bf16 applies: results of dense products are stored in it, operands rounded to it where the CPU multiplies
    it; weights stay float32, sums over edges are taken in it."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def make_optimizer(model: torch.nn.Module, train: TrainConfig, *, fused: bool = False) -> torch.optim.Optimizer:
    """The optimizer a config asks for; ``fused`` makes short work of many small parameters."""
    parameters = list(model.parameters())
    how: dict[str, Any] = {"fused": True} if fused else {"foreach": False}
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=train.lr, weight_decay=train.weight_decay, momentum=train.momentum, **how)
    kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=train.lr, weight_decay=train.weight_decay, **how)


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What an optimizer remembers, as {parameter name/word: tensor}; settings come from the config."""
    return {
        f"{name}/{word}": value
        for name, parameter in model.named_parameters()
        for word, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The reverse of ``optimizer_tensors``; dtypes stay as they were saved."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, tensor in tensors.items():
        name, _, word = key.rpartition("/")
        optimizer.state[parameters[name]][word] = tensor.clone()
