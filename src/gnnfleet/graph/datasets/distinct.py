"""An exact number of distinct edges: draw, sort, drop repeats, draw the missing ones, drop the surplus at random.

Edges are drawn by index and dropped by a keyed hash of the pair, so the number of threads has no influence.
"""

from __future__ import annotations

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
    """The number of edges of one group."""

    name: str
    count: int
    draw: Callable[[int, int], Pairs]  # (first, count) → int32 ends of at most ``count`` edges


def _single_quota(src: Tensor, dst: Tensor) -> Tensor:
    return torch.zeros_like(src, dtype=torch.int8)


def draw_distinct(
    quotas: Sequence[EdgeQuota],
    draws: Draws,
    *,
    nodes: int,
    directed: bool,
    quota_of: Callable[[Tensor, Tensor], Tensor] = _single_quota,
) -> Pairs:
    """Draw distinct edges without self-loops until all quotas are met; undirected ones once, lower end first.

    ``quota_of`` maps (src, dst) to the index of the quota of each pair. Raises ConfigError if the pairs run out.
    """
    src = dst = torch.empty(0, dtype=torch.int32)
    groups = torch.empty(0, dtype=torch.int8)
    drawn, counts, yields = [0] * len(quotas), [0] * len(quotas), [1.0] * len(quotas)
    for attempt in range(_ROUNDS + 1):
        missing = [max(quota.count - count, 0) for quota, count in zip(quotas, counts, strict=True)]
        if not any(missing):
            return _drop_surplus(quotas, groups, src=src, dst=dst, hashes=pair_hash(draws, src, dst))
        if attempt == _ROUNDS:
            break
        sizes = [int(count / y * _SPARE) + 16 if count else 0 for count, y in zip(missing, yields, strict=True)]
        fresh = [q.draw(first, size) for q, first, size in zip(quotas, drawn, sizes, strict=True) if size]
        src, dst = _distinct([(src, dst), *fresh], nodes, directed)
        groups = quota_of(src, dst)
        before, counts = counts, [int((groups == k).sum()) for k in range(len(quotas))]
        for k, size in enumerate(sizes):
            drawn[k] += size
            if size:
                yields[k] = min(1.0, max((counts[k] - before[k]) / size, 0.05))
    quota, count = next((quota, count) for quota, count in zip(quotas, counts, strict=True) if count < quota.count)
    raise ConfigError(
        f"only {count:,} of {quota.count:,} different {quota.name} could be drawn: set fewer edges or more nodes"
    )


def _distinct(pieces: Sequence[Pairs], nodes: int, directed: bool) -> Pairs:
    src, dst = (torch.cat(ends) for ends in zip(*pieces, strict=True))
    if not directed:
        src, dst = torch.minimum(src, dst), torch.maximum(src, dst)
    different = src != dst
    indptr, src, _ = csr.distinct_edges(src[different], dst[different], num_src=nodes, num_dst=nodes)
    return src, Edges(indptr=indptr, src=src).dst()


def _drop_surplus(quotas: Sequence[EdgeQuota], groups: Tensor, *, src: Tensor, dst: Tensor, hashes: Tensor) -> Pairs:
    keep = torch.zeros(src.shape[0], dtype=torch.bool)
    for k, quota in enumerate(quotas):
        if quota.count:
            in_group = groups == k
            bound = torch.kthvalue(hashes[in_group], quota.count).values
            keep |= in_group & (hashes <= bound)
    return src[keep], dst[keep]


def store_edges(src: Tensor, dst: Tensor, *, nodes: int, symmetric: bool) -> Edges:
    """Sort edges between nodes of one type into store order; ``symmetric`` adds the other direction."""
    if symmetric:
        src, dst = torch.cat([src, dst]), torch.cat([dst, src])
    indptr, src = csr.sort_sources(src, dst, num_src=nodes, num_dst=nodes)
    return Edges(indptr=indptr, src=src)
