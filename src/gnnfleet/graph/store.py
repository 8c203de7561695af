"""Graph stores: write a Graph as a bundle of arrays, open it as memory-mapped tensors.

docs/formats.md describes the files. Both directions go through ``NODE_ARRAYS`` and ``EDGE_ARRAYS``, so a tensor of a
node or edge type is stored under its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch import Tensor

from gnnfleet.errors import InputError, StoreError
from gnnfleet.graph.graph import ColumnGroups, Edges, EdgeType, Graph, Nodes
from gnnfleet.graph.ids import Ids
from gnnfleet.io.bundle import Bundle, BundleWriter

KIND = "graph"
NODE_ARRAYS = ("x", "y", "split")
EDGE_ARRAYS = ("indptr", "src", "weight", "attr", "time", "order", "y")
MAX_NODES = 1 << 48


def open_store(path: str | Path) -> Graph:
    """Open a store without reading its arrays; raises StoreError if it is incomplete or damaged."""
    bundle = Bundle.open(path, KIND)
    try:
        nodes = {entry["type"]: _open_nodes(bundle, entry) for entry in bundle.meta["nodes"]}
        edges = {EdgeType(*entry["type"]): _open_edges(bundle, entry) for entry in bundle.meta["edges"]}
        name, undirected = str(bundle.meta["name"]), bool(bundle.meta["undirected"])
        return Graph.of(nodes, edges, name=name, undirected=undirected, store=bundle)
    except KeyError as error:
        raise StoreError(f"{path}/{KIND}.json lacks {error}: make the store again from its source") from error
    except (TypeError, ValueError, AttributeError, IndexError, InputError) as error:
        raise StoreError(f"{path}/{KIND}.json is invalid ({error}): make the store again from its source") from error


def save_store(
    graph: Graph, path: str | Path, *, overwrite: bool = False, advance: Callable[[int], None] = lambda _: None
) -> Graph:
    """Write a graph and open the store; ``advance`` is called with the number of bytes written."""
    with BundleWriter(path, kind=KIND, overwrite=overwrite) as out:
        for file, tensor in tensor_files(graph).items():
            out.put(file, tensor)
            advance(tensor.nbytes)
        for node_type, nodes in graph.nodes.items():
            if not nodes.ids.are_rows:
                nodes.ids.write(out.file(f"{node_dir(node_type)}/ids.parquet"))
        for edge_type, edges in graph.edges.items():
            for name, pairs in edges.links.items():
                out.put(f"{edge_dir(edge_type)}/links_{name}.npy", pairs)
        node_entries = [node_entry(kind, n.count, n.classes, n.columns) for kind, n in graph.nodes.items()]
        edge_entries = [edge_entry(kind, e.count, e.columns) for kind, e in graph.edges.items()]
        meta = {"name": graph.name, "undirected": graph.undirected, "nodes": node_entries, "edges": edge_entries}
        out.commit(meta)
    return open_store(path)


def tensor_files(graph: Graph) -> dict[str, Tensor]:
    """The tensors of all node and edge types by their file in the store."""
    tensors = {f"{node_dir(k)}/{name}.npy": getattr(n, name) for k, n in graph.nodes.items() for name in NODE_ARRAYS}
    tensors |= {f"{edge_dir(k)}/{name}.npy": getattr(e, name) for k, e in graph.edges.items() for name in EDGE_ARRAYS}
    return {file: tensor for file, tensor in tensors.items() if tensor is not None}


def node_entry(node_type: str, count: int, classes: Sequence[str], columns: ColumnGroups) -> dict[str, Any]:
    """A node type in the ``meta`` of a manifest; ``columns`` is left out for features without names."""
    return {"type": node_type, "count": count, "classes": list(classes), **_names(columns)}


def edge_entry(edge_type: EdgeType, count: int, columns: ColumnGroups) -> dict[str, Any]:
    return {"type": list(edge_type), "count": count, **_names(columns)}


def _names(columns: ColumnGroups) -> dict[str, Any]:
    return {"columns": [list(column) for column in columns]} if columns else {}


def node_dir(node_type: str) -> str:
    return f"nodes/{_safe(node_type)}"


def edge_dir(edge_type: EdgeType) -> str:
    return "edges/" + "+".join(map(_safe, edge_type))


def _safe(name: str) -> str:
    """Encode a type's name as a unique file name."""
    return quote(name, safe="").replace(".", "%2E")


def _open_nodes(bundle: Bundle, entry: dict[str, Any]) -> Nodes:
    folder = node_dir(entry["type"])
    if not isinstance(entry["count"], int) or not 0 <= entry["count"] < MAX_NODES:
        raise ValueError(f"{entry['count']!r} nodes of type {entry['type']}")
    tensors = {name: bundle.tensor(f"{folder}/{name}.npy") for name in NODE_ARRAYS if f"{folder}/{name}.npy" in bundle}
    ids = Ids(entry["count"])
    if f"{folder}/ids.parquet" in bundle:
        ids = Ids.from_parquet(bundle.path / folder / "ids.parquet", entry["count"])
    classes = tuple(map(str, entry["classes"]))
    return Nodes(
        count=entry["count"], classes=classes, ids=ids, columns=_open_columns(entry, tensors.get("x")), **tensors
    )


def _open_edges(bundle: Bundle, entry: dict[str, Any]) -> Edges:
    folder = edge_dir(EdgeType(*entry["type"]))
    tensors = {name: bundle.tensor(f"{folder}/{name}.npy") for name in EDGE_ARRAYS if f"{folder}/{name}.npy" in bundle}
    prefix = f"{folder}/links_"
    links = {
        name.removeprefix(prefix).removesuffix(".npy"): bundle.tensor(name)
        for name in bundle.files
        if name.startswith(prefix)
    }
    return Edges(links=links, columns=_open_columns(entry, tensors.get("attr")), **tensors)


def _open_columns(entry: dict[str, Any], values: Tensor | None) -> ColumnGroups:
    """Names of feature columns; older stores and features without names have none."""
    columns = tuple((name, width) for name, width in entry.get("columns", ()))
    if not all(isinstance(name, str) and isinstance(width, int) and width >= 0 for name, width in columns):
        raise ValueError(f"columns of {entry['type']} must be names with widths")
    named, stored = sum(width for _, width in columns), 0 if values is None else values.shape[1]
    if columns and named != stored:
        raise ValueError(f"columns of {entry['type']} name {named} features, found {stored}")
    return columns
