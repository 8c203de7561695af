"""Inputs a strategy is built from, and the precision it computes in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.message_store import MessageStore
from gnnfleet.comm.world import World
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.chunk_layout import ChunkLayout
from gnnfleet.graph.partition.node_assignment import NodeAssignment
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.nn.base import Model
from gnnfleet.nn.temporal.model import TemporalModel
from gnnfleet.report.progress import NoProgress, Progress
from gnnfleet.tasks.base import Task
from gnnfleet.tasks.event import EventTask
from gnnfleet.tasks.train_options import TrainConfig

PRECISIONS = {"float32": torch.float32, "bf16": torch.float32, "float64": torch.float64}
"""The dtype of weights and features; bf16 is for what dense products give, and read where the CPU multiplies it."""

MEMORY = 4 << 30
"""Bytes of activations an evaluation may hold at a time, unless a run says otherwise."""


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
    progress: Progress = NoProgress()
    world: World = field(default_factory=World)
    shard: Shard | None = None  # this rank's part of the graph, for strategies that use parts
    workers: int = 1
    processes: int = 1  # that train beside each other on this machine, each in a world of its own
    message_store: MessageStore | None = None  # how workers that come and go are reached
    assignment: NodeAssignment | None = None  # who of them has which nodes
    layouts: Sequence[ChunkLayout] | None = None  # how nodes may be cut into chunks
    log_user: Callable[[str], None] = lambda text: None  # to the user, on the rank that speaks

    @property
    def evaluation_memory(self) -> int:
        """Bytes of activations an evaluation may hold at a time."""
        return MEMORY if self.memory is None else self.memory


def autocast(precision: str) -> AbstractContextManager[Any]:
    """Where bf16 applies: results of dense products are stored in it, operands rounded to it where the CPU multiplies
    it; weights stay float32, sums over edges are taken in it."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


@dataclass(frozen=True, eq=False)
class EventJob:
    """What the strategy is built from: a stream in place of a graph."""

    model: TemporalModel
    task: EventTask
    train: TrainConfig
    features: Tensor | None = None  # [V, S] what is known of nodes, before any is learnt
    seed: int = 0
    precision: str = "float32"
    memory: int | None = None
    world: World = field(default_factory=World)
    progress: Progress = NoProgress()
    log_user: Callable[[str], None] = lambda text: None
