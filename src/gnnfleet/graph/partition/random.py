"""Partitioners that ignore edges: ``random`` and ``range`` (store order)."""

from __future__ import annotations

import numpy as np

from gnnfleet.graph.partition.edge_scan import EdgeScan, NumpyArray
from gnnfleet.graph.partition.request import PartitionRequest
from gnnfleet.report.progress import Progress


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
