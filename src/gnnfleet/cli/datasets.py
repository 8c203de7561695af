"""``gnnfleet datasets``: list generators and their parameters, generate a store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli.options import JsonFlag, QuietFlag, SetOption, parse_settings
from gnnfleet.cli.output import format_bytes, print_result, table

if TYPE_CHECKING:
    from gnnfleet.graph.graph import Edges, Graph

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of a generator; see gnnfleet datasets list.")]


def list_datasets(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show the parameters of this generator.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List all generators, or the parameters of one."""
    from gnnfleet.graph.datasets import DATASETS

    if name is not None:
        show_dataset(name, as_json=as_json)
        return
    result = {"datasets": [{"name": entry.name, "summary": entry.summary} for entry in DATASETS.values()]}
    print_result(result, as_json=as_json, human=[f"{entry.name:<12} {entry.summary}" for entry in DATASETS.values()])


def show_dataset(name: NameArgument, as_json: JsonFlag = False) -> None:
    """Show the parameters of a generator with their defaults."""
    from gnnfleet.graph.datasets import find_dataset

    dataset = find_dataset(name)
    shown = [
        (p["name"], p["type"], "" if p["default"] is None else str(p["default"]), p["meaning"])
        for p in dataset.parameters
    ]
    listed = table(f"{dataset.name}: {dataset.summary}", ["parameter", "type", "default", "meaning"], shown)
    described = {"name": dataset.name, "summary": dataset.summary, "parameters": dataset.parameters}
    print_result(described, as_json=as_json, human=[listed])


def make_dataset(
    name: NameArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Directory of the new store.")],
    settings: SetOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing store.")] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Generate a graph and write it as a store."""
    from gnnfleet.graph.datasets import find_dataset
    from gnnfleet.graph.store import KIND, save_store, tensor_files
    from gnnfleet.io.bundle import check_target
    from gnnfleet.report.progress import make_progress

    dataset = find_dataset(name)
    config = dataset.configure(dict(parse_settings(settings)))
    check_target(output, KIND, overwrite)
    start = time.perf_counter()
    with make_progress(quiet) as progress:
        graph = dataset.make(config, progress)
        generated = time.perf_counter()
        nbytes = sum(tensor.nbytes for tensor in tensor_files(graph).values())
        graph = save_store(graph, output, overwrite=overwrite, advance=progress.stage("writing the store", nbytes))
    seconds = {"generate": generated - start, "write": time.perf_counter() - generated}
    assert graph.store is not None
    result = {
        "dataset": name,
        "store": str(output),
        "nodes": {
            kind: {"count": n.count, "features": 0 if n.x is None else n.x.shape[1], "classes": n.num_classes}
            for kind, n in graph.nodes.items()
        },
        "edges": {str(kind): edges.count for kind, edges in graph.edges.items()},
        "bytes": graph.store.nbytes,
        "seconds": {stage: round(duration, 3) for stage, duration in seconds.items()},
        "parameters": config.model_dump(mode="json"),
    }
    print_result(result, as_json=as_json, human=_tables(graph, result))


def _tables(graph: Graph, result: dict[str, Any]) -> list[Any]:
    nodes = [(kind, row["count"], row["features"], row["classes"]) for kind, row in result["nodes"].items()]
    edges = [
        (str(kind), entry.count, 0 if entry.attr is None else entry.attr.shape[1], _data(entry))
        for kind, entry in graph.edges.items()
    ]
    durations = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in result["seconds"].items())
    return [
        table(None, ["nodes", "count", "features", "classes"], nodes),
        table(None, ["edges", "count", "features", "data"], edges),
        f"{result['store']}: {format_bytes(result['bytes'])}, {durations}",
    ]


def _data(edges: Edges) -> str:
    return ", ".join(name for name in ("weight", "time") if getattr(edges, name) is not None)
