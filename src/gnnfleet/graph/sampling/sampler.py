"""Neighbour sampling: the blocks of a batch, one view per layer, grown from the seeds outward.

In every view destinations come first; they are the sources of the next view, in the same order. A hop draws for all
nodes reached so far, since a layer computes all rows that the next one reads. Draws are keyed by (key, hop, relation,
store id); hop 0 is next to the seeds. Sums over uniformly drawn neighbours are scaled up to all neighbours
(``LocalEdges.sampling_scale``). Weighted draws already contain the weights, so their sums are not scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Edges, EdgeType, Graph
from gnnfleet.graph.views.local import LocalEdges, LocalView, graph_degrees
from gnnfleet.graph.views.view_base import Degrees, NodeRows, selected_degrees
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.draws import DrawKey, Purpose
from gnnfleet.ops.gather import drop_pages, gather, gather_by_window, is_paged
from gnnfleet.ops.sample import Fanout, Frontier, edge_sources, sample

Fanouts = Sequence[int] | Mapping[EdgeType, Sequence[int]]
"""In-edges drawn per node, the hop next to the seeds first, −1 for all; a dict if they differ by edge type."""


@dataclass(frozen=True, eq=False)
class SampledEdges:
    """In-edges of one type drawn for the destinations of a hop. S destinations, E edges."""

    offsets: Tensor  # [S + 1] int64
    sources: Tensor  # [E] store ids, int32 or int64
    edge_ids: Tensor  # [E] int64
    weight: Tensor | None = None
    attr: Tensor | None = None
    scale: Callable[[], Tensor] | None = None  # see ``LocalEdges``


_EMPTY = torch.empty(0, dtype=torch.int64)

DegreesOf = Callable[[str, Tensor], Degrees]
"""(node type, store ids) → ``NodeRows.degree`` of these nodes."""


class BlockBuilder:
    """Builds rows and views of one batch from drawn edges, hop by hop from the seeds outward.

    Raises InputError for missing or repeated seeds. ``finish`` must be called, also after an error.
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
            raise ConfigError(f"the graph has no nodes of type {', '.join(sorted(unknown))}")
        self.key = key
        self._frontiers, self._degrees, self._layers = frontiers, degrees, layers
        self._views: list[LocalView] = []
        for kind, frontier in frontiers.items():
            frontier.start(seeds.get(kind, _EMPTY).long().contiguous())

    @property
    def ids(self) -> dict[str, Tensor]:
        """Store ids of all nodes reached, by row: the destinations of the next hop."""
        return {kind: frontier.ids for kind, frontier in self._frontiers.items()}

    def add_hop(self, drawn: Mapping[EdgeType, SampledEdges]) -> None:
        """Add the edges drawn for ``ids``."""
        dst = self.ids
        for kind, edges in drawn.items():
            self._frontiers[kind.src].add(edges.sources)
        for frontier in self._frontiers.values():
            frontier.assign_rows()
        relations = {kind: self._relation(kind, edges) for kind, edges in drawn.items()}
        layer = self._layers - 1 - len(self._views)
        self._views.append(LocalView(self._rows(dst), relations, key=self.key, layer=layer))

    def add_empty_hop(self, edge_types: Iterable[EdgeType]) -> None:
        """Add a last hop without edges, for a first layer whose aggregate is precomputed."""
        offsets = {kind: torch.zeros(len(self.ids[kind.dst]) + 1, dtype=torch.int64) for kind in edge_types}
        relations = {kind: self._relation(kind, SampledEdges(offsets[kind], _EMPTY, _EMPTY)) for kind in offsets}
        self._views.append(LocalView(self._rows(self.ids), relations, key=self.key))

    def finish(self) -> list[LocalView]:
        """Return the views, the one that reads features first, and release the frontiers for another batch."""
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
    """Draws blocks from a graph; keeps the memory of its largest batch and serves one thread at a time.

    ``weighted`` draws in proportion to edge weights, for edge types that have some. Raises ConfigError.
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
        self._degrees = {kind: graph_degrees(graph, kind) for kind in graph.nodes}
        self._frontiers = {kind: Frontier(table.count) for kind, table in graph.nodes.items()}

    def blocks(self, seeds: Mapping[str, Tensor], key: DrawKey, *, skip_last_hop: bool = False) -> list[LocalView]:
        """One view per hop, the one that reads features first; seeds are different store ids by node type.

        With ``skip_last_hop``, for a precomputed aggregate of the first layer, the first view has no edges, only
        destinations. Raises InputError for missing or repeated seeds.
        """
        builder = BlockBuilder(
            self._frontiers,
            seeds,
            key,
            layers=len(self.hops),
            degrees=lambda kind, ids: selected_degrees(self._degrees[kind], ids),
        )
        try:
            for hop, counts in enumerate(self.hops[:-1] if skip_last_hop else self.hops):
                builder.add_hop(self._draw(hop, counts, builder))
            if skip_last_hop:
                builder.add_empty_hop(self._edges)
        finally:
            views = builder.finish()
            for reader in self._readers.values():
                reader.end_batch()
        return views

    def _draw(self, hop: int, counts: Mapping[EdgeType, int], builder: BlockBuilder) -> dict[EdgeType, SampledEdges]:
        dst, drawn = builder.ids, {}
        for number, (kind, edges) in enumerate(self._edges.items()):
            ids = dst[kind.dst]
            offsets, positions = sample(
                edges,
                ids,
                Fanout(counts[kind], self._replace),
                draws=builder.key.draws(Purpose.SAMPLE, hop, relation=number),
                weight=self._weights[kind],
            )
            uniform = counts[kind] >= 0 and self._weights[kind] is None
            scale = sampling_scale(partial(_row_degrees, edges.indptr, ids), offsets) if uniform else None
            drawn[kind] = SampledEdges(offsets, *self._readers[kind].read(positions), scale)
        return drawn


class _EdgeReader:
    """Reads sources, weights and features of edges. Pages of large files do not stay in memory."""

    def __init__(self, edges: CSR, data: Edges) -> None:
        self._edges, self._data = edges, data
        # Checked only once: ``is_paged`` parses the memory map of the process.
        columns = (edges.indptr, edges.col, data.weight, data.attr)
        self._paged = [column is not None and is_paged(column) for column in columns]

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(sources, positions, weights, features)."""
        edges, weight, attr = self._edges, self._data.weight, self._data.attr
        _, *paged = self._paged
        gather_sources, gather_weights, gather_features = (gather_by_window if p else gather for p in paged)
        return (
            gather_sources(edges.col[:, None], positions)[:, 0] if paged[0] else edge_sources(edges, positions),
            positions,
            None if weight is None else gather_weights(weight[:, None], positions)[:, 0],
            None if attr is None else gather_features(attr, positions),
        )

    def end_batch(self) -> None:
        if self._paged[0]:
            drop_pages(self._edges.indptr[:, None])


def sampling_scale(degree: Callable[[], Tensor], offsets: Tensor) -> Callable[[], Tensor]:
    """Edges in the store per edge drawn, computed by the layer that needs it."""
    return lambda: degree().double() / offsets.diff().clamp(min=1)


def _row_degrees(indptr: Tensor, rows: Tensor) -> Tensor:
    return indptr[rows + 1] - indptr[rows]


def hop_counts(edge_types: Sequence[EdgeType], fanouts: Fanouts) -> list[dict[EdgeType, int]]:
    """[hop][edge type] → in-edges to draw; raises ConfigError for other values than integers from −1."""
    if isinstance(fanouts, Mapping):
        by_type = {EdgeType(*kind): list(counts) for kind, counts in fanouts.items()}
        if set(by_type) != set(edge_types):
            raise ConfigError(f"fanouts by edge type must name all of {', '.join(map(str, edge_types))}")
    else:
        by_type = {kind: list(fanouts) for kind in edge_types}
    lengths = {len(counts) for counts in by_type.values()}
    if len(lengths) != 1 or not min(lengths):
        raise ConfigError("fanouts must be one integer per layer, equally many for every edge type")
    for counts in by_type.values():
        wrong = [count for count in counts if not isinstance(count, int) or count < -1]
        if wrong:
            raise ConfigError(f"a fanout must be a number of neighbours, or −1 for all, found {wrong[0]!r}")
    return [{kind: counts[hop] for kind, counts in by_type.items()} for hop in range(lengths.pop())]


def _sampling_weights(kind: EdgeType, edges: Edges) -> Tensor | None:
    weight = edges.weight
    if weight is None:
        return None
    if weight.numel() and not (float(weight.min()) >= 0 and float(weight.max()) < torch.inf):
        raise ConfigError(f"weighted sampling needs finite weights that are not negative, but edges {kind} have others")
    return weight.float().contiguous()
