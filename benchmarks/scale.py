"""Growth from 5 M to 50 M edges: generate, save, partition, train. Cells of ``full_batch.py``."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from epochs import make_local

HIDDEN = 128  # the activations of 2 M nodes fit 24 GiB at this width


def scale(million_edges: int) -> dict[str, Any]:
    """Seconds of each stage on a communities graph of mean degree 25 and 100 features."""
    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.partition.assign import assign_nodes
    from gnnfleet.graph.partition.partitioned_graph import write_partition
    from gnnfleet.graph.store import open_store, save_store

    report: dict[str, Any] = {"million_edges": million_edges}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        start = time.perf_counter()
        graph = make_dataset(
            "communities", nodes=40_000 * million_edges, edges=1_000_000 * million_edges, features=100, classes=47
        )
        report["generate"] = time.perf_counter() - start
        report["edges"] = graph.single_edges.count
        save_store(graph, store)
        graph = open_store(store)
        start = time.perf_counter()
        write_partition(graph, assign_nodes(graph, 4, "stream"), Path(folder) / "parts")
        report["partition"] = time.perf_counter() - start
        start = time.perf_counter()
        strategy = make_local(graph, "sage", "float32", hidden=HIDDEN)
        report["build"] = time.perf_counter() - start
        seconds = []
        for epoch in range(4):
            start = time.perf_counter()
            list(strategy.train_epoch(epoch))
            seconds.append(time.perf_counter() - start)
        report["seconds"] = min(seconds[1:])
    return report
