"""ChunkView: the verbs of a GraphView on a chunk. Rows of other chunks are fresh or historical."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gnnfleet.comm.collectives import sum_over_ranks
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.views.edge_list import EdgeList
from gnnfleet.sharded.full_batch.partitioned_view import PartitionedView
from gnnfleet.sharded.pipeline.chunked_partition import Chunk, ChunkBlocks
from gnnfleet.sharded.pipeline.history import ChunkExchange, HistoryStore, PipelineSlot


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkView(PartitionedView):
    """A chunk in a slot of the pipeline."""

    chunk: Chunk
    history: HistoryStore
    slot: PipelineSlot

    @classmethod
    def open(cls, chunk: Chunk, history: HistoryStore) -> ChunkView:
        blocks = ChunkBlocks(chunk)
        return cls(
            blocks=blocks,
            nodes=blocks.nodes,
            relations=blocks.edges,
            chunk=chunk,
            history=history,
            slot=PipelineSlot(0, (-1,) * history.halo.world.size),
        )

    def in_slot(self, slot: PipelineSlot, history: HistoryStore | None = None) -> ChunkView:
        """The view of the same chunk in another slot, and with another history if one is given."""
        return replace(self, slot=slot, history=history or self.history)

    def _exchange(self) -> ChunkExchange:
        return self.history.new_exchange(self.chunk, self.slot, self.layer)

    def edge_list(self, edge_type: EdgeType | None = None) -> EdgeList:
        partition, ids = self.chunk.partition, self.chunk.fetched_ids
        return replace(super().edge_list(edge_type), fetched_degree=lambda kind: partition.degree(kind)[ids])

    def gather_rows(self, x: Tensor, store_ids: Tensor) -> Tensor:
        raise ConfigError("strategy pipe gathers rows of other chunks for the loss only, not in layers: use sar")

    def sum_over_nodes(self, t: Tensor) -> Tensor:
        if self.chunk.rows != self.chunk.partition.rows:
            raise ConfigError("this layer needs all nodes at once, a chunk has only some: set strategy.chunks=1")
        return sum_over_ranks(self.history.halo.world, t)
