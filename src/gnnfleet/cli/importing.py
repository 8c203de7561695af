"""``gnnfleet import`` and ``gnnfleet export``: what users have into a store, and a store back into tables."""

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

IMPORT_EXAMPLES = """Examples

[bold]gnnfleet import nodes.parquet edges.parquet -o shop[/bold]   two tables; columns by their usual names

[bold]gnnfleet import 'parts/*.csv' -o shop --undirected[/bold]   many files; those with src and dst are edges

[bold]gnnfleet import edges.csv -o mail --src sender --dst receiver --time sent[/bold]   nodes come from the edges

[bold]gnnfleet import ml_wikipedia.txt -o wiki --columns src,dst,time[/bold]   events, no header line, values by spaces

[bold]gnnfleet import people.csv links.csv -o s --label job --features 'f*,age' --split 0.6/0.2/0.2[/bold]

[bold]gnnfleet import -o shop --nodes user='users/*.parquet' --nodes product=products.csv,id=sku
--edges user:buys:product=orders.csv,src=customer,dst=sku,time=day[/bold]   several types, each with its own columns

[bold]gnnfleet import cora.npz -o cora[/bold]   also .pt, .graphml, .gml, an OGB directory, tgb:tgbl-wiki
"""

_TABLES, _GRAPH = "Columns of tables", "The graph"
_GRAPH_ENDINGS = (".npz", ".pt", ".graphml", ".gml")
SHOWN = 5
"""Names of feature columns in the report; --json has all."""


def _column(name: str, text: str) -> Any:
    return typer.Option(name, metavar="COLUMN", help=text, rich_help_panel=_TABLES)


def _patterns(name: str, text: str) -> Any:
    return typer.Option(name, metavar="PATTERNS", help=text, rich_help_panel=_TABLES)


def _rule(name: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(name, metavar=metavar, help=text, rich_help_panel=_GRAPH)


SourcesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SOURCES",
        help="Parquet or CSV tables (quoted globs too), or one .npz, .pt, .graphml or .gml file or OGB directory.",
        show_default=False,
    ),
]
NodeTablesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--nodes",
        metavar="TYPE=FILES",
        help="A node type: files and own columns, by commas, several features by spaces: "
        "'user=u.csv,id=key,features=age f*'. Repeatable.",
    ),
]
EdgeTablesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--edges",
        metavar="SRC:REL:DST=FILES",
        help="An edge type: user:buys:product=o.csv,src=who,dst=what. Repeatable.",
    ),
]
OutputOption = Annotated[Path, typer.Option("--output", "-o", metavar="STORE", help="The directory to make.")]
OverwriteFlag = Annotated[bool, typer.Option("--overwrite", help="Replace a store that is there already.")]
IdOption = Annotated[str | None, _column("--id", "Node id: integers or text. [dim]Usually id.[/dim]")]
SrcOption = Annotated[str | None, _column("--src", "Source of an edge. [dim]Usually src, source or from.[/dim]")]
DstOption = Annotated[str | None, _column("--dst", "Destination of an edge. [dim]Usually dst, target or to.[/dim]")]
LabelOption = Annotated[
    str | None,
    _patterns(
        "--label",
        "Class numbers (−1 or nothing: none) or names; several columns ('tag_*') or a list: several labels per node; "
        "none: no labels. [dim]Usually label or y.[/dim]",
    ),
]
SplitColumnOption = Annotated[
    str | None, _column("--split-column", "Words train, val, test; or none. [dim]Usually split.[/dim]")
]
TimeOption = Annotated[
    str | None,
    _column(
        "--time", "Time of an edge; timestamps become microseconds since 1970. [dim]Usually time, timestamp or t.[/dim]"
    ),
]
WeightOption = Annotated[str | None, _column("--weight", "Weight of an edge, or none. [dim]Usually weight.[/dim]")]
FeaturesOption = Annotated[
    str | None,
    _patterns("--features", "Node features, as 'f*,price', or none. [dim]Else all other numbers and lists.[/dim]"),
]
EdgeFeaturesOption = Annotated[str | None, _patterns("--edge-features", "Edge features, likewise.")]
EdgeLabelOption = Annotated[str | None, _patterns("--edge-label", "Labels of edges, as those of nodes; or none.")]
ColumnsOption = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="NAMES",
        help="Names of the columns of CSV tables without a header line, as src,dst,time.",
        rich_help_panel=_TABLES,
    ),
]
UndirectedFlag = Annotated[
    bool,
    _rule(
        "--undirected",
        "Add the reverse of every edge; between two node types as dst:rev_relation:src. Self-loops are not doubled.",
    ),
]
DuplicatesOption = Annotated[
    str | None,
    _rule(
        "--duplicates",
        "keep, drop (keep the first), sum (add weights and features) or error: edges of the same ends and time. "
        "[dim]drop if undirected, else keep.[/dim]",
        "RULE",
    ),
]
SelfLoopsOption = Annotated[str, _rule("--self-loops", "keep, drop or error.", "RULE")]
MissingOption = Annotated[
    str, _rule("--missing", "Ids of edges that no node table has: error, or add (features 0, no label).", "RULE")
]
DtypeOption = Annotated[str | None, _rule("--dtype", "Features as float32, float16 or bfloat16.", "TYPE")]
SplitRuleOption = Annotated[
    str | None,
    _rule(
        "--split",
        "Make a split: shares as 0.6/0.2/0.2, or 20-per-class (then 500 val, 1,000 test, or a third and the rest of "
        "what remains). Drawn by id among labelled nodes.",
        "RULE",
    ),
]
SplitSeedOption = Annotated[int, _rule("--seed", "Seed of the split.")]
ImportMemoryOption = Annotated[
    str, typer.Option("--memory", metavar="SIZE", help="For sorting; more is kept on disk meanwhile.")
]
NameOption = Annotated[str | None, typer.Option("--name", help="Name of the graph; the directory's otherwise.")]


def import_graph(
    *,
    sources: SourcesArgument = None,
    output: OutputOption,
    nodes: NodeTablesOption = None,
    edges: EdgeTablesOption = None,
    overwrite: OverwriteFlag = False,
    id_column: IdOption = None,
    src: SrcOption = None,
    dst: DstOption = None,
    label: LabelOption = None,
    split_column: SplitColumnOption = None,
    time_column: TimeOption = None,
    weight: WeightOption = None,
    features: FeaturesOption = None,
    edge_features: EdgeFeaturesOption = None,
    edge_label: EdgeLabelOption = None,
    columns: ColumnsOption = None,
    undirected: UndirectedFlag = False,
    duplicates: DuplicatesOption = None,
    self_loops: SelfLoopsOption = "keep",
    missing: MissingOption = "error",
    dtype: DtypeOption = None,
    split: SplitRuleOption = None,
    seed: SplitSeedOption = 0,
    memory: ImportMemoryOption = "1GiB",
    name: NameOption = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Make a store from tables, of any size, or from a graph of another tool."""
    from gnnfleet.graph.ingest.spec import ImportRules
    from gnnfleet.report.progress import make_progress

    node_columns = {"columns": columns, "id": id_column, "label": label, "split": split_column, "features": features}
    edge_columns = {"columns": columns, "src": src, "dst": dst, "time": time_column, "weight": weight}
    edge_columns |= {"features": edge_features, "label": edge_label}
    rules: dict[str, Any] = {
        "undirected": undirected,
        "duplicates": duplicates,
        "self_loops": self_loops,
        "missing": missing,
        "dtype": dtype,
        "split_rule": split,
        "seed": seed,
        "memory": memory,
        "name": name,
    }
    with make_progress(quiet) as progress:
        if sources and _is_graph_file(sources):
            from gnnfleet.graph.ingest.in_memory import import_in_memory

            given = {**node_columns, **edge_columns, "edge-features": edge_features, "nodes": nodes, "edges": edges}
            given |= {"features": features, "label": label, "edge-label": edge_label}
            source, attributes = _one_graph(sources, given)
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
    store: Annotated[Path, typer.Argument(help="A store.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory to make.")],
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Write a store as Parquet tables, nodes and edges, with the original ids."""
    from gnnfleet.graph.export import export_tables
    from gnnfleet.graph.validate import open_validated_store
    from gnnfleet.report.progress import make_progress

    with make_progress(quiet) as progress:
        report = export_tables(open_validated_store(store), output, progress=progress)
    table = output_module.table(str(report.path), ["file", "rows"], report.files.items())
    output_module.print_result({"path": str(report.path), "files": report.files}, as_json=as_json, human=[table])


def _is_graph_file(sources: Sequence[str]) -> bool:
    """Whether a source is a graph of another tool rather than a table."""
    return any(Path(s).is_dir() or s.lower().endswith(_GRAPH_ENDINGS) or s.startswith("tgb:") for s in sources)


def _one_graph(sources: Sequence[str], given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The one source, and the attributes that a file of NetworkX may name as tables name columns."""
    if len(sources) > 1:
        raise ConfigError(f"import one graph at a time, found {', '.join(sources)}")
    named = {option: value for option, value in given.items() if value}
    words = {"label": "y", "split": "split", "weight": "weight", "time": "time"}
    lists = {"features": "x", "edge-features": "edge_attr"}
    attributes: dict[str, Any] = {}
    if sources[0].lower().endswith((".graphml", ".gml")):
        attributes = {words[option]: named.pop(option) for option in words if option in named}
        attributes |= {lists[option]: named.pop(option).split(",") for option in lists if option in named}
    if named:
        word = next(iter(named))
        option = "split-column" if word == "split" else word
        raise ConfigError(f"--{option} does not concern {sources[0]}: leave it out")
    return sources[0], attributes


def _table_spec(
    sources: Sequence[str],
    typed: tuple[Sequence[str], Sequence[str]],
    columns: tuple[dict[str, Any], dict[str, Any]],
) -> TableSpec:
    from gnnfleet.graph.graph import EdgeType
    from gnnfleet.graph.ingest.spec import EdgeTable, NodeTable, TableSpec
    from gnnfleet.graph.ingest.tables import classify_tables

    node_columns, edge_columns = columns
    if sources and any(typed):
        raise ConfigError("name tables either plainly, for one type of node, or all with --nodes and --edges")
    if not sources:
        return TableSpec(
            nodes={
                kind: NodeTable(**{**node_columns, **own}) for kind, own in _parse(typed[0], "--nodes TYPE", NodeTable)
            },
            edges={
                EdgeType.parse(kind): EdgeTable(**{**edge_columns, **own})
                for kind, own in _parse(typed[1], "--edges SRC:RELATION:DST", EdgeTable)
            },
        )
    words = {word: edge_columns[word] for word in ("src", "dst", "columns")}
    spec = classify_tables(sources, id=node_columns["id"], **words)
    return replace(
        spec,
        nodes={kind: replace(table, **node_columns) for kind, table in spec.nodes.items()},
        edges={kind: replace(table, **edge_columns) for kind, table in spec.edges.items()},
    )


def _parse(words: Sequence[str], option: str, table: type[Any]) -> list[tuple[str, dict[str, Any]]]:
    """``user=a.csv,b.csv,id=key`` as (``user``, files and columns); raises ConfigError for anything else."""
    parts = {field.name for field in fields(table)} - {"files"}
    made: list[tuple[str, dict[str, Any]]] = []
    for word in words:
        kind, equals, rest = word.partition("=")
        items = [item for item in rest.split(",") if item]
        own: dict[str, Any] = {}
        files = []
        for item in items:
            key, is_column, column = item.partition("=")
            if is_column and key in parts:
                own[key] = column
            elif is_column and not Path(item).exists():
                raise ConfigError(
                    f"{option}=FILES: {key!r} is no column of such a table; expected {', '.join(sorted(parts))}"
                )
            else:
                files.append(item)
        if not equals or not kind or not files:
            raise ConfigError(f"expected {option}=FILES, found {word!r}")
        if kind in (known for known, _ in made):
            raise ConfigError(f"{kind!r} is given twice: list all its files in one {option}=FILE,FILE or a glob")
        made.append((kind, {"files": tuple(files), **own}))
    return made


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
    unused = {
        **{kind: c.unused for kind, c in report.nodes.items()},
        **{str(k): c.unused for k, c in report.edges.items()},
    }
    for kind, columns in unused.items():
        if columns:
            remarks.print_note(f"{kind}: columns not used: {', '.join(columns)}", quiet=quiet)
    if not any(counts.count for counts in report.edges.values()):
        remarks.print_note("this store has no edges: name a table of them too, unless there are none yet", quiet=quiet)
    changed = [f"{what.replace('_', ' ')} {count:,}" for what, count in report.cleaned.items() if count]
    if changed:
        remarks.print_note(f"found and done: {', '.join(changed)}", quiet=quiet)
    remarks.print_note(f"{report.path} is ready ({report.seconds:.1f} s)", quiet=quiet)


def _splits(counts: Any) -> str | None:
    found = (counts.train, counts.val, counts.test)
    return "/".join(f"{count:,}" for count in found) if any(found) else None


def _features(counts: Any) -> str | None:
    return f"{counts.features:,}{_named(counts)}" if counts.features else None


def _named(counts: Any) -> str:
    """The first columns that features were made of, where they have names."""
    names = [name for name, _ in counts.columns]
    more = ["…"] if len(names) > SHOWN else []
    return f" ({', '.join(names[:SHOWN] + more)})" if names else ""


def _data(counts: Any) -> str:
    words = [
        "weight" if counts.weighted else "",
        f"time ({counts.time})" if counts.time else "",
        f"{counts.features} feature{'s' * (counts.features > 1)}{_named(counts)}" if counts.features else "",
        f"{counts.labelled:,} labelled" if counts.labelled else "",
    ]
    return ", ".join(word for word in words if word)
