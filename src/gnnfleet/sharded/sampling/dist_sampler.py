"""Sampled blocks of a graph spread over ranks: those of several batches in one relay per hop.

Whoever owns a node draws its neighbours, by (key, hop, relation, store id): blocks are those that one process would
draw, whatever the parts and however many batches share a relay. A rank asks an owner for a node once; the owner draws
for it in all later hops too. With its first answer comes where its in-edges are in the store and how many, so that the
asker can tell which edges were drawn without being told. M batches, S nodes reached, E edges drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnfleet.comm.all_to_all import ByteBuffer, all_to_all_bytes
from gnnfleet.comm.halo_exchange import RingExchange
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.sampling.sampler import BlockBuilder, Fanouts, SampledEdges, SamplingScale, hop_counts
from gnnfleet.graph.views.local import LocalView
from gnnfleet.ops.csr import CSR, put_segments
from gnnfleet.ops.draws import DrawKey, Draws, Purpose
from gnnfleet.ops.sample import Fanout, Frontier, edge_sources, sample
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.sharded.sampling.neighbor_index import InNeighbors, OwnNodes, build_in_neighbors

_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class SampledNodes:
    """The nodes of one type that a batch has reached, by where they live. Rows are those of its blocks."""

    rows: Tensor  # [·] rows of own nodes
    owner_places: Tensor  # [·] their places in this part
    remote_ids: tuple[Tensor, ...]  # by owner, rows of its nodes, in the order in which they were asked for

    @classmethod
    def empty(cls, ranks: int) -> SampledNodes:
        return cls(_NONE, _NONE, (_NONE,) * ranks)

    @property
    def count(self) -> int:
        return len(self.rows) + sum(map(len, self.remote_ids))

    def extended(self, first: int, owner: Tensor, rank: int, places: Tensor) -> SampledNodes:
        """With new nodes from row ``first`` on; ``places`` are those of own ones."""
        new = [torch.cat([old, (owner == q).nonzero()[:, 0] + first]) for q, old in enumerate(self.remote_ids)]
        own, new[rank] = torch.cat([self.rows, new[rank]]), _NONE
        return SampledNodes(own, torch.cat([self.owner_places, places]), tuple(new))


@dataclass(eq=False)
class SampledBatch:
    """One batch: its blocks, and where the nodes they read live, by type."""

    key: DrawKey
    nodes: dict[str, SampledNodes]
    views: list[LocalView] = field(default_factory=list)
    degrees: dict[str, Callable[[bool], Tensor]] = field(default_factory=dict)  # filled in by whoever fetches rows
    scratch: int = 0  # bytes that drawing took, kept for the next relay

    @property
    def ids(self) -> dict[str, Tensor]:
        """Store ids of the nodes whose features are read."""
        return {kind: rows.node_ids for kind, rows in self.views[0].nodes.items()}

    def degrees_of(self, kind: str, ids: Tensor) -> Callable[[bool], Tensor]:
        """Of the first rows, once they are known."""
        degrees = self.degrees  # not self: the views know this function, and a circle would keep a batch in memory
        return lambda weighted: degrees[kind](weighted)[: len(ids)]


@dataclass(eq=False)
class _RemoteDegrees:
    """What owners told of nodes of theirs, for one batch and edge type: by owner, in the order of ``SampledNodes.remote_ids``."""

    first: list[Tensor]
    degree: list[Tensor]

    @classmethod
    def empty(cls, ranks: int) -> _RemoteDegrees:
        return cls([_NONE] * ranks, [_NONE] * ranks)


class DistNeighborSampler:
    """All ranks make and call it together; serves one thread at a time. Raises ConfigError for wrong fanouts."""

    def __init__(self, view: RingView, ring: RingExchange, fanouts: Fanouts, *, replace: bool = False) -> None:
        self.hops = hop_counts(view.edge_types, fanouts)
        self.world, self._owners, self._replace = ring.world, view.owners, replace
        self._neighbours = build_in_neighbors(view.blocks, ring, view.owners.counts)
        self.own = {kind: OwnNodes(rows.node_ids) for kind, rows in view.nodes.items()}
        self._frontiers: list[dict[str, Frontier]] = []
        most = max(view.owners.counts.values(), default=0)
        self._index = torch.int32 if most <= torch.iinfo(torch.int32).max else torch.int64

    def blocks(
        self, batches: Sequence[tuple[Mapping[str, Tensor], DrawKey]], *, given: bool = False
    ) -> list[SampledBatch]:
        """The blocks of (seeds by node type, key) of each batch; as many batches on all ranks, perhaps without seeds.

        ``given`` as in ``graph.sample.Sampler``. Two rounds per hop, however many batches.
        """
        found = [
            SampledBatch(key, {kind: SampledNodes.empty(self.world.size) for kind in self.own}) for _, key in batches
        ]
        growths: list[BlockBuilder] = []
        try:
            for one, frontiers, (seeds, key) in zip(found, self._room(len(batches)), batches, strict=True):
                growths.append(BlockBuilder(frontiers, seeds, key, layers=len(self.hops), degrees=one.degrees_of))
            talk = _SamplingRounds(self, found, growths)
            for hop, counts in enumerate(self.hops[:-1] if given else self.hops):
                talk.hop(hop, counts)
            talk.assign_owners()
            for growth in growths if given else ():
                growth.stop(self._neighbours)
        finally:
            views = [growth.finish() for growth in growths]
        for one, blocks, frontiers in zip(found, views, self._frontiers, strict=False):
            one.views, one.scratch = blocks, sum(frontier.nbytes for frontier in frontiers.values())
        return found

    def _room(self, count: int) -> list[dict[str, Frontier]]:
        while len(self._frontiers) < count:
            self._frontiers.append({kind: Frontier(nodes) for kind, nodes in self._owners.counts.items()})
        return self._frontiers[:count]


class _SamplingRounds:
    """The relays of one call of ``blocks``."""

    def __init__(
        self, sampler: DistNeighborSampler, found: Sequence[SampledBatch], growths: Sequence[BlockBuilder]
    ) -> None:
        self._sampler, self._found, self._growths = sampler, found, growths
        self._world, self._neighbours = sampler.world, sampler._neighbours
        self._kinds = list(sampler.own)
        ranks = self._world.size
        # What others have asked here: by rank, batch and node type, places; what owners told: by batch and edge type.
        self._asked = [[dict.fromkeys(self._kinds, _NONE) for _ in found] for _ in range(ranks)]
        self._told = [{kind: _RemoteDegrees.empty(ranks) for kind in self._neighbours} for _ in found]

    def assign_owners(self) -> list[list[dict[str, Tensor]]]:
        """Find the owners of what was reached last; by rank and batch, the new ids of others."""
        rank, sampler = self._world.rank, self._sampler
        fresh: list[list[dict[str, Tensor]]] = [[{} for _ in self._found] for _ in range(self._world.size)]
        for m, (one, growth) in enumerate(zip(self._found, self._growths, strict=True)):
            for kind, ids in growth.ids.items():
                before = one.nodes[kind].count
                new = ids[before:]
                owner = sampler._owners.owner_of(kind, new)
                places = sampler.own[kind].rows_of(new[owner == rank])
                known = one.nodes[kind]
                one.nodes[kind] = now = known.extended(before, owner, rank, places)
                for q, rows in enumerate(now.remote_ids):
                    fresh[q][m][kind] = ids[rows[len(known.remote_ids[q]) :]].to(sampler._index)
        return fresh

    def hop(self, hop: int, counts: Mapping[EdgeType, int]) -> None:
        new = self._send_requests(self.assign_owners())
        drawn = self._serve(hop, counts, new)
        for m, growth in enumerate(self._growths):
            growth.add_hop({kind: self._draw(hop, kind, counts[kind], m, drawn[m]) for kind in self._neighbours})

    def _send_requests(self, fresh: list[list[dict[str, Tensor]]]) -> list[list[dict[str, Tensor]]]:
        """Tell owners what is wanted of them from now on; by rank and batch, the places newly asked for here."""
        messages = []
        for batches in fresh:
            parcel = ByteBuffer()
            lists = [each[kind] for each in batches for kind in self._kinds]
            parcel.write(torch.tensor([len(ids) for ids in lists], dtype=torch.int64))
            for ids in lists:
                parcel.write(ids)
            messages.append(parcel.message)
        new: list[list[dict[str, Tensor]]] = [[{} for _ in self._found] for _ in range(self._world.size)]
        for q, message in enumerate(all_to_all_bytes(self._world, messages, what="nodes to draw for")):
            parcel = ByteBuffer(message)
            lengths = iter(parcel.read(len(self._found) * len(self._kinds), torch.int64).tolist())
            for m in range(len(self._found)):
                for kind in self._kinds:
                    ids = parcel.read(next(lengths), self._sampler._index).long()
                    new[q][m][kind] = places = self._sampler.own[kind].rows_of(ids)
                    self._asked[q][m][kind] = torch.cat([self._asked[q][m][kind], places])
        return new

    def _serve(
        self, hop: int, counts: Mapping[EdgeType, int], new: list[list[dict[str, Tensor]]]
    ) -> list[dict[EdgeType, list[dict[str, Tensor]]]]:
        """Draw for others and hear what they drew: by batch, edge type and owner, sources and data of edges."""
        parcels = [ByteBuffer() for _ in range(self._world.size)]
        for m in range(len(self._found)):
            for kind, neighbours in self._neighbours.items():
                self._pack_reply(hop, kind, neighbours, counts[kind], m, new, parcels)
        messages = [parcel.message for parcel in parcels]
        heard = [ByteBuffer(message) for message in all_to_all_bytes(self._world, messages, what="drawn neighbours")]
        found: list[dict[EdgeType, list[dict[str, Tensor]]]] = [{} for _ in self._found]
        for m in range(len(self._found)):
            for kind, neighbours in self._neighbours.items():
                found[m][kind] = [
                    self._unpack_reply(parcel, kind, neighbours, counts[kind], m, q) for q, parcel in enumerate(heard)
                ]
        return found

    def _pack_reply(
        self,
        hop: int,
        kind: EdgeType,
        neighbours: InNeighbors,
        count: int,
        m: int,
        new: list[list[dict[str, Tensor]]],
        parcels: list[ByteBuffer],
    ) -> None:
        asked = [by_batch[m][kind.dst] for by_batch in self._asked]
        places = torch.cat(asked)
        if not len(places):
            return
        ids = self._sampler.own[kind.dst].ids[places]
        offsets, positions = sample(
            neighbours.edges, places, self._fanout(count), draws=self._draws(hop, kind, m), ids=ids
        )
        sources, data = edge_sources(neighbours.edges, positions), neighbours.data(positions)
        starts = [0]
        for rows in asked:
            starts.append(starts[-1] + len(rows))
        bounds = offsets[torch.tensor(starts)].tolist()
        for q, parcel in enumerate(parcels):
            if not len(asked[q]):
                continue
            fresh = new[q][m][kind.dst]
            parcel.write(neighbours.first[fresh])
            parcel.write(neighbours.degree[fresh])
            cut = slice(bounds[q], bounds[q + 1])
            parcel.write(sources[cut])
            for values in data.values():
                parcel.write(values[cut])

    def _unpack_reply(
        self, parcel: ByteBuffer, kind: EdgeType, neighbours: InNeighbors, count: int, m: int, q: int
    ) -> dict[str, Tensor]:
        rows, told = self._found[m].nodes[kind.dst].remote_ids[q], self._told[m][kind]
        index = neighbours.edges.col.dtype
        if not len(rows):
            return {"sources": torch.empty(0, dtype=index)}
        fresh = len(rows) - len(told.first[q])
        told.first[q] = torch.cat([told.first[q], parcel.read(fresh, torch.int64)])
        told.degree[q] = torch.cat([told.degree[q], parcel.read(fresh, torch.int64)])
        edges = int(_drawn_counts(told.degree[q], self._fanout(count)).sum())
        found = {"sources": parcel.read(edges, index)}
        for name, values in (("weight", neighbours.weight), ("attr", neighbours.attr)):
            if values is not None:
                found[name] = parcel.read(edges, values.dtype, 1 if values.dim() == 1 else int(values.shape[1]))
        return found

    def _draw(
        self, hop: int, kind: EdgeType, count: int, m: int, heard: Mapping[EdgeType, list[dict[str, Tensor]]]
    ) -> SampledEdges:
        """What was drawn for all nodes of a batch, by whoever owns them."""
        neighbours, reached, told = self._neighbours[kind], self._found[m].nodes[kind.dst], self._told[m][kind]
        ids, fanout, draws = self._growths[m].ids[kind.dst], self._fanout(count), self._draws(hop, kind, m)
        own = sample(neighbours.edges, reached.owner_places, fanout, draws=draws, ids=ids[reached.rows])
        pieces = [
            _EdgePiece(
                reached.rows,
                own[0],
                neighbours.edge_ids(reached.owner_places, *own),
                {"sources": edge_sources(neighbours.edges, own[1]), **neighbours.data(own[1])},
            )
        ]
        degree = torch.empty(len(ids), dtype=torch.int64)
        degree[reached.rows] = neighbours.degree[reached.owner_places]
        for q, rows in enumerate(reached.remote_ids):
            if not len(rows):
                continue
            degree[rows] = told.degree[q]
            # Where a row's edges begin and end in the store, one pair after the other: rows 0, 2, 4 … of that list.
            spans = torch.stack([told.first[q], told.first[q] + told.degree[q]], 1).view(-1)
            edges = CSR(spans, torch.empty(0, dtype=torch.int64), 0)
            again = sample(edges, 2 * torch.arange(len(rows)), fanout, draws=draws, ids=ids[rows])
            pieces.append(_EdgePiece(rows, *again, heard[kind][q]))
        offsets, edge_ids, data = _join(pieces, degree, fanout)
        weight = data.get("weight")
        return SampledEdges(
            offsets,
            data["sources"],
            edge_ids,
            None if weight is None else weight[:, 0],
            data.get("attr"),
            SamplingScale(lambda: degree, offsets) if count >= 0 else None,
        )

    def _fanout(self, count: int) -> Fanout:
        return Fanout(count, self._sampler._replace)

    def _draws(self, hop: int, kind: EdgeType, m: int) -> Draws:
        return self._found[m].key.draws(Purpose.SAMPLE, hop, relation=list(self._neighbours).index(kind))


@dataclass(frozen=True, eq=False)
class _EdgePiece:
    """Edges drawn for some of the rows."""

    rows: Tensor
    offsets: Tensor
    edge_ids: Tensor
    data: Mapping[str, Tensor]


def _join(pieces: Sequence[_EdgePiece], degree: Tensor, fanout: Fanout) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(offsets, edge ids, everything else) by row."""
    offsets = torch.zeros(len(degree) + 1, dtype=torch.int64)
    torch.cumsum(_drawn_counts(degree, fanout), 0, out=offsets[1:])
    total = int(offsets[-1])

    def whole(parts: list[Tensor]) -> Tensor:
        if len(parts) == 1 and len(pieces[0].rows) == len(degree):  # all rows, in order
            return parts[0]
        out = parts[0].new_empty(total, *parts[0].shape[1:])
        for piece, part in zip(pieces, parts, strict=True):
            put_segments(part, piece.offsets, piece.rows, into=offsets, out=out)
        return out

    data = {name: whole([piece.data[name] for piece in pieces]) for name in pieces[0].data}
    return offsets, whole([piece.edge_ids for piece in pieces]), data


def _drawn_counts(degree: Tensor, fanout: Fanout) -> Tensor:
    """How many edges are drawn for nodes of some degrees."""
    if fanout.count < 0:
        return degree
    return torch.where(degree > 0, fanout.count, 0) if fanout.replace else degree.clamp(max=fanout.count)
