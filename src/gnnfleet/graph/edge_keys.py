"""Edges known by their ends: one number for (edge type, source, destination), to look edges up and to leave them out.

Leaving out is what keeps link prediction honest: a message over the very edge that is to be predicted, or over its
reverse, gives the answer away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType, Graph
from gnnfleet.graph.ingest.clean import inverse_type
from gnnfleet.graph.links import Links
from gnnfleet.graph.views.local import LocalEdges, LocalView
from gnnfleet.ops.csr import CSR

# Bits of the table that most edges of a view are dismissed by, before any is searched for.
_SIEVE = 1 << 22


@dataclass(frozen=True, eq=False)
class EdgeKeys:
    """Numbers edges of a graph; edge types and nodes as the graph numbers them."""

    edge_types: tuple[EdgeType, ...]
    width: int  # nodes of the largest type

    @classmethod
    def of(cls, graph: Graph) -> EdgeKeys:
        width = max([1, *(nodes.count for nodes in graph.nodes.values())])
        if len(graph.edges) * width**2 >= 2**63:
            raise ConfigError(f"{width} nodes and {len(graph.edges)} edge types are too many to look edges up by ends")
        return cls(tuple(graph.edges), width)

    def keys(self, relation: Tensor | int, src: Tensor, dst: Tensor) -> Tensor:
        """[n] int64, different for different edges; ascending in store order within an edge type."""
        return (relation * self.width + dst) * self.width + src

    def of_links(self, links: Links) -> Tensor:
        """[L] the keys of links."""
        return self.keys(links.relation, links.src, links.dst)

    def of_reversed_links(self, links: Links) -> Tensor:
        """Keys of the reverse of links: in the inverse edge type where there is one, else in the same, if it can be."""
        number = {kind: i for i, kind in enumerate(self.edge_types)}
        turned = [number.get(inverse_type(kind), i if kind.src == kind.dst else -1) for i, kind in enumerate(number)]
        relation = torch.tensor(turned, dtype=torch.int64)[links.relation]
        keep = relation >= 0
        return self.keys(relation[keep], links.dst[keep], links.src[keep])

    def of_all_edges(self, graph: Graph) -> Tensor:
        """[E] ascending: every edge of the graph. Eight bytes an edge."""
        parts = [self.keys(i, e.src.long(), e.dst().long()) for i, e in enumerate(graph.edges.values())]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def contains(keys: Tensor, wanted: Tensor) -> Tensor:
    """[n] bool: which of ``wanted`` are among ``keys``, which are ascending."""
    if not len(keys):
        return torch.zeros_like(wanted, dtype=torch.bool)
    place = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
    return keys[place] == wanted


@dataclass(frozen=True, eq=False)
class EdgeMask:
    """Edges that a view shall not have: some links and their reverses. Made once, used on many views or blocks."""

    keys: EdgeKeys
    hidden: Tensor  # ascending keys
    sieve: Tensor  # bool

    @classmethod
    def of(cls, keys: EdgeKeys, links: Links) -> EdgeMask:
        gone: Tensor = torch.unique(torch.cat([keys.of_links(links), keys.of_reversed_links(links)]))
        sieve = torch.zeros(_SIEVE, dtype=torch.bool)
        sieve[_slot(gone)] = True
        return cls(keys, gone, sieve)

    def apply(self, view: LocalView) -> LocalView:
        """The view (whole graph or block) without them, also in its degrees."""
        relations = {}
        lost = {name: torch.zeros(len(rows.node_ids)) for name, rows in view.nodes.items()}
        for number, kind in enumerate(self.keys.edge_types):
            if kind not in view.relations:
                continue
            relation = relations[kind] = view.relations[kind]
            low = number * self.keys.width**2
            span = torch.searchsorted(self.hidden, torch.tensor([low, low + self.keys.width**2]))
            if span[0] == span[1]:
                continue
            cut = relation.structure
            src, dst = view.nodes[kind.src].node_ids[cut.col.long()], view.nodes[kind.dst].node_ids[cut.row.long()]
            hidden = self._among(self.keys.keys(number, src, dst))
            relations[kind] = select_edges(relation, ~hidden)
            if kind.src == kind.dst:  # degrees do not count self-loops
                hidden &= src != dst
            lost[kind.dst] += torch.bincount(cut.row[hidden], minlength=len(lost[kind.dst]))
        nodes = {
            name: replace(rows, degree=_MaskedDegrees(rows.degree, lost[name])) for name, rows in view.nodes.items()
        }
        return replace(view, nodes=nodes, relations=relations)

    def _among(self, keys: Tensor) -> Tensor:
        maybe = self.sieve[_slot(keys)].nonzero()[:, 0]
        found = torch.zeros(len(keys), dtype=torch.bool)
        found[maybe[contains(self.hidden, keys[maybe])]] = True
        return found


class _MaskedDegrees:
    """Degrees without the hidden edges: a count would give away what the messages no longer say.

    Weighted degrees keep them. In a sampled block only hidden edges that were sampled are taken off.
    """

    def __init__(self, degree: Callable[[bool], Tensor], lost: Tensor) -> None:
        self._degree, self._lost = degree, lost

    def __call__(self, weighted: bool) -> Tensor:
        return self._degree(weighted) if weighted else self._degree(weighted) - self._lost


def select_edges(relation: LocalEdges, keep: Tensor) -> LocalEdges:
    """The edges of a view under a mask [E]."""
    kept = torch.zeros(len(keep) + 1, dtype=torch.int64)
    torch.cumsum(keep, 0, out=kept[1:])
    cut = relation.structure
    return relation.cut(CSR(kept[cut.indptr], cut.col[keep], cut.num_cols), keep, relation.sampling_scale)


def _slot(keys: Tensor) -> Tensor:
    """A spread of keys over the sieve; collisions only cost a search."""
    return (keys * 0x9E3779B1 >> 11) & (_SIEVE - 1)
