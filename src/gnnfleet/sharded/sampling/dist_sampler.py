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

from gnnfleet.comm.all_to_all import Parcel, relay
from gnnfleet.comm.halo_exchange import Ring
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.sampling.sampler import Drawn, Fanouts, Growth, Share, hop_counts
from gnnfleet.graph.views.local import LocalView
from gnnfleet.ops.csr import Compressed, put_segments
from gnnfleet.ops.draws import DrawKey, Draws, Purpose
from gnnfleet.ops.sample import Fanout, Frontier, pick, sample
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.sharded.sampling.neighbor_index import Neighbours, OwnNodes, open_neighbours

_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Reached:
    """The nodes of one type that a batch has reached, by where they live. Rows are those of its blocks."""

    rows: Tensor  # [·] rows of own nodes
    places: Tensor  # [·] their places in this part
    far: tuple[Tensor, ...]  # by owner, rows of its nodes, in the order in which they were asked for

    @classmethod
    def nothing(cls, ranks: int) -> Reached:
        return cls(_NONE, _NONE, (_NONE,) * ranks)

    @property
    def count(self) -> int:
        return len(self.rows) + sum(map(len, self.far))

    def and_more(self, first: int, owner: Tensor, rank: int, places: Tensor) -> Reached:
        """With new nodes from row ``first`` on; ``places`` are those of own ones."""
        new = [torch.cat([old, (owner == q).nonzero()[:, 0] + first]) for q, old in enumerate(self.far)]
        own, new[rank] = torch.cat([self.rows, new[rank]]), _NONE
        return Reached(own, torch.cat([self.places, places]), tuple(new))


@dataclass(eq=False)
class Sampled:
    """One batch: its blocks, and where the nodes they read live, by type."""

    key: DrawKey
    reached: dict[str, Reached]
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
class _Far:
    """What owners told of nodes of theirs, for one batch and edge type: by owner, in the order of ``Reached.far``."""

    first: list[Tensor]
    degree: list[Tensor]

    @classmethod
    def nothing(cls, ranks: int) -> _Far:
        return cls([_NONE] * ranks, [_NONE] * ranks)


class PartSampler:
    """All ranks make and call it together; serves one thread at a time. Raises ConfigError for wrong fanouts."""

    def __init__(self, view: RingView, ring: Ring, fanouts: Fanouts, *, replace: bool = False) -> None:
        self.hops = hop_counts(view.edge_types, fanouts)
        self.world, self._owners, self._replace = ring.world, view.owners, replace
        self._neighbours = open_neighbours(view.part, ring, view.owners.counts)
        self.own = {kind: OwnNodes(rows.node_ids) for kind, rows in view.nodes.items()}
        self._frontiers: list[dict[str, Frontier]] = []
        most = max(view.owners.counts.values(), default=0)
        self._index = torch.int32 if most <= torch.iinfo(torch.int32).max else torch.int64

    def blocks(self, batches: Sequence[tuple[Mapping[str, Tensor], DrawKey]], *, given: bool = False) -> list[Sampled]:
        """The blocks of (seeds by node type, key) of each batch; as many batches on all ranks, perhaps without seeds.

        ``given`` as in ``graph.sample.Sampler``. Two rounds per hop, however many batches.
        """
        found = [Sampled(key, {kind: Reached.nothing(self.world.size) for kind in self.own}) for _, key in batches]
        growths: list[Growth] = []
        try:
            for one, frontiers, (seeds, key) in zip(found, self._room(len(batches)), batches, strict=True):
                growths.append(Growth(frontiers, seeds, key, layers=len(self.hops), degrees=one.degrees_of))
            talk = _Talk(self, found, growths)
            for hop, counts in enumerate(self.hops[:-1] if given else self.hops):
                talk.hop(hop, counts)
            talk.settle()
            for growth in growths if given else ():
                growth.stop(self._neighbours)
        finally:
            views = [growth.end() for growth in growths]
        for one, blocks, frontiers in zip(found, views, self._frontiers, strict=False):
            one.views, one.scratch = blocks, sum(frontier.nbytes for frontier in frontiers.values())
        return found

    def _room(self, count: int) -> list[dict[str, Frontier]]:
        while len(self._frontiers) < count:
            self._frontiers.append({kind: Frontier(nodes) for kind, nodes in self._owners.counts.items()})
        return self._frontiers[:count]


class _Talk:
    """The relays of one call of ``blocks``."""

    def __init__(self, sampler: PartSampler, found: Sequence[Sampled], growths: Sequence[Growth]) -> None:
        self._sampler, self._found, self._growths = sampler, found, growths
        self._world, self._neighbours = sampler.world, sampler._neighbours
        self._kinds = list(sampler.own)
        ranks = self._world.size
        # What others have asked here: by rank, batch and node type, places; what owners told: by batch and edge type.
        self._asked = [[dict.fromkeys(self._kinds, _NONE) for _ in found] for _ in range(ranks)]
        self._told = [{kind: _Far.nothing(ranks) for kind in self._neighbours} for _ in found]

    def settle(self) -> list[list[dict[str, Tensor]]]:
        """Find the owners of what was reached last; by rank and batch, the new ids of others."""
        rank, sampler = self._world.rank, self._sampler
        fresh: list[list[dict[str, Tensor]]] = [[{} for _ in self._found] for _ in range(self._world.size)]
        for m, (one, growth) in enumerate(zip(self._found, self._growths, strict=True)):
            for kind, ids in growth.ids.items():
                before = one.reached[kind].count
                new = ids[before:]
                owner = sampler._owners.of(kind, new)
                places = sampler.own[kind].places(new[owner == rank])
                known = one.reached[kind]
                one.reached[kind] = now = known.and_more(before, owner, rank, places)
                for q, rows in enumerate(now.far):
                    fresh[q][m][kind] = ids[rows[len(known.far[q]) :]].to(sampler._index)
        return fresh

    def hop(self, hop: int, counts: Mapping[EdgeType, int]) -> None:
        new = self._ask(self.settle())
        drawn = self._answer(hop, counts, new)
        for m, growth in enumerate(self._growths):
            growth.hop({kind: self._draw(hop, kind, counts[kind], m, drawn[m]) for kind in self._neighbours})

    def _ask(self, fresh: list[list[dict[str, Tensor]]]) -> list[list[dict[str, Tensor]]]:
        """Tell owners what is wanted of them from now on; by rank and batch, the places newly asked for here."""
        messages = []
        for batches in fresh:
            parcel = Parcel()
            lists = [each[kind] for each in batches for kind in self._kinds]
            parcel.put(torch.tensor([len(ids) for ids in lists], dtype=torch.int64))
            for ids in lists:
                parcel.put(ids)
            messages.append(parcel.message)
        new: list[list[dict[str, Tensor]]] = [[{} for _ in self._found] for _ in range(self._world.size)]
        for q, message in enumerate(relay(self._world, messages, what="nodes to draw for")):
            parcel = Parcel(message)
            lengths = iter(parcel.take(len(self._found) * len(self._kinds), torch.int64).tolist())
            for m in range(len(self._found)):
                for kind in self._kinds:
                    ids = parcel.take(next(lengths), self._sampler._index).long()
                    new[q][m][kind] = places = self._sampler.own[kind].places(ids)
                    self._asked[q][m][kind] = torch.cat([self._asked[q][m][kind], places])
        return new

    def _answer(
        self, hop: int, counts: Mapping[EdgeType, int], new: list[list[dict[str, Tensor]]]
    ) -> list[dict[EdgeType, list[dict[str, Tensor]]]]:
        """Draw for others and hear what they drew: by batch, edge type and owner, sources and data of edges."""
        parcels = [Parcel() for _ in range(self._world.size)]
        for m in range(len(self._found)):
            for kind, neighbours in self._neighbours.items():
                self._tell(hop, kind, neighbours, counts[kind], m, new, parcels)
        messages = [parcel.message for parcel in parcels]
        heard = [Parcel(message) for message in relay(self._world, messages, what="drawn neighbours")]
        found: list[dict[EdgeType, list[dict[str, Tensor]]]] = [{} for _ in self._found]
        for m in range(len(self._found)):
            for kind, neighbours in self._neighbours.items():
                found[m][kind] = [
                    self._hear(parcel, kind, neighbours, counts[kind], m, q) for q, parcel in enumerate(heard)
                ]
        return found

    def _tell(
        self,
        hop: int,
        kind: EdgeType,
        neighbours: Neighbours,
        count: int,
        m: int,
        new: list[list[dict[str, Tensor]]],
        parcels: list[Parcel],
    ) -> None:
        asked = [by_batch[m][kind.dst] for by_batch in self._asked]
        places = torch.cat(asked)
        if not len(places):
            return
        ids = self._sampler.own[kind.dst].ids[places]
        offsets, positions = sample(
            neighbours.edges, places, self._fanout(count), draws=self._draws(hop, kind, m), ids=ids
        )
        sources, data = pick(neighbours.edges, positions), neighbours.data(positions)
        starts = [0]
        for rows in asked:
            starts.append(starts[-1] + len(rows))
        bounds = offsets[torch.tensor(starts)].tolist()
        for q, parcel in enumerate(parcels):
            if not len(asked[q]):
                continue
            fresh = new[q][m][kind.dst]
            parcel.put(neighbours.first[fresh])
            parcel.put(neighbours.degree[fresh])
            cut = slice(bounds[q], bounds[q + 1])
            parcel.put(sources[cut])
            for values in data.values():
                parcel.put(values[cut])

    def _hear(
        self, parcel: Parcel, kind: EdgeType, neighbours: Neighbours, count: int, m: int, q: int
    ) -> dict[str, Tensor]:
        rows, told = self._found[m].reached[kind.dst].far[q], self._told[m][kind]
        index = neighbours.edges.col.dtype
        if not len(rows):
            return {"sources": torch.empty(0, dtype=index)}
        fresh = len(rows) - len(told.first[q])
        told.first[q] = torch.cat([told.first[q], parcel.take(fresh, torch.int64)])
        told.degree[q] = torch.cat([told.degree[q], parcel.take(fresh, torch.int64)])
        edges = int(_drawn_counts(told.degree[q], self._fanout(count)).sum())
        found = {"sources": parcel.take(edges, index)}
        for name, values in (("weight", neighbours.weight), ("attr", neighbours.attr)):
            if values is not None:
                found[name] = parcel.take(edges, values.dtype, 1 if values.dim() == 1 else int(values.shape[1]))
        return found

    def _draw(
        self, hop: int, kind: EdgeType, count: int, m: int, heard: Mapping[EdgeType, list[dict[str, Tensor]]]
    ) -> Drawn:
        """What was drawn for all nodes of a batch, by whoever owns them."""
        neighbours, reached, told = self._neighbours[kind], self._found[m].reached[kind.dst], self._told[m][kind]
        ids, fanout, draws = self._growths[m].ids[kind.dst], self._fanout(count), self._draws(hop, kind, m)
        own = sample(neighbours.edges, reached.places, fanout, draws=draws, ids=ids[reached.rows])
        pieces = [
            _Piece(
                reached.rows,
                own[0],
                neighbours.edge_ids(reached.places, *own),
                {"sources": pick(neighbours.edges, own[1]), **neighbours.data(own[1])},
            )
        ]
        degree = torch.empty(len(ids), dtype=torch.int64)
        degree[reached.rows] = neighbours.degree[reached.places]
        for q, rows in enumerate(reached.far):
            if not len(rows):
                continue
            degree[rows] = told.degree[q]
            # Where a row's edges begin and end in the store, one pair after the other: rows 0, 2, 4 … of that list.
            spans = torch.stack([told.first[q], told.first[q] + told.degree[q]], 1).view(-1)
            edges = Compressed(spans, torch.empty(0, dtype=torch.int64), 0)
            again = sample(edges, 2 * torch.arange(len(rows)), fanout, draws=draws, ids=ids[rows])
            pieces.append(_Piece(rows, *again, heard[kind][q]))
        offsets, edge_ids, data = _join(pieces, degree, fanout)
        weight = data.get("weight")
        return Drawn(
            offsets,
            data["sources"],
            edge_ids,
            None if weight is None else weight[:, 0],
            data.get("attr"),
            Share(lambda: degree, offsets) if count >= 0 else None,
        )

    def _fanout(self, count: int) -> Fanout:
        return Fanout(count, self._sampler._replace)

    def _draws(self, hop: int, kind: EdgeType, m: int) -> Draws:
        return self._found[m].key.draws(Purpose.SAMPLE, hop, relation=list(self._neighbours).index(kind))


@dataclass(frozen=True, eq=False)
class _Piece:
    """Edges drawn for some of the rows."""

    rows: Tensor
    offsets: Tensor
    edge_ids: Tensor
    data: Mapping[str, Tensor]


def _join(pieces: Sequence[_Piece], degree: Tensor, fanout: Fanout) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
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
