"""Graphs from NetworkX objects and the files it reads. Attributes are taken by name; nothing is guessed but the weight.

Node ids stay integers or strings where all are; otherwise all become strings. An undirected NetworkX graph gives both
directions of every edge, self-loops once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import EDGE, NO_SPLIT, NODE, SPLITS, Graph, validated_edges, validated_nodes
from gnnfleet.graph.ingest.relations import Array

AttributeNames = str | Sequence[str] | None
_SPLIT_CODES = {**SPLITS, "valid": SPLITS["val"], "validation": SPLITS["val"], "": NO_SPLIT}


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
    """The graph of a NetworkX (Multi)(Di)Graph; raises InputError naming the node or edge that lacks an attribute.

    ``x`` and ``edge_attr`` name one attribute (a number or a list) or several that are put side by side; ``y`` holds
    class numbers, class names or lists of 0 and 1, missing where unknown; ``split`` holds train, val or test, missing
    for neither. Edges without ``weight`` weigh 1; a graph without any has no weights.
    """
    rows = {node: row for row, node in enumerate(g.nodes)}
    labels, classes = (None, ()) if y is None else _labels([data.get(y) for _, data in g.nodes(data=True)], y)
    node_values = [data for _, data in g.nodes(data=True)]
    nodes = validated_nodes(
        len(rows),
        x=_columns(node_values, x, lambda i: f"node {list(rows)[i]!r}"),
        y=labels,
        split=None if split is None else _split([data.get(split) for data in node_values], split),
        ids=_ids(list(rows)),
        classes=classes,
    )
    triples = list(g.edges(data=True))
    pairs = np.array([(rows[s], rows[d]) for s, d, _ in triples], dtype=np.int64).reshape(-1, 2).T
    values = [data for _, _, data in triples]

    def edge_name(i: int) -> str:
        return f"edge {triples[i][0]!r} to {triples[i][1]!r}"

    given = {
        "weight": _weights(values, weight),
        "attr": _columns(values, edge_attr, edge_name),
        "time": None if time is None else np.array([_need(data, time, edge_name, i) for i, data in enumerate(values)]),
    }
    undirected = not g.is_directed()
    take = np.arange(pairs.shape[1])
    if undirected:
        back = np.flatnonzero(pairs[0] != pairs[1])
        take = np.concatenate([take, back])
        pairs = np.concatenate([pairs, pairs[::-1, back]], axis=1)
    data: dict[str, Any] = {word: None if array is None else array[take] for word, array in given.items()}
    edges = validated_edges(pairs, num_src=len(rows), num_dst=len(rows), **data)
    called = name or str(getattr(g, "name", "") or "graph")
    return Graph.of({NODE: nodes}, {EDGE: edges}, name=called, undirected=undirected)


def read_graphml(path: str | Path, **attributes: Any) -> Graph:
    """The graph of a ``.graphml`` or ``.gml`` file; ``attributes`` are those of ``from_networkx``."""
    path = Path(path)
    try:
        import networkx
    except ImportError as error:
        raise ConfigError("networkx is not installed: pip install 'gnnfleet[networkx]'") from error
    endings = {ending.lower() for ending in path.suffixes[-2:]}
    if not endings & {".graphml", ".gml"}:
        raise InputError(f"{path}: expected a file that ends in .graphml or .gml")
    try:
        g = networkx.read_graphml(path) if ".graphml" in endings else _read_gml(path)
    except FileNotFoundError as error:
        raise InputError(f"no file {path}") from error
    except Exception as error:  # each of its parsers has failures of its own
        raise InputError(f"{path} cannot be read by networkx: {error}") from error
    attributes.setdefault("name", path.name.split(".")[0])
    try:
        return from_networkx(g, **attributes)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _read_gml(path: Path) -> Any:
    import networkx

    try:
        return networkx.read_gml(path)
    except networkx.NetworkXError as error:
        if "label" not in str(error):
            raise
        return networkx.read_gml(path, label="id")  # nodes without labels, or labels that repeat


def _ids(nodes: list[Any]) -> list[int] | list[str] | None:
    """None where the nodes are their own row numbers."""
    if all(isinstance(node, (int, np.integer)) and not isinstance(node, bool) for node in nodes):
        numbers = [int(node) for node in nodes]
        if numbers == list(range(len(nodes))):
            return None
        if all(-(2**63) <= number < 2**63 for number in numbers):
            return numbers
    return [str(node) for node in nodes]


def _need(data: dict[str, Any], attribute: str, called: Callable[[int], str], row: int) -> Any:
    value = data.get(attribute)
    if value is None:
        raise InputError(f"{called(row)} has no attribute {attribute!r}; it has {', '.join(map(str, data)) or 'none'}")
    return value


def _columns(values: list[dict[str, Any]], names: AttributeNames, called: Callable[[int], str]) -> Array | None:
    """[n, F] float32: the named attributes side by side."""
    if names is None:
        return None
    parts = []
    for attribute in [names] if isinstance(names, str) else names:
        cells = [_need(data, attribute, called, row) for row, data in enumerate(values)]
        try:
            part = np.array(cells, dtype=np.float32)
        except (ValueError, TypeError) as error:
            raise InputError(f"attribute {attribute!r} must be a number or a list of one length: {error}") from error
        parts.append(part.reshape(len(values), -1) if len(values) else np.empty((0, 1), dtype=np.float32))
    return np.concatenate(parts, axis=1) if parts else None


def _weights(values: list[dict[str, Any]], attribute: str | None) -> Array | None:
    if attribute is None or not any(data.get(attribute) is not None for data in values):
        return None
    cells = [1.0 if data.get(attribute) is None else data[attribute] for data in values]
    try:
        return np.array(cells, dtype=np.float32).reshape(len(values))
    except (ValueError, TypeError) as error:
        raise InputError(
            f"edge attribute {attribute!r} must be a number: {error}; pass weight=None to leave it"
        ) from error


def _labels(cells: list[Any], attribute: str) -> tuple[Array, tuple[str, ...]]:
    known = [cell for cell in cells if cell is not None]
    if known and all(isinstance(cell, str) for cell in known):
        classes = sorted(set(known))
        number = {cell: i for i, cell in enumerate(classes)}
        return np.array([-1 if cell is None else number[cell] for cell in cells], dtype=np.int64), tuple(classes)
    width = next((len(cell) for cell in known if hasattr(cell, "__len__") and not isinstance(cell, str)), None)
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
        word = cell.lower() if isinstance(cell, str) else cell
        code = NO_SPLIT if word is None else _SPLIT_CODES.get(word, word)
        if isinstance(code, bool) or code not in (NO_SPLIT, *SPLITS.values()):
            raise InputError(f"{attribute!r} must be train, val or test (or 0, 1, 2; −1 for none), found {cell!r}")
        codes.append(int(code))
    return np.array(codes, dtype=np.int8)
