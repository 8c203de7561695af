"""METIS through pymetis: ``mincut`` (k-way, best of several seeds) and ``super`` (mini-clusters assigned at random).

METIS needs the simple undirected graph in memory; ``stream`` is for graphs that do not fit. METIS does not release the
GIL, so ranks with a heartbeat call it in another process.
"""

from __future__ import annotations

import math

import numpy as np
import pymetis
import torch

from gnnfleet.errors import PartitionError
from gnnfleet.graph.partition.edge_scan import EdgeScan, NumpyArray, PartitionRequest
from gnnfleet.ops import csr
from gnnfleet.report.progress import Progress

# SuperTMA's scripts use 15,000 mini-clusters on graphs of a few hundred thousand nodes and more; smaller graphs get
# clusters of about ten nodes.
MAX_SUPER_NODES = 15_000


def mincut_parts(scan: EdgeScan, request: PartitionRequest, progress: Progress) -> tuple[NumpyArray, None]:
    """Minimise the edge cut; the best of ``tries`` seeds."""
    if request.parts >= scan.num_nodes:
        return _single_nodes(scan, request.parts), None
    graph = simple_graph(scan, progress)
    advance = progress.stage(f"METIS, best of {request.tries}", request.tries)
    # METIS repeats its search and returns the best cut. On a small graph that is cheap, and single runs differ by 20 %.
    repeats = max(1, min(16, 2_000_000 // max(len(graph[1]), 1)))
    best_cut, best_part = math.inf, None
    for attempt in range(max(request.tries, 1)):
        seed = request.seed * 1009 + attempt
        cut, part = metis_kway(
            graph, request.parts, request.weights, seed=seed, imbalance=request.imbalance, repeats=repeats
        )
        if cut < best_cut:
            best_cut, best_part = cut, part
        advance(1)
    assert best_part is not None
    return best_part, None


def super_parts(scan: EdgeScan, request: PartitionRequest, progress: Progress) -> tuple[NumpyArray, NumpyArray]:
    """Assign METIS mini-clusters to parts at random with equal weight; the mini-clusters also order the nodes."""
    count = request.clusters or max(request.parts, min(MAX_SUPER_NODES, scan.num_nodes // 10))
    if count >= scan.num_nodes:
        cluster = _single_nodes(scan, count)
    else:
        graph = simple_graph(scan, progress)
        progress.stage(f"METIS, {count} clusters")
        # Clusters are balanced by nodes: they are many, so their assignment evens out any other weight.
        unit_weights = np.ones(scan.num_nodes, dtype=np.int64)
        _, cluster = metis_kway(graph, count, unit_weights, seed=request.seed, imbalance=0.05)
    weights = np.bincount(cluster, weights=request.weights, minlength=count)
    random = np.random.default_rng([request.seed, request.parts, count])
    return balance_weights(weights, request.parts, random)[cluster], cluster


def balance_weights(weights: NumpyArray, parts: int, random: np.random.Generator) -> NumpyArray:
    """[C] int32: the part of every cluster. Clusters go in random order to the part with the least weight so far."""
    load = np.zeros(parts)
    assigned = np.zeros(len(weights), dtype=np.int32)
    for c in random.permutation(len(weights)):
        part = int(load.argmin())
        assigned[c] = part
        # The small constant spreads clusters without weight (no training node) over the parts too.
        load[part] += weights[c] + 1e-6
    return assigned


def simple_graph(scan: EdgeScan, progress: Progress) -> tuple[NumpyArray, NumpyArray]:
    """Return (xadj, adjncy): the undirected graph without self-loops and parallel edges, both directions present."""
    advance = progress.stage("undirected graph", scan.num_edges)
    if scan.num_nodes >= 2**31:
        raise PartitionError(f"the graph has {scan.num_nodes} nodes, METIS takes fewer than 2^31: use --method stream")
    pairs = []
    for edges in scan.slices():
        src, dst = edges.src, edges.dst()
        no_loop = src != dst
        pairs.append(np.stack([src[no_loop], dst[no_loop]]))
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
    # Nodes before the first edge read index −1 above; their count is 0.
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
    index = pymetis.zero_copy_dtype()  # arrays of another dtype are copied one number at a time
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
    """One node per part, since METIS requires more nodes than parts."""
    return (np.arange(scan.num_nodes) % parts).astype(np.int32)
