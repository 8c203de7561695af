"""Negative edges: links with one end, or both, drawn anew from all nodes of the right type.

A draw goes by the edge type and id of the positive, not by its place in a batch, so negatives depend neither on
batches nor on threads or parts.
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

# Draws of one family are told apart by layer: training, evaluation, the list that all links of a step share, which of
# several is the one where one is asked for.
TRAINING, EVALUATION, SHARED, ONE = 0, 1, 2, 3
_TRIES = 4


@dataclass(frozen=True, eq=False)
class LinkNegativeSampler:
    """Draws negatives of a graph. ``known`` are keys of edges to avoid; after a few tries one may be taken anyway."""

    keys: EdgeKeys
    counts: Tensor  # [R, 2] nodes of the source and the destination type of each edge type
    known: Tensor | None = None

    @classmethod
    def of(cls, graph: Graph, *, avoid: bool = True) -> LinkNegativeSampler:
        """For a graph; ``avoid`` its edges."""
        keys = EdgeKeys.of(graph)
        counts = [(graph.nodes[kind.src].count, graph.nodes[kind.dst].count) for kind in graph.edges]
        return cls(keys, torch.tensor(counts).view(-1, 2), keys.of_all_edges(graph) if avoid else None)

    def avoiding(self, links: Links) -> LinkNegativeSampler:
        """Avoids these links too, whether or not the graph's edges are avoided."""
        more = self.keys.of_links(links)
        every = more if self.known is None else torch.cat([self.known, more])
        return replace(self, known=every.sort().values)

    def corrupt(self, links: Links, key: DrawKey, *, count: int, ends: NegativeEnds, layer: int = TRAINING) -> Links:
        """``count`` negatives for each link, in a row."""
        draws = key.draws(Purpose.NEGATIVE, layer)
        numbers = links.draw_ids
        every = links.select(torch.arange(len(links)).repeat_interleave(count))
        made = self._replace(every, self._uniforms(draws, numbers, count), ends)
        if self.known is None:
            return made
        src, dst = made.src, made.dst
        for turn in range(1, _TRIES):
            edges = contains(self.known, self.keys.of_links(made)) | contains(self.known, self._reversed(made))
            again = edges.nonzero()[:, 0]
            if not len(again):
                break
            fresh = self._uniforms(draws.at(layer, relation=turn), numbers[again // count], count)
            fresh = fresh.view(len(again), count, 2)[torch.arange(len(again)), again % count]
            redone = self._replace(every.select(again), fresh, ends)
            src, dst = src.clone(), dst.clone()
            src[again], dst[again] = redone.src, redone.dst
            made = Links(made.relation, src, dst, made.ids)
        return made

    def shared_nodes(self, key: DrawKey, count: int, nodes: int) -> Tensor:
        """[count] nodes of one type that all links of a step are set against."""
        return (key.draws(Purpose.NEGATIVE, SHARED).uniforms(count) * nodes).long()

    def _uniforms(self, draws: Draws, numbers: Tensor, count: int) -> Tensor:
        """[n · count, 2]."""
        return draws.uniforms_at(numbers, 2 * count).reshape(-1, 2)

    def _reversed(self, links: Links) -> Tensor:
        """Keys of the same pairs in the other direction where the edge type allows it, else of the links themselves.

        Decoders score both directions alike: the reverse of an edge would be a negative that contradicts it.
        """
        kinds = self.keys.edge_types
        within = torch.tensor([kind.src == kind.dst for kind in kinds])[links.relation]
        return self.keys.keys(
            links.relation, torch.where(within, links.dst, links.src), torch.where(within, links.src, links.dst)
        )

    def _replace(self, links: Links, uniforms: Tensor, ends: NegativeEnds) -> Links:
        counts = self.counts[links.relation]
        if ends == "either":  # the first number tosses the coin
            head = uniforms[:, 0] < 0.5
        else:
            head = torch.full((len(links),), ends == "src")
        both = torch.full_like(head, ends == "pair")
        src = torch.where(head | both, (uniforms[:, 1] * counts[:, 0]).long(), links.src)
        last = torch.where(both, uniforms[:, 0], uniforms[:, 1])
        dst = torch.where(~head | both, (last * counts[:, 1]).long(), links.dst)
        return Links(links.relation, src, dst, links.ids)
