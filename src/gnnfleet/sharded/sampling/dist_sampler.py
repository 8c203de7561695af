"""Distributed neighbour sampling: blocks of several batches of a partitioned graph, with one exchange per hop.

The owner of a node draws its neighbours, keyed by (hop, relation, store id): blocks are those that one process would
draw, for any partition and any number of batches per exchange. A rank requests a node once; the owner draws for it in
all later hops too. The first reply has the node's degree and first store edge id, so the ids of drawn edges need not be
sent. M batches, S nodes reached, E edges drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnfleet.comm.all_to_all import ByteBuffer, all_to_all_bytes, all_to_all_lists
from gnnfleet.comm.halo_exchange import RingExchange
from gnnfleet.graph.graph import EdgeType, index_dtype
from gnnfleet.graph.sampling.sampler import BlockBuilder, Fanouts, SampledEdges, hop_counts, sampling_scale
from gnnfleet.graph.views.local import LocalView
from gnnfleet.graph.views.view_base import Degrees
from gnnfleet.ops.csr import CSR, offsets_of, put_segments
from gnnfleet.ops.draws import DrawKey, Draws, Purpose
from gnnfleet.ops.sample import Fanout, Frontier, edge_sources, sample
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.sharded.sampling.feature_store import LocalNodes, build_in_neighbors

_EMPTY = torch.empty(0, dtype=torch.int64)

_ByBatch = list[dict[str, Tensor]]
"""[batch][node type]."""


@dataclass(frozen=True, eq=False)
class SampledNodes:
    """The nodes of one type that a batch has reached, by owner. Rows are those of its blocks."""

    rows: Tensor  # [·] rows of local nodes
    positions: Tensor  # [·] their positions, see ``LocalNodes``
    remote_rows: tuple[Tensor, ...]  # by owner, rows of its nodes, in the order of the requests

    @property
    def count(self) -> int:
        return len(self.rows) + sum(map(len, self.remote_rows))

    def extended(self, first: int, owner: Tensor, rank: int, positions: Tensor) -> SampledNodes:
        """Add nodes from row ``first`` on; ``positions`` are those of the local ones."""
        rows = [torch.cat([old, (owner == q).nonzero()[:, 0] + first]) for q, old in enumerate(self.remote_rows)]
        local_rows, rows[rank] = torch.cat([self.rows, rows[rank]]), _EMPTY
        return SampledNodes(local_rows, torch.cat([self.positions, positions]), tuple(rows))


@dataclass(eq=False)
class SampledBatch:
    """One batch: its blocks, and the owners of the nodes they read, by type."""

    key: DrawKey
    nodes: dict[str, SampledNodes]
    views: list[LocalView] = field(default_factory=list)
    degrees: dict[str, Degrees] = field(default_factory=dict)  # set when the batch's rows are fetched
    scratch: int = 0  # bytes of working memory for sampling, kept for the next call

    @property
    def ids(self) -> dict[str, Tensor]:
        """Store ids of the nodes whose features are read."""
        return {kind: rows.node_ids for kind, rows in self.views[0].nodes.items()}

    def remote_ids(self, kind: str) -> Tensor:
        """Store ids of the nodes of other partitions whose features are read."""
        return self.ids[kind][torch.cat(self.nodes[kind].remote_rows)]

    def degrees_of(self, kind: str, ids: Tensor) -> Degrees:
        """Degrees of the first rows, for views to call once rows are fetched."""
        degrees = self.degrees  # not self: views keep this function, and a cycle would keep the batch in memory
        return lambda weighted: degrees[kind](weighted)[: len(ids)]


@dataclass(eq=False)
class _RemoteDegrees:
    """Replies of owners about one batch and edge type: by owner, in the order of ``SampledNodes.remote_rows``."""

    first: list[Tensor]  # store edge id of each node's first in-edge
    degree: list[Tensor]


class DistNeighborSampler:
    """Collective, as is ``blocks``; one thread at a time may use it. Raises ConfigError for wrong fanouts."""

    def __init__(self, view: RingView, ring: RingExchange, fanouts: Fanouts, *, replace: bool = False) -> None:
        self.hops = hop_counts(view.edge_types, fanouts)
        self.world, self.owners, self.replace = ring.world, view.owners, replace
        self.neighbors = build_in_neighbors(view.blocks, ring, view.owners.counts)
        self.own_nodes = {kind: LocalNodes(rows.node_ids) for kind, rows in view.nodes.items()}
        self._frontiers: list[dict[str, Frontier]] = []
        self.index_dtype = index_dtype(max(view.owners.counts.values(), default=0))

    def blocks(
        self, seeds_and_keys: Sequence[tuple[Mapping[str, Tensor], DrawKey]], *, skip_last_hop: bool = False
    ) -> list[SampledBatch]:
        """The blocks of (seeds by node type, key) of each batch. All ranks pass as many batches, perhaps without seeds.

        ``skip_last_hop`` as in ``NeighborSampler.blocks``. Two rounds per hop, however many batches.
        """
        no_nodes = SampledNodes(_EMPTY, _EMPTY, (_EMPTY,) * self.world.size)
        batches = [SampledBatch(key, dict.fromkeys(self.own_nodes, no_nodes)) for _, key in seeds_and_keys]
        while len(self._frontiers) < len(batches):
            self._frontiers.append({kind: Frontier(nodes) for kind, nodes in self.owners.counts.items()})
        builders: list[BlockBuilder] = []
        try:
            for batch, frontiers, (seeds, key) in zip(batches, self._frontiers, seeds_and_keys, strict=False):
                builders.append(BlockBuilder(frontiers, seeds, key, layers=len(self.hops), degrees=batch.degrees_of))
            rounds = _SamplingRounds(self, batches, builders)
            for hop, counts in enumerate(self.hops[:-1] if skip_last_hop else self.hops):
                rounds.add_hop(hop, counts)
            rounds.assign_owners()
            for builder in builders if skip_last_hop else ():
                builder.add_empty_hop(self.neighbors)
        finally:
            views = [builder.finish() for builder in builders]
        for batch, batch_views, frontiers in zip(batches, views, self._frontiers, strict=False):
            batch.views = batch_views
            batch.scratch = sum(frontier.nbytes for frontier in frontiers.values())
        return batches


class _SamplingRounds:
    """The exchanges of one call of ``blocks``."""

    def __init__(
        self, sampler: DistNeighborSampler, batches: Sequence[SampledBatch], builders: Sequence[BlockBuilder]
    ) -> None:
        self._sampler, self._batches, self._builders = sampler, batches, builders
        self._world, self._neighbors = sampler.world, sampler.neighbors
        self._kinds = list(sampler.own_nodes)
        ranks = self._world.size
        # Positions requested by other ranks so far, [rank][batch][node type].
        self._requested: list[_ByBatch] = [[dict.fromkeys(self._kinds, _EMPTY) for _ in batches] for _ in range(ranks)]
        self._degrees = [
            {kind: _RemoteDegrees([_EMPTY] * ranks, [_EMPTY] * ranks) for kind in self._neighbors} for _ in batches
        ]

    def assign_owners(self) -> list[_ByBatch]:
        """Find the owners of the nodes reached last; the new ids [owner][batch][node type] of remote ones."""
        rank, sampler = self._world.rank, self._sampler
        new_ids: list[_ByBatch] = [[{} for _ in self._batches] for _ in range(self._world.size)]
        for m, (batch, builder) in enumerate(zip(self._batches, self._builders, strict=True)):
            for kind, ids in builder.ids.items():
                before = batch.nodes[kind]
                reached = ids[before.count :]
                owner = sampler.owners.owner_of(kind, reached)
                positions = sampler.own_nodes[kind].positions_of(reached[owner == rank])
                after = batch.nodes[kind] = before.extended(before.count, owner, rank, positions)
                for q, rows in enumerate(after.remote_rows):
                    new_ids[q][m][kind] = ids[rows[len(before.remote_rows[q]) :]].to(sampler.index_dtype)
        return new_ids

    def add_hop(self, hop: int, counts: Mapping[EdgeType, int]) -> None:
        new = self._send_requests(self.assign_owners())
        replies = self._serve(hop, counts, new)
        for m, builder in enumerate(self._builders):
            builder.add_hop({kind: self._draw(hop, kind, counts[kind], m, replies[m]) for kind in self._neighbors})

    def _send_requests(self, new_ids: list[_ByBatch]) -> list[_ByBatch]:
        """Send new ids to their owners; the positions [rank][batch][node type] newly requested from this rank."""
        lists = [[by_kind[kind] for by_kind in batches for kind in self._kinds] for batches in new_ids]
        received = all_to_all_lists(self._world, lists, self._sampler.index_dtype, op="nodes to draw for")
        new: list[_ByBatch] = [[{} for _ in self._batches] for _ in range(self._world.size)]
        for q, id_lists in enumerate(map(iter, received)):
            for m in range(len(self._batches)):
                for kind in self._kinds:
                    ids = next(id_lists).long()
                    new[q][m][kind] = positions = self._sampler.own_nodes[kind].positions_of(ids)
                    self._requested[q][m][kind] = torch.cat([self._requested[q][m][kind], positions])
        return new

    def _serve(
        self, hop: int, counts: Mapping[EdgeType, int], new: list[_ByBatch]
    ) -> list[dict[EdgeType, list[dict[str, Tensor]]]]:
        """Draw for other ranks and receive their draws: [batch][edge type][owner] sources and data of edges."""
        buffers = [ByteBuffer() for _ in range(self._world.size)]
        for m in range(len(self._batches)):
            for kind in self._neighbors:
                self._pack_reply(hop, kind, counts[kind], m, new, buffers)
        messages = all_to_all_bytes(self._world, [buffer.message for buffer in buffers], op="drawn neighbours")
        received = [ByteBuffer(message) for message in messages]
        return [
            {
                kind: [self._unpack_reply(buffer, kind, counts[kind], m, q) for q, buffer in enumerate(received)]
                for kind in self._neighbors
            }
            for m in range(len(self._batches))
        ]

    def _pack_reply(
        self, hop: int, kind: EdgeType, count: int, m: int, new: list[_ByBatch], buffers: list[ByteBuffer]
    ) -> None:
        neighbors = self._neighbors[kind]
        by_rank = [by_batch[m][kind.dst] for by_batch in self._requested]
        positions = torch.cat(by_rank)
        if not len(positions):
            return
        ids = self._sampler.own_nodes[kind.dst].ids[positions]
        offsets, drawn = sample(
            neighbors.edges, positions, self._fanout(count), draws=self._draws(hop, kind, m), ids=ids
        )
        sources, data = edge_sources(neighbors.edges, drawn), neighbors.edge_data(drawn)
        starts = [0]
        for requested in by_rank:
            starts.append(starts[-1] + len(requested))
        bounds = offsets[torch.tensor(starts)].tolist()
        for q, buffer in enumerate(buffers):
            if not len(by_rank[q]):
                continue
            fresh = new[q][m][kind.dst]
            buffer.write(neighbors.first[fresh])
            buffer.write(neighbors.degree[fresh])
            edges_of_rank = slice(bounds[q], bounds[q + 1])
            buffer.write(sources[edges_of_rank])
            for values in data.values():
                buffer.write(values[edges_of_rank])

    def _unpack_reply(self, buffer: ByteBuffer, kind: EdgeType, count: int, m: int, q: int) -> dict[str, Tensor]:
        neighbors = self._neighbors[kind]
        rows, degrees = self._batches[m].nodes[kind.dst].remote_rows[q], self._degrees[m][kind]
        column_dtype = neighbors.edges.col.dtype
        if not len(rows):
            return {"sources": torch.empty(0, dtype=column_dtype)}
        fresh = len(rows) - len(degrees.first[q])
        degrees.first[q] = torch.cat([degrees.first[q], buffer.read(fresh, torch.int64)])
        degrees.degree[q] = torch.cat([degrees.degree[q], buffer.read(fresh, torch.int64)])
        edges = int(_drawn_counts(degrees.degree[q], self._fanout(count)).sum())
        data = {"sources": buffer.read(edges, column_dtype)}
        for name, values in (("weight", neighbors.weight), ("attr", neighbors.attr)):
            if values is not None:
                data[name] = buffer.read(edges, values.dtype, 1 if values.dim() == 1 else int(values.shape[1]))
        return data

    def _draw(
        self, hop: int, kind: EdgeType, count: int, m: int, replies: Mapping[EdgeType, list[dict[str, Tensor]]]
    ) -> SampledEdges:
        """The edges drawn for all nodes of a batch, by this rank and by other owners."""
        neighbors, nodes, degrees = self._neighbors[kind], self._batches[m].nodes[kind.dst], self._degrees[m][kind]
        ids, fanout, draws = self._builders[m].ids[kind.dst], self._fanout(count), self._draws(hop, kind, m)
        offsets, drawn = sample(neighbors.edges, nodes.positions, fanout, draws=draws, ids=ids[nodes.rows])
        data = {"sources": edge_sources(neighbors.edges, drawn), **neighbors.edge_data(drawn)}
        pieces = [_EdgePiece(nodes.rows, offsets, neighbors.edge_ids(nodes.positions, offsets, drawn), data)]
        degree = torch.empty(len(ids), dtype=torch.int64)
        degree[nodes.rows] = neighbors.degree[nodes.positions]
        for q, rows in enumerate(nodes.remote_rows):
            if not len(rows):
                continue
            degree[rows] = degrees.degree[q]
            # The first and last edge id of each row, in pairs: rows 0, 2, 4 … of this CSR, whose draws are edge ids.
            bounds = torch.stack([degrees.first[q], degrees.first[q] + degrees.degree[q]], 1).view(-1)
            edges = CSR(bounds, torch.empty(0, dtype=torch.int64), 0)
            offsets, edge_ids = sample(edges, 2 * torch.arange(len(rows)), fanout, draws=draws, ids=ids[rows])
            pieces.append(_EdgePiece(rows, offsets, edge_ids, replies[kind][q]))
        offsets, edge_ids, data = _join(pieces, degree, fanout)
        weight = data.get("weight")
        return SampledEdges(
            offsets,
            data["sources"],
            edge_ids,
            None if weight is None else weight[:, 0],
            data.get("attr"),
            sampling_scale(lambda: degree, offsets) if count >= 0 else None,
        )

    def _fanout(self, count: int) -> Fanout:
        return Fanout(count, self._sampler.replace)

    def _draws(self, hop: int, kind: EdgeType, m: int) -> Draws:
        return self._batches[m].key.draws(Purpose.SAMPLE, hop, relation=list(self._neighbors).index(kind))


@dataclass(frozen=True, eq=False)
class _EdgePiece:
    """Edges drawn for some of the rows."""

    rows: Tensor
    offsets: Tensor
    edge_ids: Tensor
    data: Mapping[str, Tensor]


def _join(pieces: Sequence[_EdgePiece], degree: Tensor, fanout: Fanout) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(offsets, edge ids, other data) of the edges of all pieces, by row."""
    offsets = offsets_of(_drawn_counts(degree, fanout))
    total = int(offsets[-1])

    def join(columns: list[Tensor]) -> Tensor:
        if len(columns) == 1 and len(pieces[0].rows) == len(degree):  # all rows, in order
            return columns[0]
        out = columns[0].new_empty(total, *columns[0].shape[1:])
        for piece, column in zip(pieces, columns, strict=True):
            put_segments(column, piece.offsets, piece.rows, into=offsets, out=out)
        return out

    data = {name: join([piece.data[name] for piece in pieces]) for name in pieces[0].data}
    return offsets, join([piece.edge_ids for piece in pieces]), data


def _drawn_counts(degree: Tensor, fanout: Fanout) -> Tensor:
    """The number of edges drawn for nodes of the given degrees."""
    if fanout.count < 0:
        return degree
    return torch.where(degree > 0, fanout.count, 0) if fanout.replace else degree.clamp(max=fanout.count)
