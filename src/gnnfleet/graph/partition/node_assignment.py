"""Assignment of nodes to workers that train on separate subgraphs, and reassignment during a run.

Nodes are assigned one by one (``random``) or in clusters: many small ones (``super``), or one per worker (``mincut``).
An assignment is a function of seed and number of workers, computed without arrays of the graph's size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.assign import Assignment
from gnnfleet.graph.partition.metis import balance_weights
from gnnfleet.graph.partition.shard import check_store_digest, partition_errors
from gnnfleet.io.bundle import Bundle, BundleWriter
from gnnfleet.ops.draws import Draws, Purpose

KIND = "gnnfleet clusters"
_NODES_PER_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class ClusterMap:
    """The cluster of every node, memory-mapped from a file."""

    cluster_of_node: Tensor  # [nodes] int32, numbered across node types
    sizes: Tensor  # [C] int64
    method: str

    @classmethod
    def open(cls, path: Path, graph: Graph | None = None) -> ClusterMap:
        """Open a file of ``write_clusters``; raises PartitionError if it is damaged or was made from another graph."""
        with partition_errors(path):
            bundle = Bundle.open(path, KIND)
            bundle.verify()
            cluster, sizes = bundle.tensor("cluster.npy"), bundle.tensor("sizes.npy")
            if len(cluster) and not 0 <= int(cluster.min()) <= int(cluster.max()) < len(sizes):
                raise ValueError(f"clusters outside 0 to {len(sizes) - 1}")
            check_store_digest(bundle, graph)
            return cls(cluster, sizes, str(bundle.meta["method"]))


def write_clusters(graph: Graph, assignment: Assignment, path: Path) -> None:
    """Write the clusters of an assignment, or its parts if it has none; an interrupted write leaves nothing."""
    cluster = torch.from_numpy(assignment.part if assignment.cluster is None else assignment.cluster)
    count = assignment.parts if assignment.cluster is None else int(cluster.max()) + 1 if len(cluster) else 0
    with BundleWriter(path, kind=KIND, overwrite=path.exists()) as out:
        out.put("cluster.npy", cluster)
        out.put("sizes.npy", torch.bincount(cluster.long(), minlength=count))
        out.commit({"method": assignment.method, "store": None if graph.store is None else graph.store.digest})


@dataclass(frozen=True, eq=False)
class NodeAssignment:
    """Assigns the nodes of a graph to workers, in clusters or one by one."""

    counts: Mapping[str, int]  # nodes by type
    clusters: ClusterMap | None
    seed: int = 0
    name: str = ""  # identifies the clusters: state saved with one assignment does not fit another

    def nodes_of(self, worker: int, num_workers: int) -> dict[str, Tensor]:
        """{node type: ascending store ids} of a worker."""
        assert 0 <= worker < num_workers
        total = sum(self.counts.values())
        blocks = [torch.empty(0, dtype=torch.int64)]
        owners = None if self.clusters is None else self._cluster_owners(self.clusters, num_workers)
        for low in range(0, total, _NODES_PER_BLOCK):
            high = min(low + _NODES_PER_BLOCK, total)
            if self.clusters is None or owners is None:
                draws = Draws(self.seed, Purpose.DEAL)
                is_assigned = (draws.uniforms(high - low, first=low) * num_workers).long() == worker
            else:
                is_assigned = owners[self.clusters.cluster_of_node[low:high].long()] == worker
            blocks.append(is_assigned.nonzero()[:, 0] + low)
        nodes = torch.cat(blocks)
        ids, start = {}, 0
        for node_type, count in self.counts.items():
            low, high = torch.searchsorted(nodes, torch.tensor([start, start + count])).tolist()
            ids[node_type] = nodes[low:high] - start
            start += count
        return ids

    def _cluster_owners(self, clusters: ClusterMap, num_workers: int) -> Tensor:
        """[C] int32: the worker of each cluster."""
        count = len(clusters.sizes)
        if count == num_workers:
            return torch.arange(count, dtype=torch.int32)
        random = np.random.default_rng([self.seed, num_workers, count])
        return torch.from_numpy(balance_weights(clusters.sizes.numpy().astype(float), num_workers, random))
