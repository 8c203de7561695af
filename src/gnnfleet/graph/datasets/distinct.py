"""Exactly so many different edges: draw, sort, drop repeats, draw again what is missing, drop at random what is over.

Edges are drawn by index and dropped by a keyed number of the pair, so the number of threads does not matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Edges
from gnnfleet.ops import csr
from gnnfleet.ops.draws import Draws
from gnnfleet.ops.generate import pair_hash

_ROUNDS = 24
_SPARE = 1.05

Pairs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class EdgeQuota:
    """So many edges of one kind."""

    name: str
    count: int
    draw: Callable[[int, int], Pairs]  # (first, count) → int32 ends, possibly fewer: what does not belong is left out


EdgeClassifier = Callable[[Tensor, Tensor], Tensor]  # (src, dst) → number of the quota each pair belongs to


def single_quota(src: Tensor, dst: Tensor) -> Tensor:
    """For a single quota."""
    return torch.zeros_like(src, dtype=torch.int8)


def draw_distinct(
    quotas: Sequence[EdgeQuota], draws: Draws, *, kind: EdgeClassifier, nodes: int, directed: bool
) -> Pairs:
    """Ends of different edges without self-loops, as many as the quotas say; undirected ones once, lower end first.

    Raises ConfigError when the pairs run out.
    """
    src = dst = torch.empty(0, dtype=torch.int32)
    kinds = torch.empty(0, dtype=torch.int8)
    drawn, found, worth = [0] * len(quotas), [0] * len(quotas), [1.0] * len(quotas)
    for turn in itertools.count():
        missing = [max(quota.count - n, 0) for quota, n in zip(quotas, found, strict=True)]
        if not any(missing):
            return _drop_surplus(quotas, kinds, src=src, dst=dst, numbers=pair_hash(draws, src, dst))
        if turn == _ROUNDS:
            break
        asked = [int(count / w * _SPARE) + 16 if count else 0 for count, w in zip(missing, worth, strict=True)]
        fresh = [q.draw(first, count) for q, first, count in zip(quotas, drawn, asked, strict=True) if count]
        src, dst = _distinct([(src, dst), *fresh], nodes, directed)
        kinds = kind(src, dst)
        before, found = found, [int((kinds == k).sum()) for k in range(len(quotas))]
        for k, count in enumerate(asked):
            drawn[k] += count
            if count:
                worth[k] = min(1.0, max((found[k] - before[k]) / count, 0.05))
    quota, n = next((quota, n) for quota, n in zip(quotas, found, strict=True) if n < quota.count)
    raise ConfigError(
        f"only {n:,} different {quota.name} were found of {quota.count:,} wanted: ask for fewer edges or more nodes"
    )


def _distinct(pieces: Sequence[Pairs], nodes: int, directed: bool) -> Pairs:
    src, dst = (torch.cat(ends) for ends in zip(*pieces, strict=True))
    if not directed:
        src, dst = torch.minimum(src, dst), torch.maximum(src, dst)
    different = src != dst
    indptr, src, _ = csr.distinct_edges(src[different], dst[different], num_src=nodes, num_dst=nodes)
    return src, Edges(indptr=indptr, src=src).dst()


def _drop_surplus(quotas: Sequence[EdgeQuota], kinds: Tensor, *, src: Tensor, dst: Tensor, numbers: Tensor) -> Pairs:
    keep = torch.zeros(src.shape[0], dtype=torch.bool)
    for k, quota in enumerate(quotas):
        if quota.count:
            of_kind = kinds == k
            bound = torch.kthvalue(numbers[of_kind], quota.count).values
            keep |= of_kind & (numbers <= bound)
    return src[keep], dst[keep]


def store_edges(src: Tensor, dst: Tensor, *, nodes: int, both: bool) -> Edges:
    """One homogeneous edge type without data in store order; ``both`` adds the other direction."""
    if both:
        src, dst = torch.cat([src, dst]), torch.cat([dst, src])
    indptr, src = csr.sort_sources(src, dst, num_src=nodes, num_dst=nodes)
    return Edges(indptr=indptr, src=src)
