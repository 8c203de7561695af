"""The pipeline schedule: pure functions with the same result on every rank.

Forward, stage s computes the t-th chunk of an epoch's order in slot s + t. Backward runs in reverse order and begins at
the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from gnnfleet.ops.draws import DrawKey, Purpose
from gnnfleet.report.timeline_svg import ChunkSpan


def chunk_order(seed: int, epoch: int, partition: int, chunks: int, *, shuffle: bool) -> list[int]:
    """The order in which the chunks of a partition go through all stages."""
    if not shuffle:
        return list(range(chunks))
    draws = DrawKey(seed, epoch).draws(Purpose.ORDER, relation=1 + partition)
    return [int(chunk) for chunk in draws.permutation(chunks)]


def split_layers(costs: Sequence[float], stages: int) -> list[range]:
    """Consecutive layers for every stage, so that the most expensive stage is as cheap as possible."""
    layers = len(costs)
    stages = min(stages, layers)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[s][i]: cost of the most expensive of s stages over the first i layers, and first layer of the last stage.
    best = [[(float("inf"), 0)] * (layers + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0)
    for stage in range(1, stages + 1):
        for high in range(stage, layers + 1):
            best[stage][high] = min(
                (max(best[stage - 1][low][0], total[high] - total[low]), low) for low in range(stage - 1, high)
            )
    ranges, high = [], layers
    for stage in range(stages, 0, -1):
        low = best[stage][high][1]
        ranges.append(range(low, high))
        high = low
    return ranges[::-1]


def bubble_share(spans: Sequence[ChunkSpan], stages: int) -> float:
    """The share of time that stages would wait for chunks if every worker had a core of its own.

    Spans take their CPU time and begin as early as their inputs allow.
    """
    chunks = 1 + max((span.slot for span in spans), default=0)
    busy = {(span.stage, span.partition, span.slot, span.is_backward): span.busy for span in spans}
    partitions = {span.partition for span in spans}
    done: dict[tuple[int, int, int, bool], float] = {}
    for partition in partitions:
        for is_backward, step in ((False, 1), (True, -1)):
            for slot in range(chunks)[::step]:
                for stage in range(stages)[::step]:
                    inputs = (
                        (stage - step, partition, slot, is_backward),
                        (stage, partition, slot - step, is_backward),
                        (stage, partition, chunks - 1, False),
                    )
                    key = stage, partition, slot, is_backward
                    done[key] = max(done.get(span, 0.0) for span in inputs) + busy.get(key, 0.0)
    available = max(done.values(), default=0.0) * stages * max(len(partitions), 1)
    return 1.0 - sum(busy.values()) / available if available > 0 else 0.0
