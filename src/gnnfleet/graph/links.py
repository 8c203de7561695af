"""Edges as things to predict: which edges messages run over, which are targets, which are held out.

``Links`` names edges by (number of the edge type, source, destination) in store ids. A store keeps held-out pairs with
their edge type (``Edges.links``); ``split_links`` makes them where there are none. Both directions of a pair count as
one link: in an edge type that is its own reverse only source ≤ destination is a target, and the inverse edge types that
``with_inverse`` adds carry messages but are no targets.
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
    """L edges. ``ids`` are what draws go by: store edge ids of training edges, else the place in the held-out list."""

    relation: Tensor  # [L] int64: the number of the edge type in the graph's order
    src: Tensor  # [L] int64
    dst: Tensor  # [L] int64
    ids: Tensor  # [L] int64

    def __len__(self) -> int:
        return int(self.src.shape[0])

    def select(self, rows: Tensor | slice) -> Links:
        """Some of them."""
        return Links(self.relation[rows], self.src[rows], self.dst[rows], self.ids[rows])

    @property
    def draw_ids(self) -> Tensor:
        """[L] int64 that tell links of all edge types apart: what draws go by."""
        return self.relation << 40 | self.ids

    @classmethod
    def concat(cls, parts: Sequence[Links]) -> Links:
        """One list of several."""
        empty = torch.empty(0, dtype=torch.int64)
        names = ("relation", "src", "dst", "ids")
        return cls(*(torch.cat([empty, *(getattr(part, name) for part in parts)]) for name in names))


@dataclass(frozen=True, eq=False)
class LinkData:
    """A graph for link prediction: its edges carry messages and are the training edges."""

    graph: Graph
    splits: dict[str, Links]  # train, val, test
    negatives: dict[str, Links]  # val, test where the data brings its own
    symmetric: Tensor  # [R] bool: edge types that are their own reverse

    @property
    def edge_types(self) -> tuple[EdgeType, ...]:
        """By number."""
        return tuple(self.graph.edges)


def link_data(graph: Graph, only: Sequence[EdgeType] = ()) -> LinkData:
    """Targets and held-out links of a graph; ``only`` names the edge types to predict.

    Without ``only``: the one edge type with held-out links if just one has any, otherwise all. Raises ConfigError.
    """
    strange = [kind for kind in only if kind not in graph.edges]
    if strange:
        raise ConfigError(f"no edge type {strange[0]}: there are {', '.join(map(str, graph.edges))}")
    held = [kind for kind, edges in graph.edges.items() if any(name in edges.links for name in HELD_OUT)]
    wanted = set(only) or set(held if len(held) == 1 else (k for k in graph.edges if not _is_inverse(k, graph)))
    numbers = [(number, kind) for number, kind in enumerate(graph.edges) if kind in wanted]
    splits = {"train": Links.concat([_targets(number, kind, graph) for number, kind in numbers])}
    negatives = {}
    for name in HELD_OUT:
        splits[name] = _held_out(graph, numbers, name)
        given = _held_out(graph, numbers, f"{name}_neg")
        if len(given):
            negatives[name] = given
    symmetric = torch.tensor([_is_symmetric(kind, graph) for kind in graph.edges], dtype=torch.bool)
    return LinkData(graph, splits, negatives, symmetric)


def has_held_out_links(graph: Graph) -> bool:
    """Whether a graph brings held-out links."""
    return any(name in edges.links for edges in graph.edges.values() for name in HELD_OUT)


def split_links(graph: Graph, shares: SplitShares, *, seed: int) -> Graph:
    """The graph without the edges that go to val and test, which become its held-out links.

    An edge, its parallels and its reverse go together. Drawn by original ids and the seed, so the same edges in
    another order split the same way. Raises ConfigError where shares leave a remainder or nothing to train on.
    """
    if has_held_out_links(graph):
        raise ConfigError("the graph has held-out links already: leave --split out")
    if shares.train <= 0 or abs(shares.train + shares.val + shares.test - 1) > 1e-9:
        raise ConfigError("shares of edges must sum to 1 and leave some for training, as 0.8/0.1/0.1")
    keys = {kind: _mixed_ids(graph, kind) for kind in graph.nodes}
    drawn = {kind: _pair_keys(kind, edges, keys, seed) for kind, edges in graph.edges.items()}
    every = torch.unique(torch.cat(list(drawn.values()))) if drawn else torch.empty(0, dtype=torch.int64)
    ends = [round(len(every) * share) for share in (shares.train, shares.train + shares.val)]
    edges = {}
    for kind, table in graph.edges.items():
        place = torch.searchsorted(every, drawn[kind])
        links = {}
        for name, mask in (("val", (place >= ends[0]) & (place < ends[1])), ("test", place >= ends[1])):
            links[name] = _once(kind, table, graph, mask)
        kept = filter_edges(table, place < ends[0])
        edges[kind] = replace(kept, links={} if _is_inverse(kind, graph) else links)
    return Graph.of(graph.nodes, edges, name=graph.name, undirected=graph.undirected)


def _mixed_ids(graph: Graph, kind: str) -> NodeKeys:
    return mix(id_keys(graph.nodes[kind].ids))


def _pair_keys(kind: EdgeType, edges: Edges, keys: dict[str, NodeKeys], seed: int) -> Tensor:
    """[E] int64: one number for an edge, its parallels and its reverse, also in an inverse edge type."""
    base = inverse_type(kind) if kind.relation.startswith(REVERSE_PREFIX) else kind
    word = hashlib.blake2b(f"{seed}/{base}".encode(), digest_size=8).digest()
    start = np.frombuffer(word, dtype="<u8")
    # A sum does not know which end is which; the second mixing parts pairs whose sums are close.
    ends = keys[kind.src][edges.src.numpy()] + keys[kind.dst][edges.dst().numpy()]
    return torch.from_numpy(mix(mix(ends) ^ start).view(np.int64))


def _once(kind: EdgeType, edges: Edges, graph: Graph, mask: Tensor) -> Tensor:
    """[2, L] the edges under a mask, each pair once."""
    pairs = torch.stack([edges.src[mask].long(), edges.dst()[mask].long()])
    if kind.src == kind.dst:
        both = _is_symmetric(kind, graph)
        pairs = torch.stack([pairs.amin(0), pairs.amax(0)]) if both else pairs
    found: Tensor = torch.unique(pairs, dim=1)
    return found


def _targets(number: int, kind: EdgeType, graph: Graph) -> Links:
    edges = graph.edges[kind]
    src, dst, ids = edges.src.long(), edges.dst().long(), torch.arange(edges.count)
    if _is_symmetric(kind, graph):
        keep = src <= dst
        src, dst, ids = src[keep], dst[keep], ids[keep]
    return Links(torch.full_like(src, number), src, dst, ids)


def _held_out(graph: Graph, numbers: list[tuple[int, EdgeType]], name: str) -> Links:
    found = []
    for number, kind in numbers:
        pairs = graph.edges[kind].links.get(name)
        if pairs is None:
            continue
        for row, end in zip(pairs, (kind.src, kind.dst), strict=True):
            if row.numel() and not 0 <= int(row.min()) <= int(row.max()) < graph.nodes[end].count:
                raise InputError(f"held-out links {name} of {kind} name nodes that are not there")
        found.append(Links(torch.full_like(pairs[0], number), pairs[0], pairs[1], torch.arange(pairs.shape[1])))
    return Links.concat(found)


def _is_inverse(kind: EdgeType, graph: Graph) -> bool:
    return kind.relation.startswith(REVERSE_PREFIX) and inverse_type(kind) in graph.edges


def _is_symmetric(kind: EdgeType, graph: Graph) -> bool:
    """Whether every edge of the type has its reverse in it; edge data is not compared."""
    if kind.src != kind.dst:
        return False
    edges = graph.edges[kind]
    return is_undirected({kind: replace(edges, weight=None, attr=None, time=None, y=None)})
