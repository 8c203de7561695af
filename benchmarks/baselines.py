"""Baselines for the stream partitioner: random, LDG, Fennel and SPRING, written for clarity.

Each takes the graph in memory, in-edges grouped by destination, and returns the part of each node. LDG and Fennel get
both directions of every edge, which is more than a stream grouped by destination has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Parts = npt.NDArray[np.int32]


@dataclass(frozen=True)
class InMemoryGraph:
    """In-edges of v are src[indptr[v] : indptr[v + 1]]."""

    indptr: npt.NDArray[np.int64]
    src: npt.NDArray[np.int32]

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    def dst(self) -> npt.NDArray[np.int64]:
        return np.repeat(np.arange(self.num_nodes), np.diff(self.indptr))

    def undirected(self) -> InMemoryGraph:
        """Both directions, no self-loops, parallel edges merged."""
        n, src, dst = max(1, self.num_nodes), self.src.astype(np.int64), self.dst()
        keep = src != dst
        key = np.unique(np.concatenate([src[keep] * n + dst[keep], dst[keep] * n + src[keep]]))
        indptr = np.zeros(self.num_nodes + 1, np.int64)
        np.cumsum(np.bincount(key // n, minlength=self.num_nodes), out=indptr[1:])
        return InMemoryGraph(indptr, (key % n).astype(np.int32))


def random(graph: InMemoryGraph, parts: int, seed: int = 0) -> Parts:
    """Shuffled round robin: perfect balance, no locality."""
    part = np.empty(graph.num_nodes, np.int32)
    part[np.random.default_rng(seed).permutation(graph.num_nodes)] = np.arange(graph.num_nodes) % parts
    return part


def ldg(graph: InMemoryGraph, parts: int, imbalance: float = 0.05) -> Parts:
    """Linear deterministic greedy (Stanton and Kliot, 2012): neighbours in the part times its free share."""
    capacity = (1 + imbalance) * graph.num_nodes / parts
    return _greedy(graph.undirected(), parts, capacity, lambda neighbors, size: neighbors * (1 - size / capacity))


def fennel(graph: InMemoryGraph, parts: int, imbalance: float = 0.05) -> Parts:
    """Fennel (Tsourakakis et al., 2014), gamma = 1.5: neighbours in the part minus the marginal cost of its size."""
    both = graph.undirected()
    alpha = parts**0.5 * (len(both.src) / 2) / max(1, graph.num_nodes) ** 1.5
    capacity = (1 + imbalance) * graph.num_nodes / parts
    return _greedy(both, parts, capacity, lambda neighbors, size: neighbors - alpha * 1.5 * size**0.5)


def _greedy(graph: InMemoryGraph, parts: int, capacity: float, score: Callable[[int, int], float]) -> Parts:
    """Assign nodes in store order to the part with the best score and free capacity; ties go to the smaller part."""
    part = [-1] * graph.num_nodes
    size = [0] * parts
    indptr, src = graph.indptr.tolist(), graph.src
    for v in range(graph.num_nodes):
        neighbors = [0] * parts
        for u in src[indptr[v] : indptr[v + 1]].tolist():
            if part[u] >= 0:
                neighbors[part[u]] += 1
        open_parts = [p for p in range(parts) if size[p] + 1 <= capacity] or list(range(parts))
        best = max(open_parts, key=lambda p: (score(neighbors[p], size[p]), -size[p]))
        part[v] = best
        size[best] += 1
    return np.asarray(part, np.int32)


def spring(graph: InMemoryGraph, parts: int) -> Parts:
    """SPRING as published with SDT-GNN, with its defects: initial size order in the merge, node 0 as default hub."""
    degree = np.diff(graph.indptr).tolist()
    cluster, richest = _spring_cluster(graph, parts, degree)
    members: dict[int, list[int]] = {}
    for v, c in enumerate(cluster):
        members.setdefault(c, []).append(v)
    capacity = 1.05 * graph.num_nodes / parts
    for c in sorted(members, key=lambda c: len(members[c])):
        hub = max((richest[v] for v in members[c]), key=lambda u: degree[u])
        target = cluster[hub]
        if target == c or len(members[c]) + len(members[target]) > capacity:
            continue
        for v in members[c]:
            cluster[v] = target
        members[target] += members.pop(c)
    part = np.zeros(graph.num_nodes, np.int32)
    size = [0] * parts
    for group in members.values():
        smallest = size.index(min(size))
        part[group] = smallest
        size[smallest] += len(group)
    return part


def _spring_cluster(graph: InMemoryGraph, parts: int, degree: list[int]) -> tuple[list[int], list[int]]:
    """One pass of volume-capped clustering; returns clusters and the in-neighbour of highest degree of each node."""
    cap = 0.1 * len(graph.src) / parts
    cluster, richest = [-1] * graph.num_nodes, [0] * graph.num_nodes
    volume: list[int] = []

    def cluster_of(v: int) -> int:
        if cluster[v] < 0:
            cluster[v] = len(volume)
            volume.append(degree[v])
        return cluster[v]

    indptr = graph.indptr.tolist()
    for j in range(graph.num_nodes):
        for i in graph.src[indptr[j] : indptr[j + 1]].tolist():
            a, b = cluster_of(i), cluster_of(j)
            if degree[i] > degree[richest[j]]:
                richest[j] = i
            if a == b or volume[a] > cap or volume[b] > cap:
                continue
            mover, source, target = (i, a, b) if volume[a] <= volume[b] else (j, b, a)
            cluster[mover] = target
            volume[source] -= degree[mover]
            volume[target] += degree[mover]
        cluster_of(j)
    return cluster, richest
