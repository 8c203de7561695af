"""What every partitioner is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from gnnfleet.graph.partition.edge_scan import NumpyArray


@dataclass(frozen=True, kw_only=True)
class PartitionRequest:
    """What a partitioner is asked for. ``weights`` is the share of work of every node, never all zero."""

    parts: int
    weights: NumpyArray
    seed: int = 0
    imbalance: float = 0.03  # heaviest part over the mean, minus one: METIS's own default
    clusters: int | None = None  # super: how many mini-clusters
    tries: int = 5  # mincut: how many seeds, best kept
