"""Partitioners: functions from a graph to the part of every node, chosen by name.

A partitioner sees the node types numbered through (``EdgeScan``). ``balance`` says what the parts share evenly:
``nodes``, ``edges`` (in-edges, the work of aggregation) or ``train`` (training nodes, the work of sampled training).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnnfleet.errors import ConfigError, PartitionError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.edge_scan import Array, EdgeScan
from gnnfleet.graph.partition.metis import mincut, super_nodes
from gnnfleet.graph.partition.partition_metrics import train_nodes
from gnnfleet.graph.partition.random import deal_random, deal_range
from gnnfleet.graph.partition.request import Request
from gnnfleet.graph.partition.streaming import stream_parts
from gnnfleet.report.progress import Progress, Silent

BALANCES = ("nodes", "edges", "train")


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The part of every node, and for ``super`` the mini-cluster it was dealt in."""

    part: Array  # [nodes] int32
    parts: int
    method: str
    seed: int = 0
    balance: str = "nodes"
    cluster: Array | None = None  # [nodes] int32


Partitioner = Callable[[EdgeScan, Request, Progress], tuple[Array, Array | None]]

PARTITIONERS: Mapping[str, Partitioner] = {
    "random": deal_random,
    "range": deal_range,
    "mincut": mincut,
    "super": super_nodes,
    "stream": stream_parts,
}


def assign(
    graph: Graph,
    parts: int,
    method: str,
    *,
    seed: int = 0,
    balance: str = "nodes",
    progress: Progress | None = None,
    **options: Any,
) -> Assignment:
    """Assign every node to one of ``parts`` parts; raises ConfigError for words it does not know."""
    if method not in PARTITIONERS:
        raise ConfigError(f"no partitioner {method!r}: choose one of {', '.join(PARTITIONERS)}")
    if parts < 1:
        raise ConfigError(f"a graph is cut into at least one part, asked for {parts}")
    scan = EdgeScan(graph)
    request = Request(parts=parts, weights=node_weights(graph, balance), seed=seed, **options)
    part, cluster = PARTITIONERS[method](scan, request, progress or Silent())
    check(part, graph.num_nodes, parts)
    return Assignment(part=part, parts=parts, method=method, seed=seed, balance=balance, cluster=cluster)


def node_weights(graph: Graph, balance: str) -> Array:
    """[nodes] int64: each node's share of what is to be balanced."""
    if balance not in BALANCES:
        raise ConfigError(f"cannot balance by {balance!r}: choose one of {', '.join(BALANCES)}")
    if balance == "nodes":
        return np.ones(graph.num_nodes, dtype=np.int64)
    if balance == "edges":
        # The node itself costs something too, and a part of isolated nodes must not grow without bound.
        return EdgeScan(graph).in_degree() + 1
    weights = train_nodes(graph).astype(np.int64)
    if not weights.any():
        raise ConfigError("cannot balance by training nodes: this graph has none (see gnnfleet import --split)")
    return weights


def check(part: Array, num_nodes: int, parts: int) -> None:
    """Refuse an assignment that does not give every node a part."""
    if part.shape != (num_nodes,) or part.dtype != np.int32:
        raise PartitionError(f"an assignment is {num_nodes} int32 numbers, found {part.dtype} {list(part.shape)}")
    if num_nodes and (part.min() < 0 or part.max() >= parts):
        raise PartitionError(f"parts are numbered 0 to {parts - 1}, found {part.min()} to {part.max()}")
