"""Rows pass between the ways of a stage: those of the chunks that all of them work on in the same slot.

A way sends another those rows of its chunk that any chunk there reads, and gets the mirrors of the chunk there; what is
made for mirrors goes home the same way. Both sides know the rows beforehand, so no ids travel. One way alone sends
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

_TAG = 11

ReceivedRows = list[tuple[Tensor | slice, list[Tensor]]]
"""(rows or mirrors of the way, what came for them: one tensor for each that was sent)."""


class StageHalo:
    """Who of the other ways needs which rows; all ways of a stage make it together."""

    def __init__(self, world: World, way: ChunkedPartition, code: WireCodec | None = None) -> None:
        self.world, self._way, self.code = world, way, code or WireCodec()
        # [rows of this way that way p has mirrors of, ascending].
        self._give: dict[str, list[Tensor]] = {}
        for direction in DIRECTIONS:
            every = all_gather_rows(world.uncounted(), way.halo[direction])
            self._give[direction] = [theirs[(theirs >= way.low) & (theirs < way.high)] - way.low for theirs in every]

    @property
    def peers(self) -> list[tuple[int, int]]:
        """(whom to send to, whom to hear from), in rotating pairs."""
        here, size = self.world.rank, self.world.size
        return [((here + step) % size, (here - step) % size) for step in range(1, size)]

    def sent_rows(self, direction: str, chunk: Chunk, way: int) -> Tensor:
        """Rows of a chunk that another way has mirrors of."""
        rows = self._give[direction][way]
        low, high = torch.searchsorted(rows, torch.tensor([chunk.low, chunk.high])).tolist()
        return rows[low:high]

    def halo_rows(self, direction: str, number: int, way: int) -> slice:
        """Where the mirrors of another way's chunk lie here; of all its rows for number −1."""
        layout = self._way.layout
        low, high = (
            layout.partition_range(way)
            if number < 0
            else layout.chunk_range(way * layout.chunks_per_partition + number)
        )
        first, last = torch.searchsorted(self._way.halo[direction], torch.tensor([low, high])).tolist()
        return slice(self._way.rows + first, self._way.rows + last)

    def send_rows(
        self, direction: str, chunk: Chunk, theirs: Sequence[int], tables: Sequence[Tensor], what: str
    ) -> PendingHaloSwap:
        """Send rows of this way's chunk, which ``tables`` [r, F] have, to mirrors of it; ``theirs`` are the chunks that
        the ways work on."""
        swap = PendingHaloSwap(self.world, self.code, what)
        with self.world.clock.phase(EXCHANGE, what):
            for to, source in self.peers:
                swap.post(
                    to,
                    [gather(table, self.sent_rows(direction, chunk, to) - chunk.low) for table in tables],
                    source,
                    self.halo_rows(direction, theirs[source], source),
                )
        return swap

    def return_grads(self, chunk: Chunk, theirs: Sequence[int], tables: Sequence[Tensor], what: str) -> PendingHaloSwap:
        """Send what was added up for mirrors of sources, which ``tables`` [n + m, F] have, to their own way."""
        swap = PendingHaloSwap(self.world, self.code, what)
        with self.world.clock.phase(EXCHANGE, what):
            for to, source in self.peers:
                swap.post(
                    to,
                    [table[self.halo_rows("in", theirs[to], to)] for table in tables],
                    source,
                    self.sent_rows("in", chunk, source),
                )
        return swap


@dataclass(frozen=True, eq=False)
class _PendingReceive:
    rows: Tensor | slice
    transfers: list[list[PendingTransfer]]  # of each table the tensors it is written as
    dtypes: list[torch.dtype]


class PendingHaloSwap:
    """Messages under way."""

    def __init__(self, world: World, code: WireCodec, what: str) -> None:
        self._world, self._code, self._what = world, code, what
        self._going: list[PendingTransfer] = []
        self._coming: list[_PendingReceive] = []

    def post(self, to: int, tables: Sequence[Tensor], source: int, rows: Tensor | slice) -> None:
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        coming: list[list[PendingTransfer]] = []
        for place, table in enumerate(tables):
            width = int(table.shape[1])
            written = self._code.encode(table.contiguous(), 0, place)
            if len(table):
                self._going += [send(self._world, part, to, tag=_TAG, op=self._what) for part in written]
            rooms = [
                torch.empty(count, wide, dtype=kind) for wide, kind in self._code.encoded_shapes(width, table.dtype)
            ]
            posted = [receive(self._world, room, source, tag=_TAG, op=self._what) for room in rooms if count]
            coming.append(posted)
        if count:
            self._coming.append(_PendingReceive(rows, coming, [table.dtype for table in tables]))

    def wait(self) -> ReceivedRows:
        """What came, when all of it is there."""
        with self._world.clock.phase(EXCHANGE, self._what):
            return self._finish()

    def _finish(self) -> ReceivedRows:
        found: ReceivedRows = []
        for each in self._coming:
            tables = [
                self._code.decode([part.wait() for part in posted], dtype)
                for posted, dtype in zip(each.transfers, each.dtypes, strict=True)
            ]
            found.append((each.rows, tables))
        for part in self._going:
            part.wait()
        if self._going or self._coming:
            self._world.traffic.add_round()
        return found
