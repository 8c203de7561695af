"""METIS through pymetis: ``mincut_parts`` (k-way, best of several seeds) and ``super`` (many mini-clusters dealt at random).

METIS works on the simple undirected graph and holds it whole in memory; ``stream`` is for graphs that do not fit.
"""

from __future__ import annotations

import numpy as np
import pymetis
import torch

from gnnfleet.errors import PartitionError
from gnnfleet.graph.partition.edge_scan import EdgeScan, NumpyArray
from gnnfleet.graph.partition.request import PartitionRequest
from gnnfleet.ops import csr
from gnnfleet.report.progress import Progress

# SuperTMA's scripts use 15,000 mini-clusters on graphs of a few hundred thousand nodes and more; smaller graphs get
# clusters of about ten nodes.
MAX_SUPER_NODES = 15_000


def mincut_parts(scan: EdgeScan, request: PartitionRequest, progress: Progress) -> tuple[NumpyArray, None]:
    """Fewest edges cut; the best of ``tries`` seeds."""
    if _trivial(scan, request.parts):
        return _one_each(scan, request.parts), None
    graph = simple_graph(scan, progress)
    advance = progress.stage(f"METIS, best of {request.tries}", request.tries)
    best: tuple[int, NumpyArray] | None = None
    # METIS itself repeats and keeps the best: on a small graph that costs nothing, and single runs differ by 20 %.
    repeats = max(1, min(16, 2_000_000 // max(len(graph[1]), 1)))
    for attempt in range(max(request.tries, 1)):
        cut, part = _kway(
            graph,
            request.parts,
            request.weights,
            seed=request.seed * 1009 + attempt,
            imbalance=request.imbalance,
            repeats=repeats,
        )
        if best is None or cut < best[0]:
            best = cut, part
        advance(1)
    assert best is not None
    return best[1], None


def super_parts(scan: EdgeScan, request: PartitionRequest, progress: Progress) -> tuple[NumpyArray, NumpyArray]:
    """METIS mini-clusters, shuffled, dealt so that parts get equal weight; the mini-clusters also order the nodes."""
    count = request.clusters or max(request.parts, min(MAX_SUPER_NODES, scan.num_nodes // 10))
    if _trivial(scan, count):
        cluster = _one_each(scan, count)
    else:
        graph = simple_graph(scan, progress)
        progress.stage(f"METIS, {count} clusters")
        # Clusters are balanced by nodes: they are many, so the deal evens out any other weight.
        cluster = _kway(graph, count, np.ones(scan.num_nodes, dtype=np.int64), seed=request.seed, imbalance=0.05)[1]
    return assign_clusters(cluster, count, request)[cluster], cluster


def assign_clusters(cluster: NumpyArray, count: int, request: PartitionRequest) -> NumpyArray:
    """[count] int32: a part for each cluster. In random order, each goes to the part that is furthest below its share.

    Equal counts alone would let parts drift apart in weight; for equal clusters this is dealing in turn.
    """
    weights = np.bincount(cluster, weights=request.weights, minlength=count)
    return balance_weights(weights, request.parts, np.random.default_rng([request.seed, request.parts, count]))


def balance_weights(weights: NumpyArray, parts: int, random: np.random.Generator) -> NumpyArray:
    """[C] int32: a part for each of some things of these weights."""
    load = np.zeros(parts)
    dealt = np.zeros(len(weights), dtype=np.int32)
    for c in random.permutation(len(weights)):
        part = int(load.argmin())
        dealt[c] = part
        # A cluster without weight (no training node in it) still takes a place, so that it is dealt in turn too.
        load[part] += weights[c] + 1e-6
    return dealt


def simple_graph(scan: EdgeScan, progress: Progress) -> tuple[NumpyArray, NumpyArray]:
    """(xadj, adjncy): the undirected graph without self-loops and parallel edges, both directions present."""
    advance = progress.stage("undirected graph", scan.num_edges)
    if scan.num_nodes >= 2**31:
        raise PartitionError("METIS cannot hold more than 2**31 nodes: use --method stream")
    pairs = []
    for chunk in scan.chunks():
        dst = np.repeat(
            np.arange(chunk.first, chunk.first + len(chunk.indptr) - 1, dtype=np.int32), np.diff(chunk.indptr)
        )
        src = chunk.src.astype(np.int32, copy=False)
        keep = src != dst
        pairs.append(np.stack([src[keep], dst[keep]]))
        advance(len(src))
    one_way = np.concatenate(pairs, axis=1) if pairs else np.empty((2, 0), np.int32)
    rows, cols = (torch.from_numpy(np.concatenate([one_way[i], one_way[1 - i]])) for i in (0, 1))
    del pairs, one_way
    n = scan.num_nodes
    indptr, order = csr.sort_edges(cols, rows, num_src=n, num_dst=n)
    neighbour: NumpyArray = cols[order].numpy()
    first = np.ones(len(neighbour), dtype=bool)
    first[1:] = neighbour[1:] != neighbour[:-1]
    starts = indptr.numpy()
    first[starts[:-1][starts[:-1] < len(neighbour)]] = True
    xadj = np.zeros(n + 1, dtype=np.int64)
    xadj[1:] = np.cumsum(first)[starts[1:] - 1] if len(neighbour) else 0
    # A node before the first edge reads index −1 above; nothing has been counted there.
    xadj[1:][starts[1:] == 0] = 0
    return xadj, neighbour[first]


def _kway(
    graph: tuple[NumpyArray, NumpyArray],
    parts: int,
    weights: NumpyArray,
    *,
    seed: int,
    imbalance: float,
    repeats: int = 1,
) -> tuple[int, NumpyArray]:
    xadj, adjncy = graph
    if parts == 1:
        return 0, np.zeros(len(xadj) - 1, dtype=np.int32)
    options = pymetis.Options(seed=seed % 2**31, ufactor=max(1, round(imbalance * 1000)), ncuts=repeats)
    uniform = bool((weights == weights[0]).all())
    index = np.int64 if pymetis._internal._idx_type_width() == 64 else np.int32  # another width is copied item by item
    cut, part = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(xadj.astype(index), adjncy.astype(index)),
        vweights=None if uniform else weights.astype(index),
        recursive=False,
        options=options,
    )
    return int(cut), np.asarray(part, dtype=np.int32)


def _trivial(scan: EdgeScan, parts: int) -> bool:
    """METIS does not take as many parts as nodes."""
    return parts >= scan.num_nodes


def _one_each(scan: EdgeScan, parts: int) -> NumpyArray:
    return (np.arange(scan.num_nodes) % parts).astype(np.int32)
