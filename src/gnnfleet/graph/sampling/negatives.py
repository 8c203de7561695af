"""Negative edges: links with one or both ends replaced by random nodes of the same type.

Draws are keyed by the edge type and id of the positive, so negatives depend neither on batches nor on threads or
partitions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gnnfleet.graph.edge_keys import EdgeKeys, contains
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.links import Links
from gnnfleet.ops.draws import DrawKey, Draws, Purpose

NegativeEnds = Literal["dst", "src", "either", "pair"]

# Layers of the draws: training, evaluation, nodes that all links of a step share, choice of a single negative.
TRAINING, EVALUATION, SHARED, SINGLE = 0, 1, 2, 3
_ATTEMPTS = 4


@dataclass(frozen=True, eq=False)
class LinkNegativeSampler:
    """Draws negatives of a graph. ``known`` are keys of edges to avoid; the last of a few attempts may still be one."""

    keys: EdgeKeys
    counts: Tensor  # [R, 2] nodes of the source and the destination type of each edge type
    known: Tensor | None = None

    @classmethod
    def of(cls, graph: Graph, *, avoid: bool = True) -> LinkNegativeSampler:
        """Build for a graph, whose edges are avoided if ``avoid`` is set."""
        keys = EdgeKeys.of(graph)
        counts = [(graph.nodes[kind.src].count, graph.nodes[kind.dst].count) for kind in graph.edges]
        return cls(keys, torch.tensor(counts).view(-1, 2), keys.of_all_edges(graph) if avoid else None)

    def avoiding(self, links: Links) -> LinkNegativeSampler:
        """Copy that also avoids these links."""
        keys = self.keys.of_links(links)
        known = keys if self.known is None else torch.cat([self.known, keys])
        return replace(self, known=known.sort().values)

    def corrupt(self, links: Links, key: DrawKey, *, count: int, ends: NegativeEnds, layer: int = TRAINING) -> Links:
        """Draw ``count`` negatives for each link, next to each other."""
        draws = key.draws(Purpose.NEGATIVE, layer)
        numbers = links.draw_ids
        positives = links.select(torch.arange(len(links)).repeat_interleave(count))
        negatives = self._replace(positives, self._uniforms(draws, numbers, count), ends)
        if self.known is None:
            return negatives
        for attempt in range(1, _ATTEMPTS):
            known = contains(self.known, self.keys.of_links(negatives))
            rejected = (known | contains(self.known, self._reversed_keys(negatives))).nonzero()[:, 0]
            if not len(rejected):
                break
            uniforms = self._uniforms(draws.at(layer, relation=attempt), numbers[rejected // count], count)
            uniforms = uniforms.view(len(rejected), count, 2)[torch.arange(len(rejected)), rejected % count]
            redrawn = self._replace(positives.select(rejected), uniforms, ends)
            src = negatives.src.index_copy(0, rejected, redrawn.src)
            dst = negatives.dst.index_copy(0, rejected, redrawn.dst)
            negatives = replace(negatives, src=src, dst=dst)
        return negatives

    def shared_nodes(self, key: DrawKey, count: int, nodes: int) -> Tensor:
        """[count] nodes of one type that serve as negatives of all links of a step."""
        return (key.draws(Purpose.NEGATIVE, SHARED).uniforms(count) * nodes).long()

    def _uniforms(self, draws: Draws, numbers: Tensor, count: int) -> Tensor:
        """[n · count, 2]."""
        return draws.uniforms_at(numbers, 2 * count).reshape(-1, 2)

    def _reversed_keys(self, links: Links) -> Tensor:
        """Keys of the reversed links if the edge type connects one node type, else of the links themselves.

        Decoders score both directions alike, so the reverse of an edge would be a contradictory negative.
        """
        reversible = torch.tensor([kind.src == kind.dst for kind in self.keys.edge_types])[links.relation]
        src = torch.where(reversible, links.dst, links.src)
        return self.keys.keys(links.relation, src, torch.where(reversible, links.src, links.dst))

    def _replace(self, links: Links, uniforms: Tensor, ends: NegativeEnds) -> Links:
        counts = self.counts[links.relation]
        if ends == "either":
            is_src = uniforms[:, 0] < 0.5
        else:
            is_src = torch.full((len(links),), ends == "src")
        both = ends == "pair"
        src = torch.where(is_src | both, (uniforms[:, 1] * counts[:, 0]).long(), links.src)
        dst = torch.where(~is_src | both, (uniforms[:, 0 if both else 1] * counts[:, 1]).long(), links.dst)
        return replace(links, src=src, dst=dst)
