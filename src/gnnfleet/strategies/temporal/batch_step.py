"""One batch of events: what it looks at, what it makes of memories, what it leaves behind.

Serial and parallel training call the same functions in the same order: ``NeighborhoodBuilder.batch``, a read of ``block.nodes``,
``update_memory``, a write, ``embed``. n events, K negatives each, Q queries, R nodes read, D columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.nn.temporal.block import EventBlock, Hop
from gnnfleet.nn.temporal.model import TemporalModel
from gnnfleet.nn.temporal.pairs import PairFeatures
from gnnfleet.ops.draws import DrawKey
from gnnfleet.ops.temporal_neighbors import TemporalNeighbors
from gnnfleet.strategies.temporal.memory import MemoryRows, MemoryUpdate, NodeMemory

QueryTime = Literal["event", "batch"]
"""When nodes are looked at: each at its event's time, or once per batch, when it begins. No query sees its batch."""


@dataclass(frozen=True, eq=False)
class MemoryTargets:
    """Whom a batch leaves a mail: each node once, with its last event; ``own_rows`` and ``other_rows`` are rows of the block."""

    ids: Tensor
    event: Tensor
    own_rows: Tensor
    other_rows: Tensor


@dataclass(frozen=True, eq=False)
class EventBatch:
    """Events ``first`` to ``end`` of a stream, and all about them that no weight decides."""

    first: int
    end: int
    negatives: Tensor  # [n, K] nodes set against the destinations
    block: EventBlock
    places: Tensor | None  # [n (2 + K)] the query of each source, destination and negative; None: 0, 1, 2, …
    targets: MemoryTargets
    pairs: Tensor | None = None  # [n, 1 + K, P] features of sources with destinations and with negatives

    @property
    def count(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, eq=False)
class NeighborhoodBuilder:
    """Finds what batches of a stream look at; may be called from another thread."""

    stream: EventStream
    history: TemporalNeighbors
    neighbours: int
    num_hops: int
    dtype: torch.dtype
    queries: QueryTime = "event"
    pair_unit: float = 0.0  # of times between meetings of pairs; 0: nobody asks for those
    drawn: int | None = None  # the seed by which events of a node are drawn; None: its latest are looked at

    def batch(
        self, low: int, high: int, negatives: Tensor, *, sweep: int = 0, whole: tuple[int, int] | None = None
    ) -> EventBatch:
        """In the pass ``sweep``; ``whole`` is the global batch, where this is a share. None of its events is seen."""
        stream, begin = self.stream, low if whole is None else whole[0]
        src, dst = stream.src[low:high], stream.dst[low:high]
        asked, places = torch.cat([src, dst, negatives.flatten()]), None
        if self.queries == "batch":
            asked, places = distinct(asked, stream.num_nodes)
            when = stream.t[begin].repeat(len(asked))
            ids = (stream.first + begin) * stream.num_nodes + asked  # a node draws anew in every batch
        else:
            when, numbers = times_of(stream.t[low:high], negatives), stream.first + torch.arange(low, high)
            ids = draw_ids(numbers, negatives)
        block = self.block(asked, when, ids, sweep=sweep, visible=begin)
        left = self._memory_targets(block, low, high, whole)
        return EventBatch(low, high, negatives, block, places, left, self._pairs(low, high, negatives, begin))

    def _pairs(self, low: int, high: int, negatives: Tensor, visible: int) -> Tensor | None:
        """As they stood when the batch began, as memories do."""
        if not self.pair_unit:
            return None
        stream = self.stream
        dst = torch.cat([stream.dst[low:high, None], negatives], 1)
        made = PairFeatures(self.history, stream.src, self.pair_unit)
        return made.of(stream.src[low:high], dst, stream.t[low:high], visible=visible)

    def block(
        self, asked: Tensor, when: Tensor, ids: Tensor, *, sweep: int = 0, visible: int | None = None
    ) -> EventBlock:
        """What nodes at times look at, from the last hop back to the one that reads memories."""
        hops: list[Hop] = []
        for ahead in range(self.num_hops - 1, -1, -1):
            if self.drawn is None:
                near, event = self.history.latest(asked, when, self.neighbours, visible=visible)
            else:
                key = DrawKey(self.drawn, sweep)
                near, event = self.history.sample_uniform(asked, when, self.neighbours, key, hop=ahead, visible=visible)
            seen, event = near >= 0, event.clamp_(min=0)
            then = self.stream.t[event]
            since = (when[:, None] - then).to(self.dtype)
            if not ahead:
                hops.append(Hop(asked, near, event, since, ids))
                break
            count, k = near.shape
            rows = count + torch.arange(count * k).view(count, k)
            hops.append(Hop(torch.arange(count), torch.where(seen, rows, -1), event, since, ids))
            asked = torch.cat([asked, torch.where(seen, near, asked[:, None]).flatten()])
            when = torch.cat([when, torch.where(seen, then, when[:, None]).flatten()])
            ids = torch.cat([ids * (k + 1), (ids[:, None] * (k + 1) + 1 + torch.arange(k)).flatten()])
        if not hops:
            nothing = torch.empty(len(asked), 0, dtype=torch.int64)
            hops.append(Hop(asked, nothing, nothing, nothing.to(self.dtype), ids))
        return self._numbered(hops)

    def _numbered(self, hops: list[Hop]) -> EventBlock:
        """The first hop's nodes by their rows among those that are read."""
        first = hops[-1]
        seen = first.neighbors >= 0
        every = torch.cat([first.query, torch.where(seen, first.neighbors, first.query[:, None]).flatten()])
        nodes, row = distinct(every, self.stream.num_nodes)
        query, near = row[: len(first.query)], row[len(first.query) :].view(seen.shape)
        hops[-1] = replace(first, query=query, neighbors=torch.where(seen, near, -1))
        return EventBlock(nodes, tuple(reversed(hops)), self.stream.msg)

    def _memory_targets(self, block: EventBlock, low: int, high: int, whole: tuple[int, int] | None) -> MemoryTargets:
        ids, event, other = last_events(self.stream, *(whole or (low, high)))
        if whole is not None:
            mine = (event >= low) & (event < high)
            ids, event, other = ids[mine], event[mine], other[mine]
        return MemoryTargets(ids, event, torch.searchsorted(block.nodes, ids), torch.searchsorted(block.nodes, other))


def distinct(ids: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """(those that occur, ascending, the row of each among them), as torch.unique; a table where that is cheaper."""
    if num_nodes > 64 * len(ids):
        found, row = torch.unique(ids, return_inverse=True)
        return found, row
    there = torch.zeros(num_nodes, dtype=torch.bool)
    there[ids] = True
    found = there.nonzero()[:, 0]
    row = torch.empty(num_nodes, dtype=torch.int64)
    row[found] = torch.arange(len(found))
    return found, row[ids]


def times_of(t: Tensor, negatives: Tensor) -> Tensor:
    """[n (2 + K)]: when sources, destinations and negatives of events are looked at."""
    return torch.cat([t, t, t.repeat_interleave(negatives.shape[1])])


def draw_ids(numbers: Tensor, negatives: Tensor) -> Tensor:
    """[n (2 + K)]: a number for each of them, whatever the batch it comes in."""
    count = negatives.shape[1]
    event = numbers * (2 + count)
    return torch.cat([event, event + 1, (event[:, None] + 2 + torch.arange(count)).flatten()])


def last_events(stream: EventStream, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
    """(nodes ascending, the last event of each among ``low`` to ``high``, its other end)."""
    src, dst = stream.src[low:high], stream.dst[low:high]
    ends, others = torch.stack([src, dst], 1).flatten(), torch.stack([dst, src], 1).flatten()
    nodes, row = distinct(ends, stream.num_nodes)
    last = torch.zeros(len(nodes), dtype=torch.int64)
    last.scatter_reduce_(0, row, torch.arange(len(ends)), "amax", include_self=False)
    return nodes, low + last // 2, others[last]


def update_memory(
    model: TemporalModel, stream: EventStream, batch: EventBatch, rows: MemoryRows
) -> tuple[Tensor | None, MemoryUpdate | None]:
    """([R, D] memories of the block's nodes with their mails taken in, what the batch leaves behind)."""
    if not model.has_memory:
        return None, None
    memory = apply_mail(model, stream, rows)
    return memory, _written(memory.detach(), batch.targets)


def replay(model: TemporalModel, stream: EventStream, memory: NodeMemory, low: int, high: int) -> None:
    """Move the state past some events, as training on them as one batch does."""
    if not model.has_memory:
        return
    ids, event, other = last_events(stream, low, high)
    # Both ends of an event are among the nodes of the batch.
    left = MemoryTargets(ids, event, torch.arange(len(ids)), torch.searchsorted(ids, other))
    with torch.no_grad():
        memory.write(_written(apply_mail(model, stream, memory.read(ids)), left))


def _written(memory: Tensor, left: MemoryTargets) -> MemoryUpdate:
    own, other = memory[left.own_rows], memory[left.other_rows]
    return MemoryUpdate(left.ids, own, torch.cat([own, other], 1), left.event)


def apply_mail(model: TemporalModel, stream: EventStream, rows: MemoryRows) -> Tensor:
    """[n, D]: memories after their mails; rows without a mail stay as they are."""
    has = (rows.mail_event >= 0).nonzero()[:, 0]
    event, before = rows.mail_event[has], rows.memory_event[has]
    # A first mail counts from the beginning of the stream: when a node came is all that is known of it so far.
    since = (stream.t[event] - stream.t[before.clamp(min=0)]).to(rows.memory.dtype)
    edge = None if stream.msg is None else stream.msg.index_select(0, event)
    fresh = model.update(rows.mail[has], edge, since, rows.memory[has])
    return rows.memory.index_copy(0, has, fresh)


def embed(
    model: TemporalModel, batch: EventBatch, memory: Tensor | None, static: Tensor | None, key: DrawKey
) -> Tensor:
    """[n (2 + K), D]: embeddings of sources, destinations and negatives, in this order; ``static`` [V, S]."""
    nodes = batch.block.nodes
    h = model.combine_static(memory, None if static is None else static[nodes], rows=len(nodes))
    z = model.embed(batch.block, h, key)
    return z if batch.places is None else z[batch.places]
