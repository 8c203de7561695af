"""pipe: one chunk for every way equals local; with several, what is not exact is exactly what the rule says."""

from __future__ import annotations

from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.graph.chunks import Layout, lay_out
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.local import LocalView
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.nn.config import make_config
from gnnfleet.nn.model import GNN, build_model
from gnnfleet.ops.draws import DrawKey
from gnnfleet.run.build import Here, build
from gnnfleet.run.config import resolve
from gnnfleet.sharded.chunk import ChunkView
from gnnfleet.sharded.mirrors import Mirrors
from gnnfleet.sharded.stream import Gradient, Stream, Turn
from gnnfleet.sharded.way import Way, slots_of
from gnnfleet.strategies.pipe.plan import Candidate, volume
from gnnfleet.strategies.pipe.strategy import PipeStrategy
from tests.equivalence.spread import plain_graph, related_graph
from tests.equivalence.test_sar import MODELS, close, trained, words
from tests.ranks import Crew

GRAPHS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "plain": (plain_graph, MODELS),
    "related": (related_graph, [{"name": "rgcn", "bases": 1}]),
}
KEY = DrawKey(1, 2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores")
    for name, (make, _) in GRAPHS.items():
        save_store(make(), path / name)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [trained(open_store(folder / name), words(model, name="local", order="store")) for model in models]
        for name, (_, models) in GRAPHS.items()
    }


def chunked(graph: Graph, world: World, ways: int, chunks: int, method: str = "mincut") -> Here:
    return Here(world, layouts=[lay_out(graph, ways, chunks, method=method)])


def every_model(world: World, store: str, name: str, ways: int, method: str) -> list[dict[str, Any]]:
    graph = open_store(store)
    found = []
    for model in GRAPHS[name][1]:
        tree = words(model, name="pipe", ways=ways, chunks=ways) | {"workers": world.size}
        found.append(trained(graph, tree, chunked(graph, world, ways, ways, method)))
    return found


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(
    ("size", "ways", "method"),
    [(1, 1, "mincut"), (2, 1, "mincut"), (2, 2, "random"), (3, 1, "mincut"), (3, 3, "mincut"), (4, 2, "random")],
)
def test_one_chunk_for_every_way_equals_local(
    crew: Crew, folder: Path, expected: dict[str, Any], name: str, size: int, ways: int, method: str
) -> None:
    found = crew.run(size, every_model, str(folder / name), name, ways, method)
    for place, model in enumerate(GRAPHS[name][1]):
        for rank in range(size):
            for word in ("losses", "metrics", "test", "weights"):
                close(found[rank][place][word], expected[name][place][word], f"{model} rank {rank} {word}")
        for word in ("logits", "embeddings"):
            close(found[0][place][word], expected[name][place][word], f"{model} {word}")
