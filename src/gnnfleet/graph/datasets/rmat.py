"""R-MAT: a recursive matrix as in Graph500, for scale. Very skewed degrees, hardly any communities, ids scrambled."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
from torch import Tensor

from gnnfleet.graph.datasets.base import MAX_COUNT, TORCH_DTYPES, FeatureDtype, SplitConfig, split_at_random
from gnnfleet.graph.datasets.distinct import EdgeQuota, Pairs, draw_distinct, single_quota, store_edges
from gnnfleet.graph.graph import EDGE, NODE, Graph, Nodes
from gnnfleet.ops.generate import normal_rows, rmat
from gnnfleet.report.progress import NoProgress, Progress

_EDGES, _IDS, _SURPLUS, _FEATURES, _LABELS, _SPLIT = range(6)


class RmatConfig(SplitConfig):
    """Parameters of ``rmat``."""

    scale: int = Field(14, ge=1, le=30, description="2^scale nodes")
    edge_factor: float = Field(16.0, gt=0, description="stored edges per node")
    nodes: int | None = Field(None, ge=2, le=MAX_COUNT, description="number of nodes, in place of scale")
    edges: int | None = Field(None, ge=1, description="stored edges, in place of edge_factor")
    a: float = Field(0.57, ge=0, le=1, description="share of the quadrant of low sources and low destinations")
    b: float = Field(0.19, ge=0, le=1, description="share of low sources, high destinations")
    c: float = Field(
        0.19, ge=0, le=1, description="share of high sources, low destinations; the rest is the fourth quadrant's"
    )
    symmetric: bool = Field(False, description="store both directions of every edge")
    repeats: bool = Field(False, description="keep self-loops and repeated edges, as Graph500 does")
    features: int = Field(0, ge=0, le=2**20, description="width of random node features; 0 for none")
    dtype: FeatureDtype = Field("float32", description="float32, float16 or bfloat16 features")
    classes: int = Field(0, ge=0, description="number of classes, drawn at random; 0 for no labels and no split")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for one, other in (("nodes", "scale"), ("edges", "edge_factor")):
            if getattr(self, one) is not None and other in self.model_fields_set:
                raise ValueError(f"{one} and {other} say the same thing: give one")
        if self.a + self.b + self.c > 1 + 1e-9:
            raise ValueError(f"a + b + c must be at most 1, found {self.a} + {self.b} + {self.c}")
        return self

    @property
    def num_nodes(self) -> int:
        return self.nodes or 2**self.scale

    @property
    def num_edges(self) -> int:
        return self.edges or round(self.num_nodes * self.edge_factor)


def make_rmat(config: RmatConfig, progress: Progress = NoProgress()) -> Graph:
    """A directed or symmetric graph; features and labels, if asked for, know nothing of the edges."""
    advance = progress.stage("generate", 2)
    draws, count = config.draws, config.num_nodes
    src, dst = _draw_pairs(config)
    ids = draws.at(_IDS).permutation(count)
    edges = store_edges(ids[src], ids[dst], nodes=count, both=config.symmetric)
    advance(1)
    y: Tensor | None = None
    split: Tensor | None = None
    if config.classes:
        y = (draws.at(_LABELS).uniforms(count) * config.classes).long()
        split = split_at_random(draws.at(_SPLIT), count, train=config.train, val=config.val)
    x = (
        normal_rows(draws.at(_FEATURES), count, config.features, dtype=TORCH_DTYPES[config.dtype])
        if config.features
        else None
    )
    advance(1)
    nodes = Nodes(count=count, x=x, y=y, split=split)
    return Graph.of({NODE: nodes}, {EDGE: edges}, name="rmat", undirected=config.symmetric)


def _draw_pairs(config: RmatConfig) -> Pairs:
    quadrants = (config.a, config.b, config.c, max(0.0, 1 - config.a - config.b - config.c))
    wanted = config.num_edges // 2 if config.symmetric else config.num_edges

    def draw(first: int, count: int) -> Pairs:
        return rmat(config.draws.at(_EDGES), count, nodes=config.num_nodes, quadrants=quadrants, first=first)

    if config.repeats:
        return draw(0, wanted)
    directed = not config.symmetric
    quota = EdgeQuota("edges", wanted, draw)
    return draw_distinct(
        [quota], config.draws.at(_SURPLUS), kind=single_quota, nodes=config.num_nodes, directed=directed
    )
