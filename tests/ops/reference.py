"""Kernels in plain Python and torch: those of ``gnnfleet.ops.reference``, and those that only tests need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import count as count_on

import torch
from torch import Tensor

from gnnfleet.ops.csr import CSR, offsets_of
from gnnfleet.ops.draws import Draws
from gnnfleet.ops.reference import aggregate as aggregate
from gnnfleet.ops.reference import attend as attend


def sort_edges(src: Tensor, dst: Tensor, *, num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
    """See ``csr.sort_edges``."""
    del num_src
    by_src = torch.argsort(src, stable=True)
    order = by_src[torch.argsort(dst[by_src], stable=True)]
    return offsets_of(torch.bincount(dst.long(), minlength=num_dst)), order


def gather(table: Tensor, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """See ``gather.gather``."""
    return table[rows.long()].to(table.dtype if dtype is None else dtype)


def keep_factors(draws: Draws, ids: Tensor, *, heads: int, dropout: float) -> Tensor:
    """[E, heads] float64: 0 with probability ``dropout``, otherwise 1 / (1 − dropout).

    Keyed by edge id; a generator call serves four heads.
    """
    key, stream = draws.kernel_args
    calls = [philox([ids & _LOW, ids >> 32 & _LOW, call, stream], key) for call in range((heads + 3) // 4)]
    integers = torch.stack([column for call in calls for column in call][:heads], 1)
    return (integers >= min(round(dropout * 2**32), 2**32 - 1)).double() / (1 - dropout)


_LOW = 0xFFFFFFFF


def philox(counter: list[Tensor | int], key: int) -> list[Tensor]:
    """Philox4x32-10 on words held in int64; products wrap, which leaves both halves right."""
    shape = next(word for word in counter if isinstance(word, Tensor))
    x0, x1, x2, x3 = (part if isinstance(part, Tensor) else torch.full_like(shape, part) for part in counter)
    key0, key1 = key & _LOW, key >> 32
    for _ in range(10):
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1 = (p1 >> 32 & _LOW) ^ x1 ^ key0, p1 & _LOW
        x2, x3 = (p0 >> 32 & _LOW) ^ x3 ^ key1, p0 & _LOW
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return [x0, x1, x2, x3]


def sample(
    structure: CSR, seeds: Tensor, count: int, *, replace: bool, draws: Draws, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See ``sample.sample``; node by node, draw by draw."""
    edges_of: list[list[int]] = []
    for node in seeds.tolist():
        first, last = int(structure.indptr[node]), int(structure.indptr[node + 1])
        chances = None if weight is None else weight[first:last].double()
        if count < 0 or not count:
            picked = list(range(last - first)) if count else []
        else:
            picked = _pick_edges(_stream(draws, node), last - first, count, replace=replace, chances=chances)
        edges_of.append([first + edge for edge in sorted(picked)])
    offsets = torch.tensor([0, *(len(edges) for edges in edges_of)]).cumsum(0)
    return offsets, torch.tensor([edge for edges in edges_of for edge in edges], dtype=torch.int64)


def _pick_edges(
    next_integer: Callable[[], int], degree: int, count: int, *, replace: bool, chances: Tensor | None
) -> list[int]:
    """Edges 0 … degree − 1 of a node, drawn with the integers of its stream."""
    if chances is not None:
        possible = int((chances > 0).sum())
        if replace:
            ends, total = chances.cumsum(0), chances.sum()
            at = [_unit(next_integer) * total for _ in range(count if possible else 0)]
            return [int(torch.searchsorted(ends, u, right=True)) for u in at]
        if possible == degree <= count:
            return list(range(degree))
        drawn = [-math.log(1 - _unit(next_integer)) for _ in range(degree)]
        keys = [e / chance if chance > 0 else math.inf for e, chance in zip(drawn, chances.tolist(), strict=True)]
        return sorted(range(degree), key=keys.__getitem__)[: min(count, possible)]
    if replace:
        return [_below(next_integer, degree) for _ in range(count if degree else 0)]
    if degree <= count:
        return list(range(degree))
    taken: set[int] = set()
    for j in range(degree - count, degree):  # Floyd
        t = _below(next_integer, j + 1)
        taken.add(j if t in taken else t)
    return list(taken)


def _stream(draws: Draws, node: int) -> Callable[[], int]:
    """The 32-bit integers of a node, one per call."""
    key, stream = draws.kernel_args

    def integers() -> Iterator[int]:
        for call in count_on():
            yield from map(int, philox([torch.tensor(node & _LOW), node >> 32, call, stream], key))

    return integers().__next__


def _unit(next_integer: Callable[[], int]) -> float:
    low = next_integer()
    return float(((next_integer() << 32 | low) >> 11) * 2.0**-53)


def _below(next_integer: Callable[[], int], limit: int) -> int:
    """0 … limit − 1, exactly uniform."""
    while True:
        product = next_integer() * limit
        if product & _LOW >= (2**32 - limit) % limit:
            return product >> 32


def temporal_neighbors(
    events: tuple[Tensor, Tensor, Tensor],
    queries: tuple[Tensor, Tensor],
    k: int,
    *,
    visible: int | None = None,
    draws: tuple[Draws, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``temporal_neighbors.TemporalNeighbors``: events are (src, dst, t), queries
    (nodes, times), draws (family, number of nodes)."""
    ends = list(zip(*(part.tolist() for part in events[:2]), strict=True))
    times = events[2].tolist()
    neighbours = torch.full((len(queries[0]), k), -1)
    numbers = torch.full((len(queries[0]), k), -1)
    for row, (node, time) in enumerate(zip(*(part.tolist() for part in queries), strict=True)):
        before = [e for e, t in enumerate(times) if t < time and (visible is None or e < visible)]
        candidates = [e for e in before if node in ends[e]]
        if draws is not None and len(candidates) > k:
            family, num_nodes = draws
            picked = _pick_edges(
                _stream(family, len(before) * num_nodes + node), len(candidates), k, replace=False, chances=None
            )
            candidates = [candidates[index] for index in sorted(picked)]
        for column, event in enumerate(reversed(candidates[-k:] if k else [])):
            src, dst = ends[event]
            neighbours[row, column] = dst if node == src else src
            numbers[row, column] = event
    return neighbours, numbers
