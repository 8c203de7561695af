"""The in-memory k-way partitioner: known answers on small graphs, caps kept, same seed same result."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gnnfleet import _native

Int32Array = npt.NDArray[np.int32]


def symmetric_csr(nodes: int, edges: list[tuple[int, int, int]]) -> tuple[Int32Array, Int32Array, Int32Array]:
    both = sorted(edges + [(b, a, w) for a, b, w in edges])
    indptr = np.concatenate([[0], np.cumsum(np.bincount([a for a, _, _ in both], minlength=nodes))])
    return (
        indptr.astype(np.int32),
        np.array([b for _, b, _ in both], np.int32),
        np.array([w for *_, w in both], np.int32),
    )


def kway(
    graph: tuple[Int32Array, Int32Array, Int32Array], parts: int, cap: int, load: list[int] | None = None, seed: int = 0
) -> Int32Array:
    nodes = len(graph[0]) - 1
    loads = np.array(load if load is not None else [1] * nodes, np.int64)
    part = np.full(nodes, -1, np.int32)
    _native.partition_kway(*graph, loads, np.ones(nodes, np.int64), parts, cap, nodes, seed, part)
    return part


def ring_of_cliques(cliques: int, size: int) -> list[tuple[int, int, int]]:
    inside = [(c * size + i, c * size + j, 3) for c in range(cliques) for i in range(size) for j in range(i)]
    return inside + [(c * size, (c + 1) % cliques * size + 1, 1) for c in range(cliques)]


def test_cliques_are_not_cut() -> None:
    part = kway(symmetric_csr(40, ring_of_cliques(4, 10)), 4, cap=10)
    assert [len(set(part[c * 10 : c * 10 + 10].tolist())) for c in range(4)] == [1, 1, 1, 1]
    assert len(set(part.tolist())) == 4


def test_a_ring_of_many_cliques_is_cut_between_them() -> None:
    edges = ring_of_cliques(96, 8)
    part = kway(symmetric_csr(768, edges), 4, cap=200)
    assert np.bincount(part, minlength=4).max() <= 200
    assert sum(w for a, b, w in edges if part[a] != part[b]) <= 12  # 4 is the least


def test_loads_are_capped() -> None:
    load = [1 + v % 7 for v in range(768)]
    part = kway(symmetric_csr(768, ring_of_cliques(96, 8)), 6, cap=int(1.05 * sum(load) / 6), load=load)
    assert np.bincount(part, load, minlength=6).max() <= 1.05 * sum(load) / 6


def test_same_seed_same_parts() -> None:
    graph = symmetric_csr(768, ring_of_cliques(96, 8))
    assert np.array_equal(kway(graph, 8, cap=110, seed=5), kway(graph, 8, cap=110, seed=5))


def test_more_parts_than_nodes() -> None:
    part = kway(symmetric_csr(3, [(0, 1, 1), (1, 2, 1)]), 8, cap=1)
    assert len(set(part.tolist())) == 3
