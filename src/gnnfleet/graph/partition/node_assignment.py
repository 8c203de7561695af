"""Who gets which nodes when they are dealt, and dealt again, to workers that each keep their own.

Nodes go one by one (``random``), or in clusters: many small ones (``super``), or one for each worker (``mincut``). A
deal is a function of the seed, its number and how many share it; no array of the graph's size is held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnfleet.errors import PartitionError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.assign import Assignment
from gnnfleet.graph.partition.metis import balance_weights
from gnnfleet.graph.partition.shard import partition_errors
from gnnfleet.io.bundle import Bundle, BundleWriter
from gnnfleet.ops.draws import Draws, Purpose

KIND = "gnnfleet clusters"
NODES_AT_ONCE = 1 << 20
"""Nodes looked at at a time."""


@dataclass(frozen=True, eq=False)
class ClusterMap:
    """The cluster of every node, mapped from a file; node types are numbered through."""

    cluster_of_node: Tensor  # [nodes] int32
    sizes: Tensor  # [C] int64
    method: str

    @classmethod
    def open(cls, path: Path, graph: Graph | None = None) -> ClusterMap:
        """Raises PartitionError for a damaged file, or one of another graph."""
        with partition_errors(path):
            bundle = Bundle.open(path, KIND)
            bundle.verify()
            found = cls(bundle.tensor("cluster.npy"), bundle.tensor("sizes.npy"), str(bundle.meta["method"]))
            if len(found.cluster_of_node) and not 0 <= int(found.cluster_of_node.min()) <= int(
                found.cluster_of_node.max()
            ) < len(found.sizes):
                raise ValueError("clusters that are not there")
            made_from = bundle.meta["store"]
        if graph is not None and graph.store is not None and made_from != graph.store.digest:
            raise PartitionError(f"{path} was made from another version of this graph")
        return found


def write_clusters(graph: Graph, assignment: Assignment, path: Path) -> None:
    """Keep the clusters of an assignment, or its parts where it has none; whole or not at all."""
    found = torch.from_numpy(assignment.part if assignment.cluster is None else assignment.cluster)
    count = assignment.parts if assignment.cluster is None else int(found.max()) + 1 if len(found) else 0
    with BundleWriter(path, kind=KIND, overwrite=path.exists()) as out:
        out.put("cluster.npy", found)
        out.put("sizes.npy", torch.bincount(found.long(), minlength=count))
        out.commit({"method": assignment.method, "store": None if graph.store is None else graph.store.digest})


@dataclass(frozen=True, eq=False)
class NodeAssignment:
    """Deals the nodes of a graph; without clusters one by one."""

    counts: Mapping[str, int]  # nodes by type
    clusters: ClusterMap | None
    seed: int = 0
    name: str = ""  # of the clusters: what is remembered of one deal does not fit another

    def can_reassign(self, num_workers: int) -> bool:
        """Whether another deal puts other nodes together."""
        return self.clusters is None or len(self.clusters.sizes) > num_workers

    def nodes_of(self, worker: int, num_workers: int, version: int = 0) -> dict[str, Tensor]:
        """{node type: ascending store ids} of one of ``among`` who share the nodes, in the deal of that number."""
        assert 0 <= worker < num_workers
        total = sum(self.counts.values())
        chosen = (
            None if self.clusters is None else torch.from_numpy(self._cluster_owners(num_workers, version) == worker)
        )
        found = []
        for low in range(0, total, NODES_AT_ONCE):
            high = min(low + NODES_AT_ONCE, total)
            if chosen is None:
                draws = Draws(self.seed, Purpose.DEAL, epoch=version)
                mine = (draws.uniforms(high - low, first=low) * num_workers).long() == worker
            else:
                assert self.clusters is not None
                mine = chosen[self.clusters.cluster_of_node[low:high].long()]
            found.append(mine.nonzero()[:, 0] + low)
        every = torch.cat([torch.empty(0, dtype=torch.int64), *found])
        ids, start = {}, 0
        for kind, count in self.counts.items():
            low, high = torch.searchsorted(every, torch.tensor([start, start + count])).tolist()
            ids[kind] = every[low:high] - start
            start += count
        return ids

    def _cluster_owners(self, among: int, number: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """[C] who gets each cluster."""
        assert self.clusters is not None
        count = len(self.clusters.sizes)
        if count == among and not number:  # one each
            return np.arange(count, dtype=np.int32)
        words = [self.seed, among, count] + [number] * (number > 0)
        return balance_weights(self.clusters.sizes.numpy().astype(float), among, np.random.default_rng(words))
