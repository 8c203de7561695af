"""``gnnfleet info``: describe a store or a partition, and verify its checksums."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli.options import JsonFlag, QuietFlag, check_is_directory
from gnnfleet.cli.output import format_bytes, print_result, table
from gnnfleet.report.remarks import print_note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gnnfleet.graph.graph import Edges, Graph, Nodes
    from gnnfleet.graph.partition.partitioned_graph import Partition
    from gnnfleet.io.bundle import Bundle

MAX_PARTS = 64
"""Largest number of rows in the table; a longer one shows the first and the last parts."""


def info(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Directory of a store or partition.", callback=check_is_directory)
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read all files and compare checksums.")] = False,
    head: Annotated[
        int, typer.Option(metavar="N", help="Show the first N nodes of every type, with original ids.")
    ] = 0,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Describe a store with its partitions, or one partition."""
    from gnnfleet.graph.partition.partitioned_graph import KIND, Partition
    from gnnfleet.graph.store import open_store
    from gnnfleet.report.progress import make_progress

    if (path / f"{KIND}.json").exists():
        partition = Partition.open(path)
        bundles = partition.part_bundles()
        result = describe_partition(partition)
        human = [partition_table(path.name, result)]
    else:
        graph = open_store(path)
        files = sorted((path / "parts").glob(f"*/{KIND}.json"))
        partitions = [Partition.open(file.parent, graph) for file in files if not file.parent.name.startswith(".")]
        assert graph.store is not None
        bundles = [graph.store, *(bundle for partition in partitions for bundle in partition.part_bundles())]
        result = describe_graph(graph, graph.store, head)
        result["partitions"] = [describe_partition(partition) for partition in partitions]
        human = graph_tables(result)
    if verify:
        with make_progress(quiet) as progress:
            advance = progress.stage("verifying checksums", sum(bundle.nbytes for bundle in bundles))
            for bundle in bundles:
                bundle.verify(advance)
    result["verified"] = verify
    print_result(result, as_json=as_json, human=human)
    if verify:
        print_note(f"all {sum(len(b.files) for b in bundles)} files match their checksums", quiet=quiet)


def describe_graph(graph: Graph, store: Bundle, head: int) -> dict[str, Any]:
    return {
        "name": graph.name,
        "path": str(store.path),
        "bytes": store.nbytes,
        "digest": store.digest,
        "undirected": graph.undirected,
        "num_nodes": graph.num_nodes,
        "num_edges": graph.num_edges,
        "nodes": {kind: _describe_nodes(nodes, head) for kind, nodes in graph.nodes.items()},
        "edges": {str(kind): _describe_edges(edges) for kind, edges in graph.edges.items()},
    }


def _describe_nodes(nodes: Nodes, head: int) -> dict[str, Any]:
    from gnnfleet.graph.graph import SPLITS

    ids = "row numbers" if nodes.ids.are_rows else str(nodes.ids.values().type).removeprefix("large_")
    labels = "regression" if nodes.regression else "multi-label" if nodes.multilabel else "multi-class"
    described: dict[str, Any] = {
        "count": nodes.count,
        "ids": ids,
        "features": 0 if nodes.x is None else nodes.x.shape[1],
        "dtype": None if nodes.x is None else str(nodes.x.dtype).removeprefix("torch."),
        "classes": nodes.num_classes,
        "labels": None if nodes.y is None else labels,
        "splits": 0 if nodes.split is None else nodes.split.shape[0],
        "split": {} if nodes.split is None else {split: int(nodes.mask(split).sum()) for split in SPLITS},
    }
    if head:
        described["head"] = _head(nodes, min(head, nodes.count))
    return described


def _head(nodes: Nodes, count: int) -> list[dict[str, Any]]:
    from gnnfleet.graph.graph import SPLITS, labelled_rows

    split_names = {code: name for name, code in SPLITS.items()}
    rows: list[dict[str, Any]] = [{"id": value} for value in nodes.ids.select(range(count)).to_pylist()]
    for i, row in enumerate(rows):
        if nodes.y is not None and nodes.regression:
            row["label"] = nodes.y[i].tolist() if bool(labelled_rows(nodes.y[i : i + 1])) else None
        elif nodes.y is not None and nodes.multilabel:
            labels = (nodes.y[i] > 0).nonzero().flatten().tolist()
            row["label"] = [nodes.classes[c] for c in labels] if nodes.classes else labels
        elif nodes.y is not None:
            label = int(nodes.y[i])
            row["label"] = None if label < 0 else nodes.classes[label] if nodes.classes else label
        if nodes.split is not None:
            row["split"] = split_names.get(int(nodes.split[0, i]))
    return rows


def _describe_edges(edges: Edges) -> dict[str, Any]:
    degree = edges.in_degree()
    described: dict[str, Any] = {
        "count": edges.count,
        "mean_in_degree": edges.count / edges.num_dst if edges.num_dst else 0.0,
        "max_in_degree": int(degree.max()) if degree.numel() else 0,
        "without_in_edges": int((degree == 0).sum()),
        "weights": edges.weight is not None,
        "features": 0 if edges.attr is None else edges.attr.shape[1],
        "links": {name: pairs.shape[1] for name, pairs in edges.links.items()},
    }
    if edges.time is not None:
        described["time"] = {"dtype": str(edges.time.dtype).removeprefix("torch.")}
        if edges.count:
            described["time"] |= {"first": edges.time.min().item(), "last": edges.time.max().item()}
    return described


def graph_tables(result: dict[str, Any]) -> list[Any]:
    title = f"{result['name']}: {result['num_nodes']:,} nodes, {result['num_edges']:,} edges, "
    title += format_bytes(result["bytes"])
    node_rows = [
        (
            kind,
            n["count"],
            n["ids"],
            f"{n['features']} {n['dtype']}" if n["features"] else "none",
            f"{n['classes']} {n['labels']}" if n["labels"] else "none",
            " / ".join(f"{count:,}" for count in n["split"].values())
            + (f" (first of {n['splits']})" if n["splits"] > 1 else ""),
        )
        for kind, n in result["nodes"].items()
    ]
    edge_rows = [
        (
            kind,
            e["count"],
            e["mean_in_degree"],
            e["max_in_degree"],
            e["without_in_edges"],
            e["weights"],
            e["features"] or "none",
            f"{e['time']['first']} … {e['time']['last']}" if "first" in e.get("time", {}) else "none",
        )
        for kind, e in result["edges"].items()
    ]
    shown: list[Any] = [
        table(title, ("nodes", "count", "ids", "features", "classes", "train / val / test"), node_rows),
        table(None, ("edges", "count", "mean in", "max in", "no in-edges", "weights", "features", "time"), edge_rows),
    ]
    for kind, nodes in result["nodes"].items():
        if nodes.get("head"):
            columns = tuple(nodes["head"][0])
            shown.append(table(f"first nodes of {kind}", columns, [tuple(row.values()) for row in nodes["head"]]))
    if result["partitions"]:
        shown.append(partition_rows(result["partitions"]))
    return shown


def describe_partition(partition: Partition) -> dict[str, Any]:
    meta = partition.bundle.meta
    return {
        "name": partition.bundle.path.name,
        "path": str(partition.bundle.path),
        "method": meta["method"],
        "balance_by": meta["balance"],
        "seed": meta["seed"],
        **meta["quality"],
    }


def partition_rows(partitions: list[dict[str, Any]]) -> Any:
    columns = ["name", "parts", "edges kept", "edges cut", "rows sent Σ(λ−1)", "replication"]
    balanced = ("nodes", "edges", "train")
    rows = [
        (
            p["name"],
            p["parts"],
            f"{100 * p['kept_share']:.1f} %",
            p["cut_edges"],
            p["volume"],
            p["replication"],
            *(p["balance"][target] for target in balanced),
        )
        for p in partitions
    ]
    return table("partitions", [*columns, *(f"{target} max/mean" for target in balanced)], rows)


def partition_table(name: str, result: dict[str, Any]) -> Any:
    title = (
        f"{name}: {100 * result['kept_share']:.1f} % of {result['num_edges']:,} edges kept, "
        f"{result['volume']:,} rows sent per layer, replication {result['replication']:.3f}"
    )
    per_part = result["per_part"]
    rows: list[Sequence[Any]] = [
        (str(p), nodes, train, edges, halo, halo * 128 * 4 // 1024)
        for p, (nodes, train, edges, halo) in enumerate(
            zip(per_part["nodes"], per_part["train"], per_part["edges"], per_part["halo"], strict=True)
        )
    ]
    if len(rows) > MAX_PARTS:  # --json has all of them
        half = MAX_PARTS // 2
        rows[half:-half] = [("…", None, None, None, None, None)]
    return table(title, ("part", "nodes", "train", "in-edges", "rows needed", "KiB at width 128"), rows)
