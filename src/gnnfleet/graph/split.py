"""Splits by a rule: shares of the nodes, or a number of nodes per class.

A node's draw depends on its id and the seed only, so the same nodes in another order are split the same way. If there
are labels, only labelled nodes are split.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import NO_SPLIT, TEST, TRAIN, VAL, Nodes, labelled_rows
from gnnfleet.graph.ids import Ids

NodeKeys = np.ndarray[Any, np.dtype[np.uint64]]
PLANETOID_VAL, PLANETOID_TEST = 500, 1000


@dataclass(frozen=True)
class SplitShares:
    """Shares of the nodes; the remainder to 1 is in no split."""

    train: float
    val: float
    test: float


@dataclass(frozen=True)
class PerClassSplit:
    """``count`` training nodes of each class, then 500 for val and 1,000 for test as in Planetoid.

    If fewer than 1,500 remain, a third of them is for val and the rest for test. A smaller class is used up.
    """

    count: int


SplitRule = SplitShares | PerClassSplit


def parse_rule(text: str) -> SplitRule:
    """Parse ``0.6/0.2/0.2`` or ``20-per-class``; raises ConfigError for other texts."""
    per_class = re.fullmatch(r"(\d+)-per-class", text.strip())
    if per_class and int(per_class[1]):
        return PerClassSplit(int(per_class[1]))
    try:
        shares = [float(share) for share in text.split("/")]
    except ValueError:
        shares = []
    if len(shares) != 3 or min(shares) < 0 or not 0 < sum(shares) <= 1 + 1e-9:
        raise ConfigError(
            "a split has the form TRAIN/VAL/TEST with shares that sum to at most 1, as 0.6/0.2/0.2, or 20-per-class; "
            f"found {text!r}"
        )
    return SplitShares(*shares)


def split_nodes(nodes: Nodes, rule: SplitRule, *, seed: int = 0) -> Tensor:
    """[1, N] int8 split codes of one node type."""
    return make_split(rule, id_keys(nodes.ids), nodes.y, seed=seed)


def make_split(rule: SplitRule, keys: NodeKeys, y: Tensor | None, *, seed: int = 0) -> Tensor:
    """[1, N] int8 split codes for nodes with these keys and labels; ConfigError for labels the rule cannot use."""
    if isinstance(rule, PerClassSplit) and (y is None or y.dim() != 1 or y.is_floating_point()):
        labels = "no labels" if y is None else "values" if y.is_floating_point() else "several labels per node"
        raise ConfigError(f"a split per class needs one label per node, found {labels}: use shares, as 0.6/0.2/0.2")
    codes = torch.full((len(keys),), NO_SPLIT, dtype=torch.int8)
    drawn = torch.from_numpy(_draw(keys, seed))
    if y is not None:
        drawn = drawn[labelled_rows(y)[drawn]]
    if isinstance(rule, SplitShares):
        return _by_shares(codes, drawn, rule)[None]
    assert y is not None
    return _per_class(codes, drawn, rule.count, y)[None]


def id_keys(ids: Ids) -> NodeKeys:
    """[N] one number per node that depends on its id only."""
    if ids.are_rows:
        return np.arange(len(ids), dtype=np.uint64)
    return value_keys(ids.values())


def value_keys(values: Any) -> NodeKeys:
    """[n] keys of an Arrow array of ids, integers or text."""
    if pa.types.is_integer(values.type):
        return np.asarray(values.to_numpy(zero_copy_only=False)).astype(np.int64).view(np.uint64)
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in values.to_pylist())
    return np.frombuffer(digests, dtype="<u8")


def _draw(keys: NodeKeys, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows in drawn order. Distinct keys have distinct draws, so there are no ties."""
    start = mix(np.asarray([seed & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64))
    return np.argsort(mix(keys ^ start), kind="stable")


def mix(values: NodeKeys) -> NodeKeys:
    """Apply the finaliser of SplitMix64, a bijection that spreads every bit."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _by_shares(codes: Tensor, drawn: Tensor, rule: SplitShares) -> Tensor:
    total = len(drawn)
    # Shares are cumulated before rounding, so that shares that sum to 1 leave no node out.
    ends = [round(total * share) for share in (rule.train, rule.train + rule.val, rule.train + rule.val + rule.test)]
    for code, start, end in zip((TRAIN, VAL, TEST), [0, *ends], ends, strict=False):
        codes[drawn[start:end]] = code
    return codes


def _per_class(codes: Tensor, drawn: Tensor, count: int, y: Tensor) -> Tensor:
    labels = y[drawn]
    order = torch.argsort(labels, stable=True)
    sizes = torch.bincount(labels)
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order)) - starts
    codes[drawn[rank < count]] = TRAIN
    rest = drawn[rank >= count]
    val, test = PLANETOID_VAL, PLANETOID_TEST
    if len(rest) < val + test:
        val = len(rest) // 3
        test = len(rest) - val
    codes[rest[:val]] = VAL
    codes[rest[val : val + test]] = TEST
    return codes
