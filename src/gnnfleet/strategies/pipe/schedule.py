"""When which chunk is worked on where: pure functions, the same on every rank.

Forward, stage s works on the t-th chunk of an epoch's order in slot s + t; backward, in reverse, the last stage begins.
S stages, n chunks of a way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gnnfleet.ops.draws import DrawKey, Purpose


def chunk_order(seed: int, epoch: int, way: int, chunks: int, *, shuffle: bool) -> list[int]:
    """The order in which the chunks of a way stream through all of its stages."""
    if not shuffle:
        return list(range(chunks))
    draws = DrawKey(seed, epoch).draws(Purpose.ORDER, relation=1 + way)
    return [int(chunk) for chunk in draws.permutation(chunks)]


def split_layers(costs: Sequence[float], stages: int) -> list[range]:
    """Consecutive layers for every stage, so that the dearest stage is as cheap as can be."""
    layers = len(costs)
    stages = min(stages, layers)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[s][i]: the dearest of s stages over the first i layers, and where the last of them begins.
    best = [[(float("inf"), 0)] * (layers + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0)
    for stage in range(1, stages + 1):
        for high in range(stage, layers + 1):
            best[stage][high] = min(
                (max(best[stage - 1][low][0], total[high] - total[low]), low) for low in range(stage - 1, high)
            )
    found, high = [], layers
    for stage in range(stages, 0, -1):
        low = best[stage][high][1]
        found.append(range(low, high))
        high = low
    return found[::-1]


@dataclass(frozen=True)
class ChunkSpan:
    """Work of a rank on a chunk."""

    stage: int
    way: int
    turn: int  # number in the epoch's order
    chunk: int
    back: bool
    begin: float  # seconds
    end: float
    busy: float  # seconds of processor time of these


def bubble_share(spans: Sequence[ChunkSpan], stages: int) -> float:
    """The share of time a stage would be idle for want of chunks, had every worker a processor of its own: from the
    processor time of each span, every span as early as what it waits for allows."""
    chunks = 1 + max((span.turn for span in spans), default=0)
    time = {(span.stage, span.way, span.turn, span.back): span.busy for span in spans}
    ways = sorted({span.way for span in spans})
    done: dict[tuple[int, int, int, bool], float] = {}
    for way in ways:
        for turn in range(chunks):
            for stage in range(stages):
                ready = max(done.get((stage - 1, way, turn, False), 0.0), done.get((stage, way, turn - 1, False), 0.0))
                done[stage, way, turn, False] = ready + time.get((stage, way, turn, False), 0.0)
        for turn in reversed(range(chunks)):
            for stage in reversed(range(stages)):
                ready = max(
                    done.get((stage + 1, way, turn, True), 0.0),
                    done.get((stage, way, turn + 1, True), 0.0),
                    done[stage, way, chunks - 1, False],
                )
                done[stage, way, turn, True] = ready + time.get((stage, way, turn, True), 0.0)
    whole = max(done.values(), default=0.0) * stages * max(len(ways), 1)
    return 1.0 - sum(time.values()) / whole if whole > 0 else 0.0
