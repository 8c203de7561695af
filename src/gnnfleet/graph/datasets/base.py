"""Shared parts of the generators: configuration, splits, string ids, integer weights and distinct edges.

A generator is a frozen configuration and a function from it to a Graph. All randomness is keyed (``ops.draws``):
the same configuration gives the same graph, bit for bit, for any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import pyarrow as pa
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from gnnfleet.errors import ConfigError, suggest
from gnnfleet.graph.graph import NO_SPLIT, TEST, TRAIN, VAL, Edges
from gnnfleet.graph.ids import Ids
from gnnfleet.ops import csr
from gnnfleet.ops.draws import Draws, Purpose
from gnnfleet.ops.generate import integer_weights, pair_hash, pareto

FeatureDtype = Literal["float32", "float16", "bfloat16"]
MAX_COUNT = 2**31 - 1  # nodes of a type, so that int32 numbers them
# Slots of the smallest weight. More slots follow the real weights more closely, at 4 bytes per slot.
_SLOTS = 3.0


class DatasetConfig(BaseModel):
    """Parameters of every generator."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    seed: int = Field(0, ge=0, lt=2**64, description="seed of all random draws")
    train: float = Field(0.1, ge=0, le=1, description="share of labelled nodes to train on")
    val: float = Field(
        0.1, ge=0, le=1, description="share of labelled nodes to validate on; the others are for the test"
    )

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.train + self.val > 1:
            raise ValueError(f"train + val must be at most 1, found {self.train} + {self.val}")
        return self

    @property
    def draws(self) -> Draws:
        return Draws(self.seed, Purpose.GENERATE)


def explain(error: ValidationError, kind: type[DatasetConfig], name: str) -> str:
    """Describe the first wrong parameter of a generator, for a message."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return f"{name}: {message}"
    key = str(first["loc"][0])
    if first["type"] != "extra_forbidden":
        return f"{name}: {key}: {message[:1].lower()}{message[1:]}, found {first['input']!r}"
    return f"{name} has no parameter {key!r}: {suggest(key, kind.model_fields)}"


def split_at_random(draws: Draws, count: int, *, train: float, val: float) -> Tensor:
    """[1, count] int8 split codes with exact shares."""
    return split_by_rank(draws.permutation(count), count, train=train, val=val)


def split_by_rank(rank: Tensor, count: int, *, train: float, val: float) -> Tensor:
    """[1, N] int8 split codes: low ranks train, the next validate, those from ``count`` on are in no split."""
    codes = torch.full(rank.shape, TEST, dtype=torch.int8)
    codes[rank < round((train + val) * count)] = VAL
    codes[rank < round(train * count)] = TRAIN
    codes[rank >= count] = NO_SPLIT
    return codes[None]


def heavy_weights(draws: Draws, count: int, *, exponent: float, limit: float) -> Tensor:
    """[count] int64 weights with a power-law tail, drawn from ``draws`` and its next relation."""
    tail = pareto(draws, count, shape=exponent - 1, limit=limit)
    return integer_weights(draws.at(draws.layer, draws.relation + 1), tail, scale=_SLOTS)


def prefixed_ids(prefix: str, count: int) -> Ids:
    """Ids such as ``user-000123``, written as bytes: a million Python strings take a second."""
    digits = max(6, len(str(max(count - 1, 0))))
    head = np.frombuffer(f"{prefix}-".encode(), dtype=np.uint8)
    text = np.empty((count, len(head) + digits), dtype=np.uint8)
    text[:, : len(head)] = head
    rest = np.arange(count)
    for column in range(text.shape[1] - 1, len(head) - 1, -1):
        rest, digit = np.divmod(rest, 10)
        text[:, column] = digit + ord("0")
    offsets = np.arange(count + 1, dtype=np.int64) * text.shape[1]
    values = pa.Array.from_buffers(pa.large_string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(text)])
    return Ids(count, lambda: values)


_ROUNDS = 24
_SPARE = 1.05

Pairs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class EdgeQuota:
    """The number of edges of one group."""

    name: str
    count: int
    draw: Callable[[int, int], Pairs]  # (first, count) → int32 ends of at most ``count`` edges


def draw_distinct(
    quotas: Sequence[EdgeQuota],
    draws: Draws,
    *,
    nodes: int,
    directed: bool,
    quota_of: Callable[[Tensor, Tensor], Tensor] = lambda src, dst: torch.zeros_like(src, dtype=torch.int8),
) -> Pairs:
    """Draw distinct edges without self-loops until all quotas are met; undirected ones once, lower end first.

    Edges are drawn by index and dropped by a keyed hash of the pair, so the number of threads has no influence.

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
