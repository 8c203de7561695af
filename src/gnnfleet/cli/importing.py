"""``gnnfleet import`` makes a store from tables or a graph of another tool; ``gnnfleet export`` writes tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnfleet.cli import output as output_module
from gnnfleet.cli.options import JsonFlag, QuietFlag
from gnnfleet.errors import ConfigError
from gnnfleet.report import remarks

if TYPE_CHECKING:
    from gnnfleet.graph.ingest.spec import ImportReport, TableSpec

IMPORT_EXAMPLES = """\
gnnfleet import nodes.parquet edges.parquet -o shop  # two tables whose columns have the usual names

gnnfleet import 'parts/*.csv' -o shop --undirected  # many files; tables with src and dst are edges

gnnfleet import edges.csv -o mail --src sender --dst receiver --time sent  # nodes are taken from the edges

gnnfleet import ml_wikipedia.txt -o wiki --columns src,dst,time  # events, no header, separated by spaces

gnnfleet import people.csv links.csv -o s --label job --features 'f*,age' --split 0.6/0.2/0.2

gnnfleet import -o shop --nodes user='users/*.parquet' --nodes product=products.csv,id=sku \\
  --edges user:buys:product=orders.csv,src=customer,dst=sku,time=day  # several node and edge types

gnnfleet import cora.npz -o cora  # also .pt, .graphml, .gml, an OGB directory, tgb:tgbl-wiki
"""

_TABLES, _GRAPH = "Columns of tables", "The graph"
_GRAPH_ENDINGS = (".npz", ".pt", ".graphml", ".gml")
SHOWN = 5
"""Number of feature columns named in the table; --json lists all."""


def _column(name: str, text: str, metavar: str = "COLUMN") -> Any:
    return typer.Option(name, metavar=metavar, help=text, rich_help_panel=_TABLES)


def _rule(name: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(name, metavar=metavar, help=text, rich_help_panel=_GRAPH)


def import_graph(
    *,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCES",
            help="Parquet or CSV tables (quoted globs too), or one .npz, .pt, .graphml or .gml file or OGB directory.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="STORE", help="Directory of the new store.")],
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            "--nodes",
            metavar="TYPE=FILES",
            help="A node type with its files and columns, separated by commas; several features by spaces: "
            "'user=u.csv,id=key,features=age f*'. Repeatable.",
        ),
    ] = None,
    edges: Annotated[
        list[str] | None,
        typer.Option(
            "--edges",
            metavar="SRC:REL:DST=FILES",
            help="An edge type, for example user:buys:product=o.csv,src=who,dst=what. Repeatable.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing store.")] = False,
    id_column: Annotated[str | None, _column("--id", "Node id: integers or text. [dim]Usually id.[/dim]")] = None,
    src: Annotated[str | None, _column("--src", "Source of an edge. [dim]Usually src, source or from.[/dim]")] = None,
    dst: Annotated[
        str | None, _column("--dst", "Destination of an edge. [dim]Usually dst, target or to.[/dim]")
    ] = None,
    label: Annotated[
        str | None,
        _column(
            "--label",
            "Class numbers (−1 or empty: none) or names. Several columns ('tag_*') or a list column: several labels "
            "per node. none: no labels. [dim]Usually label or y.[/dim]",
            "PATTERNS",
        ),
    ] = None,
    value: Annotated[
        str | None,
        _column("--value", "Numbers to predict by regression, instead of --label; empty: none.", "PATTERNS"),
    ] = None,
    split_column: Annotated[
        str | None, _column("--split-column", "Column with train, val, test; or none. [dim]Usually split.[/dim]")
    ] = None,
    time_column: Annotated[
        str | None,
        _column("--time", "Time of an edge; timestamps become microseconds. [dim]Usually time, timestamp or t.[/dim]"),
    ] = None,
    weight: Annotated[str | None, _column("--weight", "Weight of an edge, or none. [dim]Usually weight.[/dim]")] = None,
    features: Annotated[
        str | None,
        _column(
            "--features",
            "Node features, for example 'f*,price', or none. [dim]Default: all other numeric and list columns.[/dim]",
            "PATTERNS",
        ),
    ] = None,
    edge_features: Annotated[
        str | None, _column("--edge-features", "Edge features, in the same form.", "PATTERNS")
    ] = None,
    edge_label: Annotated[
        str | None, _column("--edge-label", "Edge labels, in the same form; or none.", "PATTERNS")
    ] = None,
    category: Annotated[
        str | None,
        _column(
            "--category",
            "Columns of categories, of nodes: a feature of 0 or 1 for each of up to 64 values, else hashed.",
            "PATTERNS",
        ),
    ] = None,
    standardize: Annotated[
        bool, _rule("--standardize", "Subtract the mean of each feature and divide by its deviation; not of lists.")
    ] = False,
    like: Annotated[
        str | None, _rule("--like", "Prepare features as in this store: same means, deviations, categories.", "STORE")
    ] = None,
    columns: Annotated[
        str | None,
        _column("--columns", "Column names of CSV tables without a header line, for example src,dst,time.", "NAMES"),
    ] = None,
    undirected: Annotated[
        bool,
        _rule(
            "--undirected",
            "Add the reverse of every edge, except of self-loops; between two node types as dst:rev_relation:src.",
        ),
    ] = False,
    duplicates: Annotated[
        str | None,
        _rule(
            "--duplicates",
            "Edges with equal ends and time: keep, drop (keep the first), sum (add weights and features) or error. "
            "[dim]Default: drop if undirected, else keep.[/dim]",
            "RULE",
        ),
    ] = None,
    self_loops: Annotated[str, _rule("--self-loops", "Self-loops: keep, drop or error.", "RULE")] = "keep",
    missing: Annotated[
        str, _rule("--missing", "Edge ends missing from the node tables: error, or add (features 0, no label).", "RULE")
    ] = "error",
    dtype: Annotated[str | None, _rule("--dtype", "Store features as float32, float16 or bfloat16.", "TYPE")] = None,
    split: Annotated[
        str | None,
        _rule(
            "--split",
            "Split labelled nodes by id: shares such as 0.6/0.2/0.2, or 20-per-class (val 500 and test 1,000 of the "
            "rest, or one third and two thirds of it if it is smaller).",
            "RULE",
        ),
    ] = None,
    seed: Annotated[int, _rule("--seed", "Seed of the split.")] = 0,
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Memory for sorting; larger tables are sorted on disk.")
    ] = "1GiB",
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the graph. Default: name of the directory.")
    ] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Make a store from tables of any size, or from a graph of another tool."""
    from gnnfleet.graph.ingest.spec import ImportRules
    from gnnfleet.report.progress import make_progress

    node_columns = {"columns": columns, "id": id_column, "label": label, "value": value}
    node_columns |= {"split": split_column, "features": features, "category": category}
    edge_columns = {"columns": columns, "src": src, "dst": dst, "time": time_column, "weight": weight}
    edge_columns |= {"features": edge_features, "label": edge_label}
    rules: dict[str, Any] = {"undirected": undirected, "duplicates": duplicates, "self_loops": self_loops}
    rules |= {"missing": missing, "dtype": dtype, "split_rule": split, "seed": seed, "memory": memory, "name": name}
    rules |= {"standardize": standardize, "like": like}
    with make_progress(quiet) as progress:
        if sources and _is_graph_file(sources):
            from gnnfleet.graph.ingest.in_memory import import_in_memory

            options = {**node_columns, **edge_columns, "edge-features": edge_features, "nodes": nodes, "edges": edges}
            options |= {"features": features, "label": label, "edge-label": edge_label}
            source, attributes = _one_graph(sources, options)
            report = import_in_memory(
                source, output, ImportRules(**rules), attributes=attributes, overwrite=overwrite, progress=progress
            )
        else:
            from gnnfleet.graph.ingest.tables import import_tables

            spec = replace(
                _table_spec(sources or [], (nodes or [], edges or []), (node_columns, edge_columns)), **rules
            )
            report = import_tables(spec, output, overwrite=overwrite, progress=progress)
    _show(report, as_json=as_json, quiet=quiet)


def export_graph(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Directory of a store.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="New directory for the tables.")],
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Write nodes and edges of a store as Parquet tables, with the original ids."""
    from gnnfleet.graph.export import export_tables
    from gnnfleet.graph.validate import open_validated_store
    from gnnfleet.report.progress import make_progress

    with make_progress(quiet) as progress:
        files = export_tables(open_validated_store(store), output, progress=progress)
    table = output_module.table(str(output), ["file", "rows"], files.items())
    output_module.print_result({"path": str(output), "files": files}, as_json=as_json, human=[table])


def _is_graph_file(sources: Sequence[str]) -> bool:
    """True if a source is a graph of another tool, not a table."""
    return any(Path(s).is_dir() or s.lower().endswith(_GRAPH_ENDINGS) or s.startswith("tgb:") for s in sources)


def _one_graph(sources: Sequence[str], options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The source, and for NetworkX files the attributes that options name."""
    if len(sources) > 1:
        raise ConfigError(f"import one graph at a time, found {', '.join(sources)}")
    named = {option: value for option, value in options.items() if value}
    scalars = {"label": "y", "split": "split", "weight": "weight", "time": "time"}
    lists = {"features": "x", "edge-features": "edge_attr"}
    attributes: dict[str, Any] = {}
    if sources[0].lower().endswith((".graphml", ".gml")):
        attributes = {scalars[option]: named.pop(option) for option in scalars if option in named}
        attributes |= {lists[option]: named.pop(option).split(",") for option in lists if option in named}
    if named:
        name = next(iter(named))
        option = "split-column" if name == "split" else name
        raise ConfigError(f"--{option} does not apply to {sources[0]}: leave it out")
    return sources[0], attributes


def _table_spec(
    sources: Sequence[str], typed: tuple[Sequence[str], Sequence[str]], columns: tuple[dict[str, Any], dict[str, Any]]
) -> TableSpec:
    from gnnfleet.graph.graph import EdgeType
    from gnnfleet.graph.ingest.spec import EdgeTable, NodeTable, TableSpec
    from gnnfleet.graph.ingest.tables import classify_tables

    node_columns, edge_columns = columns
    if sources and any(typed):
        raise ConfigError("tables were named both with and without --nodes or --edges: name all in one way")
    if not sources:
        return TableSpec(
            nodes={
                kind: NodeTable(**{**node_columns, **columns_of_type})
                for kind, columns_of_type in _parse(typed[0], "--nodes TYPE", NodeTable)
            },
            edges={
                EdgeType.parse(kind): EdgeTable(**{**edge_columns, **columns_of_type})
                for kind, columns_of_type in _parse(typed[1], "--edges SRC:RELATION:DST", EdgeTable)
            },
        )
    edge_ends = {name: edge_columns[name] for name in ("src", "dst", "columns")}
    spec = classify_tables(sources, id=node_columns["id"], **edge_ends)
    return replace(
        spec,
        nodes={kind: replace(table, **node_columns) for kind, table in spec.nodes.items()},
        edges={kind: replace(table, **edge_columns) for kind, table in spec.edges.items()},
    )


def _parse(arguments: Sequence[str], option: str, table: type[Any]) -> list[tuple[str, dict[str, Any]]]:
    """Parse ``user=a.csv,b.csv,id=key`` to (``user``, files and columns); raises ConfigError."""
    column_names = {field.name for field in fields(table)} - {"files"}
    tables: dict[str, dict[str, Any]] = {}
    for argument in arguments:
        kind, equals, rest = argument.partition("=")
        columns: dict[str, Any] = {}
        files = []
        for item in filter(None, rest.split(",")):
            key, is_column, column = item.partition("=")
            if is_column and key in column_names:
                columns[key] = column
            elif is_column and not Path(item).exists():
                expected = ", ".join(sorted(column_names))
                raise ConfigError(f"{option}=FILES: {key!r} is not a column of such a table; expected {expected}")
            else:
                files.append(item)
        if not equals or not kind or not files:
            raise ConfigError(f"expected {option}=FILES, found {argument!r}")
        if kind in tables:
            raise ConfigError(f"{kind!r} is named twice: list all its files in one {option}=FILE,FILE or a glob")
        tables[kind] = {"files": tuple(files), **columns}
    return list(tables.items())


def _show(report: ImportReport, *, as_json: bool, quiet: bool) -> None:
    nodes = [
        (kind, c.count, c.ids, _features(c), c.classes or None, c.labelled or None, _splits(c))
        for kind, c in report.nodes.items()
    ]
    edges = [
        (str(kind), c.rows, c.count, c.self_loops, c.parallel, c.duplicates_dropped + c.self_loops_dropped, _data(c))
        for kind, c in report.edges.items()
    ]
    human = [
        output_module.table(
            None, ["nodes", "count", "ids", "features", "classes", "labelled", "train/val/test"], nodes
        ),
        output_module.table(None, ["edges", "read", "stored", "self-loops", "parallel", "dropped", "data"], edges),
    ]
    output_module.print_result(report.as_dict(), as_json=as_json, human=human)
    tables: dict[Any, Any] = {**report.nodes, **report.edges}
    for kind, c in tables.items():
        if c.unused:
            remarks.print_note(f"{kind}: columns not used: {', '.join(c.unused)}", quiet=quiet)
    for remark in report.remarks:
        remarks.print_note(remark, quiet=quiet)
    if not any(counts.count for counts in report.edges.values()):
        remarks.print_note("this store has no edges: import a table of edges too if there is one", quiet=quiet)
    changed = [f"{name.replace('_', ' ')} {count:,}" for name, count in report.cleaned.items() if count]
    if changed:
        remarks.print_note(f"cleaned: {', '.join(changed)}", quiet=quiet)
    remarks.print_note(f"saved to {report.path} ({report.seconds:.1f} s)", quiet=quiet)


def _splits(counts: Any) -> str | None:
    sizes = (counts.train, counts.val, counts.test)
    return "/".join(f"{size:,}" for size in sizes) if any(sizes) else None


def _features(counts: Any) -> str | None:
    return f"{counts.features:,}{_named(counts)}" if counts.features else None


def _named(counts: Any) -> str:
    """The first feature columns in parentheses, if they have names."""
    names = [name for name, _ in counts.columns]
    more = ["…"] if len(names) > SHOWN else []
    return f" ({', '.join(names[:SHOWN] + more)})" if names else ""


def _data(counts: Any) -> str:
    parts = [
        "weight" if counts.weighted else "",
        f"time ({counts.time})" if counts.time else "",
        f"{counts.features} feature{'s' * (counts.features > 1)}{_named(counts)}" if counts.features else "",
        f"{counts.labelled:,} labelled" if counts.labelled else "",
    ]
    return ", ".join(part for part in parts if part)
