"""Runs of pipe that several test files share."""

from __future__ import annotations

from typing import Any

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.graph.partition.chunk_layout import build_chunk_layout
from gnnfleet.graph.store import open_store
from gnnfleet.strategies.protocol import State, Strategy
from gnnfleet.training.build import RankContext, build


def pipe(store: str, world: World, *, chunks: int = 4, ways: int = 1, method: str = "mincut", **words: Any) -> Strategy:
    graph = open_store(store)
    knobs = {"name": "pipe", "graph_parallel": ways, "chunks": chunks, **words.pop("strategy", {})}
    tree = {
        "strategy": knobs,
        "model": {"name": "gcn2", "hidden": 8, "layers": 6, **words.pop("model", {})},
        "workers": world.size,
        "train": {"lr": 0.01},
        "seed": 3,
    }
    here = RankContext(
        world,
        layouts=[build_chunk_layout(graph, ways, chunks, method=method)],
        log_user=words.pop("say", lambda text: None),
    )
    return build(graph, resolve(tree | words), context=here).strategy


def copied(run: Strategy) -> State:
    return {part: {name: t.clone() for name, t in tensors.items()} for part, tensors in run.state_dict().items()}
