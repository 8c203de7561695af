"""The sampler equals its reference, has the right distribution, and does not depend on threads or other seeds."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.ops.csr import CSR, sort_into_rows
from gnnfleet.ops.draws import DrawKey, Draws, Purpose
from gnnfleet.ops.native import num_threads, single_threaded
from gnnfleet.ops.sample import Fanout, Frontier, edge_sources, sample
from tests.ops import reference


def draws(step: int = 0, hop: int = 0, relation: int = 0) -> Draws:
    return DrawKey(7, 1, step).draws(Purpose.SAMPLE, hop, relation)


def rows_of(degrees: list[int], *, num_cols: int = 50, wide: bool = False) -> CSR:
    indptr = torch.tensor([0, *degrees]).cumsum(0)
    col = torch.randint(num_cols, (int(indptr[-1]),), generator=torch.Generator().manual_seed(1))
    return CSR(indptr, col if wide else col.int(), num_cols)


DEGREES = [0, 1, 5, 3, 64, 65, 0, 12, 200, 2, 33]


@pytest.mark.parametrize("count", [-1, 0, 1, 3, 5, 33, 64, 150])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_sampling_equals_the_reference(count: int, replace: bool, weighted: bool) -> None:
    edges = rows_of(DEGREES)
    weight = None
    if weighted:
        weight = torch.rand(edges.num_edges, generator=torch.Generator().manual_seed(2))
        weight[torch.rand(edges.num_edges, generator=torch.Generator().manual_seed(3)) < 0.3] = 0
        weight[:1] = 0  # a node without any weight
    seeds = torch.tensor([8, 0, 4, 10, 1, 2, 7, 5, 6])
    offsets, edges_drawn = sample(edges, seeds, Fanout(count, replace), draws=draws(3, 1, 2), weight=weight)
    expected = reference.sample(edges, seeds, count, replace=replace, draws=draws(3, 1, 2), weight=weight)
    assert torch.equal(offsets, expected[0])
    assert torch.equal(edges_drawn, expected[1])


@given(
    degrees=st.lists(st.integers(0, 90), min_size=1, max_size=30),
    count=st.integers(-1, 70),
    weighted=st.booleans(),
    step=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_draws_without_replacement_are_distinct_and_complete(
    degrees: list[int], count: int, weighted: bool, step: int
) -> None:
    edges = rows_of(degrees)
    weight = (torch.rand(edges.num_edges) * 3 - 1).clamp(min=0) if weighted else None
    offsets, drawn = sample(edges, torch.arange(len(degrees)), Fanout(count), draws=draws(step), weight=weight)
    for node in range(len(degrees)):
        first, last = int(edges.indptr[node]), int(edges.indptr[node + 1])
        drawn_of_node = drawn[int(offsets[node]) : int(offsets[node + 1])]
        possible = torch.arange(first, last)
        if weight is not None and count >= 0:
            possible = possible[weight[first:last] > 0]
        assert len(drawn_of_node) == (len(possible) if count < 0 else min(count, len(possible)))
        assert bool((drawn_of_node.diff() > 0).all()), "ascending, each once"
        assert bool(torch.isin(drawn_of_node, possible).all())
        if count < 0 or count >= len(possible):
            assert torch.equal(drawn_of_node, possible), "all of them"


def chi_square(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    assert set(counts) <= set(expected), "an impossible outcome"
    return sum((counts[outcome] - mean) ** 2 / mean for outcome, mean in expected.items())


def outcomes(
    weight: list[float] | None, degree: int, count: int, *, replace: bool, times: int
) -> Counter[tuple[int, ...]]:
    """Count the draws of a node with ``degree`` edges, over many such nodes of one graph."""
    edges = CSR(torch.arange(times + 1) * degree, torch.zeros(times * degree, dtype=torch.int32), 1)
    all_weights = None if weight is None else torch.tensor(weight).repeat(times)
    _, drawn = sample(edges, torch.arange(times), Fanout(count, replace), draws=draws(), weight=all_weights)
    return Counter(map(tuple, (drawn.view(times, count) % degree).tolist()))


def limit(freedom: int) -> float:
    """Quantile of chi-square that is exceeded with a probability below 1e-4 (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize(("degree", "count"), [(5, 2), (5, 4), (70, 1), (7, 3), (66, 2)])
def test_every_subset_is_equally_likely(degree: int, count: int) -> None:
    subsets = list(combinations(range(degree), count))
    times = 40 * len(subsets)
    counts = outcomes(None, degree, count, replace=False, times=times)
    assert chi_square(counts, {subset: times / len(subsets) for subset in subsets}) < limit(len(subsets) - 1)


def test_large_fanouts_are_uniform() -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    for subset, times in outcomes(None, 100, 40, replace=False, times=2000).items():
        for edge in subset:
            counts[(edge,)] += times
    # Draws of one node exclude each other, so counts vary less than the bound allows.
    assert chi_square(counts, {(edge,): 800.0 for edge in range(100)}) < limit(99)


WEIGHT = [1.0, 0.0, 2.0, 0.5, 4.0]


def test_weighted_subsets_follow_their_probabilities() -> None:
    total, times = sum(WEIGHT), 30_000
    expected: dict[tuple[int, ...], float] = {}
    for first, second in permutations([0, 2, 3, 4], 2):  # one after the other, in proportion to the remaining weight
        probability = WEIGHT[first] / total * WEIGHT[second] / (total - WEIGHT[first])
        subset = (min(first, second), max(first, second))
        expected[subset] = expected.get(subset, 0.0) + times * probability
    assert chi_square(outcomes(WEIGHT, 5, 2, replace=False, times=times), expected) < limit(5)


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_draws_with_replacement_are_independent(weight: list[float] | None) -> None:
    weights = weight or [1.0] * 5
    times, total = 20_000, sum(weights)
    expected: dict[tuple[int, ...], float] = {}
    for first in range(5):
        for second in range(5):
            if weights[first] * weights[second]:
                pair = (min(first, second), max(first, second))
                expected[pair] = expected.get(pair, 0.0) + times * weights[first] * weights[second] / total**2
    assert chi_square(outcomes(weight, 5, 2, replace=True, times=times), expected) < limit(len(expected) - 1)


def graph_with_hub() -> CSR:
    random = torch.Generator().manual_seed(4)
    src, dst = torch.randint(20_000, (2, 300_000), generator=random).int()
    dst[:20_000] = 5  # a hub
    indptr, _, col = sort_into_rows(src, dst, num_src=20_000, num_dst=20_000)
    return CSR(indptr, col, 20_000)


@pytest.mark.parametrize("weighted", [False, True])
def test_draws_do_not_depend_on_threads_and_other_seeds(threads: int, weighted: bool) -> None:
    edges = graph_with_hub()
    weight = torch.rand(edges.num_edges, generator=torch.Generator().manual_seed(5)) if weighted else None
    seeds = torch.randperm(20_000, generator=torch.Generator().manual_seed(6))[:15_000]
    assert num_threads(len(seeds) * 32) == threads
    offsets, drawn = sample(edges, seeds, Fanout(7), draws=draws(), weight=weight)
    with single_threaded():
        assert num_threads() == 1
        all_offsets, expected = sample(edges, torch.arange(20_000), Fanout(7), draws=draws(), weight=weight)
    rows = expected.split(all_offsets.diff().tolist())
    assert torch.equal(drawn, torch.cat([rows[seed] for seed in seeds.tolist()]))
    assert torch.equal(offsets.diff(), all_offsets.diff()[seeds])


def test_hops_relations_and_steps_draw_independently() -> None:
    edges = rows_of([40] * 30)
    seeds = torch.arange(30)
    families = [draws(), draws(step=1), draws(hop=1), draws(relation=1)]
    draws_of_families = [sample(edges, seeds, Fanout(10), draws=family)[1] for family in families]
    assert all(not torch.equal(first, second) for first, second in combinations(draws_of_families, 2))


@pytest.mark.parametrize("wide", [False, True])
def test_a_frontier_puts_seeds_first_and_new_nodes_in_ascending_order(threads: int, wide: bool) -> None:
    edges = graph_with_hub()
    edges = CSR(edges.indptr, edges.col.long() if wide else edges.col, edges.num_cols)
    frontier = Frontier(20_000)
    for step in range(2):  # a frontier is used again
        seeds = torch.randperm(20_000, generator=torch.Generator().manual_seed(step))[:3_000]
        frontier.start(seeds)
        for hop in range(2):
            before = frontier.ids
            _, drawn = sample(edges, before, Fanout(4), draws=draws(step, hop))
            sources = edge_sources(edges, drawn)
            assert torch.equal(sources, edges.col[drawn])
            frontier.add(sources)
            frontier.assign_rows()
            new = torch.unique(sources.long())
            new = new[~torch.isin(new, before)]
            assert torch.equal(frontier.ids, torch.cat([before, new]))
            rows = frontier.rows(sources)
            assert rows.dtype == torch.int32 and torch.equal(frontier.ids[rows.long()], sources.long())


def check_hops(frontier: Frontier, seeds: Tensor, hops: list[list[Tensor]]) -> None:
    """Compare a batch with numpy: new nodes of each hop, by one or several relations, get rows in ascending order."""
    frontier.start(seeds)
    expected = seeds.numpy()
    for relations in hops:
        for sources in relations:
            frontier.add(sources)
        frontier.assign_rows()
        all_sources = np.concatenate([sources.numpy().astype(np.int64) for sources in relations])
        expected = np.concatenate([expected, np.setdiff1d(all_sources, expected)])
        assert np.array_equal(frontier.ids.numpy(), expected)
        order = np.argsort(expected)
        for sources in relations:
            row = order[np.searchsorted(expected, sources.numpy(), sorter=order)]
            for _ in range(2):  # from the noted positions, then by looking up the ids
                rows = frontier.rows(sources)
                assert rows.dtype == torch.int32 and np.array_equal(rows.numpy(), row)


def seeds_and_hops(count: int, sizes: list[int], *, within: int, seed: int = 0) -> tuple[Tensor, list[list[Tensor]]]:
    """Seeds and sources of hops with two relations each, among ``within`` ids spread evenly below count."""
    random = torch.Generator().manual_seed(seed)
    step = count // within
    seeds = torch.randperm(within, generator=random)[: within // 50] * step
    return seeds, [[torch.randint(within, (size,), generator=random) * step for _ in range(2)] for size in sizes]


@pytest.mark.parametrize(
    ("count", "within"),
    [
        (1, 1),
        (17, 17),
        (60_000, 60_000),  # every line of 32 ids
        (10**9, 60_000),  # one id in a line
        (2**31 + 10**6, 40_000),
        (2**39, 60_000),
        (2**42 - 1, 1 << 15),
    ],
)
def test_a_frontier_equals_numpy(threads: int, count: int, within: int) -> None:
    frontier = Frontier(count)
    for seed in range(3):  # the table grows within a hop of the first batch and stays large
        check_hops(frontier, *seeds_and_hops(count, [300, 20_000, 90_000], within=within, seed=seed))


def test_colliding_ids_get_their_rows(threads: int) -> None:
    """Lines of 32 ids whose hash is the last entry or the first of a table of up to 2^15 entries."""
    keys = np.arange(1 << 24, dtype=np.uint64)
    entry = (keys * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - 15)
    lines = torch.from_numpy(keys[(entry == 2**15 - 1) | (entry == 0)].astype(np.int64))  # the last entry and the first
    assert len(lines) > 1000
    ids = lines * 32 + torch.arange(len(lines)) % 32
    random = torch.Generator().manual_seed(1)
    sources = ids[torch.randint(len(ids), (20_000,), generator=random)]
    frontier = Frontier(2**40 - 1)
    for _ in range(2):
        check_hops(frontier, ids[:7], [[ids[:40]], [sources]])


@given(seed=st.integers(0, 10**6), count=st.integers(1, 5000), size=st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_any_frontier_equals_numpy(seed: int, count: int, size: int) -> None:
    check_hops(
        Frontier(count), *seeds_and_hops(count, [size, 2 * size], within=max(1, count // (1 + seed % 40)), seed=seed)
    )


def test_memory_grows_with_the_nodes_of_a_batch_only() -> None:
    """The same nodes need the same memory in a graph of any size, and a batch keeps no more than it needed."""
    table_bytes = []
    for count in (10**7, 10**9, 2**39):
        frontier = Frontier(count)
        seeds, hops = seeds_and_hops(10**7, [2_000, 50_000], within=20_000)
        with single_threaded():  # the memory of each thread depends on their order
            check_hops(frontier, seeds, hops)
        table_bytes.append(frontier._table.bytes)
    assert table_bytes[0] == table_bytes[1] == table_bytes[2]
    assert table_bytes[0] < 400 * 20_000  # capacities are powers of two, and vectors grow by doubling
    assert Frontier(2**39)._table.bytes < 10_000
    with pytest.raises(ValueError, match=r"2\^42 nodes"):
        Frontier(2**42)


@pytest.mark.parametrize("count", [1_000, 10**9])
def test_a_frontier_is_clean_after_errors(count: int) -> None:
    frontier = Frontier(count)
    batch = (torch.tensor([5, 900, 17]), [[torch.tensor([17, 3, 900, 16])], [torch.tensor([999, 18, 5])]])
    for seeds in ([5, 900, 5], [5, count], [5, -1]):
        with pytest.raises(InputError, match="different store ids below"):
            frontier.start(torch.tensor(seeds))
        assert not len(frontier.ids)
        check_hops(frontier, *batch)
    for wrong in (-1, count, -(2**40), 2**62):
        frontier.start(torch.tensor([5]))
        with pytest.raises(IndexError, match="out of range"):
            frontier.add(torch.tensor([17, 300, wrong, 301]))
        frontier.clear()
        check_hops(frontier, *batch)
    frontier.start(torch.tensor([5]))  # a batch that is interrupted between add and assign_rows
    frontier.add(torch.tensor([17, 300]))
    with pytest.raises(ValueError, match="before it is grown"):
        frontier.rows(torch.tensor([17]))
    check_hops(frontier, *batch)
    assert frontier.rows(torch.tensor([5, 4, 800, -1, count])).tolist() == [0, -1, -1, -1, -1]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("replace", [False, True])
def test_rows_of_a_part_draw_by_their_store_ids(threads: int, weighted: bool, replace: bool) -> None:
    edges = graph_with_hub()
    weight = torch.rand(edges.num_edges, generator=torch.Generator().manual_seed(5)) if weighted else None
    ids = torch.randperm(20_000, generator=torch.Generator().manual_seed(6))[:12_000]  # row i of the part is ids[i]
    degree = edges.indptr.diff()[ids]
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    positions = torch.repeat_interleave(edges.indptr[ids] - indptr[:-1], degree) + torch.arange(int(indptr[-1]))
    part = CSR(indptr, edges.col[positions], edges.num_cols)
    rows = torch.randperm(12_000, generator=torch.Generator().manual_seed(7))[:10_000]
    part_weight = None if weight is None else weight[positions]
    offsets, drawn = sample(part, rows, Fanout(7, replace), draws=draws(), weight=part_weight, ids=ids[rows])
    expected = sample(edges, ids[rows], Fanout(7, replace), draws=draws(), weight=weight)
    assert torch.equal(offsets, expected[0]) and torch.equal(positions[drawn], expected[1])
    assert not torch.equal(
        positions[sample(part, rows, Fanout(7, replace), draws=draws(), weight=part_weight)[1]], expected[1]
    )
    with pytest.raises(ValueError, match="one id per seed"):
        sample(part, rows, Fanout(7), draws=draws(), ids=ids)


def test_wrong_seeds_are_refused() -> None:
    frontier = Frontier(10)
    for seeds in ([3, 3], [10], [-1]):
        with pytest.raises(InputError, match="different store ids below 10"):
            frontier.start(torch.tensor(seeds))
    frontier.start(torch.tensor([3]))  # the refused seeds left nothing behind
    with pytest.raises(IndexError):
        sample(rows_of([1, 2]), torch.tensor([2]), Fanout(1), draws=draws())
