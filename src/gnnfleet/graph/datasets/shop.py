"""A heterogeneous graph: users buy and view products, brands make them; the category of a product is its class.

Users have a favourite category, brands a home category, products a popularity. Ids are strings (``product-000123``).
Brands have no features. Edges ``buys`` have times; the weights of ``views`` are numbers of views.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from gnnfleet.graph.datasets.base import (
    MAX_COUNT,
    DatasetConfig,
    FeatureDtype,
    heavy_weights,
    prefixed_ids,
    split_at_random,
)
from gnnfleet.graph.graph import Edges, EdgeType, Graph, Nodes, validated_edges
from gnnfleet.io.bundle import DTYPES
from gnnfleet.ops import csr
from gnnfleet.ops.generate import WeightedChoice, normal_rows, normal_rows_around
from gnnfleet.report.progress import Progress

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


class ShopConfig(DatasetConfig):
    users: int = Field(10_000, ge=1, le=MAX_COUNT, description="number of users")
    products: int = Field(2_000, ge=1, le=MAX_COUNT, description="number of products")
    brands: int = Field(100, ge=1, le=MAX_COUNT, description="number of brands")
    categories: int = Field(8, ge=1, le=MAX_COUNT, description="number of categories: the classes")
    buys: int = Field(50_000, ge=0, description="edges user:buys:product; a user may buy a product several times")
    views: int = Field(
        150_000, ge=0, description="number of views; views of the same pair become one edge with a weight"
    )
    taste: float = Field(0.7, ge=0, le=1, description="share of buys in the user's favourite category; of views, half")
    loyalty: float = Field(0.8, ge=0, le=1, description="share of products whose brand has the same home category")
    exponent: float = Field(
        2.2, gt=1.5, le=10, description="frequency of activity or popularity k is proportional to k^-exponent"
    )
    features: int = Field(32, ge=0, le=2**20, description="width of the products' features; 0 for none")
    user_features: int = Field(0, ge=0, le=2**20, description="width of the users' features; 0 for none")
    signal: float = Field(0.2, ge=0, description="strength of the category in a feature; noise has 1")
    dtype: FeatureDtype = Field("float32", description="float32, float16 or bfloat16 features")
    labels: Literal["products", "users", "both"] = Field(
        "products", description="labelled types: products by category, users by favourite category"
    )
    reverse: bool = Field(True, description="add bought_by, viewed_by and makes")
    days: int = Field(365, ge=1, le=2**31, description="days that the buys cover; times are in seconds")


class _Choices(NamedTuple):
    favourite: Tensor  # [users] int32
    products: WeightedChoice  # in groups by category
    users: WeightedChoice


def make_shop(config: ShopConfig, progress: Progress = Progress()) -> Graph:
    """Generate three node types and three edge types, or six with their reverses."""
    advance = progress.stage("generate", 3)
    draws = config.draws
    category = (draws.at(_CATEGORY).uniforms(config.products) * config.categories).to(torch.int32)
    favourite = (draws.at(_TASTE).uniforms(config.users) * config.categories).to(torch.int32)
    popularity = heavy_weights(draws.at(_POPULARITY), config.products, exponent=config.exponent, limit=_HUB)
    activity = heavy_weights(draws.at(_ACTIVITY), config.users, exponent=config.exponent, limit=_HUB)
    products = WeightedChoice.of(popularity, category, config.categories)
    choices = _Choices(favourite, products, WeightedChoice.of(activity))
    advance(1)
    sizes = {USER: config.users, PRODUCT: config.products, BRAND: config.brands}
    edges: dict[EdgeType, Edges] = {}
    for kind, (src, dst), data in (_buys(config, choices), _views(config, choices), _makers(config, category)):
        edges[kind] = validated_edges(torch.stack([src, dst]), num_src=sizes[kind.src], num_dst=sizes[kind.dst], **data)
        if config.reverse:
            pairs = torch.stack([dst, src])
            edges[REVERSE[kind]] = validated_edges(pairs, num_src=sizes[kind.dst], num_dst=sizes[kind.src], **data)
    advance(1)
    nodes = {
        USER: _labelled_nodes(config, USER, favourite, width=config.user_features, layer=_USERS),
        PRODUCT: _labelled_nodes(config, PRODUCT, category, width=config.features, layer=_PRODUCTS),
        BRAND: Nodes(count=config.brands, ids=prefixed_ids(BRAND, config.brands)),
    }
    advance(1)
    return Graph.of(nodes, edges, name="shop")


_Relation = tuple[EdgeType, tuple[Tensor, Tensor], dict[str, Any]]


def _choose(config: ShopConfig, choices: _Choices, layer: int, count: int) -> tuple[Tensor, Tensor]:
    """Draw users by activity, and for each a product by popularity, of the favourite category or of any."""
    draws = config.draws
    user = choices.users.draw_any(draws.at(layer), count)
    from_favourite = draws.at(layer, 1).uniforms(count) < (config.taste if layer == _BUYS else config.taste / 2)
    liked = choices.products.draw(draws.at(layer, 2), choices.favourite[user])
    other = choices.products.draw_any(draws.at(layer, 3), count)
    # A category of a small shop may have no product.
    return user, torch.where(from_favourite & (liked >= 0), liked, other)


def _buys(config: ShopConfig, choices: _Choices) -> _Relation:
    time = (config.draws.at(_TIMES).uniforms(config.buys) * (config.days * _DAY)).long()
    return BUYS, _choose(config, choices, _BUYS, config.buys), {"time": time}


def _views(config: ShopConfig, choices: _Choices) -> _Relation:
    user, product = _choose(config, choices, _VIEWS, config.views)
    indptr, src, repeats = csr.distinct_edges(user, product, num_src=config.users, num_dst=config.products)
    return VIEWS, (src, Edges(indptr=indptr, src=src).dst()), {"weight": repeats.to(torch.float32)}


def _makers(config: ShopConfig, category: Tensor) -> _Relation:
    draws, count = config.draws, config.products
    weights = heavy_weights(draws.at(_MAKER), config.brands, exponent=config.exponent, limit=_HUB)
    home = torch.arange(config.brands, dtype=torch.int32) % config.categories
    makers = WeightedChoice.of(weights, home, config.categories)
    loyal = makers.draw(draws.at(_MAKER, 2), category)
    other = makers.draw_any(draws.at(_MAKER, 3), count)
    brand = torch.where((draws.at(_MAKER, 4).uniforms(count) < config.loyalty) & (loyal >= 0), loyal, other)
    return MADE_BY, (torch.arange(count, dtype=torch.int32), brand), {}


def _labelled_nodes(config: ShopConfig, kind: str, category: Tensor, *, width: int, layer: int) -> Nodes:
    draws, count = config.draws, category.shape[0]
    nodes = Nodes(count=count, ids=prefixed_ids(kind, count))
    if width:
        centres = normal_rows(draws.at(_CENTRES, layer), config.categories, width)
        dtype = DTYPES[config.dtype][0]
        x = normal_rows_around(draws.at(layer), centres, category, scale=config.signal, dtype=dtype)
        nodes = replace(nodes, x=x)
    if config.labels in (f"{kind}s", "both"):
        classes = tuple(f"category-{i}" for i in range(config.categories))
        split = split_at_random(draws.at(_SPLIT, layer), count, train=config.train, val=config.val)
        nodes = replace(nodes, y=category.long(), classes=classes, split=split)
    return nodes
