"""``gnnfleet demo``: what works, on generated data, in a minute."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from gnnfleet.run.console import JsonFlag, QuietFlag, emit, parse_settings, remark, table


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the demo writes.")] = Path("demo"),
    parts: Annotated[int, typer.Option(help="Into how many parts the graph is cut.")] = 4,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the generated graph.")
    ] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Generate a graph with communities, cut it with every partitioner, compare what the cuts cost.

    The directory is the demo's own: what an earlier demo left there is replaced.
    """
    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.partition import write_partition
    from gnnfleet.graph.partitioners import PARTITIONERS, assign
    from gnnfleet.graph.quality import measure
    from gnnfleet.graph.store import save_store
    from gnnfleet.report.progress import show

    choices: dict[str, Any] = {"nodes": 50_000, "mean_degree": 20, **parse_settings(settings)}
    rows, results = [], []
    with show(quiet) as progress:
        graph = make_dataset("communities", progress=progress, **choices)
        graph = save_store(graph, output / "communities", overwrite=True)
        for method in PARTITIONERS:
            start = time.monotonic()
            assignment = assign(graph, parts, method, progress=progress)
            seconds = time.monotonic() - start
            quality = measure(graph, assignment.part, parts, progress=progress)
            write_partition(
                graph, assignment, output / "communities" / "parts" / method, quality=quality, progress=progress
            )
            found = quality.summary()
            results.append({"method": method, "seconds": seconds, **found})
            rows.append(
                (
                    method,
                    f"{100 * found['kept_share']:.1f} %",
                    found["volume"],
                    found["replication"],
                    found["balance"]["nodes"],
                    found["balance"]["edges"],
                    found["bytes_per_layer"]["128"]["total"] / 2**20,
                    seconds,
                )
            )
    title = f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges in {parts} parts"
    columns = ("method", "edges kept", "rows sent Σ(λ−1)", "replication", "nodes max/mean", "edges max/mean")
    shown = table(title, (*columns, "MiB a layer, width 128", "seconds"), rows)
    emit({"graph": graph.name, "parts": parts, "partitions": results}, as_json=as_json, human=[shown])
    remark(
        f"the store and its partitions are in {output}: try  gnnfleet info {output}/communities", quiet=quiet or as_json
    )
