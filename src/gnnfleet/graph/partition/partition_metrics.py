"""What an assignment costs: edges kept and cut, rows that travel, how even the parts are. Counted, never estimated.

Net j is node j and everything it sends to; it touches λ_j parts, so row j travels λ_j − 1 times in each layer. The
sum over nodes is the true volume of full-graph training, and ``need[p][q]`` says which of it part p takes from part q.
A row that several relations need travels once.
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
    """The figures of an assignment to P parts."""

    num_nodes: int
    nodes: NumpyArray  # [P] nodes owned
    train: NumpyArray  # [P] training nodes owned (of the first split)
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
        """Mean number of parts that hold a node, as owner or as copy."""
        return 1.0 + self.volume / self.num_nodes if self.num_nodes else 1.0

    def summary(self, widths: tuple[int, ...] = (64, 128, 256)) -> dict[str, Any]:
        """The report as plain numbers; bytes are float32 rows of one layer's forward pass."""
        total = int(self.edges.sum())
        return {
            "parts": len(self.nodes),
            "num_nodes": self.num_nodes,
            "num_edges": total,
            "kept_edges": self.kept_edges,
            "kept_share": self.kept_edges / total if total else 1.0,
            "cut_edges": self.cut_edges,
            "volume": self.volume,
            "volume_max_part": int(self.halo_rows.sum(axis=1).max(initial=0)),
            "replication": self.replication,
            "balance": {
                "nodes": imbalance(self.nodes),
                "edges": imbalance(self.edges.sum(axis=1)),
                "train": imbalance(self.train),
            },
            "per_part": {
                "nodes": self.nodes.tolist(),
                "train": self.train.tolist(),
                "edges": self.edges.sum(axis=1).tolist(),
                "halo": self.halo_rows.sum(axis=1).tolist(),
            },
            "need": self.halo_rows.tolist(),
            "bytes_per_layer": {
                str(width): {
                    "total": 4 * width * self.volume,
                    "max_part": 4 * width * int(self.halo_rows.sum(axis=1).max(initial=0)),
                }
                for width in widths
            },
        }


def measure_partition(
    graph: Graph, part: NumpyArray, parts: int, *, progress: Progress | None = None
) -> PartitionMetrics:
    """Count an assignment ([nodes] int32) exactly, in one pass over the edges for each 64 parts."""
    scan = EdgeScan(graph)
    edges = np.zeros((parts, parts), dtype=np.int64)
    need = np.zeros((parts, parts), dtype=np.int64)
    advance = (progress or NoProgress()).stage("count", scan.num_edges * -(-parts // 64))
    for base in range(0, parts, 64):
        seen = np.zeros(scan.num_nodes, dtype=np.uint64)
        for chunk in scan.chunks():
            _native.count_traffic(chunk.first, chunk.indptr, chunk.src, part, base, seen, edges, need)
            advance(len(chunk.src))
    return PartitionMetrics(
        num_nodes=scan.num_nodes,
        nodes=np.bincount(part, minlength=parts),
        train=np.bincount(part[train_mask(graph)], minlength=parts),
        edges=edges,
        halo_rows=need,
    )


def train_mask(graph: Graph) -> NumpyArray:
    """[nodes] bool over all types: training nodes of the first split."""
    mask = np.zeros(graph.num_nodes, dtype=bool)
    for kind, start in graph.node_offsets.items():
        nodes = graph.nodes[kind]
        if nodes.split is not None:
            mask[start : start + nodes.count] = (nodes.split[0] == TRAIN).numpy()
    return mask


def imbalance(load: NumpyArray) -> float:
    """Heaviest part over the mean; 1 is perfect, and what nothing is divided into."""
    return float(load.max() * len(load) / load.sum()) if load.sum() else 1.0
