"""ChunkView: the verbs of a GraphView on a chunk of a way, whose neighbours elsewhere are fresh or remembered."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gnnfleet.comm.collectives import sum_over_ranks
from gnnfleet.errors import ConfigError
from gnnfleet.sharded.full_batch.partitioned_view import LazyMergedEdges, PartitionedView
from gnnfleet.sharded.pipeline.chunked_partition import Chunk, ChunkBlocks
from gnnfleet.sharded.pipeline.history import ChunkExchange, HistoryStore, PipelineSlot


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkView(PartitionedView):
    """What a layer sees of a chunk."""

    chunk: Chunk
    history: HistoryStore
    slot: PipelineSlot

    @classmethod
    def open(cls, chunk: Chunk, stream: HistoryStore) -> ChunkView:
        blocks = ChunkBlocks(chunk)
        return cls(
            blocks=blocks,
            nodes=blocks.nodes,
            relations=blocks.edges,
            merged=LazyMergedEdges(blocks),
            chunk=chunk,
            history=stream,
            slot=PipelineSlot(0, (-1,) * stream.halo.world.size),
        )

    def in_slot(self, turn: PipelineSlot, stream: HistoryStore | None = None) -> ChunkView:
        """The same chunk in a slot of a pass, perhaps over other tables."""
        return replace(self, slot=turn, history=stream or self.history)

    def _exchange(self) -> ChunkExchange:
        return self.history.new_exchange(self.chunk, self.slot, self.layer)

    def gather_rows(self, x: Tensor, store_ids: Tensor) -> Tensor:
        raise ConfigError("strategy pipe gives rows of other chunks to the last layer's loss only, not to layers")

    def sum_over_nodes(self, t: Tensor) -> Tensor:
        if self.chunk.rows != self.chunk.partition.rows:
            raise ConfigError("this layer looks at all nodes at once, a chunk has some of them: use strategy.chunks=1")
        return sum_over_ranks(self.history.halo.world, t)
