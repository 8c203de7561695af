"""Writer of ``.npz`` files in the layout of ``read_npz``; graphs that the layout cannot hold are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EDGE, NO_SPLIT, NODE, SPLITS, Graph
from gnnfleet.graph.ingest.relations import Array

_LINKS = {"val": "valid_edge", "val_neg": "valid_edge_neg", "test": "test_edge", "test_neg": "test_edge_neg"}


def write_npz(graph: Graph, path: str | Path) -> None:
    """Write ``path``; edges in store order. Raises ConfigError for data that only some types have."""
    arrays: dict[str, Any] = {**_node_arrays(graph), **_edge_arrays(graph)}
    with Path(path).open("wb") as file:  # a file, because numpy appends .npz to names without it
        np.savez_compressed(file, **arrays)


def _node_arrays(graph: Graph) -> dict[str, Array]:
    plain = list(graph.nodes) == [NODE]
    counts = [table.count for table in graph.nodes.values()]
    arrays: dict[str, Array] = {"num_nodes": np.array(graph.num_nodes)}
    if not plain:
        arrays["node_type_names"] = np.array(list(graph.nodes))
        arrays["node_type_offset"] = np.cumsum([0, *counts])
    for kind, table in graph.nodes.items():
        ending = "" if plain else f"__{kind}"
        if table.x is not None:
            arrays[f"x{ending}"] = _array(table.x)
        if not plain or not table.ids.are_rows:
            arrays[f"ids{ending}"] = np.array(table.ids.values().to_pylist())
        if table.classes:
            arrays["class_names"] = np.array(table.classes)
    y = _stack([table.y for table in graph.nodes.values()], counts, "labels", fill=-1)
    if y is not None:
        arrays["y" if y.ndim == 1 else "y_multi"] = y
    splits = [None if table.split is None else table.split.T for table in graph.nodes.values()]
    codes = _stack(splits, counts, "splits", fill=NO_SPLIT)
    if codes is not None:
        arrays |= {f"{name}_masks": np.equal(codes.T, code) for name, code in SPLITS.items()}
    return arrays


def _edge_arrays(graph: Graph) -> dict[str, Array]:
    offset, plain = graph.node_offsets, list(graph.edges) == [EDGE]
    has_one_node_type = list(graph.nodes) == [NODE]
    starts = {kind: torch.tensor([[offset[kind.src]], [offset[kind.dst]]]) for kind in graph.edges}
    pairs = [table.edge_index() + starts[kind] for kind, table in graph.edges.items()]
    counts = [table.count for table in graph.edges.values()]
    arrays: dict[str, Array] = {"edge_index": torch.cat([torch.empty(2, 0, dtype=torch.int64), *pairs], 1).numpy()}
    if not plain:
        arrays["edge_type"] = np.repeat(np.arange(len(counts)), counts)
        names = [kind.relation if has_one_node_type else "-".join(kind) for kind in graph.edges]
        arrays["edge_type_names"] = np.array(names, dtype=np.str_)
    for name in ("weight", "attr", "time"):
        columns = [getattr(table, name) for table in graph.edges.values()]
        if (values := _stack(columns, counts, f"edge {name}", fill=None)) is not None:
            arrays[f"edge_{name}"] = values
    for name, array in _LINKS.items():
        held_out = [(i, k, t.links[name]) for i, (k, t) in enumerate(graph.edges.items()) if name in t.links]
        if held_out:
            arrays[array] = torch.cat([links + starts[kind] for _, kind, links in held_out], 1).numpy()
            if not plain:
                lengths = [links.shape[1] for _, _, links in held_out]
                arrays[f"{array}_type"] = np.repeat([i for i, _, _ in held_out], lengths)
    return arrays


def _stack(tables: list[Tensor | None], counts: list[int], name: str, *, fill: int | None) -> Array | None:
    """Concatenate the rows of all types; a missing table is filled with ``fill`` or, without it, an error."""
    present = [table for table in tables if table is not None]
    if not present:
        return None
    if len({table.shape[1:] for table in present}) > 1 or (fill is None and len(present) < len(tables)):
        raise ConfigError(
            f"an .npz file cannot hold {name} that differ between types: save the graph as a store instead"
        )
    shape: Any = present[0].shape[1:]
    rows = [
        np.full((count, *shape), fill, dtype=_array(present[0]).dtype) if table is None else _array(table)
        for table, count in zip(tables, counts, strict=True)
    ]
    return np.concatenate(rows)


def _array(tensor: Tensor) -> Array:
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
