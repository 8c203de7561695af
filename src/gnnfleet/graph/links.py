"""Links for link prediction: message edges, training targets and held-out pairs.

``Links`` identifies edges by (number of the edge type, source, destination) in store ids. A store keeps held-out pairs
per edge type (``Edges.links``); ``split_links`` draws them for a graph without. Both directions of a pair are one link:
in an edge type that is its own reverse only source ≤ destination is a target. Inverse edge types from
``add_inverse_edges`` carry messages but are no targets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import Edges, EdgeType, Graph
from gnnfleet.graph.ingest.clean import REVERSE_PREFIX, filter_edges, inverse_type, is_undirected
from gnnfleet.graph.split import NodeKeys, SplitShares, id_keys, mix

HELD_OUT = ("val", "test")


@dataclass(frozen=True, eq=False)
class Links:
    """L edges. ``ids`` key random draws: store edge ids of training edges, else positions in the held-out list."""

    relation: Tensor  # [L] int64: the number of the edge type in the graph's order
    src: Tensor  # [L] int64
    dst: Tensor  # [L] int64
    ids: Tensor  # [L] int64

    def __len__(self) -> int:
        return int(self.src.shape[0])

    def select(self, rows: Tensor | slice) -> Links:
        return Links(self.relation[rows], self.src[rows], self.dst[rows], self.ids[rows])

    @property
    def draw_ids(self) -> Tensor:
        """[L] int64 keys for random draws, unique across edge types."""
        return self.relation << 40 | self.ids

    @classmethod
    def concat(cls, parts: Sequence[Links]) -> Links:
        empty = torch.empty(0, dtype=torch.int64)
        names = ("relation", "src", "dst", "ids")
        return cls(*(torch.cat([empty, *(getattr(part, name) for part in parts)]) for name in names))


@dataclass(frozen=True, eq=False)
class LinkData:
    """A graph for link prediction, whose edges carry messages and are the training edges."""

    graph: Graph
    splits: dict[str, Links]  # train, val, test
    negatives: dict[str, Links]  # val, test if the dataset has them
    symmetric: Tensor  # [R] bool: edge types that are their own reverse

    @property
    def edge_types(self) -> tuple[EdgeType, ...]:
        return tuple(self.graph.edges)


def link_data(graph: Graph, only: Sequence[EdgeType] = ()) -> LinkData:
    """Collect targets and held-out links of a graph; ``only`` names the edge types to predict.

    By default that is the edge type with held-out links if only one has any, otherwise all. Raises ConfigError.
    """
    unknown = [kind for kind in only if kind not in graph.edges]
    if unknown:
        raise ConfigError(f"no edge type {unknown[0]}: the graph has {', '.join(map(str, graph.edges))}")
    held_out = [kind for kind, edges in graph.edges.items() if any(name in edges.links for name in HELD_OUT)]
    default = held_out if len(held_out) == 1 else [kind for kind in graph.edges if not _is_inverse(kind, graph)]
    numbers = [(number, kind) for number, kind in enumerate(graph.edges) if kind in (only or default)]
    splits = {"train": Links.concat([_targets(number, kind, graph) for number, kind in numbers])}
    negatives = {}
    for name in HELD_OUT:
        splits[name] = _held_out(graph, numbers, name)
        pairs = _held_out(graph, numbers, f"{name}_neg")
        if len(pairs):
            negatives[name] = pairs
    symmetric = torch.tensor([_is_symmetric(kind, graph) for kind in graph.edges], dtype=torch.bool)
    return LinkData(graph, splits, negatives, symmetric)


def has_held_out_links(graph: Graph) -> bool:
    """True if any edge type has held-out links."""
    return any(name in edges.links for edges in graph.edges.values() for name in HELD_OUT)


def split_links(graph: Graph, shares: SplitShares, *, seed: int) -> Graph:
    """Move the edges of val and test from the graph to its held-out links.

    An edge, its parallels and its reverse stay together. Draws depend on original ids and the seed, so the same edges
    in another order are split the same way. Raises ConfigError unless the shares sum to 1 with some for training.
    """
    if has_held_out_links(graph):
        raise ConfigError("the graph already has held-out links: remove --split")
    if shares.train <= 0 or abs(shares.train + shares.val + shares.test - 1) > 1e-9:
        raise ConfigError("shares of edges must sum to 1 and leave some for training, as 0.8/0.1/0.1")
    keys = {kind: mix(id_keys(nodes.ids)) for kind, nodes in graph.nodes.items()}
    pair_keys = {kind: _pair_keys(kind, edges, keys, seed) for kind, edges in graph.edges.items()}
    distinct = torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *pair_keys.values()]))
    ends = [round(len(distinct) * share) for share in (shares.train, shares.train + shares.val)]
    edges = {}
    for kind, table in graph.edges.items():
        rank = torch.searchsorted(distinct, pair_keys[kind])
        links = {}
        if not _is_inverse(kind, graph):
            masks = {"val": (rank >= ends[0]) & (rank < ends[1]), "test": rank >= ends[1]}
            links = {name: _distinct_pairs(kind, table, graph, mask) for name, mask in masks.items()}
        edges[kind] = replace(filter_edges(table, rank < ends[0]), links=links)
    return Graph.of(graph.nodes, edges, name=graph.name, undirected=graph.undirected)


def _pair_keys(kind: EdgeType, edges: Edges, keys: dict[str, NodeKeys], seed: int) -> Tensor:
    """[E] int64: one number for an edge, its parallels and its reverse, also in an inverse edge type."""
    base = inverse_type(kind) if kind.relation.startswith(REVERSE_PREFIX) else kind
    digest = hashlib.blake2b(f"{seed}/{base}".encode(), digest_size=8).digest()
    start = np.frombuffer(digest, dtype="<u8")
    # A sum is the same for both directions; the second mix separates pairs whose sums are close.
    ends = keys[kind.src][edges.src.numpy()] + keys[kind.dst][edges.dst().numpy()]
    return torch.from_numpy(mix(mix(ends) ^ start).view(np.int64))


def _distinct_pairs(kind: EdgeType, edges: Edges, graph: Graph, mask: Tensor) -> Tensor:
    """[2, L] distinct pairs of the edges under a mask."""
    pairs = torch.stack([edges.src[mask].long(), edges.dst()[mask].long()])
    if _is_symmetric(kind, graph):
        pairs = torch.stack([pairs.amin(0), pairs.amax(0)])
    distinct: Tensor = torch.unique(pairs, dim=1)
    return distinct


def _targets(number: int, kind: EdgeType, graph: Graph) -> Links:
    edges = graph.edges[kind]
    src, dst, ids = edges.src.long(), edges.dst().long(), torch.arange(edges.count)
    if _is_symmetric(kind, graph):
        keep = src <= dst
        src, dst, ids = src[keep], dst[keep], ids[keep]
    return Links(torch.full_like(src, number), src, dst, ids)


def _held_out(graph: Graph, numbers: list[tuple[int, EdgeType]], name: str) -> Links:
    links = []
    for number, kind in numbers:
        pairs = graph.edges[kind].links.get(name)
        if pairs is None:
            continue
        for row, end in zip(pairs, (kind.src, kind.dst), strict=True):
            if row.numel() and not 0 <= int(row.min()) <= int(row.max()) < graph.nodes[end].count:
                raise InputError(
                    f"held-out links {name} of {kind} name {end} {int(row.max())}, expected nodes below "
                    f"{graph.nodes[end].count}"
                )
        links.append(Links(torch.full_like(pairs[0], number), pairs[0], pairs[1], torch.arange(pairs.shape[1])))
    return Links.concat(links)


def _is_inverse(kind: EdgeType, graph: Graph) -> bool:
    return kind.relation.startswith(REVERSE_PREFIX) and inverse_type(kind) in graph.edges


def _is_symmetric(kind: EdgeType, graph: Graph) -> bool:
    """True if every edge of the type has its reverse in it; edge data is not compared."""
    if kind.src != kind.dst:
        return False
    edges = graph.edges[kind]
    return is_undirected({kind: replace(edges, weight=None, attr=None, time=None, y=None)})
