"""Out-of-core import of tables: find columns, number the nodes, match and sort the edges.

    report = import_tables(TableSpec(nodes={"node": NodeTable(files=("nodes.parquet",))}, edges={…}), "shop")

Python never holds all edges or all features; DuckDB respects its memory limit and spills to disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import EDGE, NODE, EdgeType
from gnnfleet.graph.ingest.columns import find_by_usual_name
from gnnfleet.graph.ingest.duck import DuckConnection
from gnnfleet.graph.ingest.edges import EdgeImporter, EdgeTablePlan, plan_edges
from gnnfleet.graph.ingest.inspection import inspect_features, inspect_labels
from gnnfleet.graph.ingest.keys import IdColumn
from gnnfleet.graph.ingest.nodes import NodeImporter, NodeResult, NodeTablePlan, plan_nodes
from gnnfleet.graph.ingest.source import column_names, find_files, open_source
from gnnfleet.graph.ingest.spec import EdgeCounts, EdgeTable, ImportReport, NodeTable, TableSpec
from gnnfleet.graph.store import KIND, edge_entry, node_entry
from gnnfleet.io.bundle import Bundle, BundleWriter
from gnnfleet.report.progress import Progress

_log = logging.getLogger(__name__)

PREPARED = "prepared"
"""Key of the manifest with the means, deviations and categories of features, by node and edge type."""

__all__ = ["EdgeTable", "ImportReport", "NodeTable", "TableSpec", "classify_tables", "import_tables"]


def import_tables(
    spec: TableSpec, output: str | Path, *, overwrite: bool = False, progress: Progress | None = None
) -> ImportReport:
    """Write a store from tables; raises InputError naming file, row and column of a bad cell."""
    progress = progress or Progress()
    started = time.monotonic()
    with (
        BundleWriter(output, kind=KIND, overwrite=overwrite) as out,
        DuckConnection(out.scratch_dir(), spec.memory) as duck,
    ):
        progress.stage("reading tables")
        like = {} if spec.like is None else _preparations(spec.like)
        node_plans = {
            kind: plan_nodes(open_source(duck, t.files, t.columns), t, spec, like.get(kind))
            for kind, t in spec.nodes.items()
        }
        edge_plans = {
            kind: plan_edges(open_source(duck, t.files, t.columns), t, spec, like.get(str(kind)))
            for kind, t in spec.edges.items()
        }
        plans: list[tuple[str | EdgeType, NodeTablePlan | EdgeTablePlan]] = [*node_plans.items(), *edge_plans.items()]
        progress.stage("inspecting columns")
        remarks: list[str] = []
        for kind, plan in plans:
            remarks += inspect_labels(plan.source, plan.labels, str(kind))
            remarks += inspect_features(plan.source, plan.features, plan.used, str(kind))
        for remark in remarks:
            _log.info("%s", remark)
        nodes = _import_nodes(duck, out, spec, node_plans, edge_plans, progress)
        edges = _import_edges(duck, out, spec, edge_plans, nodes, progress)
        name = spec.name or Path(output).resolve().name
        progress.stage("writing checksums")
        node_entries = [node_entry(kind, n.keys.count, n.classes, n.counts.columns) for kind, n in nodes.items()]
        edge_entries = [edge_entry(kind, counts.count, counts.columns) for kind, counts in edges.items()]
        prepared = {str(kind): plan.features.preparation for kind, plan in plans if plan.features.columns}
        meta = {"name": name, "undirected": spec.undirected, "nodes": node_entries, "edges": edge_entries}
        out.commit({**meta, PREPARED: prepared})
    return ImportReport(
        path=Path(output),
        name=name,
        undirected=spec.undirected,
        nodes={kind: imported.counts for kind, imported in nodes.items()},
        edges=edges,
        seconds=time.monotonic() - started,
        remarks=tuple(remarks),
    )


def _preparations(store: str) -> dict[str, Any]:
    """The preparation of features by type that an import of tables wrote; raises ConfigError for other stores."""
    prepared = Bundle.open(store, KIND).meta.get(PREPARED)
    if not isinstance(prepared, dict):
        raise ConfigError(f"--like needs a store that was imported from tables, found {store}")
    return prepared


def classify_tables(
    patterns: Sequence[str],
    *,
    src: str | None = None,
    dst: str | None = None,
    id: str | None = None,
    columns: str | None = None,
) -> TableSpec:
    """Tell edge tables (src and dst) from node tables (id) of a graph of one type; raises ConfigError for others.

    Raises InputError if a table lacks a column that is named.
    """
    nodes: list[str] = []
    edges: list[str] = []
    options = {"src": src, "dst": dst, "id": id}
    for path in find_files(patterns):
        names = column_names(path, columns)
        if find_by_usual_name(names, "src", src) and find_by_usual_name(names, "dst", dst):
            edges.append(path)
        elif find_by_usual_name(names, "id", id):
            nodes.append(path)
        elif absent := [
            f"{column!r} (--{option})" for option, column in options.items() if column not in (None, *names)
        ]:
            raise InputError(
                f"{path}: there is no column {' and '.join(absent)}, found {', '.join(names)}. An edge table has "
                f"columns {src or 'src'} and {dst or 'dst'}, a node table has {id or 'id'}"
            )
        else:
            raise ConfigError(
                f"{path}: expected columns src and dst (an edge table) or id (a node table), "
                f"found {', '.join(names)}. "
                "Name them with --src COLUMN --dst COLUMN, or --id COLUMN. "
                "If the file has no header line, name all columns: --columns src,dst,time"
            )
    return TableSpec(
        nodes={NODE: NodeTable(files=tuple(nodes), id=id, columns=columns)} if nodes else {},
        edges={EDGE: EdgeTable(files=tuple(edges), src=src, dst=dst, columns=columns)} if edges else {},
    )


def _import_nodes(
    duck: DuckConnection,
    out: BundleWriter,
    spec: TableSpec,
    node_plans: dict[str, NodeTablePlan],
    edge_plans: dict[EdgeType, EdgeTablePlan],
    progress: Progress,
) -> dict[str, NodeResult]:
    ends: dict[str, list[IdColumn]] = {kind: [] for kind in node_plans}
    for edge_type, edge_plan in edge_plans.items():
        ends.setdefault(edge_type.src, []).append(edge_plan.src)
        ends.setdefault(edge_type.dst, []).append(edge_plan.dst)
    any_labels = any(plan.labels for plan in node_plans.values())
    imported = {}
    for kind, columns in ends.items():
        plan = node_plans.get(kind)
        advance = progress.stage(f"nodes {kind}", plan.source.rows if plan else None)
        # A split rule applies to node types with labels; if none has labels, it applies to all types.
        draw_split = not any_labels or (plan is not None and plan.labels is not None)
        importer = NodeImporter(duck, out, spec, kind, draw_split=draw_split)
        imported[kind] = importer.from_table(plan, columns, advance) if plan else importer.from_edges(columns)
    return imported


def _import_edges(
    duck: DuckConnection,
    out: BundleWriter,
    spec: TableSpec,
    plans: dict[EdgeType, EdgeTablePlan],
    nodes: dict[str, NodeResult],
    progress: Progress,
) -> dict[EdgeType, EdgeCounts]:
    imported: dict[EdgeType, EdgeCounts] = {}
    for kind, plan in plans.items():
        advance = progress.stage(f"edges {kind}", plan.source.rows * (2 if spec.undirected else 1))
        written = EdgeImporter(duck, out, spec, plan).run(kind, nodes[kind.src].keys, nodes[kind.dst].keys, advance)
        for edge_type, counts in written.items():
            if edge_type in imported or (edge_type != kind and edge_type in plans):
                raise ConfigError(
                    f"--undirected adds edges {edge_type}, but a table already has that edge type: rename the relation"
                )
            imported[edge_type] = counts
    return imported
