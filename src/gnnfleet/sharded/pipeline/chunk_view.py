"""ChunkView: the verbs of a GraphView on a chunk of a way, whose neighbours elsewhere are fresh or remembered."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gnnfleet.comm.collectives import sum_over_ranks
from gnnfleet.errors import ConfigError
from gnnfleet.sharded.full_batch.partitioned_view import MergedOnce, PartView
from gnnfleet.sharded.pipeline.chunked_partition import Chunk, ChunkPart
from gnnfleet.sharded.pipeline.history import Call, Stream, Turn


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkView(PartView):
    """What a layer sees of a chunk."""

    chunk: Chunk
    stream: Stream
    turn: Turn

    @classmethod
    def open(cls, chunk: Chunk, stream: Stream) -> ChunkView:
        part = ChunkPart(chunk)
        turn = Turn(0, (-1,) * stream.mirrors.world.size)
        given = {"part": part, "nodes": part.nodes, "relations": part.edges, "merged": MergedOnce(part)}
        return cls(**given, chunk=chunk, stream=stream, turn=turn)  # type: ignore[arg-type]

    def during(self, turn: Turn, stream: Stream | None = None) -> ChunkView:
        """The same chunk in a slot of a pass, perhaps over other tables."""
        return replace(self, turn=turn, stream=stream or self.stream)

    def _visits(self) -> Call:
        return self.stream.call(self.chunk, self.turn, self.layer)

    def take(self, x: Tensor, store_ids: Tensor) -> Tensor:
        raise ConfigError("strategy pipe gives rows of other chunks to the last layer's loss only, not to layers")

    def sum_over_nodes(self, t: Tensor) -> Tensor:
        if self.chunk.rows != self.chunk.way.rows:
            raise ConfigError("this layer looks at all nodes at once, a chunk has some of them: use strategy.chunks=1")
        return sum_over_ranks(self.stream.mirrors.world, t)
