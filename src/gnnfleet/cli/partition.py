"""``gnnfleet partition``: partition a store and report the quality of the partition."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli.options import JsonFlag, QuietFlag, StoreArgument
from gnnfleet.cli.output import print_result
from gnnfleet.errors import ConfigError
from gnnfleet.report.remarks import print_note

if TYPE_CHECKING:
    from gnnfleet.graph.graph import Graph
    from gnnfleet.graph.partition.assign import Assignment


MethodChoice = StrEnum("MethodChoice", ["random", "super", "mincut", "stream", "range"])
BalanceChoice = StrEnum("BalanceChoice", ["nodes", "edges", "train"])


def partition(
    store: StoreArgument,
    parts: Annotated[int, typer.Option("--parts", "-p", metavar="N", help="Number of parts, usually one per worker.")],
    method: Annotated[
        MethodChoice, typer.Option("--method", "-m", help="Partition method; see above.")
    ] = MethodChoice.mincut,
    balance: Annotated[BalanceChoice, typer.Option(help="Quantity to balance over parts.")] = BalanceChoice.nodes,
    seed: Annotated[int, typer.Option(help="Random seed. The same seed gives the same parts.")] = 0,
    imbalance: Annotated[
        float | None,
        typer.Option(help="mincut, stream: allowed excess of the heaviest part over the mean. Default 0.03."),
    ] = None,
    clusters: Annotated[
        int | None, typer.Option(help="super: number of clusters. Default nodes / 10, at most 15,000.")
    ] = None,
    tries: Annotated[
        int | None, typer.Option(help="mincut: number of seeds to try; the best partition is kept. Default 5.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory to write. Default STORE/parts/NAME.")
    ] = None,
    ids: Annotated[
        Path | None,
        typer.Option(
            help="Also write original id, node type and part of every node: Parquet, or CSV if it ends in .csv."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report the quality and write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing partition.")] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Partition a store into one directory per worker, and report edges cut, traffic and balance.

    random  random assignment: best balance, most edges cut
    range   consecutive ranges of the store: for stores already in a good order
    super   many METIS clusters, assigned at random: similar parts that keep neighbourhoods
    mincut  METIS k-way, best of several seeds: fewest edges cut; needs the graph in memory
    stream  a few passes over the edges on disk, memory per node only: for graphs too large for METIS
    """
    from gnnfleet.cli.info import partition_table
    from gnnfleet.graph.partition.assign import assign_nodes
    from gnnfleet.graph.partition.edge_scan import measure_partition
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
            write_partition(graph, assignment, target, overwrite=overwrite, metrics=quality, progress=progress)
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
    """Raise ConfigError if no file can be written there. Creates nothing."""
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"--ids {path} cannot be written: expected a file in a writable directory")


def write_ids(graph: Graph, assignment: Assignment, path: Path) -> None:
    """Write one row per node: original id, node type, part. Ids of different kinds become strings."""
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
