"""Partitioners by name: functions from a graph to the part of every node.

``balance`` selects the quantity that parts share evenly: ``nodes``, ``edges`` (in-edges, the work of aggregation) or
``train`` (training nodes, the work of sampled training).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.edge_scan import EdgeScan, NumpyArray, PartitionRequest, train_mask
from gnnfleet.graph.partition.metis import mincut_parts, super_parts
from gnnfleet.graph.partition.streaming import stream_parts
from gnnfleet.report.progress import Progress

BALANCE_TARGETS = ("nodes", "edges", "train")


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The part of every node and, for ``super``, its mini-cluster."""

    part: NumpyArray  # [nodes] int32
    parts: int
    method: str
    seed: int = 0
    balance: str = "nodes"
    cluster: NumpyArray | None = None  # [nodes] int32


def random_parts(scan: EdgeScan, request: PartitionRequest, progress: Progress) -> tuple[NumpyArray, None]:
    """Split a random permutation of the nodes into ranges of equal weight."""
    order = np.random.default_rng([request.seed, request.parts]).permutation(scan.num_nodes)
    part = np.empty(scan.num_nodes, dtype=np.int32)
    part[order] = split_evenly(request.weights[order], request.parts)
    return part, None


def range_parts(scan: EdgeScan, request: PartitionRequest, progress: Progress) -> tuple[NumpyArray, None]:
    """Split the nodes in store order into ranges of equal weight."""
    return split_evenly(request.weights, request.parts), None


def split_evenly(weights: NumpyArray, parts: int) -> NumpyArray:
    """[n] int32, ascending: the part of each item when the sequence is split into ranges of equal weight."""
    total = int(weights.sum())
    if total == 0:
        return (np.arange(len(weights), dtype=np.int64) * parts // max(len(weights), 1)).astype(np.int32)
    # An item belongs to the part of its midpoint, so that a heavy item does not shift the boundary to one side.
    twice_middle: NumpyArray = 2 * np.cumsum(weights) - weights
    part: NumpyArray = np.minimum(twice_middle * parts // (2 * total), parts - 1).astype(np.int32)
    return part


Partitioner = Callable[[EdgeScan, PartitionRequest, Progress], tuple[NumpyArray, NumpyArray | None]]

PARTITIONERS: Mapping[str, Partitioner] = {
    "random": random_parts,
    "range": range_parts,
    "mincut": mincut_parts,
    "super": super_parts,
    "stream": stream_parts,
}


def assign_nodes(
    graph: Graph,
    parts: int,
    method: str,
    *,
    seed: int = 0,
    balance: str = "nodes",
    progress: Progress | None = None,
    **options: Any,
) -> Assignment:
    """Assign every node to one of ``parts`` parts; raises ConfigError for invalid arguments."""
    if method not in PARTITIONERS:
        raise ConfigError(f"no partitioner {method!r}: choose one of {', '.join(PARTITIONERS)}")
    if parts < 1:
        raise ConfigError(f"the number of parts is {parts}, expected at least 1")
    request = PartitionRequest(parts=parts, weights=node_weights(graph, balance), seed=seed, **options)
    part, cluster = PARTITIONERS[method](EdgeScan(graph), request, progress or Progress())
    assert part.shape == (graph.num_nodes,) and part.dtype == np.int32, (part.shape, part.dtype)
    assert not len(part) or 0 <= part.min() <= part.max() < parts, (part.min(), part.max())
    return Assignment(part=part, parts=parts, method=method, seed=seed, balance=balance, cluster=cluster)


def node_weights(graph: Graph, balance: str) -> NumpyArray:
    """[nodes] int64: the weight of each node in the quantity to balance."""
    if balance not in BALANCE_TARGETS:
        raise ConfigError(f"cannot balance by {balance!r}: choose one of {', '.join(BALANCE_TARGETS)}")
    if balance == "nodes":
        return np.ones(graph.num_nodes, dtype=np.int64)
    if balance == "edges":
        # A node has a cost of its own: otherwise a part of isolated nodes could grow without bound.
        return EdgeScan(graph).in_degree() + 1
    weights = train_mask(graph).astype(np.int64)
    if not weights.any():
        raise ConfigError("cannot balance by training nodes: this graph has none (see gnnfleet import --split)")
    return weights
