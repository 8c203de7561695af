"""The sampler equals its plain twin, draws what it should, and knows nothing of threads or of other seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.errors import InputError
from gnnfleet.ops import reference
from gnnfleet.ops.csr import Compressed, sort_into_rows
from gnnfleet.ops.draws import DrawKey, Draws, Purpose
from gnnfleet.ops.native import alone, threads
from gnnfleet.ops.sample import Fanout, Frontier, sample


def draws(step: int = 0, hop: int = 0, relation: int = 0) -> Draws:
    return DrawKey(7, 1, step).draws(Purpose.SAMPLE, hop, relation)


def rows_of(degrees: list[int], *, num_cols: int = 50, wide: bool = False) -> Compressed:
    indptr = torch.tensor([0, *degrees]).cumsum(0)
    col = torch.randint(num_cols, (int(indptr[-1]),), generator=torch.Generator().manual_seed(1))
    return Compressed(indptr, col if wide else col.int(), num_cols)


@pytest.fixture(params=[1, 2, 4])
def team(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


DEGREES = [0, 1, 5, 3, 64, 65, 0, 12, 200, 2, 33]


@pytest.mark.parametrize("count", [-1, 0, 1, 3, 5, 33, 64, 150])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_the_plain_twin(count: int, replace: bool, weighted: bool) -> None:
    edges = rows_of(DEGREES)
    weight = None
    if weighted:
        weight = torch.rand(edges.num_edges, generator=torch.Generator().manual_seed(2))
        weight[torch.rand(edges.num_edges, generator=torch.Generator().manual_seed(3)) < 0.3] = 0
        weight[:1] = 0  # a node without any weight
    seeds = torch.tensor([8, 0, 4, 10, 1, 2, 7, 5, 6])
    offsets, found = sample(edges, seeds, Fanout(count, replace), draws=draws(3, 1, 2), weight=weight)
    expected = reference.sample(edges, seeds, count, replace=replace, draws=draws(3, 1, 2), weight=weight)
    assert torch.equal(offsets, expected[0])
    assert torch.equal(found, expected[1])


@given(
    degrees=st.lists(st.integers(0, 90), min_size=1, max_size=30),
    count=st.integers(-1, 70),
    weighted=st.booleans(),
    step=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_without_replacement(degrees: list[int], count: int, weighted: bool, step: int) -> None:
    edges = rows_of(degrees)
    weight = (torch.rand(edges.num_edges) * 3 - 1).clamp(min=0) if weighted else None
    offsets, found = sample(edges, torch.arange(len(degrees)), Fanout(count), draws=draws(step), weight=weight)
    for node in range(len(degrees)):
        first, last = int(edges.indptr[node]), int(edges.indptr[node + 1])
        mine = found[int(offsets[node]) : int(offsets[node + 1])]
        possible = torch.arange(first, last)
        if weight is not None and count >= 0:
            possible = possible[weight[first:last] > 0]
        assert len(mine) == (len(possible) if count < 0 else min(count, len(possible)))
        assert bool((mine.diff() > 0).all()), "ascending, each once"
        assert bool(torch.isin(mine, possible).all())
        if count < 0 or count >= len(possible):
            assert torch.equal(mine, possible), "all of them"


def chi_square(seen: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    assert set(seen) <= set(expected), "something that cannot happen"
    return sum((seen[outcome] - mean) ** 2 / mean for outcome, mean in expected.items())


def outcomes(
    weight: list[float] | None, degree: int, count: int, *, replace: bool, times: int
) -> Counter[tuple[int, ...]]:
    """What one node with ``degree`` edges draws, over many nodes of one graph."""
    edges = Compressed(torch.arange(times + 1) * degree, torch.zeros(times * degree, dtype=torch.int32), 1)
    all_weights = None if weight is None else torch.tensor(weight).repeat(times)
    _, found = sample(edges, torch.arange(times), Fanout(count, replace), draws=draws(), weight=all_weights)
    return Counter(map(tuple, (found.view(times, count) % degree).tolist()))


def limit(freedom: int) -> float:
    """Above this with a chance below one in ten thousand (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize(("degree", "count"), [(5, 2), (5, 4), (70, 1), (7, 3), (66, 2)])
def test_every_subset_is_as_likely(degree: int, count: int) -> None:
    subsets = list(combinations(range(degree), count))
    times = 40 * len(subsets)
    seen = outcomes(None, degree, count, replace=False, times=times)
    assert chi_square(seen, {subset: times / len(subsets) for subset in subsets}) < limit(len(subsets) - 1)


def test_large_fanouts_are_even() -> None:
    seen: Counter[tuple[int, ...]] = Counter()
    for subset, times in outcomes(None, 100, 40, replace=False, times=2000).items():
        for edge in subset:
            seen[(edge,)] += times
    # Draws of one node exclude each other, which makes counts vary less than the law allows.
    assert chi_square(seen, {(edge,): 800.0 for edge in range(100)}) < limit(99)


WEIGHT = [1.0, 0.0, 2.0, 0.5, 4.0]


def test_weighted_subsets_follow_their_chances() -> None:
    total, times = sum(WEIGHT), 30_000
    expected: dict[tuple[int, ...], float] = {}
    for first, second in permutations([0, 2, 3, 4], 2):  # one after the other, in proportion to what is left
        chance = WEIGHT[first] / total * WEIGHT[second] / (total - WEIGHT[first])
        subset = (min(first, second), max(first, second))
        expected[subset] = expected.get(subset, 0.0) + times * chance
    assert chi_square(outcomes(WEIGHT, 5, 2, replace=False, times=times), expected) < limit(5)


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_draws_with_replacement_are_independent(weight: list[float] | None) -> None:
    chances = weight or [1.0] * 5
    times, total = 20_000, sum(chances)
    expected: dict[tuple[int, ...], float] = {}
    for one in range(5):
        for two in range(5):
            if chances[one] * chances[two]:
                pair = (min(one, two), max(one, two))
                expected[pair] = expected.get(pair, 0.0) + times * chances[one] * chances[two] / total**2
    assert chi_square(outcomes(weight, 5, 2, replace=True, times=times), expected) < limit(len(expected) - 1)


def big() -> Compressed:
    random = torch.Generator().manual_seed(4)
    src, dst = torch.randint(20_000, (2, 300_000), generator=random).int()
    dst[:20_000] = 5  # a hub
    indptr, _, col = sort_into_rows(src, dst, num_src=20_000, num_dst=20_000)
    return Compressed(indptr, col, 20_000)


@pytest.mark.parametrize("weighted", [False, True])
def test_neither_threads_nor_other_seeds_matter(team: int, weighted: bool) -> None:
    edges = big()
    weight = torch.rand(edges.num_edges, generator=torch.Generator().manual_seed(5)) if weighted else None
    seeds = torch.randperm(20_000, generator=torch.Generator().manual_seed(6))[:15_000]
    assert threads(len(seeds) * 32) == team
    offsets, found = sample(edges, seeds, Fanout(7), draws=draws(), weight=weight)
    with alone():
        assert threads() == 1
        plain, expected = sample(edges, torch.arange(20_000), Fanout(7), draws=draws(), weight=weight)
    rows = expected.split(plain.diff().tolist())
    assert torch.equal(found, torch.cat([rows[seed] for seed in seeds.tolist()]))
    assert torch.equal(offsets.diff(), plain.diff()[seeds])


def test_hops_relations_and_steps_draw_apart() -> None:
    edges = rows_of([40] * 30)
    seeds = torch.arange(30)
    families = [draws(), draws(step=1), draws(hop=1), draws(relation=1)]
    found = [sample(edges, seeds, Fanout(10), draws=family)[1] for family in families]
    assert all(not torch.equal(one, two) for one, two in combinations(found, 2))


@pytest.mark.parametrize("wide", [False, True])
def test_a_frontier_gives_seeds_the_first_rows_and_new_nodes_ascending_ones(team: int, wide: bool) -> None:
    edges = big()
    edges = Compressed(edges.indptr, edges.col.long() if wide else edges.col, edges.num_cols)
    frontier = Frontier(20_000)
    for step in range(2):  # a frontier is used again
        seeds = torch.randperm(20_000, generator=torch.Generator().manual_seed(step))[:3_000]
        frontier.start(seeds)
        for hop in range(2):
            before = frontier.ids
            _, found = sample(edges, before, Fanout(4), draws=draws(step, hop))
            sources = frontier.meet(edges, found)
            assert torch.equal(sources, edges.col[found])
            frontier.grow()
            new = torch.unique(sources.long())
            new = new[~torch.isin(new, before)]
            assert torch.equal(frontier.ids, torch.cat([before, new]))
            rows = frontier.rows(sources)
            assert rows.dtype == torch.int32 and torch.equal(frontier.ids[rows.long()], sources.long())


def test_wrong_seeds_are_refused() -> None:
    frontier = Frontier(10)
    for seeds in ([3, 3], [10], [-1]):
        with pytest.raises(InputError, match="different store ids below 10"):
            frontier.start(torch.tensor(seeds))
    frontier.start(torch.tensor([3]))  # nothing is left of the attempts
    with pytest.raises(IndexError):
        sample(rows_of([1, 2]), torch.tensor([2]), Fanout(1), draws=draws())
