"""Edge keys: one number for (edge type, source, destination), to look up edges and to mask them.

Link prediction masks its target edges: a message over a target edge or its reverse would reveal the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType, Graph
from gnnfleet.graph.ingest.clean import inverse_type
from gnnfleet.graph.links import Links
from gnnfleet.graph.views.local import LocalEdges, LocalView
from gnnfleet.graph.views.view_base import Degrees
from gnnfleet.ops.csr import CSR, offsets_of

# Slots of the table that dismisses most edges of a view before a search.
_SIEVE = 1 << 22


@dataclass(frozen=True, eq=False)
class EdgeKeys:
    """Keys for the edges of a graph; edge types and nodes are numbered as in the graph."""

    edge_types: tuple[EdgeType, ...]
    width: int  # nodes of the largest type

    @classmethod
    def of(cls, graph: Graph) -> EdgeKeys:
        width = max([1, *(nodes.count for nodes in graph.nodes.values())])
        if len(graph.edges) * width**2 >= 2**63:
            raise ConfigError(f"{width} nodes and {len(graph.edges)} edge types are too many for 64-bit edge keys")
        return cls(tuple(graph.edges), width)

    def keys(self, relation: Tensor | int, src: Tensor, dst: Tensor) -> Tensor:
        """[n] int64, unique per edge; ascending in store order within an edge type."""
        return (relation * self.width + dst) * self.width + src

    def of_links(self, links: Links) -> Tensor:
        return self.keys(links.relation, links.src, links.dst)

    def of_reversed_links(self, links: Links) -> Tensor:
        """Keys of reversed links, in the inverse edge type or else in the same type if its ends allow it."""
        number = {kind: i for i, kind in enumerate(self.edge_types)}
        inverse = [number.get(inverse_type(kind), i if kind.src == kind.dst else -1) for i, kind in enumerate(number)]
        relation = torch.tensor(inverse, dtype=torch.int64)[links.relation]
        keep = relation >= 0
        return self.keys(relation[keep], links.dst[keep], links.src[keep])

    def of_all_edges(self, graph: Graph) -> Tensor:
        """[E] ascending keys of all edges, eight bytes per edge."""
        keys = [self.keys(i, e.src.long(), e.dst().long()) for i, e in enumerate(graph.edges.values())]
        return torch.cat(keys) if keys else torch.empty(0, dtype=torch.int64)


def contains(keys: Tensor, queries: Tensor) -> Tensor:
    """[n] bool: True for queries that are among the ascending ``keys``."""
    if not len(keys):
        return torch.zeros_like(queries, dtype=torch.bool)
    position = torch.searchsorted(keys, queries).clamp_(max=len(keys) - 1)
    return keys[position] == queries


@dataclass(frozen=True, eq=False)
class EdgeMask:
    """Links and their reverses to hide from views or blocks."""

    keys: EdgeKeys
    hidden: Tensor  # ascending keys
    sieve: Tensor  # bool

    @classmethod
    def of(cls, keys: EdgeKeys, links: Links) -> EdgeMask:
        hidden: Tensor = torch.unique(torch.cat([keys.of_links(links), keys.of_reversed_links(links)]))
        sieve = torch.zeros(_SIEVE, dtype=torch.bool)
        sieve[_slot(hidden)] = True
        return cls(keys, hidden, sieve)

    def apply(self, view: LocalView) -> LocalView:
        """Remove the hidden edges from a view (whole graph or block) and from its degrees."""
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
            csr = relation.structure
            src, dst = view.nodes[kind.src].node_ids[csr.col.long()], view.nodes[kind.dst].node_ids[csr.row.long()]
            hidden = self._among(self.keys.keys(number, src, dst))
            relations[kind] = select_edges(relation, ~hidden)
            if kind.src == kind.dst:  # degrees do not count self-loops
                hidden &= src != dst
            lost[kind.dst] += torch.bincount(csr.row[hidden], minlength=len(lost[kind.dst]))
        nodes = {
            name: replace(rows, degree=_masked_degrees(rows.degree, lost[name])) for name, rows in view.nodes.items()
        }
        return replace(view, nodes=nodes, relations=relations)

    def _among(self, keys: Tensor) -> Tensor:
        candidates = self.sieve[_slot(keys)].nonzero()[:, 0]
        is_hidden = torch.zeros(len(keys), dtype=torch.bool)
        is_hidden[candidates[contains(self.hidden, keys[candidates])]] = True
        return is_hidden


def _masked_degrees(degree: Degrees, lost: Tensor) -> Degrees:
    """Degrees without the hidden edges, which would otherwise reveal the answer.

    Weighted degrees still include them. In a sampled block only the hidden edges that were sampled are subtracted.
    """
    return lambda weighted: degree(weighted) if weighted else degree(weighted) - lost


def select_edges(relation: LocalEdges, keep: Tensor) -> LocalEdges:
    """Select the edges of a view under a mask [E]."""
    csr = relation.structure
    structure = CSR(offsets_of(keep)[csr.indptr], csr.col[keep], csr.num_cols)
    return relation.select(structure, keep, relation.sampling_scale)


def _slot(keys: Tensor) -> Tensor:
    """Hash keys to slots of the sieve; collisions only cost a search."""
    return (keys * 0x9E3779B1 >> 11) & (_SIEVE - 1)
