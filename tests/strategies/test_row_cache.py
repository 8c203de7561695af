"""Row caches report the true contents of their slots and follow their rules exactly; belady is optimal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnnfleet.strategies.macrobatch.cache_policies import CacheDecision, RowCache, make_cache
from gnnfleet.strategies.macrobatch.config import CachePolicy

POLICIES: tuple[CachePolicy, ...] = get_args(CachePolicy)
WHOLE_TRACE = 10**6

sets = st.lists(st.sets(st.integers(0, 9), max_size=7), min_size=1, max_size=14)


def ids(*rows: int) -> Tensor:
    return torch.tensor(sorted(rows), dtype=torch.int64)


def tensors(trace: Sequence[set[int]]) -> list[Tensor]:
    return [ids(*rows) for rows in trace]


def skewed(seed: int, *, steps: int, count: int, rows_per_step: int) -> list[Tensor]:
    """Steps that request ``rows_per_step`` of ``count`` ids with a power law of popularity, which drifts slowly."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    trace = []
    for _ in range(steps):
        popular = 1.0 / torch.arange(1, count + 1, dtype=torch.float64)
        drawn = torch.multinomial(popular, rows_per_step, generator=generator)
        trace.append(order[drawn].sort().values)
        swap = torch.randint(0, count, (2,), generator=generator)
        order[swap] = order[swap.flip(0)]
    return trace


class Replay:
    """Replays a trace on a cache and compares every decision with a dict of the slots."""

    def __init__(self, cache: RowCache, trace: Sequence[Tensor], *, window: int = 0) -> None:
        self.cache, self.trace, self.window = cache, trace, window
        self.hits = 0
        self.contents: dict[int, int] = {}  # slot → id of the row in it

    @property
    def cached_ids(self) -> set[int]:
        return set(self.contents.values())

    def __iter__(self) -> Iterator[CacheDecision]:
        for number, rows in enumerate(self.trace):
            before = rows.clone()
            decision = self.cache.step(rows, self.trace[number + 1 : number + 1 + self.window])
            assert torch.equal(rows, before)
            self.check(decision, rows.tolist())
            yield decision

    def run(self) -> Replay:
        for _ in self:
            pass
        return self

    def check(self, decision: CacheDecision, rows: list[int]) -> None:
        slots, admitted, target_slots = (
            decision.slots.tolist(),
            decision.admitted.tolist(),
            decision.target_slots.tolist(),
        )
        assert {t.dtype for t in (decision.slots, decision.admitted, decision.target_slots)} == {torch.int64}
        slot_of = {row: slot for slot, row in self.contents.items()}
        assert slots == [slot_of.get(row, -1) for row in rows]
        self.hits += sum(slot >= 0 for slot in slots)
        assert len(admitted) == len(target_slots) == len(set(admitted)) == len(set(target_slots))
        assert all(slots[position] < 0 for position in admitted), "cached rows are not written"
        assert all(0 <= slot < self.cache.capacity for slot in target_slots)
        self.contents |= {slot: rows[position] for position, slot in zip(admitted, target_slots, strict=True)}
        assert len(self.cached_ids) == len(self.contents) <= self.cache.capacity


# ---- contents of slots -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(trace=sets, capacity=st.integers(0, 8), warmup=sets, window=st.integers(0, 4))
def test_decisions_equal_the_contents_of_slots(
    policy: CachePolicy, trace: list[set[int]], capacity: int, warmup: list[set[int]], window: int
) -> None:
    options = {"delta": 2} if policy == "score" else {}
    cache = make_cache(policy, capacity, warmup=tensors(warmup), **options)
    Replay(cache, tensors(trace), window=window).run()


@pytest.mark.parametrize("policy", POLICIES)
def test_decisions_on_larger_traces_equal_the_contents_of_slots(policy: CachePolicy) -> None:
    warmup = skewed(9, steps=4, count=2000, rows_per_step=300)
    cache = make_cache(policy, 250, warmup=warmup, **({"delta": 3} if policy == "score" else {}))
    replay = Replay(cache, skewed(1, steps=25, count=2000, rows_per_step=300), window=3).run()
    assert replay.hits > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_empty_caches_and_empty_requests(policy: CachePolicy) -> None:
    trace = tensors([{1, 2}, {1, 2}, set(), {2}])
    empty = make_cache(policy, 0, warmup=trace)
    for decision in Replay(empty, trace, window=2):
        assert bool((decision.slots == -1).all()) and not len(decision.admitted) and not len(decision.target_slots)
    assert Replay(make_cache(policy, 5), tensors([set(), set()]), window=1).run().cached_ids == set()
    replay = Replay(make_cache(policy, 5, warmup=[ids(), ids(1, 2), ids()]), trace, window=2).run()
    assert replay.cached_ids == {1, 2} and replay.hits == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_decisions_do_not_depend_on_threads(policy: CachePolicy) -> None:
    # Large enough that torch divides the work; on a busy machine two threads are far slower than one.
    before, replay = torch.get_num_threads(), []
    try:
        torch.set_num_threads(1)
        trace = skewed(4, steps=3, count=60_000, rows_per_step=36_000)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            cache = make_cache(policy, 34_000, warmup=trace[1:], **({"delta": 1} if policy == "score" else {}))
            replay.append([cache.step(rows, trace[k + 1 :]) for k, rows in enumerate(trace)])
    finally:
        torch.set_num_threads(before)
    for decision, other in zip(*replay, strict=True):
        assert torch.equal(decision.slots, other.slots)
        assert torch.equal(decision.admitted, other.admitted) and torch.equal(decision.target_slots, other.target_slots)


def count_numbers(value: Any) -> int:
    """Count the numbers that an object stores, in tensors and otherwise."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, list | tuple | set | dict):
        return sum(map(count_numbers, value.values() if isinstance(value, dict) else value))
    return count_numbers(vars(value)) if hasattr(value, "__dict__") else 1


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_bounded(policy: CachePolicy) -> None:
    capacity, warmup = 10, [torch.arange(5000), torch.arange(5000)]
    cache = make_cache(policy, capacity, warmup=warmup)
    missed: set[int] = set()
    for number in range(60):
        rows = torch.arange(6000 + 20 * (number % 30), 6050 + 20 * (number % 30))
        decision = cache.step(rows, [rows + 20, rows + 40])
        missed |= set(rows[decision.slots < 0].tolist())
        counters = 2 * len(missed) if policy == "score" else 0
        assert count_numbers(cache) <= 8 * capacity + counters + 10


def test_an_option_of_another_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="delta"):
        make_cache("belady", 3, delta=2)


# ---- score -----------------------------------------------------------------------------------------------------------


class ReferenceScore:
    """The rule of the score policy with dicts, one id at a time."""

    def __init__(self, capacity: int, warmup: Sequence[set[int]], delta: int, alpha: float) -> None:
        self.capacity, self.delta, self.fade, self.steps = capacity, delta, 1 - alpha, 0
        counts = Counter(row for rows in warmup for row in rows)
        initial = sorted(counts, key=lambda row: (-counts[row], row))[:capacity]
        self.slot = {row: index for index, row in enumerate(initial)}
        self.score = dict.fromkeys(initial, 1.0)
        self.idle = dict.fromkeys(initial, 0)
        self.present: set[int] = set()
        self.miss_counts: dict[int, float] = {}

    def step(self, rows: set[int]) -> None:
        self.steps += 1
        for row in self.slot.keys() - rows:
            self.idle[row] += 1
            self.score[row] *= self.fade
        for row in (rows & self.slot.keys()) - self.present:
            self.present.add(row)
            self.idle[row], self.score[row] = 0, 1.0
        missed = sorted(rows - self.slot.keys())
        for row in missed:
            self.miss_counts[row] = self.miss_counts.get(row, 0.0) + 1
        free = sorted(set(range(self.capacity)) - set(self.slot.values()))
        victims = [row for row in self.slot if self.idle[row] >= self.delta] if self.steps % self.delta == 0 else []
        victims.sort(key=lambda row: (self.score[row], self.slot[row]))
        slots = [(slot, -1) for slot in free] + [(self.slot[row], row) for row in victims]
        candidates = sorted(missed, key=lambda row: (-self.miss_counts[row], row))
        for row, (slot, victim) in zip(candidates, slots, strict=False):
            if victim >= 0:
                if victim in self.present:
                    self.miss_counts[victim] = self.score[victim]
                del self.slot[victim], self.score[victim], self.idle[victim]
                self.present.discard(victim)
            self.slot[row], self.idle[row], self.score[row] = slot, 0, self.miss_counts.pop(row)
            self.present.add(row)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    trace=sets,
    capacity=st.integers(0, 6),
    warmup=sets,
    delta=st.integers(1, 4),
    alpha=st.sampled_from([0.0, 0.05, 0.4]),
)
def test_score_follows_the_rule(
    trace: list[set[int]], capacity: int, warmup: list[set[int]], delta: int, alpha: float
) -> None:
    reference = ReferenceScore(capacity, warmup, delta, alpha)
    cache = make_cache("score", capacity, warmup=tensors(warmup), delta=delta, alpha=alpha)
    replay = Replay(cache, tensors(trace))
    for rows, _ in zip(trace, replay, strict=True):
        reference.step(rows)
        assert replay.contents == {reference.slot[row]: row for row in reference.present}


@pytest.mark.parametrize(("delta", "alpha"), [(1, 0.05), (4, 0.0), (4, 1e-9), (4, 0.05), (4, 0.9), (150, 0.05)])
def test_score_evicts_idle_rows_and_keeps_frequent_ones(delta: int, alpha: float) -> None:
    # The first step admits 1 and 2. Row 2 is not requested again, and 3 is missed until a step swaps.
    trace = tensors([{1, 2}, *[{1, 3}] * (3 * delta)])
    replay = Replay(make_cache("score", 2, delta=delta, alpha=alpha), trace)
    for number, _ in enumerate(replay, start=1):
        assert replay.cached_ids == ({1, 3} if number >= 2 * delta else {1, 2})


def test_score_adapts_when_popularity_changes() -> None:
    # A count of 60 must not be used as a score: it would survive ln(60) / alpha idle steps, which are thousands.
    delta, old, new = 5, set(range(4)), set(range(10, 14))
    cache = make_cache("score", 4, warmup=[ids(20, 21, 22, 23)], delta=delta, alpha=1e-3)
    replay = Replay(cache, tensors([*[old] * 60, *[new] * (2 * delta)]))
    for number, _ in enumerate(replay, start=1):
        if number == 60:
            assert replay.cached_ids == old
    assert replay.cached_ids == new


def test_score_admits_the_most_missed_rows_first() -> None:
    # Rows 1 and 2 are not requested. The fourth step swaps; of its misses, 6 and 7 were missed before.
    trace = [{5, 6}, {5, 7}, {5, 6, 7, 8}, {6, 7, 8, 9}]
    replay = Replay(make_cache("score", 2, warmup=[ids(1, 2)], delta=4), tensors(trace)).run()
    assert replay.cached_ids == {6, 7}


def test_score_evicts_the_lowest_score_first() -> None:
    # Both are idle long enough at the sixth step, 1 longer than 2; one row is admitted.
    trace = [{1, 2}, {2}, *[set()] * 3, {9}]
    replay = Replay(make_cache("score", 2, delta=3, alpha=0.1), tensors(trace)).run()
    assert replay.cached_ids == {2, 9}


def test_score_reserves_slots_for_the_rows_of_the_warmup() -> None:
    # Row 1 is requested, row 2 is not: its slot is reserved until it has been idle for too long.
    trace = [{1, 8}, {1, 8}, {1, 8}, {1, 8}, {1, 8}]
    replay = Replay(make_cache("score", 2, warmup=[ids(1, 2), ids(1, 2, 8)], delta=4), tensors(trace))
    assert [decision.slots.tolist() for decision in replay] == [[-1, -1], [0, -1], [0, -1], [0, -1], [0, 1]]


# ---- belady ----------------------------------------------------------------------------------------------------------


def max_hits(trace: Sequence[set[int]], capacity: int) -> int:
    """Maximum over all sets of rows that could be cached after each step."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for rows in trace:
        after: dict[frozenset[int], int] = {}
        for cached, hits in best.items():
            hits += len(cached & rows)
            for size in range(capacity + 1):
                for subset in combinations(sorted(cached | rows), size):
                    after[frozenset(subset)] = max(after.get(frozenset(subset), 0), hits)
        best = after
    return max(best.values())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(trace=st.lists(st.sets(st.integers(0, 5), max_size=5), min_size=1, max_size=7), capacity=st.integers(0, 3))
def test_belady_is_the_optimum(trace: list[set[int]], capacity: int) -> None:
    replay = Replay(make_cache("belady", capacity), tensors(trace), window=WHOLE_TRACE).run()
    assert replay.hits == max_hits(trace, capacity)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [5, 40, 150])
def test_belady_has_more_hits_than_the_others(seed: int, capacity: int) -> None:
    trace = skewed(seed, steps=25, count=300, rows_per_step=60)
    warmup = trace[::4]  # an advantage for the others

    def hits(policy: CachePolicy, window: int = 0, **options: Any) -> int:
        return Replay(make_cache(policy, capacity, warmup=warmup, **options), trace, window=window).run().hits

    best = hits("belady", WHOLE_TRACE)
    assert 0 < max(hits("score"), hits("score", delta=4), hits("belady")) < best
    assert hits("belady", 2) <= best


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    trace=sets,
    capacity=st.integers(0, 6),
    window=st.integers(0, 3),
    fade=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_belady_follows_the_rule(trace: list[set[int]], capacity: int, window: int, fade: float) -> None:
    uses: dict[int, float] = {}
    replay = Replay(make_cache("belady", capacity, fade=fade), tensors(trace), window=window)
    for number, (rows, _) in enumerate(zip(trace, replay, strict=True)):
        future = trace[number + 1 : number + 1 + window]
        before = set(uses)
        uses = {row: uses.get(row, 0.0) * fade + (row in rows) for row in before | rows}

        def rank(
            row: int,
            future: list[set[int]] = future,
            before: set[int] = before,
            uses: dict[int, float] = uses,
        ) -> tuple[float, ...]:
            soonest = next((k for k, later in enumerate(future) if row in later), len(future))
            return (soonest, -uses[row] if soonest == len(future) else 0, row not in before, row)

        uses = {row: uses[row] for row in sorted(uses, key=rank)[:capacity]}
        assert replay.cached_ids == set(uses)


def test_belady_writes_as_few_rows_as_possible() -> None:
    # All four are requested next, so the two cached rows stay.
    trace = tensors([{5, 6}, {1, 2, 5, 6}, {1, 2, 5, 6}])
    steps = list(Replay(make_cache("belady", 2), trace, window=WHOLE_TRACE))
    assert [len(decision.admitted) for decision in steps] == [2, 0, 0]
