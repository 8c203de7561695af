"""Halo exchange between the graph-parallel ranks of a stage, for the chunks that they compute in the same slot.

A rank sends the rows of its chunk that are halo rows of another partition, and receives the halo rows of the chunk
there. Gradients of halo rows return the same way. Both sides know the rows, so no ids are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnfleet.comm.collectives import all_gather_rows
from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.p2p import PendingTransfer, receive, send
from gnnfleet.comm.world import World
from gnnfleet.graph.partition.shard import DIRECTIONS
from gnnfleet.ops.gather import gather
from gnnfleet.report.phase_timer import EXCHANGE
from gnnfleet.sharded.pipeline.chunked_partition import Chunk, ChunkedPartition

TableShapes = list[tuple[int, torch.dtype]]
"""(columns, dtype) of each table of a message."""


def table_shapes(tables: Sequence[Tensor]) -> TableShapes:
    return [(int(table.shape[1]), table.dtype) for table in tables]


def send_tables(
    world: World, codec: WireCodec, peer: int, tables: Sequence[Tensor], *, tag: int, op: str
) -> list[PendingTransfer]:
    """Start to send a message. Empty tensors are not sent: both sides know the number of rows."""
    encoded = [part for index, table in enumerate(tables) for part in codec.encode(table.contiguous(), 0, index)]
    return [send(world, part, peer, tag=tag, op=op) for part in encoded if part.numel()]


class PendingTables:
    def __init__(
        self, world: World, codec: WireCodec, peer: int, count: int, shapes: TableShapes, *, tag: int, op: str
    ) -> None:
        self._codec, self._dtypes = codec, [dtype for _, dtype in shapes]
        self._buffers = [
            [torch.empty(count, columns, dtype=encoded) for columns, encoded in codec.encoded_shapes(width, dtype)]
            for width, dtype in shapes
        ]
        buffers = [buffer for table in self._buffers for buffer in table if buffer.numel()]
        self._transfers = [receive(world, buffer, peer, tag=tag, op=op) for buffer in buffers]

    def wait(self) -> list[Tensor]:
        for transfer in self._transfers:
            transfer.wait()
        return [self._codec.decode(table, dtype) for table, dtype in zip(self._buffers, self._dtypes, strict=True)]


_TAG = 11

Rows = slice | Tensor


class StageHalo:
    """Rows that graph-parallel ranks exchange. The constructor is collective."""

    def __init__(self, world: World, partition: ChunkedPartition, codec: WireCodec | None = None) -> None:
        self.world, self.codec, self._partition = world, codec or WireCodec(), partition
        # By direction, for every rank: rows of this partition that are halo rows there, ascending.
        self._sent_rows: dict[str, list[Tensor]] = {}
        for direction in DIRECTIONS:
            halos = all_gather_rows(world.uncounted(), partition.halo[direction])
            self._sent_rows[direction] = [
                halo[(halo >= partition.low) & (halo < partition.high)] - partition.low for halo in halos
            ]

    def sent_rows(self, direction: str, chunk: Chunk, peer: int) -> Tensor:
        """Rows of a chunk that are halo rows of another partition."""
        rows = self._sent_rows[direction][peer]
        low, high = torch.searchsorted(rows, torch.tensor([chunk.low, chunk.high])).tolist()
        return rows[low:high]

    def halo_rows(self, direction: str, number: int, peer: int) -> slice:
        """Halo rows that belong to a chunk of another partition; number −1 means all of its chunks."""
        layout, partition = self._partition.layout, self._partition
        first = peer * layout.chunks_per_partition
        bounds = layout.partition_range(peer) if number < 0 else layout.chunk_range(first + number)
        low, high = torch.searchsorted(partition.halo[direction], torch.tensor(bounds)).tolist()
        return slice(partition.rows + low, partition.rows + high)

    def send_rows(
        self, direction: str, chunk: Chunk, chunks: Sequence[int], tables: Sequence[Tensor], op: str
    ) -> PendingHaloSwap:
        """Send the chunk's rows of ``tables`` [r, F]; ``chunks`` are the chunk numbers of all ranks."""

        def outgoing(peer: int) -> list[Tensor]:
            rows = self.sent_rows(direction, chunk, peer) - chunk.low
            return [gather(table, rows) for table in tables]

        return self._swap(outgoing, lambda peer: self.halo_rows(direction, chunks[peer], peer), op)

    def return_grads(self, chunk: Chunk, chunks: Sequence[int], tables: Sequence[Tensor], op: str) -> PendingHaloSwap:
        """Send the gradients of halo rows of sources in ``tables`` [n + m, F] to the ranks that own the rows."""

        def outgoing(peer: int) -> list[Tensor]:
            rows = self.halo_rows("in", chunks[peer], peer)
            return [table[rows] for table in tables]

        return self._swap(outgoing, lambda peer: self.sent_rows("in", chunk, peer), op)

    def _swap(
        self, outgoing: Callable[[int], list[Tensor]], incoming: Callable[[int], Rows], op: str
    ) -> PendingHaloSwap:
        """Exchange tables with all ranks, in rotating pairs; both directions have the same widths."""
        world, codec = self.world, self.codec
        swap = PendingHaloSwap(world, op)
        with world.clock.phase(EXCHANGE, op):
            for step in range(1, world.size):
                peer, source = (world.rank + step) % world.size, (world.rank - step) % world.size
                tables, rows = outgoing(peer), incoming(source)
                count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
                if count:
                    pending = PendingTables(world, codec, source, count, table_shapes(tables), tag=_TAG, op=op)
                    swap.receiving.append((rows, pending))
                swap.sending += send_tables(world, codec, peer, tables, tag=_TAG, op=op)
        return swap


@dataclass(eq=False)
class PendingHaloSwap:
    world: World
    op: str
    sending: list[PendingTransfer] = field(default_factory=list)
    receiving: list[tuple[Rows, PendingTables]] = field(default_factory=list)

    def wait(self) -> list[tuple[Rows, list[Tensor]]]:
        """(rows or halo rows of the partition, their values in each table), once all have arrived."""
        with self.world.clock.phase(EXCHANGE, self.op):
            received = [(rows, pending.wait()) for rows, pending in self.receiving]
            for transfer in self.sending:
                transfer.wait()
        if self.sending or self.receiving:
            self.world.traffic.add_round()
        return received
