"""Partitions a graph in passes over its edges on disk, with O(nodes) memory.

Three steps: streaming clustering (capped label propagation), METIS on the small quotient graph between clusters, and
restreaming refinement of every node on the communication volume sum (lambda - 1). SPRING (SDT-GNN, CATGNN) is the
ancestor; the last two steps replace its merge and its assignment by node count. The volume is that of Demirci et al.,
https://arxiv.org/abs/2212.05009. Memory holds one slice of edges and arrays with one entry per node.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gnnfleet.errors import PartitionError
from gnnfleet.graph.partition.edge_scan import EdgeScan, NumpyArray, PartitionRequest
from gnnfleet.graph.partition.metis import metis_kway
from gnnfleet.ops.native import _native
from gnnfleet.report.progress import Progress

log = logging.getLogger(__name__)

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

SLICE_EDGES = 1 << 18
"""Edges in memory at once: 1 or 2 MiB."""

CLUSTERS_PER_PART = 64
"""A cluster weighs at most one part divided by this: heavy enough to matter, light enough to balance."""

FINE_CLUSTERS_PER_PART = 512
"""The same for a graph whose quotient surely fits its table: finer is better if no pair is dropped."""

MIN_PAIRS = 1 << 20
"""Slots of the quotient table for a small graph."""

SMALL_EDGES, ATTEMPTS = 1 << 22, 8
"""Up to this number of edges passes are short: several attempts cost a few seconds."""

CLUSTER_PASSES, REFINE_PASSES = 3, 6
"""Passes over the edges at most; fewer if they move few nodes."""

SIZE_SLACK = 1.3
"""Node counts may reach this multiple of the mean when something else is balanced."""


@dataclass(frozen=True)
class QuotientGraph:
    """The graph between clusters: symmetric CSR with edge weights, and the weight and node count of every cluster."""

    indptr: Int32Array
    neighbour: Int32Array
    weight: Int32Array
    load: Int64Array
    size: Int64Array


def stream_parts(scan: EdgeScan, request: PartitionRequest, progress: Progress) -> tuple[NumpyArray, None]:
    """Partition with method ``stream``; see ``stream``."""
    weights = None if bool((request.weights == 1).all()) else request.weights
    counted = EdgeScan(scan.graph, progress.stage("stream"))
    return stream(counted, request.parts, weights=weights, seed=request.seed, imbalance=request.imbalance), None


def stream(
    scan: EdgeScan,
    parts: int,
    *,
    weights: npt.NDArray[np.integer] | None = None,
    seed: int = 0,
    imbalance: float = 0.05,
) -> Int32Array:
    """Return the part of every node, (num_nodes,) int32.

    `weights` (num_nodes,) are balanced; None means one per node. A part weighs at most (1 + imbalance) times the mean,
    or the least that any assignment of whole nodes could reach. The quotient graph of a
    small graph is partitioned and refined `ATTEMPTS` times, and the best assignment is returned. Raises PartitionError
    for invalid arguments.
    """
    weight = _checked_weights(scan, weights, imbalance)
    if parts == 1 or scan.num_nodes == 0:
        return np.zeros(scan.num_nodes, np.int32)
    label = _clusters_for_parts(scan, weight, parts, seed=seed)
    graph = _quotient(scan, label, _compact(label), weight)
    best = None
    for cluster_weight in _cluster_weights(graph):
        for attempt in range(ATTEMPTS if scan.num_edges <= SMALL_EDGES else 1):
            metis_seed = ATTEMPTS * seed + attempt + 1  # METIS treats seed 0 like seed 1
            part = _partition_quotient(graph, cluster_weight, parts, imbalance=imbalance, seed=metis_seed)
            assignment = _BalancedAssignment(part[label], parts, weight, imbalance)
            volume = _refine(scan, assignment, passes=REFINE_PASSES, seed=seed)
            if not assignment.is_balanced():
                # Moves that restore balance ignore edges, so their loss is refined once more.
                assignment.rebalance()
                volume = _refine(scan, assignment, passes=2, seed=seed)
            if best is None or (not assignment.is_balanced(), volume) < best[:2]:
                best = (not assignment.is_balanced(), volume, assignment)
    assert best is not None
    assignment = best[2]
    assignment.rebalance()
    if not assignment.is_balanced():
        log.warning(
            "parts are not balanced: the heaviest weighs %d, expected at most %d",
            assignment.load.max(),
            assignment.load_cap,
        )
    return assignment.part


def cluster(scan: EdgeScan, *, max_nodes: int, seed: int = 0) -> Int32Array:
    """Return the cluster of every node, (num_nodes,) int32, numbered without gaps, at most `max_nodes` nodes in each.

    The clusters order the nodes of a part so that neighbours lie close together.
    """
    if scan.num_nodes == 0:
        return np.zeros(0, np.int32)
    label = _propagate(scan, None, cap=max_nodes, seed=seed)
    _compact(label)
    return label


def _checked_weights(scan: EdgeScan, weights: npt.NDArray[np.integer] | None, imbalance: float) -> Int32Array | None:
    if imbalance < 0:
        raise PartitionError(f"imbalance is {imbalance}, expected at least 0")
    if scan.num_nodes >= 1 << 31:
        raise PartitionError(f"the graph has {scan.num_nodes} nodes, expected fewer than 2^31: node labels are 32-bit")
    if weights is None:
        return None
    if weights.size and (int(weights.min()) < 0 or int(weights.max()) >= 1 << 30):
        raise PartitionError(f"weights are {weights.min()} to {weights.max()}, expected values in [0, 2^30)")
    return np.ascontiguousarray(weights, np.int32)


def _is_symmetric(scan: EdgeScan) -> bool:
    """True if every edge has its reverse."""
    asymmetry = 0
    for edges in scan.slices(SLICE_EDGES):
        # The kernels of later passes use these numbers as indices unchecked.
        if edges.src.size and (int(edges.src.min()) < 0 or int(edges.src.max()) >= scan.num_nodes):
            raise PartitionError(
                f"sources are {edges.src.min()} to {edges.src.max()}, expected values in [0, {scan.num_nodes})"
            )
        asymmetry += _native.stream_asymmetry(*edges)
    return asymmetry % (1 << 64) == 0


def _clusters_for_parts(scan: EdgeScan, weight: Int32Array | None, parts: int, *, seed: int) -> Int32Array:
    """Cluster the nodes so finely, by weight and by count, that parts of whole clusters can be balanced."""
    nodes = scan.num_nodes
    clusters = parts * (FINE_CLUSTERS_PER_PART if 2 * scan.num_edges <= MIN_PAIRS else CLUSTERS_PER_PART)
    if weight is None:
        return _propagate(scan, None, cap=max(2, nodes // clusters), seed=seed)
    # One number bounds both: nodes count as much as weights, each with about half of the total.
    total = int(weight.sum(dtype=np.int64))
    if total >= nodes:
        mass = weight + np.int32(total // nodes)
    else:
        mass = weight * np.int32(nodes // max(1, total)) + np.int32(1)
    cap = max(2, int(mass.sum(dtype=np.int64)) // clusters)
    return _propagate(scan, mass, cap=cap, seed=seed)


def _propagate(scan: EdgeScan, weight: Int32Array | None, *, cap: int, seed: int) -> Int32Array:
    """Label every node with its cluster, a node number."""
    nodes = scan.num_nodes
    label = np.arange(nodes, dtype=np.int32)
    mass = np.ones(nodes, np.int64) if weight is None else weight.astype(np.int64)
    # In-neighbours alone would never move a node without in-edges; in a symmetric graph they are all there is.
    vote = vote_count = None
    if not _is_symmetric(scan):
        vote, vote_count = np.zeros(nodes, np.int32), np.zeros(nodes, np.int32)
    for sweep in range(CLUSTER_PASSES):
        moves = 0
        for edges in scan.slices(SLICE_EDGES):
            moves += _native.stream_cluster(*edges, label, mass, weight, vote, vote_count, cap, seed)
        if vote_count is not None:
            vote_count //= 2  # old votes count less: their labels may no longer exist
        log.debug("clustering pass %d: %d moves", sweep, moves)
        if moves * 200 < nodes:
            break
    return label


def _compact(label: Int32Array) -> int:
    """Renumber labels in place to 0 .. clusters - 1 and return the number of clusters."""
    new_label = np.zeros(len(label), np.int32)
    new_label[label] = 1
    np.cumsum(new_label, out=new_label)
    clusters = int(new_label[-1])
    new_label -= 1
    np.take(new_label, label, out=label)
    return clusters


def _quotient(scan: EdgeScan, label: Int32Array, clusters: int, weight: Int32Array | None) -> QuotientGraph:
    # A large graph has a slot per node, rounded down to a power of two; a slot takes 12 bytes.
    slots = max(MIN_PAIRS, 1 << scan.num_nodes.bit_length() - 1)
    slots = min(slots, 2 << (2 * scan.num_edges).bit_length())
    key, count, used = np.zeros(slots, np.uint64), np.zeros(slots, np.uint32), 0
    for edges in scan.slices(SLICE_EDGES):
        used = _native.stream_quotient(*edges, label, key, count, used)
    indptr = np.empty(clusters + 1, np.int32)
    neighbour, edge_weight = np.empty(2 * used, np.int32), np.empty(2 * used, np.int32)
    _native.stream_quotient_csr(key, count, indptr, neighbour, edge_weight)
    log.debug("quotient: %d clusters, %d pairs", clusters, used)
    size = _sum_by(label, None, clusters)
    load = size if weight is None else _sum_by(label, weight, clusters)
    return QuotientGraph(indptr, neighbour, edge_weight, load, size)


def _cluster_weights(graph: QuotientGraph) -> Iterator[Int64Array]:
    """Yield the vertex weights to try, [clusters].

    METIS through pymetis balances one number per vertex. The weight alone leaves node counts free, which suits weights
    spread over all nodes (in-edges); the sum of weight and node count suits few weighted nodes (training nodes).
    """
    yield graph.load
    if graph.load is not graph.size:
        yield ((graph.load / graph.load.mean() + graph.size / graph.size.mean()) * 1000).astype(np.int64)


def _partition_quotient(
    graph: QuotientGraph, cluster_weight: Int64Array, parts: int, *, imbalance: float, seed: int
) -> Int32Array:
    """Assign clusters to parts: METIS for those with neighbours, the lightest part for the others, heavy ones first."""
    connected = np.diff(graph.indptr) > 0
    count = int(connected.sum())
    part = np.full(len(connected), -1, np.int32)
    load = np.zeros(parts, np.int64)
    if count > parts:  # METIS expects more vertices than parts
        row = np.cumsum(connected) - 1
        indptr = np.concatenate([graph.indptr[:1], graph.indptr[1:][connected]])
        # Refinement gets part of the permitted imbalance: it could hardly move a node between full parts.
        part[connected] = metis_kway(
            (indptr, row[graph.neighbour]),
            parts,
            cluster_weight[connected],
            edge_weights=graph.weight,
            seed=seed,
            imbalance=0.6 * imbalance,
        )[1]
        np.add.at(load, part[connected], graph.load[connected])
    order = np.argsort(-graph.load, kind="stable")
    _native.stream_fill_lightest(order, graph.load, part, load)
    return part


def _cap(total: int, heaviest: int, parts: int, imbalance: float) -> int:
    """Return the greatest permitted weight of a part; never less than any assignment of whole nodes needs."""
    return max(int((1 + imbalance) * total / parts), -(-total // parts), heaviest)


class _BalancedAssignment:
    """An assignment with the loads of its parts and their caps."""

    def __init__(self, part: Int32Array, parts: int, weight: Int32Array | None, imbalance: float) -> None:
        self.part, self.weight, self.parts = part, weight, parts
        self.size = _sum_by(part, None, parts)
        self.load = self.size.copy() if weight is None else _sum_by(part, weight, parts)
        heaviest = 1 if weight is None else int(weight.max())
        self.load_cap = _cap(int(self.load.sum()), heaviest, parts, imbalance)
        self.size_cap = len(part) if weight is None else _cap(len(part), 1, parts, max(SIZE_SLACK - 1, imbalance))

    def is_balanced(self) -> bool:
        return bool((self.load <= self.load_cap).all() and (self.size <= self.size_cap).all())

    def rebalance(self) -> None:
        if not self.is_balanced():
            _native.stream_rebalance(self.part, self.load, self.size, self.weight, self.load_cap, self.size_cap)


def _pin_layout(parts: int) -> tuple[int, int] | None:
    """Return (64-bit integers per node, bits per counter), at most 48 bytes a node; None for too many parts."""
    for max_parts, integers, bits in ((16, 1, 4), (32, 2, 4), (64, 4, 4), (128, 4, 2), (192, 6, 2)):
        if parts <= max_parts:
            return integers, bits
    return None


def _refine(scan: EdgeScan, assignment: _BalancedAssignment, *, passes: int, seed: int) -> int:
    """Improve the assignment in place; returns the volume, or 0 if there are too many parts to count it."""
    layout = _pin_layout(assignment.parts)
    if layout is None:
        _refine_cut(scan, assignment, passes=passes, seed=seed)
        return 0
    integers, bits = layout
    pins = np.empty((scan.num_nodes, integers), np.uint64)
    _native.stream_pins_reset(pins, bits, assignment.part)
    for edges in scan.slices(SLICE_EDGES):
        _native.stream_pins(*edges, pins, bits, assignment.part)
    volume: int = _native.stream_pins_volume(pins, bits)
    for sweep in range(passes):
        # A part above its cap first loses the nodes that cost least; the limit on the cost grows with each pass.
        max_loss = 1 << 2 * sweep
        moves = 0
        for edges in scan.slices(SLICE_EDGES):
            moves += _native.stream_refine(
                *edges, pins, bits, assignment.part, assignment.load, assignment.size, assignment.weight,
                None, assignment.load_cap, assignment.size_cap, max_loss,
            )  # fmt: skip
        new_volume: int = _native.stream_pins_volume(pins, bits)
        log.debug("refinement pass %d: %d moves, volume %d to %d", sweep, moves, volume, new_volume)
        gain, volume = volume - new_volume, new_volume
        if assignment.is_balanced() and gain <= new_volume // 500:
            break
    return volume


def _refine_cut(scan: EdgeScan, assignment: _BalancedAssignment, *, passes: int, seed: int) -> None:
    """Refine the cut by label propagation with parts as labels, which needs no counters (for very many parts)."""
    for _ in range(passes):
        for edges in scan.slices(SLICE_EDGES):
            _native.stream_cluster(
                *edges, assignment.part, assignment.load, assignment.weight, None, None,
                assignment.load_cap, seed,
            )  # fmt: skip
    assignment.size[:] = _sum_by(assignment.part, None, assignment.parts)


def _sum_by(label: Int32Array, weight: Int32Array | None, labels: int) -> Int64Array:
    """Sum the weights, or count the nodes, of every label."""
    total = np.zeros(labels, np.int64)
    block = max(1 << 16, labels)  # in blocks: bincount copies its arguments at twice the width
    for first in range(0, len(label), block):
        block_weight = None if weight is None else weight[first : first + block]
        total += np.bincount(label[first : first + block], block_weight, labels).astype(np.int64)
    return total
