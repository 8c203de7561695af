"""``strategy.clusters=auto``: how many super-nodes are dealt is measured before a run, as by ``diagnose``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnnfleet.analysis.partition_diagnosis import diagnose, recommend
from gnnfleet.config.schema import RunConfig
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.metis import SUPER_NODES
from gnnfleet.report.progress import show
from gnnfleet.report.remarks import remark
from gnnfleet.strategies.tma.config import TmaConfig

STEPS, BATCHES = 20, 20
"""On the whole graph before parts are compared; of each part, for its gradient."""


def settle_clusters(graph: Graph, config: RunConfig, *, quiet: bool) -> RunConfig:
    """The config with a number in place of ``auto``; the graph is one of a store, which keeps what was cut."""
    strategy = config.strategy
    if not isinstance(strategy, TmaConfig) or strategy.clusters != "auto":
        return config
    number = 0  # other schemes deal no super-nodes
    if (config.partition or strategy.partitioner) == "super":
        numbers = candidates(graph.num_nodes, config.workers)
        with show(quiet) as progress:
            rows = diagnose(graph, config, ["super"], numbers, STEPS, batches=BATCHES, progress=progress)
        best = recommend(rows)
        if best is not None:
            number = numbers[rows.index(best)]
            why = f"{best.kept:.0%} of the edges are kept, gradients have cosine {best.trained.cosine or 0:.3f}"
            remark(f"strategy.clusters={number} of {', '.join(map(str, numbers))}: {why}", quiet=quiet)
    return config.model_copy(update={"strategy": strategy.model_copy(update={"clusters": number})})


def candidates(nodes: int, workers: int) -> list[int]:
    """From ten super-nodes for each trainer to the default number."""
    most = max(workers, min(SUPER_NODES, nodes // 10))
    fewer = (workers * 10 * times for times in (1, 3, 10, 30, 100, 300))
    return [*(number for number in fewer if number < most), most]


def without_auto(words: Mapping[str, Any]) -> dict[str, Any]:
    """Words of a run that goes on: what was measured for it before stays."""
    strategy = words.get("strategy")
    if isinstance(strategy, Mapping) and strategy.get("clusters") == "auto":
        strategy = {key: value for key, value in strategy.items() if key != "clusters"}
    return dict(words) if strategy is None else {**words, "strategy": strategy}
