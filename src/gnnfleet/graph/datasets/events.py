"""Events: a stream user → item for temporal models. Users repeat themselves, items come and go, tastes change.

The stream order is ``Edges.order``. A user's label says whether the user's taste changes during the stream; users are
split by the time of their first event.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gnnfleet.graph.datasets.base import (
    MAX_COUNT,
    TORCH_DTYPES,
    FeatureDtype,
    SplitConfig,
    heavy_weights,
    split_by_rank,
)
from gnnfleet.graph.graph import EdgeType, Graph, Nodes, validated_edges
from gnnfleet.ops import csr
from gnnfleet.ops.generate import WeightedChoice, integer_weights, normal_rows, normal_rows_around
from gnnfleet.report.progress import NoProgress, Progress

USER, ITEM = "user", "item"
INTERACTS = EdgeType(USER, "interacts", ITEM)

_ACTIVITY, _POPULARITY, _PEAK, _TOPIC, _FIRST, _SECOND, _CHANGES, _USERS, _FRESH, _REPEAT, _TIMES, _CENTRES, _NOISE = (
    range(13)
)
_WINDOWS = 64  # popularity stands still within a window
_PEAK_WIDTH = 0.2  # an item's peak, on either side, as a share of the stream
_HUB = 300.0


class EventsConfig(SplitConfig):
    """Parameters of ``events``."""

    train: float = Field(0.7, ge=0, le=1, description="share of users to train on: those who come first")
    val: float = Field(0.15, ge=0, le=1, description="share of users to validate on; the rest is for the test")
    users: int = Field(2_000, ge=1, le=MAX_COUNT, description="number of users")
    items: int = Field(1_000, ge=1, le=MAX_COUNT, description="number of items")
    events: int = Field(50_000, ge=0, le=2**32 - 1, description="number of interactions")
    topics: int = Field(8, ge=2, le=MAX_COUNT, description="number of topics of items and of tastes of users")
    repeat: float = Field(0.5, ge=0, lt=1, description="share of events that repeat the user's item before")
    taste: float = Field(0.7, ge=0, le=1, description="share of new choices from the topic the user likes at the time")
    drift: float = Field(
        0.8, ge=0, le=1, description="share of popularity that is passing, and of users whose taste changes"
    )
    exponent: float = Field(2.2, gt=1.5, le=10, description="activity and popularity k are as frequent as k^-exponent")
    gap: float = Field(10.0, ge=1, le=1e9, description="mean time between events that are not at the same time")
    ties: float = Field(0.05, ge=0, le=1, description="share of events at the same time as the one before")
    features: int = Field(16, ge=0, le=2**20, description="width of the edge features; 0 for none")
    signal: float = Field(0.5, ge=0, description="strength of the item's topic in an edge feature, against noise of 1")
    dtype: FeatureDtype = Field("float32", description="float32, float16 or bfloat16 features")
    labels: bool = Field(True, description="label users by whether their taste changes, and split them")

    @model_validator(mode="after")
    def _topics_fit(self) -> Self:
        if self.items < self.topics:
            raise ValueError(f"items must be at least topics, found {self.items} for {self.topics} topics")
        return self


class _Items(NamedTuple):
    topic: Tensor  # [items] int32
    popularity: Tensor  # [items] int64
    peak: Tensor  # [items] float64, in shares of the stream


class _Tastes(NamedTuple):
    first: Tensor  # [users] int32
    second: Tensor  # [users] int32
    changes_at: Tensor  # [users] float64: share of the stream; above 1 for users who stay


def make_events(config: EventsConfig, progress: Progress = NoProgress()) -> Graph:
    """Two node types, one edge type with times, order and features."""
    advance = progress.stage("generate", 3)
    draws, count = config.draws, config.events
    items, tastes = _items(config), _tastes(config)
    activity = heavy_weights(draws.at(_ACTIVITY), config.users, exponent=config.exponent, limit=_HUB)
    user = WeightedChoice.of(activity).draw_any(draws.at(_USERS), count)
    item = _fresh_items(config, user, items=items, tastes=tastes)
    order, starts = _by_user(user, config.users)
    item = _repeat(config, item, order=order, starts=starts)
    advance(1)
    attr = None
    if config.features:
        centres = normal_rows(draws.at(_CENTRES), config.topics, config.features)
        attr = normal_rows_around(
            draws.at(_NOISE), centres, items.topic[item], scale=config.signal, dtype=TORCH_DTYPES[config.dtype]
        )
    advance(1)
    pairs = torch.stack([user, item])
    edges = validated_edges(pairs, num_src=config.users, num_dst=config.items, attr=attr, time=_times(config))
    advance(1)
    nodes = {USER: _users(config, tastes, order=order, starts=starts), ITEM: Nodes(count=config.items)}
    return Graph.of(nodes, {INTERACTS: edges}, name="events")


def _items(config: EventsConfig) -> _Items:
    draws, count = config.draws, config.items
    return _Items(
        # Every topic has an item: no choice runs empty.
        topic=draws.at(_TOPIC).permutation(count) % config.topics,
        popularity=heavy_weights(draws.at(_POPULARITY), count, exponent=config.exponent, limit=_HUB),
        peak=draws.at(_PEAK).uniforms(count) * (1 + 2 * _PEAK_WIDTH) - _PEAK_WIDTH,
    )


def _tastes(config: EventsConfig) -> _Tastes:
    draws, count = config.draws, config.users
    first = (draws.at(_FIRST).uniforms(count) * config.topics).to(torch.int32)
    step = (draws.at(_SECOND).uniforms(count) * (config.topics - 1)).to(torch.int32) + 1
    changes = draws.at(_CHANGES).uniforms(count) < config.drift
    when = draws.at(_CHANGES, 1).uniforms(count) * 0.6 + 0.2
    return _Tastes(first, (first + step) % config.topics, torch.where(changes, when, 2.0))


def _fresh_items(config: EventsConfig, user: Tensor, *, items: _Items, tastes: _Tastes) -> Tensor:
    """[events] int32: what each user would choose anew, window by window."""
    out, count = torch.empty_like(user), user.shape[0]
    for window in range(_WINDOWS):
        first, last = count * window // _WINDOWS, count * (window + 1) // _WINDOWS
        now = (window + 0.5) / _WINDOWS
        near = (1 - (items.peak - now).abs() / _PEAK_WIDTH).clamp(min=0)
        # The mean of `near` over the stream is about _PEAK_WIDTH, so passing and lasting popularity weigh the same.
        weights = items.popularity * (1 - config.drift + config.drift * near / _PEAK_WIDTH)
        shelf = WeightedChoice.of(
            integer_weights(config.draws.at(_FRESH, 8 + window), weights, scale=1.0), items.topic, config.topics
        )
        who = user[first:last]
        topic = torch.where(tastes.changes_at[who] <= now, tastes.second[who], tastes.first[who])
        liked = shelf.draw(config.draws.at(_FRESH), topic, first=first)
        anything = shelf.draw_any(config.draws.at(_FRESH, 1), last - first, first=first)
        by_taste = config.draws.at(_FRESH, 2).uniforms(last - first, first=first) < config.taste
        out[first:last] = torch.where(by_taste, liked, anything)
    return out


def _by_user(user: Tensor, users: int) -> tuple[Tensor, Tensor]:
    """(order, starts): events by user, in time; user u owns order[starts[u]:starts[u + 1]]."""
    starts, order = csr.counting_sort(user, users)
    return order, starts


def _repeat(config: EventsConfig, item: Tensor, *, order: Tensor, starts: Tensor) -> Tensor:
    """An event that repeats takes the item of the user's latest event that does not."""
    count = item.shape[0]
    repeats = (config.draws.at(_REPEAT).uniforms(count) < config.repeat)[order]
    repeats[starts[:-1][starts.diff() > 0]] = False
    source = torch.where(repeats, 0, torch.arange(count)).cummax(0).values
    out = torch.empty_like(item)
    out[order] = item[order][source]
    return out


def _times(config: EventsConfig) -> Tensor:
    """[events] int64, never falling; gaps are whole, so their sum is exact."""
    draws, count = config.draws, config.events
    gap = 1 + (draws.at(_TIMES).exponentials(count) * (config.gap - 0.5)).long()
    tie = draws.at(_TIMES, 1).uniforms(count) < config.ties
    return torch.where(tie, 0, gap).cumsum(0)


def _users(config: EventsConfig, tastes: _Tastes, *, order: Tensor, starts: Tensor) -> Nodes:
    if not config.labels:
        return Nodes(count=config.users)
    came = starts.diff() > 0
    entered = torch.full((config.users,), config.events, dtype=torch.int64)
    entered[came] = order[starts[:-1][came]]
    rank = torch.empty_like(entered)
    rank[torch.argsort(entered, stable=True)] = torch.arange(config.users)
    return Nodes(
        count=config.users,
        y=torch.where(came, (tastes.changes_at <= 1).long(), -1),
        classes=("stays", "changes"),
        split=split_by_rank(rank, int(came.sum()), train=config.train, val=config.val),
    )
