"""Metrics of an assignment: edges kept and cut, rows sent between parts, balance. All are exact counts.

Net j is node j with its out-neighbours. If it touches λ_j parts, row j is sent λ_j − 1 times in each layer, once even
if several relations need it. The sum over nodes is the communication volume of full-graph training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gnnfleet.graph.graph import TRAIN, Graph
from gnnfleet.graph.partition.edge_scan import EdgeScan, NumpyArray
from gnnfleet.ops.native import _native
from gnnfleet.report.progress import NoProgress, Progress


@dataclass(frozen=True, kw_only=True)
class PartitionMetrics:
    """Metrics of an assignment to P parts."""

    num_nodes: int
    nodes: NumpyArray  # [P]
    train: NumpyArray  # [P] training nodes of the first split
    edges: NumpyArray  # [P, P] edges from part q into part p
    halo_rows: NumpyArray  # [P, P] distinct rows part p needs from part q; 0 on the diagonal

    @property
    def kept_edges(self) -> int:
        return int(np.trace(self.edges))

    @property
    def cut_edges(self) -> int:
        return int(self.edges.sum()) - self.kept_edges

    @property
    def volume(self) -> int:
        """Σ(λ − 1): rows sent per layer, over all parts."""
        return int(self.halo_rows.sum())

    @property
    def replication(self) -> float:
        """Mean number of parts that hold a node, as its owner or in their halo."""
        return 1.0 + self.volume / self.num_nodes if self.num_nodes else 1.0

    def summary(self) -> dict[str, Any]:
        """All metrics as plain numbers; bytes are of float32 rows in the forward pass of one layer."""
        total = int(self.edges.sum())
        edges, halo = self.edges.sum(axis=1), self.halo_rows.sum(axis=1)
        max_halo = int(halo.max(initial=0))
        return {
            "parts": len(self.nodes),
            "num_nodes": self.num_nodes,
            "num_edges": total,
            "kept_edges": self.kept_edges,
            "kept_share": self.kept_edges / total if total else 1.0,
            "cut_edges": self.cut_edges,
            "volume": self.volume,
            "volume_max_part": max_halo,
            "replication": self.replication,
            "balance": {"nodes": imbalance(self.nodes), "edges": imbalance(edges), "train": imbalance(self.train)},
            "per_part": {
                "nodes": self.nodes.tolist(),
                "train": self.train.tolist(),
                "edges": edges.tolist(),
                "halo": halo.tolist(),
            },
            "need": self.halo_rows.tolist(),
            "bytes_per_layer": {
                str(width): {"total": 4 * width * self.volume, "max_part": 4 * width * max_halo}
                for width in (64, 128, 256)
            },
        }


def measure_partition(
    graph: Graph, part: NumpyArray, parts: int, *, progress: Progress | None = None
) -> PartitionMetrics:
    """Measure an assignment ([nodes] int32), in one pass over the edges per 64 parts."""
    scan = EdgeScan(graph)
    edges = np.zeros((parts, parts), dtype=np.int64)
    halo_rows = np.zeros((parts, parts), dtype=np.int64)
    advance = (progress or NoProgress()).stage("count", scan.num_edges * -(-parts // 64))
    for base in range(0, parts, 64):
        reached_parts = np.zeros(scan.num_nodes, dtype=np.uint64)  # one bit per part
        for edge_slice in scan.slices():
            _native.count_traffic(*edge_slice, part, base, reached_parts, edges, halo_rows)
            advance(len(edge_slice.src))
    return PartitionMetrics(
        num_nodes=scan.num_nodes,
        nodes=np.bincount(part, minlength=parts),
        train=np.bincount(part[train_mask(graph)], minlength=parts),
        edges=edges,
        halo_rows=halo_rows,
    )


def train_mask(graph: Graph) -> NumpyArray:
    """[nodes] bool, numbered across node types: training nodes of the first split."""
    mask = np.zeros(graph.num_nodes, dtype=bool)
    for node_type, start in graph.node_offsets.items():
        nodes = graph.nodes[node_type]
        if nodes.split is not None:
            mask[start : start + nodes.count] = (nodes.split[0] == TRAIN).numpy()
    return mask


def imbalance(load: NumpyArray) -> float:
    """Heaviest part over the mean; 1 if all parts are empty."""
    return float(load.max() * len(load) / load.sum()) if load.sum() else 1.0
