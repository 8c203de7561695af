"""Runs of pipe that several test files share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.graph.partition.chunk_layout import build_chunk_layout
from gnnfleet.graph.store import open_store
from gnnfleet.strategies.pipe.strategy import PipeStrategy
from gnnfleet.strategies.protocol import State, Strategy
from gnnfleet.training.build import RankContext, build

BASE = {"model": {"name": "gcn2", "hidden": 8, "layers": 6}, "train": {"lr": 0.01}, "seed": 3}


def pipe(
    store: str | Path,
    world: World,
    *,
    chunks: int = 4,
    partitions: int = 1,
    method: str = "mincut",
    log: list[str] | None = None,
    strategy: dict[str, Any] | None = None,
    **config: Any,
) -> PipeStrategy:
    """A run on one grid; ``log`` receives the lines for the user."""
    graph = open_store(store)
    settings = {"name": "pipe", "graph_parallel": partitions, "chunks": chunks, **(strategy or {})}
    layouts = [build_chunk_layout(graph, partitions, chunks, method=method)]
    return _build(graph, {**BASE, "strategy": settings, "workers": world.size, **config}, world, layouts, log)


def pipe_on_two_layouts(store: str | Path, world: World, log: list[str] | None = None, **config: Any) -> PipeStrategy:
    """A run of two workers that chooses between a pipeline, graph parallelism and a single worker."""
    graph = open_store(store)
    layouts = [build_chunk_layout(graph, 1, 8), build_chunk_layout(graph, 2, 2)]
    return _build(graph, {**BASE, "strategy": {"name": "pipe"}, "workers": 2, **config}, world, layouts, log)


def _build(graph: Any, config: dict[str, Any], world: World, layouts: list[Any], log: list[str] | None) -> PipeStrategy:
    context = RankContext(world, layouts=layouts, log_user=[].append if log is None else log.append)
    run = build(graph, resolve(config), context=context).strategy
    assert isinstance(run, PipeStrategy)
    return run


def local(store: str | Path, **config: Any) -> Strategy:
    """The same training in one process."""
    settings = {**BASE, "strategy": {"name": "local", "order": "store"}, **config}
    return build(open_store(store), resolve(settings)).strategy


def losses_of(run: Strategy, epochs: range) -> list[float]:
    return [record.loss for epoch in epochs for record in run.train_epoch(epoch)]


def copy_state(run: Strategy) -> State:
    return {part: {name: t.clone() for name, t in tensors.items()} for part, tensors in run.state_dict().items()}


def is_equal(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in state.items())
