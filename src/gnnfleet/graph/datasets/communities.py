"""Communities: the usual node classification graph. Power-law degrees, planted communities of power-law sizes, features
that tell a node's class faintly and its neighbourhood's class well.

Nodes live at *places* ordered by community while edges are drawn; store ids are a random permutation of places, so ids
carry no locality. K communities, C classes, N nodes, F features.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.datasets.base import (
    MAX_COUNT,
    TORCH_DTYPES,
    FeatureDtype,
    SplitConfig,
    heavy_weights,
    split_at_random,
)
from gnnfleet.graph.datasets.distinct import EdgeQuota, Pairs, draw_distinct, store_edges
from gnnfleet.graph.graph import EDGE, NODE, Graph, Nodes
from gnnfleet.ops.draws import Draws
from gnnfleet.ops.generate import WeightedChoice, normal_rows, normal_rows_around
from gnnfleet.report.progress import NoProgress, Progress

# One family of draws each.
_SIZES, _DEGREES, _IDS, _INSIDE, _ACROSS, _SURPLUS, _CLASS, _COMMUNITY, _NOISE, _SPLIT = range(10)
_SMALLEST = 3  # nodes of a community
_NODES_PER_COMMUNITY = 200
_SIZE_LIMIT = 100.0  # largest community over the smallest


class CommunitiesConfig(SplitConfig):
    """Parameters of ``communities``."""

    nodes: int = Field(10_000, ge=6, le=MAX_COUNT, description="number of nodes")
    mean_degree: float = Field(20.0, gt=0, description="stored edges per node; each pair of neighbours has two")
    edges: int | None = Field(None, ge=2, description="stored edges, in place of mean_degree")
    classes: int = Field(10, ge=1, description="number of classes; a class is a set of communities")
    communities: int | None = Field(None, ge=1, description="number of communities; one per 200 nodes unless given")
    homophily: float = Field(
        0.8, ge=0, le=1, description="share of edges inside a community; the others join different classes"
    )
    exponent: float = Field(2.6, gt=1.5, le=10, description="degrees k are as frequent as k^-exponent")
    hub: float = Field(1000.0, ge=1, description="largest expected degree over the smallest")
    size_exponent: float = Field(2.5, gt=1.5, le=10, description="the same law for the sizes of communities")
    features: int = Field(64, ge=0, le=2**20, description="width of the node features; 0 for none")
    signal: float = Field(0.15, ge=0, description="strength of class and community in a feature, against noise of 1")
    dtype: FeatureDtype = Field("float32", description="float32, float16 or bfloat16 features")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.edges is not None and "mean_degree" in self.model_fields_set:
            raise ValueError("edges and mean_degree say the same thing: give one")
        count = self.num_communities
        if count < self.classes:
            raise ValueError(f"communities must be at least classes, found {count} for {self.classes} classes")
        if self.nodes < _SMALLEST * count:
            raise ValueError(f"nodes must be at least {_SMALLEST} per community, found {self.nodes} for {count}")
        if self.classes == 1 and self.homophily < 1:
            raise ValueError("homophily must be 1 when classes is 1: there is no other class to join")
        return self

    @property
    def num_communities(self) -> int:
        return self.communities or max(self.classes, self.nodes // _NODES_PER_COMMUNITY)

    @property
    def num_pairs(self) -> int:
        return (self.edges or round(self.nodes * self.mean_degree)) // 2


class _Places(NamedTuple):
    """Nodes before they get their ids, ordered by community."""

    bounds: Tensor  # [K + 1] int64: community k owns places bounds[k]:bounds[k + 1]
    community: Tensor  # [N] int32
    label: Tensor  # [N] int32
    slots: WeightedChoice


def make_communities(config: CommunitiesConfig, progress: Progress = NoProgress()) -> Graph:
    """A symmetric graph without self-loops or repeated edges, with features, labels and a split."""
    advance = progress.stage("generate", 3)
    draws = config.draws
    places = _lay_out(config)
    advance(1)
    src, dst = _draw_pairs(config, places)
    ids = draws.at(_IDS).permutation(config.nodes)
    edges = store_edges(ids[src], ids[dst], nodes=config.nodes, both=True)
    advance(1)
    community, y = torch.empty_like(places.community), torch.empty(config.nodes, dtype=torch.int64)
    community[ids.long()] = places.community
    y[ids.long()] = places.label.long()
    nodes = Nodes(
        count=config.nodes,
        x=_features(config, community) if config.features else None,
        y=y,
        split=split_at_random(draws.at(_SPLIT), config.nodes, train=config.train, val=config.val),
    )
    advance(1)
    return Graph.of({NODE: nodes}, {EDGE: edges}, name="communities", undirected=True)


def _lay_out(config: CommunitiesConfig) -> _Places:
    count, nodes = config.num_communities, config.nodes
    shares = heavy_weights(config.draws.at(_SIZES), count, exponent=config.size_exponent, limit=_SIZE_LIMIT).cumsum(0)
    bounds = torch.zeros(count + 1, dtype=torch.int64)
    bounds[1:] = _SMALLEST * torch.arange(1, count + 1) + shares * (nodes - _SMALLEST * count) // shares[-1]
    community = torch.repeat_interleave(torch.arange(count, dtype=torch.int32), bounds.diff(), output_size=nodes)
    weights = heavy_weights(config.draws.at(_DEGREES), nodes, exponent=config.exponent, limit=config.hub)
    slots = WeightedChoice.of(weights)
    ends = torch.zeros(nodes + 1, dtype=torch.int64)
    ends[1:] = weights.cumsum(0)
    return _Places(bounds, community, community % config.classes, WeightedChoice(slots.table, ends[bounds]))


def _draw_pairs(config: CommunitiesConfig, places: _Places) -> Pairs:
    inside = round(config.homophily * config.num_pairs)
    sizes = places.bounds.diff()
    room = int((sizes * (sizes - 1) // 2).sum())
    if inside > room:
        raise ConfigError(
            f"communities have room for {2 * room:,} edges inside, {2 * inside:,} wanted: "
            "ask for fewer edges, fewer communities or less homophily"
        )

    def draw_inside(first: int, count: int) -> Pairs:
        draws = config.draws.at(_INSIDE)
        src = places.slots.draw_any(draws, count, first=first)
        return src, places.slots.draw(draws.at(_INSIDE, 1), places.community[src], first=first)

    def draw_across(first: int, count: int) -> Pairs:
        src = places.slots.draw_any(config.draws.at(_ACROSS), count, first=first)
        dst = places.slots.draw_any(config.draws.at(_ACROSS, 1), count, first=first)
        differ = places.label[src] != places.label[dst]
        return src[differ], dst[differ]

    def kind(src: Tensor, dst: Tensor) -> Tensor:
        return (places.community[src] != places.community[dst]).to(torch.int8)

    quotas = [
        EdgeQuota("edges inside communities", inside, draw_inside),
        EdgeQuota("edges across classes", config.num_pairs - inside, draw_across),
    ]
    return draw_distinct(quotas, config.draws.at(_SURPLUS), kind=kind, nodes=config.nodes, directed=False)


def _features(config: CommunitiesConfig, community: Tensor) -> Tensor:
    """Half of a centre's variance is the class's, so that the class shows without knowing its communities."""
    draws: Draws = config.draws
    of_class = normal_rows(draws.at(_CLASS), config.classes, config.features)
    centres = normal_rows(draws.at(_COMMUNITY), config.num_communities, config.features)
    centres = (centres + of_class[torch.arange(config.num_communities) % config.classes]) * 0.5**0.5
    return normal_rows_around(
        draws.at(_NOISE), centres, community, scale=config.signal, dtype=TORCH_DTYPES[config.dtype]
    )
