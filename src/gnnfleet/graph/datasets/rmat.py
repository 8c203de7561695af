"""R-MAT, a recursive matrix as in Graph500: very skewed degrees, hardly any communities, permuted ids."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from gnnfleet.graph.datasets.base import (
    MAX_COUNT,
    DatasetConfig,
    EdgeQuota,
    FeatureDtype,
    Pairs,
    draw_distinct,
    split_at_random,
    store_edges,
)
from gnnfleet.graph.graph import EDGE, NODE, Graph, Nodes
from gnnfleet.io.bundle import DTYPES
from gnnfleet.ops.generate import normal_rows, rmat
from gnnfleet.report.progress import Progress

_EDGES, _IDS, _SURPLUS, _FEATURES, _LABELS, _SPLIT = range(6)


class RmatConfig(DatasetConfig):
    scale: int = Field(14, ge=1, le=30, description="2^scale nodes")
    edge_factor: float = Field(16.0, gt=0, description="stored edges per node")
    nodes: int | None = Field(None, ge=2, le=MAX_COUNT, description="number of nodes, instead of scale")
    edges: int | None = Field(None, ge=1, description="stored edges, instead of edge_factor")
    a: float = Field(0.57, ge=0, le=1, description="share of edges with low sources and low destinations")
    b: float = Field(0.19, ge=0, le=1, description="share of edges with low sources and high destinations")
    c: float = Field(0.19, ge=0, le=1, description="share with high sources and low destinations; d is 1 - a - b - c")
    symmetric: bool = Field(False, description="store both directions of every edge")
    repeats: bool = Field(False, description="keep self-loops and repeated edges, as Graph500 does")
    features: int = Field(0, ge=0, le=2**20, description="width of random node features; 0 for none")
    dtype: FeatureDtype = Field("float32", description="float32, float16 or bfloat16 features")
    classes: int = Field(0, ge=0, description="number of random classes; 0 for no labels and no split")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for size, default in (("nodes", "scale"), ("edges", "edge_factor")):
            if getattr(self, size) is not None and default in self.model_fields_set:
                raise ValueError(f"{size} and {default} exclude each other: set one")
        if self.a + self.b + self.c > 1 + 1e-9:
            raise ValueError(f"a + b + c must be at most 1, found {self.a} + {self.b} + {self.c}")
        return self

    @property
    def num_nodes(self) -> int:
        return self.nodes or 2**self.scale

    @property
    def num_edges(self) -> int:
        return self.edges or round(self.num_nodes * self.edge_factor)


def make_rmat(config: RmatConfig, progress: Progress = Progress()) -> Graph:
    """Generate a directed or symmetric graph; its features and labels are independent of the edges."""
    advance = progress.stage("generate", 2)
    draws, count = config.draws, config.num_nodes
    src, dst = _draw_pairs(config)
    ids = draws.at(_IDS).permutation(count)
    edges = store_edges(ids[src], ids[dst], nodes=count, symmetric=config.symmetric)
    advance(1)
    x = y = split = None
    if config.features:
        x = normal_rows(draws.at(_FEATURES), count, config.features, dtype=DTYPES[config.dtype][0])
    if config.classes:
        y = (draws.at(_LABELS).uniforms(count) * config.classes).long()
        split = split_at_random(draws.at(_SPLIT), count, train=config.train, val=config.val)
    advance(1)
    nodes = Nodes(count=count, x=x, y=y, split=split)
    return Graph.of({NODE: nodes}, {EDGE: edges}, name="rmat", undirected=config.symmetric)


def _draw_pairs(config: RmatConfig) -> Pairs:
    quadrants = (config.a, config.b, config.c, max(0.0, 1 - config.a - config.b - config.c))
    count = config.num_edges // 2 if config.symmetric else config.num_edges

    def draw(first: int, count: int) -> Pairs:
        return rmat(config.draws.at(_EDGES), count, nodes=config.num_nodes, quadrants=quadrants, first=first)

    if config.repeats:
        return draw(0, count)
    quota = EdgeQuota("edges", count, draw)
    return draw_distinct([quota], config.draws.at(_SURPLUS), nodes=config.num_nodes, directed=not config.symmetric)
