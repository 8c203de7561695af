"""A stream of user-item events for temporal models: users repeat items, popularity and tastes drift.

The label of a user tells if the user's taste changes during the stream. Users are split by the time of their first
event.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gnnfleet.graph.datasets.base import MAX_COUNT, DatasetConfig, FeatureDtype, heavy_weights, split_by_rank
from gnnfleet.graph.graph import EdgeType, Graph, Nodes, validated_edges
from gnnfleet.io.bundle import DTYPES
from gnnfleet.ops import csr
from gnnfleet.ops.generate import WeightedChoice, integer_weights, normal_rows, normal_rows_around
from gnnfleet.report.progress import Progress

USER, ITEM = "user", "item"
INTERACTS = EdgeType(USER, "interacts", ITEM)

_ACTIVITY, _POPULARITY, _PEAK, _TOPIC, _FIRST, _SECOND, _CHANGES, _USERS, _NEW, _REPEAT, _TIMES, _CENTRES, _NOISE = (
    range(13)
)
_WINDOWS = 64  # popularity is constant within a window
_PEAK_WIDTH = 0.2  # distance from an item's peak to its base, as a share of the stream
_HUB = 300.0


class EventsConfig(DatasetConfig):
    train: float = Field(
        0.7, ge=0, le=1, description="share of users to train on: those with the earliest first events"
    )
    val: float = Field(0.15, ge=0, le=1, description="share of users to validate on; the others are for the test")
    users: int = Field(2_000, ge=1, le=MAX_COUNT, description="number of users")
    items: int = Field(1_000, ge=1, le=MAX_COUNT, description="number of items")
    events: int = Field(50_000, ge=0, le=2**32 - 1, description="number of interactions")
    topics: int = Field(
        8, ge=2, le=MAX_COUNT, description="number of topics; an item has one, a user likes one at a time"
    )
    repeat: float = Field(0.5, ge=0, lt=1, description="share of events that repeat the user's previous item")
    taste: float = Field(
        0.7, ge=0, le=1, description="share of new items from the topic that the user likes at the time"
    )
    drift: float = Field(0.8, ge=0, le=1, description="share of temporary popularity, and of users whose taste changes")
    exponent: float = Field(
        2.2, gt=1.5, le=10, description="frequency of activity or popularity k is proportional to k^-exponent"
    )
    gap: float = Field(10.0, ge=1, le=1e9, description="mean time between events with different times")
    ties: float = Field(0.05, ge=0, le=1, description="share of events at the same time as the previous event")
    features: int = Field(16, ge=0, le=2**20, description="width of the edge features; 0 for none")
    signal: float = Field(0.5, ge=0, description="strength of the item's topic in an edge feature; noise has 1")
    dtype: FeatureDtype = Field("float32", description="float32, float16 or bfloat16 features")
    labels: bool = Field(True, description="label users as stays or changes (of taste), and split them")

    @model_validator(mode="after")
    def _topics_fit(self) -> Self:
        if self.items < self.topics:
            raise ValueError(f"items must be at least as many as topics, found {self.items} for {self.topics} topics")
        return self


class _Items(NamedTuple):
    topic: Tensor  # [items] int32
    popularity: Tensor  # [items] int64
    peak: Tensor  # [items] float64, in shares of the stream


class _Tastes(NamedTuple):
    first: Tensor  # [users] int32
    second: Tensor  # [users] int32
    changes_at: Tensor  # [users] float64: share of the stream; above 1 if it never changes


def make_events(config: EventsConfig, progress: Progress = Progress()) -> Graph:
    """Generate two node types and one edge type with times, order and features."""
    advance = progress.stage("generate", 3)
    draws, count = config.draws, config.events
    items, tastes = _items(config), _tastes(config)
    activity = heavy_weights(draws.at(_ACTIVITY), config.users, exponent=config.exponent, limit=_HUB)
    user = WeightedChoice.of(activity).draw_any(draws.at(_USERS), count)
    item = _new_items(config, user, items=items, tastes=tastes)
    starts, order = csr.counting_sort(user, config.users)  # events by user, in time; see ``_repeat``
    item = _repeat(config, item, order=order, starts=starts)
    advance(1)
    attr = None
    if config.features:
        centres = normal_rows(draws.at(_CENTRES), config.topics, config.features)
        dtype = DTYPES[config.dtype][0]
        attr = normal_rows_around(draws.at(_NOISE), centres, items.topic[item], scale=config.signal, dtype=dtype)
    advance(1)
    pairs = torch.stack([user, item])
    edges = validated_edges(pairs, num_src=config.users, num_dst=config.items, attr=attr, time=_times(config))
    advance(1)
    nodes = {USER: _users(config, tastes, order=order, starts=starts), ITEM: Nodes(count=config.items)}
    return Graph.of(nodes, {INTERACTS: edges}, name="events")


def _items(config: EventsConfig) -> _Items:
    draws, count = config.draws, config.items
    return _Items(
        # Every topic has an item, so every choice succeeds.
        topic=draws.at(_TOPIC).permutation(count) % config.topics,
        popularity=heavy_weights(draws.at(_POPULARITY), count, exponent=config.exponent, limit=_HUB),
        peak=draws.at(_PEAK).uniforms(count) * (1 + 2 * _PEAK_WIDTH) - _PEAK_WIDTH,
    )


def _tastes(config: EventsConfig) -> _Tastes:
    draws, count = config.draws, config.users
    first = (draws.at(_FIRST).uniforms(count) * config.topics).to(torch.int32)
    shift = (draws.at(_SECOND).uniforms(count) * (config.topics - 1)).to(torch.int32) + 1
    changes = draws.at(_CHANGES).uniforms(count) < config.drift
    time = draws.at(_CHANGES, 1).uniforms(count) * 0.6 + 0.2
    return _Tastes(first, (first + shift) % config.topics, torch.where(changes, time, 2.0))


def _new_items(config: EventsConfig, user: Tensor, *, items: _Items, tastes: _Tastes) -> Tensor:
    """[events] int32: an item for every event as if no event repeated one, window by window."""
    out, count = torch.empty_like(user), user.shape[0]
    for window in range(_WINDOWS):
        first, last = count * window // _WINDOWS, count * (window + 1) // _WINDOWS
        now = (window + 0.5) / _WINDOWS
        closeness = (1 - (items.peak - now).abs() / _PEAK_WIDTH).clamp(min=0)
        # The mean of `closeness` over the stream is about _PEAK_WIDTH, so temporary and lasting popularity are equal.
        popularity = items.popularity * (1 - config.drift + config.drift * closeness / _PEAK_WIDTH)
        weights = integer_weights(config.draws.at(_NEW, 8 + window), popularity, scale=1.0)
        choice = WeightedChoice.of(weights, items.topic, config.topics)
        users = user[first:last]
        topic = torch.where(tastes.changes_at[users] <= now, tastes.second[users], tastes.first[users])
        liked = choice.draw(config.draws.at(_NEW), topic, first=first)
        other = choice.draw_any(config.draws.at(_NEW, 1), last - first, first=first)
        by_taste = config.draws.at(_NEW, 2).uniforms(last - first, first=first) < config.taste
        out[first:last] = torch.where(by_taste, liked, other)
    return out


def _repeat(config: EventsConfig, item: Tensor, *, order: Tensor, starts: Tensor) -> Tensor:
    """Give repeating events the item of the user's last event that does not repeat.

    ``order`` [events] sorts events by user, then time; user u has ``order[starts[u]:starts[u + 1]]``.
    """
    count = item.shape[0]
    repeats = (config.draws.at(_REPEAT).uniforms(count) < config.repeat)[order]
    repeats[starts[:-1][starts.diff() > 0]] = False
    source = torch.where(repeats, 0, torch.arange(count)).cummax(0).values
    out = torch.empty_like(item)
    out[order] = item[order][source]
    return out


def _times(config: EventsConfig) -> Tensor:
    """[events] int64, non-decreasing; gaps are integers, so their sum is exact."""
    draws, count = config.draws, config.events
    gap = 1 + (draws.at(_TIMES).exponentials(count) * (config.gap - 0.5)).long()
    tie = draws.at(_TIMES, 1).uniforms(count) < config.ties
    return torch.where(tie, 0, gap).cumsum(0)


def _users(config: EventsConfig, tastes: _Tastes, *, order: Tensor, starts: Tensor) -> Nodes:
    if not config.labels:
        return Nodes(count=config.users)
    active = starts.diff() > 0
    first_event = torch.full((config.users,), config.events, dtype=torch.int64)
    first_event[active] = order[starts[:-1][active]]
    rank = torch.empty_like(first_event)
    rank[torch.argsort(first_event, stable=True)] = torch.arange(config.users)
    return Nodes(
        count=config.users,
        y=torch.where(active, (tastes.changes_at <= 1).long(), -1),
        classes=("stays", "changes"),
        split=split_by_rank(rank, int(active.sum()), train=config.train, val=config.val),
    )
