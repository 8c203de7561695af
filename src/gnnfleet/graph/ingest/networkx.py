"""Conversion of NetworkX graphs and of the files NetworkX reads. Attributes are named; only ``weight`` has a default.

Node ids stay integers or strings if all of them are; otherwise all become strings. Edges of an undirected NetworkX
graph are stored in both directions, self-loops once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import EDGE, NO_SPLIT, NODE, SPLITS, Graph, validated_edges, validated_nodes
from gnnfleet.graph.ingest.relations import Array, locate_errors, take_rows
from gnnfleet.graph.ingest.spec import SPLIT_CODES

AttributeNames = str | Sequence[str] | None


def from_networkx(
    g: Any,
    *,
    x: AttributeNames = None,
    y: str | None = None,
    split: str | None = None,
    weight: str | None = "weight",
    edge_attr: AttributeNames = None,
    time: str | None = None,
    name: str | None = None,
) -> Graph:
    """Convert a NetworkX (Multi)(Di)Graph; raises InputError naming the node or edge that lacks an attribute.

    ``x`` and ``edge_attr`` name one attribute (a number or a list) or several to concatenate. ``y`` holds class
    numbers, class names or lists of 0 and 1 and may be missing; ``split`` holds train, val or test and may be missing.
    Edges without ``weight`` get weight 1; a graph without any weight has none.
    """
    rows = {node: row for row, node in enumerate(g.nodes)}
    node_attributes = [attributes for _, attributes in g.nodes(data=True)]
    labels, classes = (None, ()) if y is None else _labels([attributes.get(y) for attributes in node_attributes], y)
    nodes = validated_nodes(
        len(rows),
        x=_columns(node_attributes, x, lambda i: f"node {list(rows)[i]!r}"),
        y=labels,
        split=None if split is None else _split([attributes.get(split) for attributes in node_attributes], split),
        ids=_ids(list(rows)),
        classes=classes,
    )
    triples = list(g.edges(data=True))
    pairs = np.array([(rows[s], rows[d]) for s, d, _ in triples], dtype=np.int64).reshape(-1, 2).T
    edge_attributes = [attributes for _, _, attributes in triples]

    def edge_name(i: int) -> str:
        return f"edge {triples[i][0]!r} to {triples[i][1]!r}"

    edge_data: dict[str, Any] = {
        "weight": _weights(edge_attributes, weight),
        "attr": _columns(edge_attributes, edge_attr, edge_name),
        "time": None if time is None else np.array(_cells(edge_attributes, time, edge_name)),
    }
    undirected = not g.is_directed()
    if undirected:
        back = np.flatnonzero(pairs[0] != pairs[1])
        edge_data = take_rows(edge_data, np.concatenate([np.arange(pairs.shape[1]), back]))
        pairs = np.concatenate([pairs, pairs[::-1, back]], axis=1)
    edges = validated_edges(pairs, num_src=len(rows), num_dst=len(rows), **edge_data)
    graph_name = name or str(getattr(g, "name", "") or "graph")
    return Graph.of({NODE: nodes}, {EDGE: edges}, name=graph_name, undirected=undirected)


def read_graphml(path: str | Path, **attributes: Any) -> Graph:
    """Read a ``.graphml`` or ``.gml`` file; ``attributes`` are those of ``from_networkx``."""
    path = Path(path)
    try:
        import networkx
    except ImportError as error:
        raise ConfigError("networkx is not installed: pip install 'gnnfleet[networkx]'") from error
    endings = {ending.lower() for ending in path.suffixes[-2:]}
    if not endings & {".graphml", ".gml"}:
        raise InputError(f"{path}: expected a file whose name ends in .graphml or .gml")
    try:
        g = networkx.read_graphml(path) if ".graphml" in endings else _read_gml(path)
    except FileNotFoundError as error:
        raise InputError(f"no file {path}") from error
    except Exception as error:  # every parser of networkx raises other types
        raise InputError(f"{path} cannot be read by networkx: {error}") from error
    attributes.setdefault("name", path.name.split(".")[0])
    with locate_errors(path):
        return from_networkx(g, **attributes)


def _read_gml(path: Path) -> Any:
    import networkx

    try:
        return networkx.read_gml(path)
    except networkx.NetworkXError as error:
        if "label" not in str(error):
            raise
        return networkx.read_gml(path, label="id")  # labels are missing or repeated


def _ids(nodes: list[Any]) -> list[int] | list[str] | None:
    """Node ids, or None if they are the row numbers."""
    if all(isinstance(node, (int, np.integer)) and not isinstance(node, bool) for node in nodes):
        numbers = [int(node) for node in nodes]
        if numbers == list(range(len(nodes))):
            return None
        if all(-(2**63) <= number < 2**63 for number in numbers):
            return numbers
    return [str(node) for node in nodes]


def _cells(rows: list[dict[str, Any]], attribute: str, row_name: Callable[[int], str]) -> list[Any]:
    """One attribute of all rows; raises InputError naming the first row without it."""
    for i, attributes in enumerate(rows):
        if attributes.get(attribute) is None:
            existing = ", ".join(map(str, attributes)) or "none"
            raise InputError(f"{row_name(i)} has no attribute {attribute!r}; it has {existing}")
    return [attributes[attribute] for attributes in rows]


def _columns(rows: list[dict[str, Any]], names: AttributeNames, row_name: Callable[[int], str]) -> Array | None:
    """[n, F] float32: the named attributes side by side."""
    if names is None:
        return None
    columns = []
    for attribute in [names] if isinstance(names, str) else names:
        cells = _cells(rows, attribute, row_name)
        try:
            column = np.array(cells, dtype=np.float32)
        except (ValueError, TypeError) as error:
            raise InputError(f"attribute {attribute!r} must be a number or a list of one length: {error}") from error
        columns.append(column.reshape(len(rows), -1) if rows else np.empty((0, 1), dtype=np.float32))
    return np.concatenate(columns, axis=1) if columns else None


def _weights(rows: list[dict[str, Any]], attribute: str | None) -> Array | None:
    if attribute is None or not any(attributes.get(attribute) is not None for attributes in rows):
        return None
    cells = [1.0 if attributes.get(attribute) is None else attributes[attribute] for attributes in rows]
    try:
        return np.array(cells, dtype=np.float32).reshape(len(rows))
    except (ValueError, TypeError) as error:
        raise InputError(
            f"edge attribute {attribute!r} must be a number: {error}; pass weight=None to ignore it"
        ) from error


def _labels(cells: list[Any], attribute: str) -> tuple[Array, tuple[str, ...]]:
    labels = [cell for cell in cells if cell is not None]
    if labels and all(isinstance(label, str) for label in labels):
        classes = sorted(set(labels))
        number = {name: i for i, name in enumerate(classes)}
        return np.array([-1 if cell is None else number[cell] for cell in cells], dtype=np.int64), tuple(classes)
    width = next((len(label) for label in labels if hasattr(label, "__len__") and not isinstance(label, str)), None)
    missing: Any = -1 if width is None else [-1] * width
    try:
        return np.array([missing if cell is None else cell for cell in cells], dtype=np.float64), ()
    except (ValueError, TypeError) as error:
        raise InputError(
            f"labels {attribute!r} must all be class numbers, names or equally long lists: {error}"
        ) from error


def _split(cells: list[Any], attribute: str) -> Array:
    codes = []
    for cell in cells:
        name = cell.lower() if isinstance(cell, str) else cell
        code = NO_SPLIT if name is None else SPLIT_CODES.get(name, name)
        if isinstance(code, bool) or code not in (NO_SPLIT, *SPLITS.values()):
            raise InputError(f"{attribute!r} must be train, val or test (or 0, 1, 2; −1 for none), found {cell!r}")
        codes.append(int(code))
    return np.array(codes, dtype=np.int8)
