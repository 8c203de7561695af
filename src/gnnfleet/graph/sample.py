"""Sampled blocks: some seeds, the neighbours drawn for them, the neighbours drawn for those, one view per layer.

In every view destinations come first; they are the sources of the next view, in the same order. A hop draws for every
node it has reached, also for those an earlier hop drew for: a layer computes all rows that the next one reads.
A draw goes by (key, hop, relation, store id), hops counted from the seeds. Sums over neighbours drawn evenly are scaled
up to all of them (``Relation.share``); with weights the draw itself stands for the weights, and sums are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.common import Rows
from gnnfleet.graph.graph import Edges, EdgeType, Graph
from gnnfleet.graph.local import Degrees, LocalView, Relation
from gnnfleet.graph.order import PickedDegrees
from gnnfleet.ops.csr import Compressed
from gnnfleet.ops.draws import DrawKey, Purpose
from gnnfleet.ops.rows import gather
from gnnfleet.ops.sample import Fanout, Frontier, sample

Fanouts = Sequence[int] | Mapping[EdgeType, Sequence[int]]
"""In-edges drawn per node, the hop next to the seeds first, −1 for all; by edge type where they differ."""


class Sampler:
    """Draws blocks from a graph; keeps a few bytes per node between batches and serves one thread at a time.

    ``weighted`` draws in proportion to the edges' weights, where an edge type has some. Raises ConfigError.
    """

    def __init__(self, graph: Graph, fanouts: Fanouts, *, replace: bool = False, weighted: bool = False) -> None:
        self._graph, self._replace = graph, replace
        self.hops = hop_counts(graph, fanouts)
        self._edges = {
            kind: Compressed(edges.indptr.contiguous(), edges.src.contiguous(), graph.nodes[kind.src].count)
            for kind, edges in graph.edges.items()
        }
        self._weights = {kind: _chances(kind, edges) if weighted else None for kind, edges in graph.edges.items()}
        self._degrees = {kind: Degrees(graph, kind) for kind in graph.nodes}
        self._frontiers = {kind: Frontier(table.count) for kind, table in graph.nodes.items()}

    def blocks(self, seeds: Mapping[str, Tensor], key: DrawKey, *, given: bool = False) -> list[LocalView]:
        """One view per hop, the one that reads features first; seeds are different store ids by node type.

        With ``given`` the first layer's aggregate is known: the last hop is not drawn and the first view has no edges,
        only destinations. Raises InputError for seeds that do not exist or come twice.
        """
        unknown = set(seeds) - set(self._frontiers)
        if unknown:
            raise ConfigError(f"there are no nodes of type {', '.join(sorted(unknown))}")
        nothing = torch.empty(0, dtype=torch.int64)
        try:
            for kind, frontier in self._frontiers.items():
                frontier.start(seeds.get(kind, nothing).long().contiguous())
            views = [self._hop(hop, counts, key) for hop, counts in enumerate(self.hops[:-1] if given else self.hops)]
            if given:
                views.append(self._edgeless(key))
        finally:
            for frontier in self._frontiers.values():
                frontier.clear()
        return views[::-1]

    def _hop(self, hop: int, counts: Mapping[EdgeType, int], key: DrawKey) -> LocalView:
        dst = {kind: frontier.ids for kind, frontier in self._frontiers.items()}
        drawn = {}
        for number, (kind, edges) in enumerate(self._edges.items()):
            offsets, positions = sample(
                edges,
                dst[kind.dst],
                Fanout(counts[kind], self._replace),
                draws=key.draws(Purpose.SAMPLE, hop, relation=number),
                weight=self._weights[kind],
            )
            drawn[kind] = offsets, positions, self._frontiers[kind.src].meet(edges, positions)
        for frontier in self._frontiers.values():
            frontier.grow()
        relations = {}
        for kind, parts in drawn.items():
            even = counts[kind] >= 0 and self._weights[kind] is None
            share = _Share(self._edges[kind], dst[kind.dst], parts[0]) if even else None
            relations[kind] = self._relation(kind, *parts, share=share)
        return LocalView(self._rows(dst), relations, key=key, layer=len(self.hops) - 1 - hop)

    def _edgeless(self, key: DrawKey) -> LocalView:
        dst = {kind: frontier.ids for kind, frontier in self._frontiers.items()}
        none = torch.empty(0, dtype=torch.int64)
        relations = {
            kind: self._relation(kind, torch.zeros(len(dst[kind.dst]) + 1, dtype=torch.int64), none, none)
            for kind in self._edges
        }
        return LocalView(self._rows(dst), relations, key=key)

    def _rows(self, dst: Mapping[str, Tensor]) -> dict[str, Rows]:
        return {
            kind: Rows(frontier.ids, len(dst[kind]), PickedDegrees(self._degrees[kind], frontier.ids))
            for kind, frontier in self._frontiers.items()
        }

    def _relation(
        self, kind: EdgeType, offsets: Tensor, positions: Tensor, sources: Tensor, share: _Share | None = None
    ) -> Relation:
        frontier, edges = self._frontiers[kind.src], self._graph.edges[kind]
        structure = Compressed(offsets, frontier.rows(sources), len(frontier.ids))
        return Relation(
            structure,
            positions,
            None if edges.weight is None else gather(edges.weight[:, None], positions)[:, 0],
            None if edges.attr is None else gather(edges.attr, positions),
            share,
        )


class _Share:
    """Edges in the store per edge drawn, worked out by the layer that asks."""

    def __init__(self, edges: Compressed, ids: Tensor, offsets: Tensor) -> None:
        self._edges, self._ids, self._offsets = edges, ids, offsets

    def __call__(self) -> Tensor:
        degree = self._edges.indptr[self._ids + 1] - self._edges.indptr[self._ids]
        return degree.double() / self._offsets.diff().clamp(min=1)


def sample_blocks(
    graph: Graph,
    seeds: Mapping[str, Tensor],
    fanouts: Fanouts,
    key: DrawKey,
    *,
    replace: bool = False,
    weighted: bool = False,
) -> list[LocalView]:
    """The blocks of one batch; see ``Sampler``, which is the thing to keep for many."""
    return Sampler(graph, fanouts, replace=replace, weighted=weighted).blocks(seeds, key)


def hop_counts(graph: Graph, fanouts: Fanouts) -> list[dict[EdgeType, int]]:
    """[hop][edge type] → in-edges to draw; raises ConfigError for anything but whole numbers from −1."""
    if isinstance(fanouts, Mapping):
        given = {EdgeType(*kind): list(counts) for kind, counts in fanouts.items()}
        if set(given) != set(graph.edges):
            raise ConfigError(f"fanouts by edge type must name all of {', '.join(map(str, graph.edges))}")
    else:
        given = {kind: list(fanouts) for kind in graph.edges}
    lengths = {len(counts) for counts in given.values()}
    if len(lengths) != 1 or not min(lengths):
        raise ConfigError("fanouts need one whole number per layer, as many for every edge type")
    for counts in given.values():
        wrong = [count for count in counts if not isinstance(count, int) or count < -1]
        if wrong:
            raise ConfigError(f"a fanout is how many neighbours to draw, or −1 for all; found {wrong[0]!r}")
    return [{kind: counts[hop] for kind, counts in given.items()} for hop in range(lengths.pop())]


def _chances(kind: EdgeType, edges: Edges) -> Tensor | None:
    weight = edges.weight
    if weight is None:
        return None
    if weight.numel() and not (float(weight.min()) >= 0 and float(weight.max()) < torch.inf):
        raise ConfigError(f"drawing by weight needs finite weights of 0 or more; edges {kind} have others")
    return weight.float().contiguous()
