"""Messages of several tables of rows between two ranks, in the encoding of a codec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.p2p import PendingTransfer, receive, send
from gnnfleet.comm.world import World

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
