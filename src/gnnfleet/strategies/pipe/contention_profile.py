"""What workers lose to each other: all walk layers at the same time, at first freely, then waiting for each other after
every forward and backward as ways do; and what links carry while all of them send.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gnnfleet.comm.collectives import all_gather_numbers, barrier, sum_over_ranks
from gnnfleet.comm.p2p import receive, send
from gnnfleet.comm.world import World
from gnnfleet.ops.gather import gather
from gnnfleet.strategies.pipe.cpu_affinity import CpuShare
from gnnfleet.strategies.pipe.grid_planner import ClusterProfile
from gnnfleet.strategies.pipe.layer_bench import BENCH_REPEATS, LayerBench, LayerHarness, measure_seconds

_PROBE = 4 << 20  # bytes of a message that bandwidth is measured with
_WIDTH = 64  # numbers of its rows
_TAG = 31


def profile_together(
    aside: World, tried: LayerHarness, foreseen: Sequence[float], cores: CpuShare, number: int
) -> ClusterProfile:
    """Each walks as many layers as a stage has, as often as there are stages; by itself it would take what is
    ``foreseen`` for each."""
    count, ways = len(foreseen), tried.chunk.partition.layout.partitions
    stages = max(1, aside.size // ways)
    each = max(1, count // stages)
    first = min(number * count // stages, count - each)
    layers = [LayerBench(tried, index) for index in range(first, first + each)]

    def walk(then: Callable[[], object] = lambda: None) -> None:
        for _ in range(stages):
            for layer in layers:
                layer.run(then)

    def seconds(work: Callable[[], object]) -> float:
        found = []
        for _ in range(BENCH_REPEATS):
            barrier(aside)
            found.append(measure_seconds(work)[0])
        return statistics.median(found)

    free = seconds(walk)
    locked = seconds(lambda: walk(lambda: _sync_latency(aside))) if ways > 1 else free
    word = statistics.median([_sync_latency(aside) for _ in range(10)][1:])
    alone = stages * sum(foreseen[first : first + each])
    every = all_gather_numbers(aside, [free / max(alone, 1e-9), cores.oversubscription, free, locked, word])
    crowding, meeting = fit_contention(every, meetings=2 * stages * each)
    return _network(aside, crowding, meeting)


def fit_contention(every: Sequence[Sequence[float]], meetings: int) -> tuple[float, float]:
    """(crowding, seconds of a meeting) from what each rank says: how many times as long it took as by itself, how many
    times it must at least, seconds when all walk freely, when they meet so many times, and of a word to all.

    What meeting costs is what it takes longer than the slowest needs anyway; waiting for others that compute is in
    ``crowding``.
    """
    slowed, least, free, locked, word = (list(column) for column in zip(*every, strict=True))
    crowding = max(statistics.median(slowed), *least)
    return crowding, max(statistics.median(word), (max(locked) - max(free)) / meetings)


def _network(aside: World, crowding: float, meeting: float) -> ClusterProfile:
    """Bandwidth and latency with all ranks sending to their neighbours at once."""
    latency = statistics.median(_pass(aside, 1) for _ in range(9))
    seconds = statistics.median(_pass(aside, _PROBE // (4 * _WIDTH)) for _ in range(BENCH_REPEATS))
    own = torch.tensor([latency, max(seconds - latency, 1e-9)], dtype=torch.float64)
    latency, seconds = (sum_over_ranks(aside, own) / aside.size).tolist()
    return ClusterProfile(_PROBE / seconds, latency, crowding, aside.size, meeting)


def _pass(world: World, rows: int) -> float:
    """Seconds until rows are sent to the next rank and those of the rank before are in their place: picked from a table
    and written to one, as ways do."""
    table, picked = torch.zeros(2 * rows, _WIDTH), torch.arange(0, 2 * rows, 2)

    def work() -> None:
        (came,) = _swap(world, gather(table, picked), [1])
        table[picked].clone()
        table[picked] = came

    return measure_seconds(work)[0]


def _sync_latency(world: World) -> float:
    """Seconds until all other ranks have said a word to this one."""
    word = torch.zeros(1, dtype=torch.uint8)
    return measure_seconds(lambda: _swap(world, word, range(1, world.size)))[0]


def _swap(world: World, here: Tensor, steps: Sequence[int]) -> list[Tensor]:
    """What others send who are so many ranks before this one, while it sends to those after it."""
    rooms = [torch.empty_like(here) for _ in steps]
    posted = [
        receive(world, room, (world.rank - step) % world.size, tag=_TAG, op="bandwidth")
        for room, step in zip(rooms, steps, strict=True)
    ]
    posted += [send(world, here, (world.rank + step) % world.size, tag=_TAG, op="bandwidth") for step in steps]
    for message in posted:
        message.wait()
    return rooms
