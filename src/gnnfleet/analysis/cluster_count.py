"""``strategy.clusters=auto``: choose the number of super-nodes before a run by measurements of ``diagnose``."""

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
"""Steps on the whole graph before parts are compared, and batches of each part for its gradient."""


def choose_clusters(graph: Graph, config: RunConfig, *, quiet: bool) -> RunConfig:
    """The config with a number instead of ``auto``; the graph has a store, which keeps the clusters."""
    strategy = config.strategy
    if not strategy.measures_clusters:
        return config
    number = 0  # other schemes have no super-nodes
    if (config.partition or strategy.partitioner) == "super":
        candidates = cluster_candidates(graph.num_nodes, config.workers)
        with make_progress(quiet) as progress:
            rows = diagnose(graph, config, ["super"], candidates, STEPS, batches=BATCHES, progress=progress)
        best = recommend(rows)
        if best is not None:
            number = candidates[rows.index(best)]
            reason = f"{best.kept:.0%} of the edges are kept, gradients have cosine {best.trained.cosine or 0:.3f}"
            print_note(f"strategy.clusters={number} of {', '.join(map(str, candidates))}: {reason}", quiet=quiet)
    return config.model_copy(update={"strategy": strategy.model_copy(update={"clusters": number})})


def cluster_candidates(nodes: int, workers: int) -> list[int]:
    """Numbers of super-nodes from ten per trainer to the default number."""
    largest = max(workers, min(MAX_SUPER_NODES, nodes // 10))
    smaller = (workers * 10 * factor for factor in (1, 3, 10, 30, 100, 300))
    return [*(number for number in smaller if number < largest), largest]


def drop_auto_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a resumed run, which keeps the number that was measured for it."""
    strategy = settings.get("strategy")
    if isinstance(strategy, Mapping) and strategy.get("clusters") == "auto":
        return {**settings, "strategy": {key: value for key, value in strategy.items() if key != "clusters"}}
    return dict(settings)
