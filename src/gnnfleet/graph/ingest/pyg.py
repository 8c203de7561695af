"""Conversion from and to PyG objects. ``from_pyg`` reads attributes only and does not need torch_geometric.

Attributes read from a Data, or from each node and edge type of a HeteroData:
    nodes   x, y, class_names, train_mask/val_mask/test_mask ([N] or [N, K]), n_id or ids, num_nodes
    edges   edge_index, edge_weight, edge_attr, edge_time or time, edge_type (one edge type per relation)
    links   val_edge_index, test_edge_index, val_neg_edge_index, test_neg_edge_index
A TemporalData (src, dst, t, msg) becomes edges with times. Other attributes are ignored and logged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import EDGE, NODE, SPLITS, Edges, EdgeType, Graph, Nodes, validated_edges, validated_nodes
from gnnfleet.graph.ingest.clean import is_undirected
from gnnfleet.graph.ingest.relations import check_links, load_pt, locate_errors, split_relations, take_rows

_log = logging.getLogger(__name__)
_LINKS = {name: f"{name}_edge_index" for name in ("val", "test", "val_neg", "test_neg")}
_MASKS = {name: f"{name}_mask" for name in SPLITS}
_NODE_ATTRIBUTES = {"x", "y", "class_names", "n_id", "ids", "num_nodes", *_MASKS.values()}
_EDGE_ATTRIBUTES = {"edge_index", "edge_weight", "edge_attr", "edge_time", "time", "edge_type", *_LINKS.values()}
_INSTALL_HINT = "torch_geometric is not installed: pip install 'gnnfleet[pyg]'"


def from_pyg(data: Any, *, name: str = "graph") -> Graph:
    """Convert a Data, HeteroData or TemporalData; raises InputError naming the type and the bad attribute."""
    if hasattr(data, "node_types") and hasattr(data, "edge_types"):
        nodes = {str(kind): _read_nodes(data[kind], _count_hetero(data, kind), str(kind)) for kind in data.node_types}
        for kind in data.node_types:
            _report_ignored(data[kind], str(kind), _NODE_ATTRIBUTES)
        edges = {}
        for kind in data.edge_types:
            edge_type = EdgeType(*map(str, kind))
            _report_ignored(data[kind], str(edge_type), _EDGE_ATTRIBUTES)
            for end in (edge_type.src, edge_type.dst):  # PyG allows edges of a node type that has no store
                nodes.setdefault(end, validated_nodes(_count_hetero(data, end)))
            edges[edge_type] = _read_edges(data[kind], edge_type, nodes)
        return Graph.of(nodes, edges, name=name, undirected=is_undirected(edges))
    if all(getattr(data, name, None) is not None for name in ("src", "dst", "t")):
        pairs = torch.stack([data.src, data.dst])
        return Graph(pairs, edge_attr=getattr(data, "msg", None), time=data.t, name=name)
    _report_ignored(data, NODE, _NODE_ATTRIBUTES | _EDGE_ATTRIBUTES)
    index = _optional(data, "edge_index")
    count = _count_nodes(data, [] if index is None else [index])
    nodes = {NODE: _read_nodes(data, count, NODE)}
    if getattr(data, "edge_type", None) is not None:
        tables = _read_relations(data, count)
    else:
        tables = {EDGE: _read_edges(data, EDGE, nodes)}
    return Graph.of(nodes, tables, name=name, undirected=is_undirected(tables))


def to_pyg(graph: Graph) -> Any:
    """Convert to a Data (one node and one edge type) or HeteroData; edges in store order, ids as n_id or ids."""
    try:
        from torch_geometric.data import Data, HeteroData
    except ImportError as error:
        raise ConfigError(_INSTALL_HINT) from error
    if not graph.is_hetero and len(graph.edges) == 1:
        return Data(**_node_values(graph.single_nodes), **_edge_values(graph.single_edges))
    data = HeteroData()
    for kind, table in graph.nodes.items():
        data[kind].update(_node_values(table))
    for edge_type, edges in graph.edges.items():
        data[tuple(edge_type)].update(_edge_values(edges))
    return data


def read_pt(path: str | Path) -> Graph:
    """Read a ``.pt`` file with a PyG object, a PyG dataset of one graph or a dict of tensors.

    Loads tensors, plain containers and PyG's own classes only; raises InputError for other files.
    """
    path = Path(path)
    try:
        import torch_geometric.data as pyg
        from torch_geometric.data import data as pyg_data
        from torch_geometric.data import storage
    except ImportError as error:
        raise ConfigError(_INSTALL_HINT) from error
    classes = [pyg.Data, pyg.HeteroData, pyg.TemporalData, pyg_data.DataEdgeAttr, pyg_data.DataTensorAttr]
    classes += [storage.BaseStorage, storage.NodeStorage, storage.EdgeStorage, storage.GlobalStorage]
    unsafe_message = (
        f"{path} needs more than tensors and PyG's own classes, and gnnfleet runs no code from a file: "
        "if you trust it, load it yourself and pass the object to gnnfleet.from_pyg"
    )
    return from_pyg(_unpack(load_pt(path, classes, unsafe_message), path, pyg), name=path.stem)


def _unpack(loaded: Any, path: Path, pyg: Any) -> Any:
    """Extract the PyG object; datasets are saved as (values, slices, class), with slices for several graphs."""
    cls: Any = None
    if isinstance(loaded, tuple) and len(loaded) in (2, 3):
        cls = loaded[2] if len(loaded) == 3 else None
        if loaded[1] is not None:
            raise InputError(
                f"{path} holds several graphs, expected one: load it with PyG and pass one graph to gnnfleet.from_pyg"
            )
        loaded = loaded[0]
    if isinstance(loaded, (pyg.Data, pyg.HeteroData, pyg.TemporalData)):
        return loaded
    if isinstance(loaded, Mapping):
        if cls is None:
            cls = pyg.HeteroData if any(isinstance(key, tuple) for key in loaded) else pyg.Data
        return cls.from_dict(dict(loaded))
    raise InputError(f"{path} holds a {type(loaded).__name__}; expected a PyG Data or HeteroData, or a dict of tensors")


def _count_hetero(data: Any, kind: str) -> int:
    """Count the nodes of one type of a HeteroData, by its edges if the type has no sizes."""
    indices = [(edge_type, _optional(data[edge_type], "edge_index")) for edge_type in data.edge_types]
    ends = [
        index[side]
        for (src, _, dst), index in indices
        for side in (0, 1)
        if index is not None and (src, dst)[side] == kind
    ]
    return _count_nodes(data[kind] if kind in data.node_types else SimpleNamespace(), ends)


def _count_nodes(store: Any, ends: list[Tensor]) -> int:
    # PyG's num_nodes property warns when it guesses, so the stored number comes first.
    stored = store.get("num_nodes") if hasattr(store, "get") else vars(store).get("num_nodes")
    if stored is None and hasattr(store, "to_dict"):
        stored = store.to_dict().get("num_nodes")
    if stored is not None:
        return int(stored)
    for name in ("x", "y", "n_id", "ids", *_MASKS.values()):
        if (rows := _optional(store, name)) is not None:
            return len(rows)
    return max((int(end.max()) + 1 for end in ends if end.numel()), default=0)


def _optional(store: Any, *names: str) -> Any:
    """The first of the attributes that is set, on the CPU."""
    attributes = (getattr(store, name, None) for name in names)
    attribute = next((attribute for attribute in attributes if attribute is not None), None)
    return attribute.detach().cpu() if isinstance(attribute, Tensor) else attribute


def _read_nodes(store: Any, count: int, kind: str) -> Nodes:
    masks = {split: mask for split, name in _MASKS.items() if (mask := _optional(store, name)) is not None}
    # PyG has one column per split, gnnfleet one row.
    masks = {split: mask.T if mask.dim() == 2 else mask for split, mask in masks.items()}
    x, ids = _optional(store, "x"), _optional(store, "n_id", "ids")
    with locate_errors(f"nodes of type {kind}"):
        return validated_nodes(
            count,
            x=x.to_dense() if isinstance(x, Tensor) and x.layout != torch.strided else x,
            y=_optional(store, "y"),
            split=masks or None,
            ids=ids.cpu().numpy() if isinstance(ids, Tensor) else ids,
            classes=_optional(store, "class_names") or (),
        )


def _read_edges(store: Any, kind: EdgeType, nodes: Mapping[str, Nodes]) -> Edges:
    num_src, num_dst = nodes[kind.src].count, nodes[kind.dst].count
    with locate_errors(f"edges {kind}"):
        pairs, edge_data = _edge_data(store, kind)
        links = {split: link for split, name in _LINKS.items() if (link := _optional(store, name)) is not None}
        check_links({name: pairs.numpy() for name, pairs in links.items()}, num_src, num_dst)
        return validated_edges(pairs, num_src=num_src, num_dst=num_dst, links=links, **edge_data)


def _read_relations(data: Any, count: int) -> dict[EdgeType, Edges]:
    """One edge type per relation of ``edge_type``, the relation numbers of PyG's relational layers."""
    pairs, edge_data = _edge_data(data, EDGE)
    codes = torch.as_tensor(data.edge_type).numpy()
    tables = {}
    for kind, rows in split_relations(pairs.numpy(), codes, count, "edge_type").items():
        values = take_rows(edge_data, rows) if len(rows) else {}
        tables[kind] = validated_edges(pairs[:, rows], num_src=count, num_dst=count, **values)
    return tables


def _edge_data(store: Any, kind: EdgeType) -> tuple[Tensor, dict[str, Any]]:
    """([2, E] pairs, edge data as arguments of ``validated_edges``)."""
    index = _optional(store, "edge_index")
    if index is None:
        if _optional(store, "adj_t") is not None:
            raise InputError(
                "found adj_t but no edge_index. Convert it: row, col, weight = data.adj_t.t().coo(); "
                "data.edge_index = torch.stack([row, col])"
            )
        index = torch.empty(2, 0, dtype=torch.int64)
    index = torch.as_tensor(index).as_subclass(Tensor).cpu()  # PyG's EdgeIndex is a subclass with its own rules
    time = _optional(store, "edge_time", "time")
    if time is not None and len(time) != index.shape[-1]:
        if _optional(store, "edge_time") is not None:
            raise InputError(f"edge_time has {len(time)} rows, expected one for each of {index.shape[-1]} edges")
        _log.info("edges %s: ignored time, which does not have one value per edge", kind)
        time = None
    return index, {"weight": _optional(store, "edge_weight"), "attr": _optional(store, "edge_attr"), "time": time}


def _report_ignored(store: Any, kind: str, used: set[str]) -> None:
    keys = store.keys() if callable(getattr(store, "keys", None)) else vars(store)
    ignored = sorted(set(map(str, keys)) - used)
    if ignored:
        _log.info("%s: ignored attributes: %s", kind, ", ".join(ignored))


def _node_values(nodes: Nodes) -> dict[str, Any]:
    values: dict[str, Any] = {"num_nodes": nodes.count, "x": nodes.x, "y": nodes.y}
    if nodes.split is not None:
        for split, name in _MASKS.items():
            mask = nodes.split == SPLITS[split]
            values[name] = mask[0] if mask.shape[0] == 1 else mask.T.contiguous()
    if not nodes.ids.are_rows:
        ids = nodes.ids.values().to_pylist()
        values.update({"n_id": torch.tensor(ids)} if ids and isinstance(ids[0], int) else {"ids": ids})
    if nodes.classes:
        values["class_names"] = list(nodes.classes)
    return {name: attribute for name, attribute in values.items() if attribute is not None}


def _edge_values(edges: Edges) -> dict[str, Any]:
    values: dict[str, Any] = {"edge_index": edges.edge_index(), "edge_weight": edges.weight, "edge_attr": edges.attr}
    values["edge_time"] = edges.time
    values.update({name: edges.links.get(split) for split, name in _LINKS.items()})
    return {name: attribute for name, attribute in values.items() if attribute is not None}
