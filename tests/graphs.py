"""Graphs and comparisons that several tests share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.graph.graph import Graph, validated_nodes
from gnnfleet.training.checkpoint import TrainState, load_checkpoint

CLASSES = tuple(f"kind {letter}" for letter in "abcdefghij")


def communities(nodes: int = 300) -> Graph:
    """Ten communities with string ids and named classes."""
    graph = make_dataset("communities", nodes=nodes, mean_degree=8, seed=1)
    table = graph.single_nodes
    named = validated_nodes(
        nodes, x=table.x, y=table.y, split=table.split, ids=[f"n{i}" for i in range(nodes)], classes=CLASSES
    )
    return Graph.of({"node": named}, graph.edges, name="communities")


def event_stream(
    src: Tensor,
    dst: Tensor,
    t: Tensor,
    *,
    num_nodes: int | None = None,
    msg: Tensor | None = None,
    y: Tensor | None = None,
) -> EventStream:
    """A stream of events in any order, sorted stably by time."""
    order = torch.argsort(t, stable=True)
    ends = torch.cat([src, dst]).long()
    return EventStream(
        src=src.long()[order],
        dst=dst.long()[order],
        t=t[order],
        num_nodes=(int(ends.max()) + 1 if len(ends) else 0) if num_nodes is None else num_nodes,
        destinations=torch.unique(dst.long()),
        edge_ids=order,
        msg=None if msg is None else msg[order],
        y=None if y is None else y[order],
    )


def scores_of(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Loss, count and metrics, without measures per class."""
    return {name: score for name, score in evaluation.items() if isinstance(score, float)}


def assert_same_checkpoint(path: Path, other_path: Path) -> None:
    """Compare all state, bit for bit."""
    (states, position, seed), (others, other_position, other_seed) = load_checkpoint(path), load_checkpoint(other_path)
    assert seed == other_seed and isinstance(position, TrainState) and position == other_position
    assert states.keys() == others.keys()
    for group, tensors in states.items():
        assert tensors.keys() == others[group].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, others[group][name]), (group, name)


def assert_same_checkpoints(run_dir: Path, other_run_dir: Path) -> None:
    """Compare the last and the best checkpoint of two runs, bit for bit."""
    for name in ("last", "best"):
        assert_same_checkpoint(run_dir / "checkpoints" / name, other_run_dir / "checkpoints" / name)
