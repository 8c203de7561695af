"""Sampled blocks: some seeds, the neighbours drawn for them, the neighbours drawn for those, one view per layer.

In every view destinations come first; they are the sources of the next view, in the same order. A hop draws for every
node it has reached, also for those an earlier hop drew for: a layer computes all rows that the next one reads.
A draw goes by (key, hop, relation, store id), hops counted from the seeds. Sums over neighbours drawn evenly are scaled
up to all of them (``LocalEdges.sampling_scale``); weighted draws already contain the weights, so sums stay unscaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Edges, EdgeType, Graph
from gnnfleet.graph.reorder import ReorderedDegrees
from gnnfleet.graph.views.local import GraphDegrees, LocalEdges, LocalView
from gnnfleet.graph.views.view_base import NodeRows
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.draws import DrawKey, Purpose
from gnnfleet.ops.gather import gather
from gnnfleet.ops.paging import drop_pages, gather_by_window, is_paged
from gnnfleet.ops.sample import Fanout, Frontier, edge_sources, sample

Fanouts = Sequence[int] | Mapping[EdgeType, Sequence[int]]
"""In-edges drawn per node, the hop next to the seeds first, −1 for all; by edge type where they differ."""


@dataclass(frozen=True, eq=False)
class SampledEdges:
    """In-edges of one type drawn for the destinations of a hop. S destinations, E edges."""

    offsets: Tensor  # [S + 1] int64
    sources: Tensor  # [E] store ids, int32 or int64
    edge_ids: Tensor  # [E] int64
    weight: Tensor | None = None
    attr: Tensor | None = None
    scale: Callable[[], Tensor] | None = None  # see ``LocalEdges``


DegreesOf = Callable[[str, Tensor], Callable[[bool], Tensor]]
"""(node type, store ids) → what ``NodeRows.degree`` is for these nodes."""


class BlockBuilder:
    """The blocks of one batch, grown hop by hop from the seeds outward. Whoever draws, rows and views are made here.

    Raises InputError for seeds that do not exist or come twice. ``finish`` must be called, whatever happens.
    """

    def __init__(
        self,
        frontiers: Mapping[str, Frontier],
        seeds: Mapping[str, Tensor],
        key: DrawKey,
        *,
        layers: int,
        degrees: DegreesOf,
    ) -> None:
        unknown = set(seeds) - set(frontiers)
        if unknown:
            raise ConfigError(f"there are no nodes of type {', '.join(sorted(unknown))}")
        self.key = key
        self._frontiers, self._degrees, self._layers = frontiers, degrees, layers
        self._views: list[LocalView] = []
        nothing = torch.empty(0, dtype=torch.int64)
        for kind, frontier in frontiers.items():
            frontier.start(seeds.get(kind, nothing).long().contiguous())

    @property
    def ids(self) -> dict[str, Tensor]:
        """Store ids of all nodes reached, in the order of their rows: the destinations of the next hop."""
        return {kind: frontier.ids for kind, frontier in self._frontiers.items()}

    def add_hop(self, drawn: Mapping[EdgeType, SampledEdges]) -> None:
        """Take what was drawn for ``ids``."""
        dst = self.ids
        for kind, edges in drawn.items():
            self._frontiers[kind.src].add(edges.sources)
        for frontier in self._frontiers.values():
            frontier.assign_rows()
        relations = {kind: self._relation(kind, edges) for kind, edges in drawn.items()}
        layer = self._layers - 1 - len(self._views)
        self._views.append(LocalView(self._rows(dst), relations, key=self.key, layer=layer))

    def stop(self, edge_types: Iterable[EdgeType]) -> None:
        """The last hop where the first layer's aggregate is known: a view without edges."""
        dst, none = self.ids, torch.empty(0, dtype=torch.int64)
        relations = {
            kind: self._relation(kind, SampledEdges(torch.zeros(len(dst[kind.dst]) + 1, dtype=torch.int64), none, none))
            for kind in edge_types
        }
        self._views.append(LocalView(self._rows(dst), relations, key=self.key))

    def finish(self) -> list[LocalView]:
        """One view per hop, the one that reads features first; the frontiers may be used for another batch."""
        for frontier in self._frontiers.values():
            frontier.clear()
        return self._views[::-1]

    def _rows(self, dst: Mapping[str, Tensor]) -> dict[str, NodeRows]:
        return {kind: NodeRows(ids, len(dst[kind]), self._degrees(kind, ids)) for kind, ids in self.ids.items()}

    def _relation(self, kind: EdgeType, drawn: SampledEdges) -> LocalEdges:
        frontier = self._frontiers[kind.src]
        structure = CSR(drawn.offsets, frontier.rows(drawn.sources), len(frontier.ids))
        return LocalEdges(structure, drawn.edge_ids, drawn.weight, drawn.attr, drawn.scale)


class NeighborSampler:
    """Draws blocks from a graph; keeps what its largest batch needed and serves one thread at a time.

    ``weighted`` draws in proportion to the edges' weights, where an edge type has some. Raises ConfigError.
    """

    def __init__(self, graph: Graph, fanouts: Fanouts, *, replace: bool = False, weighted: bool = False) -> None:
        self._graph, self._replace = graph, replace
        self.hops = hop_counts(tuple(graph.edges), fanouts)
        self._edges = {
            kind: CSR(edges.indptr.contiguous(), edges.src.contiguous(), graph.nodes[kind.src].count)
            for kind, edges in graph.edges.items()
        }
        self._weights = {
            kind: _sampling_weights(kind, edges) if weighted else None for kind, edges in graph.edges.items()
        }
        self._readers = {kind: _EdgeReader(edges, graph.edges[kind]) for kind, edges in self._edges.items()}
        self._degrees = {kind: GraphDegrees(graph, kind) for kind in graph.nodes}
        self._frontiers = {kind: Frontier(table.count) for kind, table in graph.nodes.items()}

    def blocks(self, seeds: Mapping[str, Tensor], key: DrawKey, *, given: bool = False) -> list[LocalView]:
        """One view per hop, the one that reads features first; seeds are different store ids by node type.

        With ``given`` the first layer's aggregate is known: the last hop is not drawn and the first view has no edges,
        only destinations. Raises InputError for seeds that do not exist or come twice.
        """
        growth = BlockBuilder(self._frontiers, seeds, key, layers=len(self.hops), degrees=self._degrees_of)
        try:
            for hop, counts in enumerate(self.hops[:-1] if given else self.hops):
                growth.add_hop(self._draw(hop, counts, growth))
            if given:
                growth.stop(self._edges)
        finally:
            views = growth.finish()
            for reader in self._readers.values():
                reader.end()
        return views

    def _degrees_of(self, kind: str, ids: Tensor) -> Callable[[bool], Tensor]:
        return ReorderedDegrees(self._degrees[kind], ids)

    def _draw(self, hop: int, counts: Mapping[EdgeType, int], growth: BlockBuilder) -> dict[EdgeType, SampledEdges]:
        dst, found = growth.ids, {}
        for number, (kind, edges) in enumerate(self._edges.items()):
            ids = dst[kind.dst]
            offsets, positions = sample(
                edges,
                ids,
                Fanout(counts[kind], self._replace),
                draws=growth.key.draws(Purpose.SAMPLE, hop, relation=number),
                weight=self._weights[kind],
            )
            even = counts[kind] >= 0 and self._weights[kind] is None
            found[kind] = SampledEdges(
                offsets,
                *self._readers[kind].read(positions),
                SamplingScale(_RowDegrees(edges, ids), offsets) if even else None,
            )
        return found


class _EdgeReader:
    """What edges at some positions carry; pages of large files do not stay in memory."""

    def __init__(self, edges: CSR, data: Edges) -> None:
        self._edges, self._data = edges, data
        columns = (edges.indptr, edges.col, data.weight, data.attr)
        self._paged = [column is not None and is_paged(column) for column in columns]

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(sources, positions, weights, features)."""
        edges, weight, attr = self._edges, self._data.weight, self._data.attr
        _, *by_window = self._paged
        far, heavy, wide = (gather_by_window if paged else gather for paged in by_window)
        return (
            far(edges.col[:, None], positions)[:, 0] if by_window[0] else edge_sources(edges, positions),
            positions,
            None if weight is None else heavy(weight[:, None], positions)[:, 0],
            None if attr is None else wide(attr, positions),
        )

    def end(self) -> None:
        """The batch was drawn."""
        if self._paged[0]:
            drop_pages(self._edges.indptr[:, None])


class SamplingScale:
    """Edges in the store per edge drawn, worked out by the layer that asks."""

    def __init__(self, degree: Callable[[], Tensor], offsets: Tensor) -> None:
        self._degree, self._offsets = degree, offsets

    def __call__(self) -> Tensor:
        return self._degree().double() / self._offsets.diff().clamp(min=1)


class _RowDegrees:
    """In-edges of some rows."""

    def __init__(self, edges: CSR, rows: Tensor) -> None:
        self._indptr, self._rows = edges.indptr, rows

    def __call__(self) -> Tensor:
        return self._indptr[self._rows + 1] - self._indptr[self._rows]


def sample_blocks(
    graph: Graph,
    seeds: Mapping[str, Tensor],
    fanouts: Fanouts,
    key: DrawKey,
    *,
    replace: bool = False,
    weighted: bool = False,
) -> list[LocalView]:
    """The blocks of one batch; see ``NeighborSampler``, which is the thing to keep for many."""
    return NeighborSampler(graph, fanouts, replace=replace, weighted=weighted).blocks(seeds, key)


def hop_counts(edge_types: Sequence[EdgeType], fanouts: Fanouts) -> list[dict[EdgeType, int]]:
    """[hop][edge type] → in-edges to draw; raises ConfigError for anything but whole numbers from −1."""
    if isinstance(fanouts, Mapping):
        given = {EdgeType(*kind): list(counts) for kind, counts in fanouts.items()}
        if set(given) != set(edge_types):
            raise ConfigError(f"fanouts by edge type must name all of {', '.join(map(str, edge_types))}")
    else:
        given = {kind: list(fanouts) for kind in edge_types}
    lengths = {len(counts) for counts in given.values()}
    if len(lengths) != 1 or not min(lengths):
        raise ConfigError("fanouts need one whole number per layer, as many for every edge type")
    for counts in given.values():
        wrong = [count for count in counts if not isinstance(count, int) or count < -1]
        if wrong:
            raise ConfigError(f"a fanout is how many neighbours to draw, or −1 for all; found {wrong[0]!r}")
    return [{kind: counts[hop] for kind, counts in given.items()} for hop in range(lengths.pop())]


def _sampling_weights(kind: EdgeType, edges: Edges) -> Tensor | None:
    weight = edges.weight
    if weight is None:
        return None
    if weight.numel() and not (float(weight.min()) >= 0 and float(weight.max()) < torch.inf):
        raise ConfigError(f"drawing by weight needs finite weights of 0 or more; edges {kind} have others")
    return weight.float().contiguous()
