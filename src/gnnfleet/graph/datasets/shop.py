"""Shop: a heterogeneous graph. Users buy and view products, brands make them; a product's category is its class.

Users have a favourite category, brands a home category, products a popularity. Ids are strings (``product-000123``),
brands have no features, buys have times, views have weights (how often).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from gnnfleet.graph.datasets.base import (
    MAX_COUNT,
    TORCH_DTYPES,
    FeatureDtype,
    SplitConfig,
    heavy_weights,
    prefixed_ids,
    split_at_random,
)
from gnnfleet.graph.graph import Edges, EdgeType, Graph, Nodes, validated_edges
from gnnfleet.ops import csr
from gnnfleet.ops.generate import WeightedChoice, normal_rows, normal_rows_around
from gnnfleet.report.progress import NoProgress, Progress

USER, PRODUCT, BRAND = "user", "product", "brand"
BUYS, VIEWS, MADE_BY = (
    EdgeType(USER, "buys", PRODUCT),
    EdgeType(USER, "views", PRODUCT),
    EdgeType(PRODUCT, "made_by", BRAND),
)
REVERSE = {
    BUYS: EdgeType(PRODUCT, "bought_by", USER),
    VIEWS: EdgeType(PRODUCT, "viewed_by", USER),
    MADE_BY: EdgeType(BRAND, "makes", PRODUCT),
}

_CATEGORY, _TASTE, _ACTIVITY, _POPULARITY, _MAKER, _BUYS, _VIEWS, _TIMES, _CENTRES, _PRODUCTS, _USERS, _SPLIT = range(
    12
)
_DAY = 86_400
_HUB = 1000.0


class ShopConfig(SplitConfig):
    """Parameters of ``shop``."""

    users: int = Field(10_000, ge=1, le=MAX_COUNT, description="number of users")
    products: int = Field(2_000, ge=1, le=MAX_COUNT, description="number of products")
    brands: int = Field(100, ge=1, le=MAX_COUNT, description="number of brands")
    categories: int = Field(8, ge=1, le=MAX_COUNT, description="number of categories: the classes")
    buys: int = Field(50_000, ge=0, description="edges user:buys:product; the same user may buy a product again")
    views: int = Field(
        150_000, ge=0, description="views; edges user:views:product are fewer, each with its number of views"
    )
    taste: float = Field(
        0.7, ge=0, le=1, description="share of buys in the user's favourite category; views half as faithful"
    )
    loyalty: float = Field(0.8, ge=0, le=1, description="share of products whose brand is at home in their category")
    exponent: float = Field(2.2, gt=1.5, le=10, description="activity and popularity k are as frequent as k^-exponent")
    features: int = Field(32, ge=0, le=2**20, description="width of the products' features; 0 for none")
    user_features: int = Field(0, ge=0, le=2**20, description="width of the users' features; 0 for none")
    signal: float = Field(0.2, ge=0, description="strength of the category in a feature, against noise of 1")
    dtype: FeatureDtype = Field("float32", description="float32, float16 or bfloat16 features")
    labels: Literal["products", "users", "both"] = Field(
        "products", description="who is classified: products by category, users by favourite category, or both"
    )
    reverse: bool = Field(True, description="add bought_by, viewed_by and makes")
    days: int = Field(365, ge=1, le=2**31, description="buys fall into so many days; times are seconds")


class _Types(NamedTuple):
    category: Tensor  # [products] int32
    favourite: Tensor  # [users] int32
    shelf: WeightedChoice  # products by category
    visits: WeightedChoice  # users by activity


def make_shop(config: ShopConfig, progress: Progress = NoProgress()) -> Graph:
    """Three node types; three edge types, or six with their reverses."""
    advance = progress.stage("generate", 3)
    draws = config.draws
    category = (draws.at(_CATEGORY).uniforms(config.products) * config.categories).to(torch.int32)
    favourite = (draws.at(_TASTE).uniforms(config.users) * config.categories).to(torch.int32)
    popularity = heavy_weights(draws.at(_POPULARITY), config.products, exponent=config.exponent, limit=_HUB)
    activity = heavy_weights(draws.at(_ACTIVITY), config.users, exponent=config.exponent, limit=_HUB)
    types = _Types(
        category, favourite, WeightedChoice.of(popularity, category, config.categories), WeightedChoice.of(activity)
    )
    advance(1)
    edges: dict[EdgeType, Edges] = {}
    for kind, (src, dst), data in (_buys(config, types), _views(config, types), _makers(config, types)):
        sizes = {USER: config.users, PRODUCT: config.products, BRAND: config.brands}
        edges[kind] = validated_edges(torch.stack([src, dst]), num_src=sizes[kind.src], num_dst=sizes[kind.dst], **data)
        if config.reverse:
            back = torch.stack([dst, src])
            edges[REVERSE[kind]] = validated_edges(back, num_src=sizes[kind.dst], num_dst=sizes[kind.src], **data)
    advance(1)
    nodes = _nodes(config, types)
    advance(1)
    return Graph.of(nodes, edges, name="shop")


_Relation = tuple[EdgeType, tuple[Tensor, Tensor], dict[str, Any]]


def _choose(config: ShopConfig, types: _Types, layer: int, count: int) -> tuple[Tensor, Tensor]:
    """A user by activity, then a product by popularity: from the favourite category, or from anywhere."""
    draws = config.draws
    user = types.visits.draw_any(draws.at(layer), count)
    faithful = config.taste if layer == _BUYS else config.taste / 2
    at_home = draws.at(layer, 1).uniforms(count) < faithful
    liked = types.shelf.draw(draws.at(layer, 2), types.favourite[user])
    anything = types.shelf.draw_any(draws.at(layer, 3), count)
    # A small shop may have no product in somebody's favourite category.
    return user, torch.where(at_home & (liked >= 0), liked, anything)


def _buys(config: ShopConfig, types: _Types) -> _Relation:
    time = (config.draws.at(_TIMES).uniforms(config.buys) * (config.days * _DAY)).long()
    return BUYS, _choose(config, types, _BUYS, config.buys), {"time": time}


def _views(config: ShopConfig, types: _Types) -> _Relation:
    user, product = _choose(config, types, _VIEWS, config.views)
    indptr, src, times = csr.distinct_edges(user, product, num_src=config.users, num_dst=config.products)
    return VIEWS, (src, Edges(indptr=indptr, src=src).dst()), {"weight": times.to(torch.float32)}


def _makers(config: ShopConfig, types: _Types) -> _Relation:
    draws, count = config.draws, config.products
    weights = heavy_weights(draws.at(_MAKER), config.brands, exponent=config.exponent, limit=_HUB)
    home = torch.arange(config.brands, dtype=torch.int32) % config.categories
    makers = WeightedChoice.of(weights, home, config.categories)
    loyal = makers.draw(draws.at(_MAKER, 2), types.category)
    anyone = makers.draw_any(draws.at(_MAKER, 3), count)
    brand = torch.where((draws.at(_MAKER, 4).uniforms(count) < config.loyalty) & (loyal >= 0), loyal, anyone)
    return MADE_BY, (torch.arange(count, dtype=torch.int32), brand), {}


def _nodes(config: ShopConfig, types: _Types) -> dict[str, Nodes]:
    def labelled(kind: str, category: Tensor, *, width: int, layer: int) -> Nodes:
        draws, count, x = config.draws, category.shape[0], None
        if width:
            centres = normal_rows(draws.at(_CENTRES, layer), config.categories, width)
            x = normal_rows_around(
                draws.at(layer), centres, category, scale=config.signal, dtype=TORCH_DTYPES[config.dtype]
            )
        has_labels = config.labels in (f"{kind}s", "both")
        split = split_at_random(draws.at(_SPLIT, layer), count, train=config.train, val=config.val)
        return Nodes(
            count=count,
            x=x,
            y=category.long() if has_labels else None,
            classes=tuple(f"category-{i}" for i in range(config.categories)) if has_labels else (),
            split=split if has_labels else None,
            ids=prefixed_ids(kind, count),
        )

    return {
        USER: labelled(USER, types.favourite, width=config.user_features, layer=_USERS),
        PRODUCT: labelled(PRODUCT, types.category, width=config.features, layer=_PRODUCTS),
        BRAND: Nodes(count=config.brands, ids=prefixed_ids(BRAND, config.brands)),
    }
