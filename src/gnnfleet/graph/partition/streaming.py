"""Partitions a graph in passes over its edges on disk, with O(nodes) memory.

Three steps: streaming clustering (capped label propagation), a k-way partition of the small graph between clusters, and
restreaming refinement of every node on the communication volume sum (lambda - 1). SPRING (SDT-GNN, CATGNN) is the
ancestor; its merge and its assignment by node count are replaced by the last two steps. The volume is that of Demirci
et al., https://arxiv.org/abs/2212.05009. Invariant: edges are never held beyond one chunk; what is kept is per node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gnnfleet.errors import PartitionError
from gnnfleet.graph.partition.edge_scan import EdgeScan, EdgeSlice, NumpyArray
from gnnfleet.graph.partition.request import PartitionRequest
from gnnfleet.ops.native import _native
from gnnfleet.report.progress import Progress

log = logging.getLogger(__name__)

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

CHUNK_EDGES = 1 << 18
"""Edges in memory at a time: 1 or 2 MiB."""

CLUSTERS_PER_PART = 64
"""A cluster weighs at most this fraction of a part: heavy enough to matter, light enough to balance."""

FINE_CLUSTERS_PER_PART = 512
"""The same for a graph whose quotient surely fits its table: finer is better as long as no pair is dropped."""

MIN_PAIRS = 1 << 20
"""Slots of the quotient table for a small graph."""

SMALL_EDGES = 1 << 22
"""Up to here passes are so short that several attempts cost less than a second or two."""

SIZE_SLACK = 1.3
"""Node counts may reach this multiple of the mean when something else is balanced."""

SLOTS_PER_NODE = 1
"""Of the quotient table, for a large graph, rounded down to a power of two; a slot costs 12 bytes."""


class RepeatableScan(Protocol):
    """A graph that can be read again and again, grouped by destination."""

    @property
    def num_nodes(self) -> int: ...

    @property
    def num_edges(self) -> int: ...

    def chunks(self, limit: int) -> Iterator[EdgeSlice]: ...


@dataclass(frozen=True)
class GraphTraits:
    """What one pass tells about a graph: every edge has its reverse; a destination comes in several pieces."""

    symmetric: bool
    pieces: bool


@dataclass(frozen=True)
class QuotientGraph:
    """The graph between clusters, symmetric CSR with edge weights, and what each cluster weighs and holds."""

    indptr: Int32Array
    neighbour: Int32Array
    weight: Int32Array
    load: Int64Array
    size: Int64Array


def stream_parts(scan: EdgeScan, request: PartitionRequest, progress: Progress) -> tuple[NumpyArray, None]:
    """The partitioner ``stream`` of a graph: see ``stream``."""
    weights = None if bool((request.weights == 1).all()) else request.weights
    advance = progress.stage("stream")
    counted = _CountingScan(scan, advance)
    return stream(counted, request.parts, weights=weights, seed=request.seed, imbalance=request.imbalance), None


class _CountingScan:
    """A scan that tells how many edges were read."""

    def __init__(self, scan: EdgeScan, advance: Callable[[float], None]) -> None:
        self.num_nodes, self.num_edges = scan.num_nodes, scan.num_edges
        self._scan, self._advance = scan, advance

    def chunks(self, limit: int) -> Iterator[EdgeSlice]:
        for chunk in self._scan.chunks(limit):
            yield chunk
            self._advance(len(chunk.src))


def stream(
    scan: RepeatableScan,
    parts: int,
    *,
    weights: npt.NDArray[np.integer] | None = None,
    seed: int = 0,
    imbalance: float = 0.05,
    cluster_passes: int = 3,
    refine_passes: int = 6,
    attempts: int | None = None,
) -> Int32Array:
    """Returns the part of each node, (num_nodes,) int32.

    `weights` (num_nodes,) are what is balanced, one per node if None: a part weighs at most (1 + imbalance) times the
    mean, or the least any assignment of whole nodes could reach. The clusters are partitioned and refined `attempts`
    times, by default once for a large graph, and the best result is kept. Raises PartitionError for arguments that make
    no sense.
    """
    weight = _checked_weights(scan, parts, weights, imbalance)
    if parts == 1 or scan.num_nodes == 0:
        return np.zeros(scan.num_nodes, np.int32)
    survey = _graph_traits(scan)
    label = _cluster_for(scan, survey, weight, parts, passes=cluster_passes, seed=seed)
    graph = _quotient(scan, label, _compact(label), weight)
    best = None
    for attempt in range(attempts or (4 if scan.num_edges <= SMALL_EDGES else 1)):
        part = _partition_quotient(graph, parts, imbalance=imbalance, seed=seed + attempt)[label]
        balance = _BalancedAssignment(part, parts, weight, imbalance)
        volume = _refine(scan, survey, balance, passes=refine_passes, seed=seed)
        if best is None or (not balance.holds(), volume) < best[:2]:
            best = (not balance.holds(), volume, balance)
    assert best is not None
    best[2].enforce()
    return best[2].part


def cluster(scan: RepeatableScan, *, max_nodes: int, seed: int = 0, passes: int = 3) -> Int32Array:
    """Returns the cluster of each node, (num_nodes,) int32, numbered without gaps, at most `max_nodes` nodes in each.

    Meant for ordering the nodes of a part so that neighbours lie close together.
    """
    if max_nodes < 1:
        raise PartitionError(f"expected max_nodes >= 1, found {max_nodes}")
    if scan.num_nodes == 0:
        return np.zeros(0, np.int32)
    label = _propagate(scan, _graph_traits(scan), None, cap=max_nodes, passes=passes, seed=seed)
    _compact(label)
    return label


def _checked_weights(
    scan: RepeatableScan, parts: int, weights: npt.NDArray[np.integer] | None, imbalance: float
) -> Int32Array | None:
    if parts < 1:
        raise PartitionError(f"expected parts >= 1, found {parts}")
    if imbalance < 0:
        raise PartitionError(f"expected imbalance >= 0, found {imbalance}")
    if scan.num_nodes >= 1 << 31:
        raise PartitionError(f"expected fewer than 2^31 nodes, found {scan.num_nodes}: node labels are 32-bit")
    if weights is None:
        return None
    if weights.shape != (scan.num_nodes,):
        raise PartitionError(f"expected weights of shape ({scan.num_nodes},), found {weights.shape}")
    if weights.size and (int(weights.min()) < 0 or int(weights.max()) >= 1 << 30):
        raise PartitionError("expected weights in [0, 2^30)")
    return np.ascontiguousarray(weights, np.int32)


def _graph_traits(scan: RepeatableScan) -> GraphTraits:
    asymmetry, end, pieces = 0, 0, False
    for c in scan.chunks(CHUNK_EDGES):
        # The kernels of later passes index by these numbers unchecked.
        if c.src.size and (int(c.src.min()) < 0 or int(c.src.max()) >= scan.num_nodes):
            raise PartitionError(f"expected sources in [0, {scan.num_nodes}), found {c.src.min()} .. {c.src.max()}")
        asymmetry += _native.stream_asymmetry(c.first, c.indptr, c.src)
        pieces |= c.first < end
        end = c.first + len(c.indptr) - 1
    return GraphTraits(symmetric=asymmetry % (1 << 64) == 0, pieces=pieces)


def _cluster_for(
    scan: RepeatableScan, survey: GraphTraits, weight: Int32Array | None, parts: int, *, passes: int, seed: int
) -> Int32Array:
    """Clusters small enough, in weight and in nodes, for the parts to be balanced."""
    nodes = scan.num_nodes
    clusters = parts * (FINE_CLUSTERS_PER_PART if 2 * scan.num_edges <= MIN_PAIRS else CLUSTERS_PER_PART)
    if weight is None:
        cap = max(2, nodes // clusters)
        return _propagate(scan, survey, None, cap=cap, passes=passes, seed=seed)
    # One number that bounds both: nodes count as much as weights, each with about half of the total.
    total = int(weight.sum(dtype=np.int64))
    if total >= nodes:
        both = weight + np.int32(total // nodes)
    else:
        both = weight * np.int32(nodes // max(1, total)) + np.int32(1)
    cap = max(2, int(both.sum(dtype=np.int64)) // clusters)
    return _propagate(scan, survey, both, cap=cap, passes=passes, seed=seed)


def _propagate(
    scan: RepeatableScan, survey: GraphTraits, weight: Int32Array | None, *, cap: int, passes: int, seed: int
) -> Int32Array:
    """Labels of clusters: some node's number each."""
    nodes = scan.num_nodes
    label = np.arange(nodes, dtype=np.int32)
    mass = np.ones(nodes, np.int64) if weight is None else weight.astype(np.int64)
    # In-neighbours alone would never move a node without in-edges; in a symmetric graph they are all there is.
    vote = vote_count = None
    if not survey.symmetric:
        vote, vote_count = np.zeros(nodes, np.int32), np.zeros(nodes, np.int32)
    for number in range(passes):
        moves = 0
        for c in scan.chunks(CHUNK_EDGES):
            moves += _native.stream_cluster(c.first, c.indptr, c.src, label, mass, weight, vote, vote_count, cap, seed)
        if vote_count is not None:
            vote_count //= 2  # old votes fade: they were cast for labels that may be gone
        log.debug("clustering pass %d: %d moves", number, moves)
        if moves * 200 < nodes:
            break
    return label


def _compact(label: Int32Array) -> int:
    """Renumbers labels in place to 0 .. clusters - 1 and returns their number."""
    number = np.zeros(len(label), np.int32)
    number[label] = 1
    np.cumsum(number, out=number)
    clusters = int(number[-1])
    number -= 1
    np.take(number, label, out=label)
    return clusters


def _quotient(scan: RepeatableScan, label: Int32Array, clusters: int, weight: Int32Array | None) -> QuotientGraph:
    slots = max(MIN_PAIRS, SLOTS_PER_NODE << scan.num_nodes.bit_length() - 1)
    slots = min(slots, 2 << (2 * scan.num_edges).bit_length())
    key, count, used = np.zeros(slots, np.uint64), np.zeros(slots, np.uint32), 0
    for c in scan.chunks(CHUNK_EDGES):
        used = _native.stream_quotient(c.first, c.indptr, c.src, label, key, count, used)
    indptr = np.empty(clusters + 1, np.int32)
    neighbour, edge_weight = np.empty(2 * used, np.int32), np.empty(2 * used, np.int32)
    _native.stream_quotient_csr(key, count, indptr, neighbour, edge_weight)
    log.debug("quotient: %d clusters, %d pairs", clusters, used)
    size = _sum_by(label, None, clusters)
    load = size if weight is None else _sum_by(label, weight, clusters)
    return QuotientGraph(indptr, neighbour, edge_weight, load, size)


def _partition_quotient(graph: QuotientGraph, parts: int, *, imbalance: float, seed: int) -> Int32Array:
    """Parts of the clusters: k-way for those with neighbours, the lightest part for the others, heavy ones first."""
    connected = np.diff(graph.indptr) > 0
    part = np.full(len(connected), -1, np.int32)
    load = np.zeros(parts, np.int64)
    if connected.any():
        part[connected] = _kway(graph, connected, parts, imbalance=imbalance, seed=seed)
        np.add.at(load, part[connected], graph.load[connected])
    order = np.argsort(-graph.load, kind="stable")
    _native.stream_fill_lightest(order, graph.load, part, load)
    return part


def _kway(
    graph: QuotientGraph, connected: npt.NDArray[np.bool_], parts: int, *, imbalance: float, seed: int
) -> Int32Array:
    number = np.cumsum(connected, dtype=np.int32) - np.int32(1)
    indptr = np.concatenate([graph.indptr[:1], graph.indptr[1:][connected]])
    load, size = graph.load[connected], graph.size[connected]
    # Part of the permitted imbalance is left to refinement, which could hardly move a node between full parts.
    load_cap = _cap(int(graph.load.sum()), int(graph.load.max()), parts, 0.6 * imbalance)
    size_cap = _cap(int(graph.size.sum()), int(graph.size.max()), parts, 0.8 * max(SIZE_SLACK - 1, imbalance))
    part = np.empty(len(load), np.int32)
    _native.partition_kway(
        indptr, number[graph.neighbour], graph.weight, load, size, parts, load_cap, size_cap, seed, part
    )
    return part


def _cap(total: int, heaviest: int, parts: int, imbalance: float) -> int:
    """The most a part may weigh; never less than any assignment of whole nodes needs."""
    return max(int((1 + imbalance) * total / parts), -(-total // parts), heaviest)


class _BalancedAssignment:
    """An assignment with the loads of its parts and the caps they must keep."""

    def __init__(self, part: Int32Array, parts: int, weight: Int32Array | None, imbalance: float) -> None:
        self.part, self.weight, self.parts = part, weight, parts
        self.size = _sum_by(part, None, parts)
        self.load = self.size.copy() if weight is None else _sum_by(part, weight, parts)
        heaviest = 1 if weight is None else int(weight.max())
        self.load_cap = _cap(int(self.load.sum()), heaviest, parts, imbalance)
        self.size_cap = len(part) if weight is None else _cap(len(part), 1, parts, max(SIZE_SLACK - 1, imbalance))

    def holds(self) -> bool:
        return bool((self.load <= self.load_cap).all() and (self.size <= self.size_cap).all())

    def enforce(self) -> None:
        if not self.holds():
            _native.stream_rebalance(self.part, self.load, self.size, self.weight, self.load_cap, self.size_cap)
        if not self.holds():
            log.warning("no balanced assignment found: heaviest part %d, cap %d", self.load.max(), self.load_cap)

    def restore(self, part: Int32Array) -> None:
        self.part[:] = part
        self.size[:] = _sum_by(part, None, self.parts)
        self.load[:] = self.size if self.weight is None else _sum_by(part, self.weight, self.parts)


def _pin_layout(parts: int) -> tuple[int, int] | None:
    """Words a node and bits a counter, at most 48 bytes a node; None if there are too many parts for that."""
    for most, words, bits in ((16, 1, 4), (32, 2, 4), (64, 4, 4), (128, 4, 2), (192, 6, 2)):
        if parts <= most:
            return words, bits
    return None


def _refine(scan: RepeatableScan, survey: GraphTraits, balance: _BalancedAssignment, *, passes: int, seed: int) -> int:
    """Improves the assignment in place; returns the volume, or 0 if there are too many parts to count it."""
    layout = _pin_layout(balance.parts)
    if layout is None:
        _refine_cut(scan, balance, passes=passes, seed=seed)
        return 0
    degree = _in_degree(scan) if survey.pieces else None
    words, bits = layout
    pins = np.empty((scan.num_nodes, words), np.uint64)
    _count_pins(scan, pins, bits, balance.part)
    volume: int = _native.stream_pins_volume(pins, bits)
    for number in range(passes):
        before = balance.part.copy() if survey.pieces and balance.holds() else None
        # A part above its cap gives away first what costs least, later whatever it takes.
        max_loss = 1 << 2 * number
        moves = 0
        for c in scan.chunks(CHUNK_EDGES):
            moves += _native.stream_refine(
                c.first, c.indptr, c.src, pins, bits, balance.part, balance.load, balance.size, balance.weight,
                degree, balance.load_cap, balance.size_cap, max_loss,
            )  # fmt: skip
        if survey.pieces:
            # A piece does not show all nets of its node, so the counters went stale and a move may have been a mistake.
            _count_pins(scan, pins, bits, balance.part)
        now: int = _native.stream_pins_volume(pins, bits)
        log.debug("refinement pass %d: %d moves, volume %d to %d", number, moves, volume, now)
        if before is not None and now > volume:
            balance.restore(before)
            return volume
        gained, volume = volume - now, now
        if balance.holds() and gained <= now // 500:
            break
    return volume


def _in_degree(scan: RepeatableScan) -> Int32Array:
    degree = np.zeros(scan.num_nodes, np.int32)
    for c in scan.chunks(CHUNK_EDGES):
        degree[c.first : c.first + len(c.indptr) - 1] += np.diff(c.indptr).astype(np.int32)
    return degree


def _count_pins(scan: RepeatableScan, pins: npt.NDArray[np.uint64], bits: int, part: Int32Array) -> None:
    _native.stream_pins_reset(pins, bits, part)
    for c in scan.chunks(CHUNK_EDGES):
        _native.stream_pins(c.first, c.indptr, c.src, pins, bits, part)


def _refine_cut(scan: RepeatableScan, balance: _BalancedAssignment, *, passes: int, seed: int) -> None:
    """For very many parts: label propagation with parts as labels, which needs no counters but sees the cut only."""
    for _ in range(passes):
        for c in scan.chunks(CHUNK_EDGES):
            _native.stream_cluster(
                c.first, c.indptr, c.src, balance.part, balance.load, balance.weight, None, None,
                balance.load_cap, seed,
            )  # fmt: skip
    balance.size[:] = _sum_by(balance.part, None, balance.parts)


def _sum_by(label: Int32Array, weight: Int32Array | None, labels: int) -> Int64Array:
    """Sum of weights, or count, of each label, in blocks: bincount would copy its arguments at twice the width."""
    total = np.zeros(labels, np.int64)
    block = max(1 << 16, labels)
    for at in range(0, len(label), block):
        piece = None if weight is None else weight[at : at + block]
        total += np.bincount(label[at : at + block], piece, labels).astype(np.int64)
    return total
