"""``gnnfleet partition``: cut a store into parts and say what it costs."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli.options import JsonFlag, QuietFlag, check_is_directory
from gnnfleet.cli.output import print_result
from gnnfleet.errors import ConfigError
from gnnfleet.report.remarks import print_note

if TYPE_CHECKING:
    from gnnfleet.graph.graph import Graph
    from gnnfleet.graph.partition.assign import Assignment


class MethodChoice(StrEnum):
    random = "random"
    super = "super"
    mincut = "mincut"
    stream = "stream"
    range = "range"


class BalanceChoice(StrEnum):
    nodes = "nodes"
    edges = "edges"
    train = "train"


def partition(
    store: Annotated[Path, typer.Argument(help="The store to cut.", callback=check_is_directory)],
    parts: Annotated[int, typer.Option("--parts", "-p", help="How many parts; usually one per worker.")],
    method: Annotated[
        MethodChoice, typer.Option("--method", "-m", help="How nodes are assigned, see below.")
    ] = MethodChoice.mincut,
    balance: Annotated[BalanceChoice, typer.Option(help="What the parts share evenly.")] = BalanceChoice.nodes,
    seed: Annotated[int, typer.Option(help="The same seed gives the same parts.")] = 0,
    imbalance: Annotated[
        float | None, typer.Option(help="mincut, stream: heaviest part over the mean, minus one. Default 0.03.")
    ] = None,
    clusters: Annotated[
        int | None, typer.Option(help="super: number of mini-clusters. Default nodes / 10, at most 15,000.")
    ] = None,
    tries: Annotated[int | None, typer.Option(help="mincut: seeds tried, best kept. Default 5.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write. Default STORE/parts/NAME.")
    ] = None,
    ids: Annotated[
        Path | None, typer.Option(help="Also write a table of original id, node type and part: Parquet, or FILE.csv.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Assign and count only, write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing partition.")] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Cut a store into parts, one directory per worker, and report what the cut costs.

    random  nodes dealt at random: even in everything, most edges cut
    range   store order cut into stretches: for stores already in a good order
    super   many METIS mini-clusters dealt at random: parts alike, neighbourhoods kept
    mincut  METIS k-way, best of several seeds: fewest edges cut; holds the graph in memory
    stream  a few passes over the edges on disk, memory for the nodes only: for graphs METIS cannot hold
    """
    from gnnfleet.cli.info import partition_table
    from gnnfleet.graph.partition.assign import assign_nodes
    from gnnfleet.graph.partition.partition_metrics import measure_partition
    from gnnfleet.graph.partition.partitioned_graph import KIND, write_partition
    from gnnfleet.graph.validate import open_validated_store
    from gnnfleet.io.bundle import check_target
    from gnnfleet.report.progress import make_progress
    from gnnfleet.training.partition_cache import empty_parts_warning, partition_name

    if ids is not None:
        if dry_run:
            raise ConfigError("--dry-run writes nothing, found --ids: leave one of them out")
        check_writable(ids)
    graph = open_validated_store(store)
    options: dict[str, Any] = {"imbalance": imbalance, "clusters": clusters, "tries": tries}
    options = {name: value for name, value in options.items() if value is not None}
    target = output or store / "parts" / partition_name(method, parts, balance, seed, options)
    if not dry_run:
        check_target(target, KIND, overwrite)
    with make_progress(quiet or as_json) as progress:
        assignment = assign_nodes(graph, parts, method, seed=seed, balance=balance, progress=progress, **options)
        quality = measure_partition(graph, assignment.part, parts, progress=progress)
        if not dry_run:
            write_partition(graph, assignment, target, overwrite=overwrite, quality=quality, progress=progress)
        if ids is not None:
            write_ids(graph, assignment, ids)
    result = {
        "name": target.name,
        "path": None if dry_run else str(target),
        "method": str(method),
        "balance_by": str(balance),
        "seed": seed,
        **quality.summary(),
    }
    if (empty := empty_parts_warning(graph, parts)) is not None:
        print_note(empty, quiet=quiet)
    print_result(result, as_json=as_json, human=[partition_table(target.name, result)])
    print_note("nothing written (--dry-run)" if dry_run else f"written to {target}", quiet=quiet or as_json)


def check_writable(path: Path) -> None:
    """Raise ConfigError where no file can be written; nothing is made yet."""
    parent = next(each for each in path.absolute().parents if each.exists())
    if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(
            f"--ids {path} cannot be written: expected a file in a directory that is there or can be made"
        )


def write_ids(graph: Graph, assignment: Assignment, path: Path) -> None:
    """One row per node: original id, node type, part; several node types with ids of different kinds become strings."""
    import pyarrow as pa

    from gnnfleet.inference.predict import write_table

    columns = [nodes.ids.values() for nodes in graph.nodes.values()]
    if len({column.type for column in columns}) > 1:
        columns = [column.cast(pa.large_string()) for column in columns]
    kinds = pa.array([kind for kind, nodes in graph.nodes.items() for _ in range(nodes.count)], pa.string())
    content = {
        "id": pa.chunked_array(columns),
        "type": kinds if path.suffix.lower() == ".csv" else kinds.dictionary_encode(),
        "part": assignment.part,
    }
    write_table(path, iter([pa.table(content)]))
