"""Inputs that a strategy is built from, and the precision it computes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from gnnfleet.nn.base import Aggregate, Model
from gnnfleet.nn.temporal.model import TemporalModel
from gnnfleet.report.progress import Progress
from gnnfleet.tasks.base import Task
from gnnfleet.tasks.event import EventTask
from gnnfleet.tasks.train_options import TrainConfig

PRECISIONS = {"float32": torch.float32, "bf16": torch.float32, "float64": torch.float64}
"""Dtype of weights and features. bf16 stores the results of dense products, and their operands where the CPU can."""

OwnedIds = Mapping[str, Tensor] | None
"""Store ids by node type: the nodes whose embedding rows a rank holds; None: all."""


@dataclass(frozen=True, eq=False)
class RankContext:
    """This rank, and the placement that the strategy's spec requires."""

    world: World = field(default_factory=World)
    shard: Shard | None = None  # placement partition: this rank's part
    progress: Progress = Progress()
    log_user: Callable[[str], None] = lambda text: None  # shows a line to the user, on the first rank
    message_store: MessageStore | None = None  # execution supervised: connects the coordinator to its trainers
    assignment: NodeAssignment | None = None  # placement clusters: the nodes of each trainer
    layouts: Sequence[ChunkLayout] | None = None  # placement chunks

    @property
    def owned_ids(self) -> OwnedIds:
        shard = self.shard
        return None if shard is None else {kind: shard.nodes(kind).store_ids for kind in shard.node_types}


@dataclass(frozen=True, eq=False, kw_only=True)
class _BaseJob:
    train: TrainConfig
    seed: int = 0
    precision: str = "float32"
    memory: int | None = None  # budget of a worker, in bytes
    context: RankContext = field(default_factory=RankContext)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and features."""
        return PRECISIONS[self.precision]

    @property
    def world(self) -> World:
        return self.context.world

    @property
    def progress(self) -> Progress:
        return self.context.progress

    def log_user(self, text: str) -> None:
        self.context.log_user(text)


@dataclass(frozen=True, eq=False, kw_only=True)
class Job(_BaseJob):
    """Inputs of a strategy; the graph has only the split that is trained on."""

    graph: Graph
    model: Model
    task: Task
    partition: str | None = None  # partitioner that the user set; None leaves it to the strategy
    workers: int = 1
    processes: int = 1  # on this machine that train at the same time, each in a world of its own
    aggregated: Aggregate | None = None  # tables of a model with precomputed hops, made on a larger graph
    evaluation_memory: int = 4 << 30  # limit of an evaluation's activations, in bytes


@dataclass(frozen=True, eq=False, kw_only=True)
class EventJob(_BaseJob):
    model: TemporalModel
    task: EventTask
    features: Tensor | None = None  # [V, S] given features of nodes


def autocast(precision: str) -> AbstractContextManager[Any]:
    """Apply bf16: it holds operands and results of dense products. Weights and sums over edges stay float32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
