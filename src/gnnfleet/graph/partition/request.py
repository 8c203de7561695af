"""The arguments that all partitioners share."""

from __future__ import annotations

from dataclasses import dataclass

from gnnfleet.graph.partition.edge_scan import NumpyArray


@dataclass(frozen=True, kw_only=True)
class PartitionRequest:
    """Number of parts, and how to balance and search."""

    parts: int
    weights: NumpyArray  # [nodes] balanced over the parts, never all zero
    seed: int = 0
    imbalance: float = 0.03  # heaviest part over the mean, minus one: METIS's own default
    clusters: int | None = None  # super: number of mini-clusters
    tries: int = 5  # mincut: number of seeds; the smallest cut is used
