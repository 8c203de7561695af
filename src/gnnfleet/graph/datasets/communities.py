"""A node classification graph: planted communities with power-law degrees and sizes.

The features of a node are weak evidence of its class, those of its neighbourhood strong evidence. Edges are drawn
between *positions*, which are ordered by community. Store ids are a random permutation of positions, so they carry no
locality. K communities, C classes, N nodes, F features.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.datasets.base import (
    MAX_COUNT,
    DatasetConfig,
    EdgeQuota,
    FeatureDtype,
    Pairs,
    draw_distinct,
    heavy_weights,
    split_at_random,
    store_edges,
)
from gnnfleet.graph.graph import EDGE, NODE, Graph, Nodes
from gnnfleet.io.bundle import DTYPES
from gnnfleet.ops.generate import WeightedChoice, normal_rows, normal_rows_around
from gnnfleet.report.progress import Progress

# Layers of the draws.
_SIZES, _DEGREES, _IDS, _INSIDE, _ACROSS, _SURPLUS, _CLASS, _COMMUNITY, _NOISE, _SPLIT = range(10)
_MIN_SIZE = 3  # nodes of a community
_NODES_PER_COMMUNITY = 200
_SIZE_LIMIT = 100.0  # ratio of the largest to the smallest community


class CommunitiesConfig(DatasetConfig):
    nodes: int = Field(10_000, ge=6, le=MAX_COUNT, description="number of nodes")
    mean_degree: float = Field(20.0, gt=0, description="stored edges per node; a pair of neighbours has two")
    edges: int | None = Field(None, ge=2, description="stored edges, instead of mean_degree")
    classes: int = Field(10, ge=1, description="number of classes; a class is a set of communities")
    communities: int | None = Field(None, ge=1, description="number of communities; by default one per 200 nodes")
    homophily: float = Field(
        0.8, ge=0, le=1, description="share of edges inside a community; the others connect different classes"
    )
    exponent: float = Field(2.6, gt=1.5, le=10, description="frequency of degree k is proportional to k^-exponent")
    hub: float = Field(1000.0, ge=1, description="ratio of the largest to the smallest expected degree")
    size_exponent: float = Field(2.5, gt=1.5, le=10, description="exponent of the sizes of communities")
    features: int = Field(64, ge=0, le=2**20, description="width of the node features; 0 for none")
    signal: float = Field(0.15, ge=0, description="strength of class and community in a feature; noise has 1")
    dtype: FeatureDtype = Field("float32", description="float32, float16 or bfloat16 features")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.edges is not None and "mean_degree" in self.model_fields_set:
            raise ValueError("edges and mean_degree exclude each other: set one")
        count = self.num_communities
        if count < self.classes:
            raise ValueError(
                f"communities must be at least as many as classes, found {count} for {self.classes} classes"
            )
        if self.nodes < _MIN_SIZE * count:
            raise ValueError(f"nodes must be at least {_MIN_SIZE} per community, found {self.nodes} for {count}")
        if self.classes == 1 and self.homophily < 1:
            raise ValueError("homophily must be 1 when classes is 1: there is no other class to connect")
        return self

    @property
    def num_communities(self) -> int:
        return self.communities or max(self.classes, self.nodes // _NODES_PER_COMMUNITY)

    @property
    def num_pairs(self) -> int:
        return (self.edges or round(self.nodes * self.mean_degree)) // 2


class _Positions(NamedTuple):
    """Nodes by community, before they get their ids."""

    bounds: Tensor  # [K + 1] int64: community k has positions bounds[k]:bounds[k + 1]
    community: Tensor  # [N] int32
    label: Tensor  # [N] int32
    slots: WeightedChoice


def make_communities(config: CommunitiesConfig, progress: Progress = Progress()) -> Graph:
    """Generate a symmetric graph without self-loops or repeated edges, with features, labels and a split."""
    advance = progress.stage("generate", 3)
    draws = config.draws
    positions = _lay_out(config)
    advance(1)
    src, dst = _draw_pairs(config, positions)
    ids = draws.at(_IDS).permutation(config.nodes)
    edges = store_edges(ids[src], ids[dst], nodes=config.nodes, symmetric=True)
    advance(1)
    community, y = torch.empty_like(positions.community), torch.empty(config.nodes, dtype=torch.int64)
    community[ids.long()] = positions.community
    y[ids.long()] = positions.label.long()
    nodes = Nodes(
        count=config.nodes,
        x=_features(config, community) if config.features else None,
        y=y,
        split=split_at_random(draws.at(_SPLIT), config.nodes, train=config.train, val=config.val),
    )
    advance(1)
    return Graph.of({NODE: nodes}, {EDGE: edges}, name="communities", undirected=True)


def _lay_out(config: CommunitiesConfig) -> _Positions:
    count, nodes = config.num_communities, config.nodes
    shares = heavy_weights(config.draws.at(_SIZES), count, exponent=config.size_exponent, limit=_SIZE_LIMIT).cumsum(0)
    bounds = torch.zeros(count + 1, dtype=torch.int64)
    bounds[1:] = _MIN_SIZE * torch.arange(1, count + 1) + shares * (nodes - _MIN_SIZE * count) // shares[-1]
    community = torch.repeat_interleave(torch.arange(count, dtype=torch.int32), bounds.diff(), output_size=nodes)
    weights = heavy_weights(config.draws.at(_DEGREES), nodes, exponent=config.exponent, limit=config.hub)
    slots = WeightedChoice.of(weights, community, count)
    return _Positions(bounds, community, community % config.classes, slots)


def _draw_pairs(config: CommunitiesConfig, positions: _Positions) -> Pairs:
    inside = round(config.homophily * config.num_pairs)
    sizes = positions.bounds.diff()
    limit = int((sizes * (sizes - 1) // 2).sum())
    if inside > limit:
        raise ConfigError(
            f"communities have room for {2 * limit:,} edges inside, but the parameters need {2 * inside:,}: "
            "set fewer edges, fewer communities or less homophily"
        )

    def draw_inside(first: int, count: int) -> Pairs:
        draws = config.draws.at(_INSIDE)
        src = positions.slots.draw_any(draws, count, first=first)
        return src, positions.slots.draw(draws.at(_INSIDE, 1), positions.community[src], first=first)

    def draw_across(first: int, count: int) -> Pairs:
        src = positions.slots.draw_any(config.draws.at(_ACROSS), count, first=first)
        dst = positions.slots.draw_any(config.draws.at(_ACROSS, 1), count, first=first)
        differ = positions.label[src] != positions.label[dst]
        return src[differ], dst[differ]

    def quota_of(src: Tensor, dst: Tensor) -> Tensor:
        return (positions.community[src] != positions.community[dst]).to(torch.int8)

    quotas = [
        EdgeQuota("edges inside communities", inside, draw_inside),
        EdgeQuota("edges across classes", config.num_pairs - inside, draw_across),
    ]
    return draw_distinct(quotas, config.draws.at(_SURPLUS), quota_of=quota_of, nodes=config.nodes, directed=False)


def _features(config: CommunitiesConfig, community: Tensor) -> Tensor:
    """[N, F]: half the variance of a community's centre is its class's, so a class is recognisable by itself."""
    draws = config.draws
    class_centres = normal_rows(draws.at(_CLASS), config.classes, config.features)
    centres = normal_rows(draws.at(_COMMUNITY), config.num_communities, config.features)
    centres = (centres + class_centres[torch.arange(config.num_communities) % config.classes]) * 0.5**0.5
    return normal_rows_around(draws.at(_NOISE), centres, community, scale=config.signal, dtype=DTYPES[config.dtype][0])
