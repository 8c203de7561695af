"""``strategy.clusters=auto``: how many super-nodes are dealt is measured before a run, as by ``diagnose``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnnfleet.analysis.partition_diagnosis import diagnose, recommend
from gnnfleet.config.schema import RunConfig
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.metis import MAX_SUPER_NODES
from gnnfleet.report.progress import make_progress
from gnnfleet.report.remarks import print_note

STEPS, BATCHES = 20, 20
"""On the whole graph before parts are compared; of each part, for its gradient."""


def choose_clusters(graph: Graph, config: RunConfig, *, quiet: bool) -> RunConfig:
    """The config with a number in place of ``auto``; the graph is one of a store, which keeps what was cut."""
    strategy = config.strategy
    if not strategy.measures_clusters:
        return config
    number = 0  # other schemes deal no super-nodes
    if (config.partition or strategy.partitioner) == "super":
        numbers = cluster_candidates(graph.num_nodes, config.workers)
        with make_progress(quiet) as progress:
            rows = diagnose(graph, config, ["super"], numbers, STEPS, batches=BATCHES, progress=progress)
        best = recommend(rows)
        if best is not None:
            number = numbers[rows.index(best)]
            why = f"{best.kept:.0%} of the edges are kept, gradients have cosine {best.trained.cosine or 0:.3f}"
            print_note(f"strategy.clusters={number} of {', '.join(map(str, numbers))}: {why}", quiet=quiet)
    return config.model_copy(update={"strategy": strategy.model_copy(update={"clusters": number})})


def cluster_candidates(nodes: int, workers: int) -> list[int]:
    """From ten super-nodes for each trainer to the default number."""
    most = max(workers, min(MAX_SUPER_NODES, nodes // 10))
    fewer = (workers * 10 * times for times in (1, 3, 10, 30, 100, 300))
    return [*(number for number in fewer if number < most), most]


def drop_auto_settings(words: Mapping[str, Any]) -> dict[str, Any]:
    """Words of a run that goes on: what was measured for it before stays."""
    strategy = words.get("strategy")
    if isinstance(strategy, Mapping) and strategy.get("clusters") == "auto":
        strategy = {key: value for key, value in strategy.items() if key != "clusters"}
    return dict(words) if strategy is None else {**words, "strategy": strategy}
