"""METIS through pymetis: ``mincut`` (k-way, best of several seeds) and ``super`` (mini-clusters assigned at random).

METIS works on the simple undirected graph and holds it whole in memory; ``stream`` is for graphs that do not fit.
It holds the GIL meanwhile, so ranks with a heartbeat call it in another process.
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
    """Cut few edges; the best of ``tries`` seeds."""
    if request.parts >= scan.num_nodes:
        return _single_nodes(scan, request.parts), None
    graph = simple_graph(scan, progress)
    advance = progress.stage(f"METIS, best of {request.tries}", request.tries)
    best: tuple[int, NumpyArray] | None = None
    # METIS repeats and keeps the best: on a small graph that costs little, and single runs differ by 20 %.
    repeats = max(1, min(16, 2_000_000 // max(len(graph[1]), 1)))
    for attempt in range(max(request.tries, 1)):
        cut, part = metis_kway(
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
    """Assign METIS mini-clusters to parts at random with equal weight; the mini-clusters also order the nodes."""
    count = request.clusters or max(request.parts, min(MAX_SUPER_NODES, scan.num_nodes // 10))
    if count >= scan.num_nodes:
        cluster = _single_nodes(scan, count)
    else:
        graph = simple_graph(scan, progress)
        progress.stage(f"METIS, {count} clusters")
        # Clusters are balanced by nodes: they are many, so their assignment evens out any other weight.
        cluster = metis_kway(graph, count, np.ones(scan.num_nodes, dtype=np.int64), seed=request.seed, imbalance=0.05)[
            1
        ]
    return assign_clusters(cluster, count, request)[cluster], cluster


def assign_clusters(cluster: NumpyArray, count: int, request: PartitionRequest) -> NumpyArray:
    """[count] int32: the part of every cluster, balanced by weight."""
    weights = np.bincount(cluster, weights=request.weights, minlength=count)
    return balance_weights(weights, request.parts, np.random.default_rng([request.seed, request.parts, count]))


def balance_weights(weights: NumpyArray, parts: int, random: np.random.Generator) -> NumpyArray:
    """[C] int32: the part of every cluster. In random order, each goes to the part with the least weight so far."""
    load = np.zeros(parts)
    assigned = np.zeros(len(weights), dtype=np.int32)
    for c in random.permutation(len(weights)):
        part = int(load.argmin())
        assigned[c] = part
        # A cluster without weight (no training node) adds a little, so that such clusters also spread over the parts.
        load[part] += weights[c] + 1e-6
    return assigned


def simple_graph(scan: EdgeScan, progress: Progress) -> tuple[NumpyArray, NumpyArray]:
    """Return (xadj, adjncy): the undirected graph without self-loops and parallel edges, both directions present."""
    advance = progress.stage("undirected graph", scan.num_edges)
    if scan.num_nodes >= 2**31:
        raise PartitionError(f"the graph has {scan.num_nodes} nodes, METIS holds at most 2**31: use --method stream")
    pairs = []
    for chunk in scan.chunks():
        dst = np.repeat(
            np.arange(chunk.first, chunk.first + len(chunk.indptr) - 1, dtype=np.int32), np.diff(chunk.indptr)
        )
        src = chunk.src.astype(np.int32, copy=False)
        keep = src != dst
        pairs.append(np.stack([src[keep], dst[keep]]))
        advance(len(src))
    directed = np.concatenate(pairs, axis=1) if pairs else np.empty((2, 0), np.int32)
    rows, cols = (torch.from_numpy(np.concatenate([directed[i], directed[1 - i]])) for i in (0, 1))
    del pairs, directed
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


def metis_kway(
    graph: tuple[NumpyArray, NumpyArray],
    parts: int,
    weights: NumpyArray,
    *,
    seed: int,
    imbalance: float,
    edge_weights: NumpyArray | None = None,
    repeats: int = 1,
) -> tuple[int, NumpyArray]:
    """Return the cut and the part of every vertex, for a symmetric CSR graph with more vertices than parts."""
    xadj, adjncy = graph
    if parts == 1:
        return 0, np.zeros(len(xadj) - 1, dtype=np.int32)
    options = pymetis.Options(seed=seed % 2**31, ufactor=max(1, round(imbalance * 1000)), ncuts=repeats)
    uniform = bool((weights == weights[0]).all())
    index = pymetis.zero_copy_dtype()  # arrays of another width are copied one number at a time
    cut, part = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(xadj.astype(index), adjncy.astype(index, copy=False)),
        vweights=None if uniform else weights.astype(index),
        eweights=None if edge_weights is None else edge_weights.astype(index),
        recursive=False,
        options=options,
    )
    return int(cut), np.asarray(part, dtype=np.int32)


def _single_nodes(scan: EdgeScan, parts: int) -> NumpyArray:
    """Assign one node to each part: METIS requires more nodes than parts."""
    return (np.arange(scan.num_nodes) % parts).astype(np.int32)
