"""A mini-batch of events: neighbourhood lookup, memory update, memory write, embeddings.

Serial and parallel training call the same functions in the same order: ``NeighborhoodBuilder.batch``, a read of
``block.nodes``, ``update_memory``, a write, ``embed``. n events, K negatives each, Q queries, R nodes read, D columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.graph.sampling.batches import epoch_batches
from gnnfleet.nn.temporal.attention import EventBlock, Hop
from gnnfleet.nn.temporal.decoders import PairFeatures
from gnnfleet.nn.temporal.model import TemporalModel
from gnnfleet.ops.draws import DrawKey, Draws, Purpose
from gnnfleet.ops.temporal_neighbors import TemporalNeighbors
from gnnfleet.strategies.job import EventJob, autocast
from gnnfleet.strategies.optim import Adam
from gnnfleet.strategies.temporal.config import TemporalConfig
from gnnfleet.strategies.temporal.memory import MemoryRows, MemoryUpdate, NodeMemory

QueryTime = Literal["event", "batch"]
"""Time of a query: that of its event, or the start of the batch, once per node. No query sees events of its batch."""


@dataclass(frozen=True, eq=False)
class MemoryTargets:
    """Nodes to which a batch sends a mail, each with its last event. ``node_rows``, ``other_rows`` index the block."""

    ids: Tensor
    event: Tensor
    node_rows: Tensor
    other_rows: Tensor


@dataclass(frozen=True, eq=False)
class EventBatch:
    """Events ``first`` to ``end`` of a stream with all inputs that do not depend on weights."""

    first: int
    end: int
    negatives: Tensor  # [n, K] nodes in place of the destinations
    block: EventBlock
    query_index: Tensor | None  # [n (2 + K)] query of each source, destination and negative; None: 0, 1, 2, …
    targets: MemoryTargets
    pairs: Tensor | None = None  # [n, 1 + K, P] features of sources with destinations and with negatives

    @property
    def count(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, eq=False)
class NeighborhoodBuilder:
    """Builds the inputs of mini-batches; may be called from another thread."""

    stream: EventStream
    history: TemporalNeighbors
    neighbours: int
    num_hops: int
    dtype: torch.dtype
    queries: QueryTime = "event"
    pair_unit: float = 0.0  # unit of times in features of pairs; 0: no such features
    sample_seed: int | None = None  # events of a node are sampled with this seed; None: the latest events are read

    def batch(
        self, low: int, high: int, negatives: Tensor, *, sweep: int = 0, global_batch: tuple[int, int] | None = None
    ) -> EventBatch:
        """Build events ``low`` to ``high`` of a global batch, by default all of it, in the pass ``sweep``."""
        stream, begin = self.stream, low if global_batch is None else global_batch[0]
        src, dst = stream.src[low:high], stream.dst[low:high]
        nodes, query_index = torch.cat([src, dst, negatives.flatten()]), None
        if self.queries == "batch":
            nodes, query_index = unique_nodes(nodes, stream.num_nodes)
            times = stream.t[begin].repeat(len(nodes))
            ids = (stream.first + begin) * stream.num_nodes + nodes  # a node has other draws in every batch
        else:
            times = query_times(stream.t[low:high], negatives)
            ids = draw_ids(stream.first + torch.arange(low, high), negatives)
        block = self.block(nodes, times, ids, sweep=sweep, visible=begin)
        ends, event, other = last_events(stream, *(global_batch or (low, high)))
        if global_batch is not None:
            is_local = (event >= low) & (event < high)
            ends, event, other = ends[is_local], event[is_local], other[is_local]
        rows = torch.searchsorted(block.nodes, ends), torch.searchsorted(block.nodes, other)
        pairs = None
        if self.pair_unit:
            features = PairFeatures(self.history, stream.src, self.pair_unit)
            pairs = features.of(src, torch.cat([dst[:, None], negatives], 1), stream.t[low:high], visible=begin)
        return EventBatch(low, high, negatives, block, query_index, MemoryTargets(ends, event, *rows), pairs)

    def block(
        self, nodes: Tensor, times: Tensor, ids: Tensor, *, sweep: int = 0, visible: int | None = None
    ) -> EventBlock:
        """Build the hops of queries (nodes at times), from the last hop back to the one that reads memories.

        ``ids`` key the random draws. Only events before number ``visible`` are read.
        """
        hops: list[Hop] = []
        for hop in range(self.num_hops - 1, -1, -1):
            if self.sample_seed is None:
                neighbors, event = self.history.latest(nodes, times, self.neighbours, visible=visible)
            else:
                key = DrawKey(self.sample_seed, sweep)
                neighbors, event = self.history.sample_uniform(
                    nodes, times, self.neighbours, key, hop=hop, visible=visible
                )
            exists, event = neighbors >= 0, event.clamp_(min=0)
            event_time = self.stream.t[event]
            time_delta = (times[:, None] - event_time).to(self.dtype)
            if not hop:
                hops.append(Hop(nodes, neighbors, event, time_delta, ids))
                break
            count, k = neighbors.shape
            rows = count + torch.arange(count * k).view(count, k)
            hops.append(Hop(torch.arange(count), torch.where(exists, rows, -1), event, time_delta, ids))
            nodes = torch.cat([nodes, torch.where(exists, neighbors, nodes[:, None]).flatten()])
            times = torch.cat([times, torch.where(exists, event_time, times[:, None]).flatten()])
            ids = torch.cat([ids * (k + 1), (ids[:, None] * (k + 1) + 1 + torch.arange(k)).flatten()])
        if not hops:
            empty = torch.empty(len(nodes), 0, dtype=torch.int64)
            hops.append(Hop(nodes, empty, empty, empty.to(self.dtype), ids))
        return self._relabelled(hops)

    def _relabelled(self, hops: list[Hop]) -> EventBlock:
        """Replace the nodes of the first hop by their rows among the nodes that are read."""
        first = hops[-1]
        exists = first.neighbors >= 0
        all_nodes = torch.cat([first.query, torch.where(exists, first.neighbors, first.query[:, None]).flatten()])
        nodes, row = unique_nodes(all_nodes, self.stream.num_nodes)
        query, neighbors = row[: len(first.query)], row[len(first.query) :].view(exists.shape)
        hops[-1] = replace(first, query=query, neighbors=torch.where(exists, neighbors, -1))
        return EventBlock(nodes, tuple(reversed(hops)), self.stream.msg)


def unique_nodes(ids: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Return torch.unique(ids, return_inverse=True), from a table over all nodes if that is cheaper."""
    if num_nodes > 64 * len(ids):
        nodes, row = torch.unique(ids, return_inverse=True)
        return nodes, row
    occurs = torch.zeros(num_nodes, dtype=torch.bool)
    occurs[ids] = True
    nodes = occurs.nonzero()[:, 0]
    row = torch.empty(num_nodes, dtype=torch.int64)
    row[nodes] = torch.arange(len(nodes))
    return nodes, row[ids]


def query_times(t: Tensor, negatives: Tensor) -> Tensor:
    """[n (2 + K)] query times of the sources, destinations and negatives of events."""
    return torch.cat([t, t, t.repeat_interleave(negatives.shape[1])])


def draw_ids(numbers: Tensor, negatives: Tensor) -> Tensor:
    """[n (2 + K)] ids of random draws of the sources, destinations and negatives, independent of the batch."""
    count = negatives.shape[1]
    event = numbers * (2 + count)
    return torch.cat([event, event + 1, (event[:, None] + 2 + torch.arange(count)).flatten()])


def last_events(stream: EventStream, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (ascending nodes, the last event of each among ``low`` to ``high``, its other end)."""
    src, dst = stream.src[low:high], stream.dst[low:high]
    ends, others = torch.stack([src, dst], 1).flatten(), torch.stack([dst, src], 1).flatten()
    nodes, row = unique_nodes(ends, stream.num_nodes)
    last = torch.zeros(len(nodes), dtype=torch.int64)
    last.scatter_reduce_(0, row, torch.arange(len(ends)), "amax", include_self=False)
    return nodes, low + last // 2, others[last]


def update_memory(
    model: TemporalModel, stream: EventStream, batch: EventBatch, rows: MemoryRows
) -> tuple[Tensor | None, MemoryUpdate | None]:
    """Return ([R, D] memories of the block's nodes after their mails, the memory write of the batch)."""
    if not model.has_memory:
        return None, None
    memory = apply_mail(model, stream, rows)
    return memory, _memory_write(memory.detach(), batch.targets)


def replay(model: TemporalModel, stream: EventStream, memory: NodeMemory, low: int, high: int) -> None:
    """Advance the node memory past a batch of events, as training on it does."""
    if not model.has_memory:
        return
    ids, event, other = last_events(stream, low, high)
    # The other end of an event is among ``ids`` too.
    targets = MemoryTargets(ids, event, torch.arange(len(ids)), torch.searchsorted(ids, other))
    with torch.no_grad():
        memory.write(_memory_write(apply_mail(model, stream, memory.read(ids)), targets))


def _memory_write(memory: Tensor, targets: MemoryTargets) -> MemoryUpdate:
    node, other = memory[targets.node_rows], memory[targets.other_rows]
    return MemoryUpdate(targets.ids, node, torch.cat([node, other], 1), targets.event)


def apply_mail(model: TemporalModel, stream: EventStream, rows: MemoryRows) -> Tensor:
    """[n, D] memories after their mails; rows without a mail are unchanged."""
    has_mail = (rows.mail_event >= 0).nonzero()[:, 0]
    event, previous = rows.mail_event[has_mail], rows.memory_event[has_mail]
    # The time of a first mail counts from the start of the stream: it is the only information about the node so far.
    time_delta = (stream.t[event] - stream.t[previous.clamp(min=0)]).to(rows.memory.dtype)
    edge = None if stream.msg is None else stream.msg.index_select(0, event)
    updated = model.update(rows.mail[has_mail], edge, time_delta, rows.memory[has_mail])
    return rows.memory.index_copy(0, has_mail, updated)


def embed(
    model: TemporalModel, batch: EventBatch, memory: Tensor | None, static: Tensor | None, key: DrawKey
) -> Tensor:
    """[n (2 + K), D] embeddings of sources, destinations and negatives, in this order; ``static`` [V, S]."""
    nodes = batch.block.nodes
    h = model.combine_static(memory, None if static is None else static[nodes], rows=len(nodes))
    z = model.embed(batch.block, h, key)
    return z if batch.query_index is None else z[batch.query_index]


STATIC_NEGATIVE_SET = 0xFFFF
"""Number of a set of negatives that training with memory does not use."""


def train_static_embedding(config: TemporalConfig, job: EventJob, builder: NeighborhoodBuilder) -> Tensor:
    """Train a table [V, D] before the node memory (DistTGL); it depends on the seed and the training events only.

    The task is the same with the table in place of memories, on training events in any order, so the table may contain
    information of later training events. Nodes without a training event have zero rows.
    """
    task, stream, train = job.task, job.task.stream, job.task.parts["train"]
    width, dtype = job.model.width, job.dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        model_config = job.model.config.model_copy(update={"name": "tgat", "pairs": False})
        model = TemporalModel(model_config, replace(job.model.dims, static=width, has_features=False)).to(dtype)
    initial = Draws(job.seed, Purpose.PARAMETERS).normals_at(torch.arange(stream.num_nodes), width)
    table = torch.nn.Parameter(initial.to(dtype) * 0.1)
    optimizer = Adam([table, *model.parameters()], lr=config.static_lr, foreach=False)
    builder = replace(builder, queries="event", neighbours=model_config.neighbours, num_hops=model.num_hops)
    advance = job.progress.stage("static memory", config.static_epochs)
    model.train()
    for epoch in range(config.static_epochs):
        for step, numbers in epoch_batches(train.numbers, config.batch_size, seed=job.seed, epoch=epoch):
            negatives = task.sample_negatives(numbers, sweep=epoch, number=STATIC_NEGATIVE_SET)
            nodes = torch.cat([stream.src[numbers], stream.dst[numbers], negatives.flatten()])
            times = query_times(stream.t[numbers], negatives)
            block = builder.block(nodes, times, draw_ids(numbers, negatives), sweep=epoch)
            with autocast(job.precision):
                z = model.embed(block, table[block.nodes], DrawKey(job.seed, epoch, step))
                loss, count = task.loss(model, z, numbers)
            (loss / max(count, 1)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        advance(1)
    embedding = torch.zeros_like(table.detach())
    trained = torch.unique(torch.cat([train.src, train.dst]))
    embedding[trained] = table.detach()[trained]
    return embedding
