"""Row caches say what really lies in their slots, follow their rules to the letter, and belady cannot be beaten."""

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
WHOLE = 10**6

sets = st.lists(st.sets(st.integers(0, 9), max_size=7), min_size=1, max_size=14)


def ids(*wanted: int) -> Tensor:
    return torch.tensor(sorted(wanted), dtype=torch.int64)


def tensors(trace: Sequence[set[int]]) -> list[Tensor]:
    return [ids(*wanted) for wanted in trace]


def skewed(seed: int, *, turns: int, count: int, each: int) -> list[Tensor]:
    """Turns that want ``each`` of ``count`` ids, some far more often than others; the favourites drift slowly."""
    made = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=made)
    trace = []
    for _ in range(turns):
        popular = 1.0 / torch.arange(1, count + 1, dtype=torch.float64)
        drawn = torch.multinomial(popular, each, generator=made)
        trace.append(order[drawn].sort().values)
        swap = torch.randint(0, count, (2,), generator=made)
        order[swap] = order[swap.flip(0)]
    return trace


class Replay:
    """Plays a trace against a cache, with a dict for the slots; any word of the cache that is not true fails."""

    def __init__(self, cache: RowCache, trace: Sequence[Tensor], *, window: int = 0) -> None:
        self.cache, self.trace, self.window = cache, trace, window
        self.hits = 0
        self.lying: dict[int, int] = {}  # slot → the id whose row was written there last

    @property
    def held(self) -> set[int]:
        return set(self.lying.values())

    def __iter__(self) -> Iterator[CacheDecision]:
        for number, wanted in enumerate(self.trace):
            before = wanted.clone()
            turn = self.cache.step(wanted, self.trace[number + 1 : number + 1 + self.window])
            assert torch.equal(wanted, before)
            self.check(turn, wanted.tolist())
            yield turn

    def run(self) -> Replay:
        for _ in self:
            pass
        return self

    def check(self, turn: CacheDecision, wanted: list[int]) -> None:
        slots, admitted, into = turn.slots.tolist(), turn.admitted.tolist(), turn.target_slots.tolist()
        assert {t.dtype for t in (turn.slots, turn.admitted, turn.target_slots)} == {torch.int64}
        where = {row: slot for slot, row in self.lying.items()}
        assert slots == [where.get(row, -1) for row in wanted]
        self.hits += sum(slot >= 0 for slot in slots)
        assert len(admitted) == len(into) == len(set(admitted)) == len(set(into))
        assert all(slots[place] < 0 for place in admitted), "a row that is there need not be written"
        assert all(0 <= slot < self.cache.capacity for slot in into)
        self.lying |= {slot: wanted[place] for place, slot in zip(admitted, into, strict=True)}
        assert len(self.held) == len(self.lying) <= self.cache.capacity


# ---- what lies where -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(trace=sets, capacity=st.integers(0, 8), warmup=sets, window=st.integers(0, 4))
def test_every_word_is_true(
    policy: CachePolicy, trace: list[set[int]], capacity: int, warmup: list[set[int]], window: int
) -> None:
    knobs = {"delta": 2} if policy == "score" else {}
    cache = make_cache(policy, capacity, warmup=tensors(warmup), **knobs)
    Replay(cache, tensors(trace), window=window).run()


@pytest.mark.parametrize("policy", POLICIES)
def test_larger_traces(policy: CachePolicy) -> None:
    warmup = skewed(9, turns=4, count=2000, each=300)
    cache = make_cache(policy, 250, warmup=warmup, **({"delta": 3} if policy == "score" else {}))
    played = Replay(cache, skewed(1, turns=25, count=2000, each=300), window=3).run()
    assert played.hits > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_to_keep_and_nothing_wanted(policy: CachePolicy) -> None:
    trace = tensors([{1, 2}, {1, 2}, set(), {2}])
    none = make_cache(policy, 0, warmup=trace)
    for turn in Replay(none, trace, window=2):
        assert bool((turn.slots == -1).all()) and not len(turn.admitted) and not len(turn.target_slots)
    assert Replay(make_cache(policy, 5), tensors([set(), set()]), window=1).run().held == set()
    some = Replay(make_cache(policy, 5, warmup=[ids(), ids(1, 2), ids()]), trace, window=2).run()
    assert some.held == {1, 2} and some.hits == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_any_number_of_threads_decides_the_same(policy: CachePolicy) -> None:
    # Large enough that torch divides the work; on a busy machine two threads are far slower than one.
    before, played = torch.get_num_threads(), []
    try:
        torch.set_num_threads(1)
        trace = skewed(4, turns=3, count=60_000, each=36_000)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            cache = make_cache(policy, 34_000, warmup=trace[1:], **({"delta": 1} if policy == "score" else {}))
            played.append([cache.step(wanted, trace[k + 1 :]) for k, wanted in enumerate(trace)])
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*played, strict=True):
        assert torch.equal(one.slots, two.slots)
        assert torch.equal(one.admitted, two.admitted) and torch.equal(one.target_slots, two.target_slots)


def elements(thing: Any) -> int:
    """Numbers that an object remembers, in tensors and otherwise."""
    if isinstance(thing, Tensor):
        return thing.numel()
    if isinstance(thing, list | tuple | set | dict):
        return sum(map(elements, thing.values() if isinstance(thing, dict) else thing))
    return elements(vars(thing)) if hasattr(thing, "__dict__") else 1


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_bounded(policy: CachePolicy) -> None:
    capacity, warmup = 10, [torch.arange(5000), torch.arange(5000)]
    cache = make_cache(policy, capacity, warmup=warmup)
    missed: set[int] = set()
    for number in range(60):
        wanted = torch.arange(6000 + 20 * (number % 30), 6050 + 20 * (number % 30))
        turn = cache.step(wanted, [wanted + 20, wanted + 40])
        missed |= set(wanted[turn.slots < 0].tolist())
        ever = 2 * len(missed) if policy == "score" else 0
        assert elements(cache) <= 8 * capacity + ever + 10


def test_a_knob_of_another_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="delta"):
        make_cache("belady", 3, delta=2)


# ---- static ----------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, derandomize=True)
@given(warmup=sets, capacity=st.integers(0, 8))
def test_static_holds_what_was_wanted_most(warmup: list[set[int]], capacity: int) -> None:
    counts = Counter(row for wanted in warmup for row in wanted)
    most = sorted(counts, key=lambda row: (-counts[row], row))[:capacity]
    everything = set(range(10))
    played = Replay(make_cache("static", capacity, warmup=tensors(warmup)), tensors([everything, everything]))
    first, second = played
    assert played.held == set(most) and played.hits == len(most)
    assert len(first.admitted) == len(most) and not len(second.admitted)


def test_static_waits_for_a_row_and_never_lets_it_go() -> None:
    played = Replay(
        make_cache("static", 2, warmup=[ids(3, 7), ids(7)]), tensors([{3, 5}, {5}, *[{5, 6}] * 40, {3, 7}, {7}])
    ).run()
    assert played.held == {3, 7} and played.hits == 2


# ---- score -----------------------------------------------------------------------------------------------------------


class SlowScore:
    """The rule with dicts, an id at a time."""

    def __init__(self, capacity: int, warmup: Sequence[set[int]], delta: int, alpha: float) -> None:
        self.capacity, self.delta, self.fade, self.turns = capacity, delta, 1 - alpha, 0
        counts = Counter(row for wanted in warmup for row in wanted)
        chosen = sorted(counts, key=lambda row: (-counts[row], row))[:capacity]
        self.slot = {row: place for place, row in enumerate(chosen)}
        self.score = dict.fromkeys(chosen, 1.0)
        self.idle = dict.fromkeys(chosen, 0)
        self.here: set[int] = set()
        self.outside: dict[int, float] = {}

    def step(self, wanted: set[int]) -> None:
        self.turns += 1
        for row in self.slot.keys() - wanted:
            self.idle[row] += 1
            self.score[row] *= self.fade
        for row in (wanted & self.slot.keys()) - self.here:
            self.here.add(row)
            self.idle[row], self.score[row] = 0, 1.0
        missed = sorted(wanted - self.slot.keys())
        for row in missed:
            self.outside[row] = self.outside.get(row, 0.0) + 1
        free = sorted(set(range(self.capacity)) - set(self.slot.values()))
        victims = [row for row in self.slot if self.idle[row] >= self.delta] if self.turns % self.delta == 0 else []
        victims.sort(key=lambda row: (self.score[row], self.slot[row]))
        room = [(slot, -1) for slot in free] + [(self.slot[row], row) for row in victims]
        recruits = sorted(missed, key=lambda row: (-self.outside[row], row))
        for row, (slot, victim) in zip(recruits, room, strict=False):
            if victim >= 0:
                if victim in self.here:
                    self.outside[victim] = self.score[victim]
                del self.slot[victim], self.score[victim], self.idle[victim]
                self.here.discard(victim)
            self.slot[row], self.idle[row], self.score[row] = slot, 0, self.outside.pop(row)
            self.here.add(row)


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
    slow = SlowScore(capacity, warmup, delta, alpha)
    cache = make_cache("score", capacity, warmup=tensors(warmup), delta=delta, alpha=alpha)
    played = Replay(cache, tensors(trace))
    for wanted, _ in zip(trace, played, strict=True):
        slow.step(wanted)
        assert played.lying == {slow.slot[row]: row for row in slow.here}


@pytest.mark.parametrize(("delta", "alpha"), [(1, 0.05), (4, 0.0), (4, 1e-9), (4, 0.05), (4, 0.9), (150, 0.05)])
def test_score_lets_idle_rows_go_and_keeps_hot_ones(delta: int, alpha: float) -> None:
    # 1 and 2 come in in the first turn; 2 is never wanted again, 3 is missed until a turn swaps.
    trace = tensors([{1, 2}, *[{1, 3}] * (3 * delta)])
    played = Replay(make_cache("score", 2, delta=delta, alpha=alpha), trace)
    for number, _ in enumerate(played, start=1):
        assert played.held == ({1, 3} if number >= 2 * delta else {1, 2})


def test_score_does_not_freeze_on_old_fame() -> None:
    # Popularity moves. A count of 60 would buy ln(60) / alpha idle turns, thousands of them, were it read as a score.
    delta, old, new = 5, set(range(4)), set(range(10, 14))
    cache = make_cache("score", 4, warmup=[ids(20, 21, 22, 23)], delta=delta, alpha=1e-3)
    played = Replay(cache, tensors([*[old] * 60, *[new] * (2 * delta)]))
    for number, _ in enumerate(played, start=1):
        if number == 60:
            assert played.held == old
    assert played.held == new


def test_score_recruits_the_most_missed_first() -> None:
    # Nobody wants 1 and 2. The fourth turn swaps; of what it misses, 6 and 7 were missed before.
    trace = [{5, 6}, {5, 7}, {5, 6, 7, 8}, {6, 7, 8, 9}]
    played = Replay(make_cache("score", 2, warmup=[ids(1, 2)], delta=4), tensors(trace)).run()
    assert played.held == {6, 7}


def test_score_gives_up_the_lowest_score_first() -> None:
    # Both are idle long enough at the sixth turn, 1 longer than 2; one recruit comes.
    trace = [{1, 2}, {2}, *[set()] * 3, {9}]
    played = Replay(make_cache("score", 2, delta=3, alpha=0.1), tensors(trace)).run()
    assert played.held == {2, 9}


def test_score_starts_from_what_the_warmup_wants() -> None:
    # 1 comes, 2 does not: its slot waits for it until it has been idle for too long.
    trace = [{1, 8}, {1, 8}, {1, 8}, {1, 8}, {1, 8}]
    played = Replay(make_cache("score", 2, warmup=[ids(1, 2), ids(1, 2, 8)], delta=4), tensors(trace))
    assert [turn.slots.tolist() for turn in played] == [[-1, -1], [0, -1], [0, -1], [0, -1], [0, 1]]


# ---- belady ----------------------------------------------------------------------------------------------------------


def most_hits(trace: Sequence[set[int]], capacity: int) -> int:
    """Over all that could be kept after each turn."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for wanted in trace:
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            hits += len(kept & wanted)
            for size in range(capacity + 1):
                for keep in combinations(sorted(kept | wanted), size):
                    after[frozenset(keep)] = max(after.get(frozenset(keep), 0), hits)
        best = after
    return max(best.values())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(trace=st.lists(st.sets(st.integers(0, 5), max_size=5), min_size=1, max_size=7), capacity=st.integers(0, 3))
def test_belady_is_the_optimum(trace: list[set[int]], capacity: int) -> None:
    played = Replay(make_cache("belady", capacity), tensors(trace), window=WHOLE).run()
    assert played.hits == most_hits(trace, capacity)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [5, 40, 150])
def test_belady_beats_the_others(seed: int, capacity: int) -> None:
    trace = skewed(seed, turns=25, count=300, each=60)
    warmup = trace[::4]  # an advantage for the others

    def hits(policy: CachePolicy, window: int = 0, **knobs: Any) -> int:
        return Replay(make_cache(policy, capacity, warmup=warmup, **knobs), trace, window=window).run().hits

    best = hits("belady", WHOLE)
    assert 0 < max(hits("static"), hits("score"), hits("score", delta=4), hits("belady")) < best
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
    played = Replay(make_cache("belady", capacity, fade=fade), tensors(trace), window=window)
    for number, (wanted, _) in enumerate(zip(trace, played, strict=True)):
        future = trace[number + 1 : number + 1 + window]
        before = set(uses)
        uses = {row: uses.get(row, 0.0) * fade + (row in wanted) for row in before | wanted}

        def rank(
            row: int,
            future: list[set[int]] = future,
            before: set[int] = before,
            uses: dict[int, float] = uses,
        ) -> tuple[float, ...]:
            soonest = next((k for k, later in enumerate(future) if row in later), len(future))
            return (soonest, -uses[row] if soonest == len(future) else 0, row not in before, row)

        uses = {row: uses[row] for row in sorted(uses, key=rank)[:capacity]}
        assert played.held == set(uses)


def test_belady_writes_no_more_than_it_must() -> None:
    # All four are wanted next, so any two do: those that lie there stay.
    trace = tensors([{5, 6}, {1, 2, 5, 6}, {1, 2, 5, 6}])
    turns = list(Replay(make_cache("belady", 2), trace, window=WHOLE))
    assert [len(turn.admitted) for turn in turns] == [2, 0, 0]
