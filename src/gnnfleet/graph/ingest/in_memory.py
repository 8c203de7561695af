"""Import of graph files of other tools: read into memory, cleaned by the same rules as tables, saved.

Event streams of the Temporal Graph Benchmark (``tgb:tgbl-wiki``) are read by TGB's own package (extra ``tgb``): its
files are pickles and tables in several formats.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.ingest.clean import clean_edges
from gnnfleet.graph.ingest.spec import ImportReport, ImportRules, count_edges, count_nodes
from gnnfleet.graph.split import parse_rule, split_nodes
from gnnfleet.graph.store import KIND, save_store
from gnnfleet.io.bundle import DTYPES, check_target
from gnnfleet.report.progress import Progress


def import_in_memory(
    source: str | Path,
    output: str | Path,
    rules: ImportRules,
    *,
    attributes: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Write a store from a ``.npz``, ``.pt``, ``.graphml`` or ``.gml`` file, an OGB directory or ``tgb:NAME``.

    ``attributes`` are arguments of ``from_networkx`` for ``.graphml`` and ``.gml`` files.
    """
    progress = progress or Progress()
    started = time.monotonic()
    output = Path(output)
    check_target(output, KIND, overwrite)
    if rules.standardize or rules.like:
        raise ConfigError("--standardize and --like apply to tables: leave them out for a graph of another tool")
    progress.stage(f"reading {source}")
    graph, cleaned = clean_edges(
        read_in_memory(source, attributes or {}),
        undirected=rules.undirected,
        duplicates=rules.duplicate_rule,
        self_loops=rules.self_loops,
    )
    graph = _change_nodes(graph, rules)
    name = rules.name or output.resolve().name
    graph = Graph.of(graph.nodes, graph.edges, name=name, undirected=graph.undirected)
    progress.stage("writing the store")
    save_store(graph, output, overwrite=overwrite)
    return ImportReport(
        path=output,
        name=name,
        undirected=graph.undirected,
        nodes={kind: count_nodes(table) for kind, table in graph.nodes.items()},
        edges={kind: count_edges(kind, table) for kind, table in graph.edges.items()},
        seconds=time.monotonic() - started,
        cleaned=cleaned,
    )


def read_in_memory(source: str | Path, attributes: Mapping[str, Any]) -> Graph:
    """Read a file or directory by its ending; raises InputError if it is missing or larger than memory."""
    try:
        return _read(source, attributes)
    except MemoryError as error:
        raise InputError(
            f"{source} describes a graph that does not fit into memory ({error}): check its numbers of nodes, or "
            "import it as tables, which are read in batches"
        ) from error


def _read(source: str | Path, attributes: Mapping[str, Any]) -> Graph:
    """Import readers when needed: some need optional libraries."""
    path = Path(source)
    if str(source).startswith(PREFIX):
        return read_tgb(str(source).removeprefix(PREFIX))
    if path.is_dir():
        from gnnfleet.graph.ingest.ogb import read_ogb

        return read_ogb(path)
    if not path.is_file():
        raise InputError(f"no such file: {source}")
    if path.suffix.lower() == ".npz":
        from gnnfleet.graph.ingest.npz import read_npz

        return read_npz(path)
    if path.suffix.lower() == ".pt":
        from gnnfleet.graph.ingest.pyg import read_pt

        return read_pt(path)
    from gnnfleet.graph.ingest.networkx import read_graphml

    return read_graphml(path, **attributes)


def _change_nodes(graph: Graph, rules: ImportRules) -> Graph:
    """Apply the dtype and the split rule; if any type has labels, only such types are split."""
    labelled = graph.labelled_type is not None
    for kind, table in graph.nodes.items():
        if rules.dtype and table.x is not None:
            graph = graph.with_nodes(kind, x=table.x.to(DTYPES[rules.dtype][0]))
        if rules.split_rule and (table.y is not None or not labelled):
            split = split_nodes(table, parse_rule(rules.split_rule), seed=rules.seed)
            graph = graph.with_nodes(kind, split=split)
    return graph


PREFIX = "tgb:"


def read_tgb(name: str) -> Graph:
    """Read a downloaded link dataset; raises ConfigError without the package, InputError without the dataset."""
    try:
        from tgb.linkproppred.dataset import LinkPropPredDataset
    except ImportError as error:
        raise ConfigError(
            "the package of TGB is not installed: pip install 'gnnfleet[tgb]', or import the dataset's table of events"
        ) from error
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results only
            dataset = LinkPropPredDataset(name=name, root="datasets", preprocess=True)
    except Exception as error:  # it raises plain Exception for missing data, and EOFError without a terminal
        raise InputError(
            f"TGB cannot load {name}: {str(error) or type(error).__name__}. Download the dataset with TGB first"
        ) from error
    return from_tgb(dataset)


def from_tgb(dataset: Any) -> Graph:
    """Convert a ``LinkPropPredDataset`` to a graph with times; node numbers stay.

    Its split by time equals ``EventStream.split`` and its edge labels are all 1, so neither is stored.
    """
    events = dataset.full_data
    pairs = np.stack([np.asarray(events[name], dtype=np.int64) for name in ("sources", "destinations")])
    edge_attr, x = events.get("edge_feat"), getattr(dataset, "node_feat", None)
    return Graph(
        torch.from_numpy(pairs),
        x=x,
        edge_attr=None if edge_attr is None else np.asarray(edge_attr, dtype=np.float32).reshape(pairs.shape[1], -1),
        time=_times(np.asarray(events["timestamps"])),
        num_nodes=max(int(pairs.max()) + 1 if pairs.size else 0, 0 if x is None else len(x)),
        name=getattr(dataset, "name", "tgb"),
    )


def _times(timestamps: Any) -> Any:
    """Whole numbers as int64, others as float64."""
    integers = timestamps.astype(np.int64)
    return integers if np.array_equal(integers, timestamps) else timestamps.astype(np.float64)
