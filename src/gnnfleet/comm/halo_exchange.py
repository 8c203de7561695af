"""Halo exchange in ring order: in round r, rank p receives from p − r and sends to p + r. Later rounds are prefetched.

Offset 0 is the rank itself, without traffic. A message holds the rows of all tables for one peer. Empty messages are
not sent: both sides know the counts. Blocks are visited, and returned rows collected, in the fixed order of offsets, so
that sums have one order. N ranks, F columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from gnnfleet.comm.collectives import sum_over_ranks
from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.p2p import PendingTransfer, receive, send
from gnnfleet.comm.shm_transport import DESCRIPTOR_WORDS, ShmMessage
from gnnfleet.comm.world import World
from gnnfleet.report.phase_timer import COMPUTE, EXCHANGE

# Fetched and returned rows have tags of their own: between the same two ranks their order is not fixed.
_FETCH_TAG, _RETURN_TAG = 1, 2

OnRows = Callable[[int, list[Tensor]], Sequence[Tensor] | None]
"""(rank q, rows of q for each table) → rows to return to q, one tensor for each ``ReturnPath``."""
OnReturns = Callable[[int, list[Tensor]], None]
"""(rank p, rows that p returns, one tensor for each ``ReturnPath``)."""

BufferFactory = Callable[[Sequence[int], torch.dtype], Tensor]


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """The rows that each rank gets; both fields have an entry for every rank, empty for this one."""

    send_rows: tuple[Tensor, ...]  # rows of this rank that go to q, int32 or int64
    recv_counts: tuple[int, ...]  # number of rows that come from q


@dataclass(frozen=True, eq=False)
class RowTable:
    """Rows of this rank ([n, F], contiguous, detached, any dtype) that others fetch along a plan."""

    plan: ExchangePlan
    rows: Tensor
    linear: int = 0  # the consumer's output is proportional to the columns from here on: a gradient is from 0 on


@dataclass(frozen=True, eq=False)
class ReturnPath:
    """The reverse of a plan: for the rows fetched from q, as many rows of ``width`` return to q."""

    plan: ExchangePlan
    width: int
    dtype: torch.dtype


@dataclass(eq=False)
class FetchedRows:
    """Received rows of other ranks, kept so that a later exchange needs no messages for them."""

    rows: dict[int, list[Tensor]] = field(default_factory=dict)
    is_complete: bool = False


class RowExchange(Protocol):
    """Hands over remote rows block by block; see ``RingExchange``."""

    @property
    def local_block(self) -> int:
        """The block whose rows are here."""

    def run(
        self,
        tables: Sequence[RowTable],
        on_rows: OnRows,
        *,
        returns: Sequence[ReturnPath] = (),
        on_returns: OnReturns | None = None,
        fetched: FetchedRows | None = None,
        op: str = "rows",
    ) -> None: ...


@dataclass(frozen=True, eq=False)
class RingExchange:
    """Visits the rows of all ranks, ``group`` ranks per round, with ``depth`` rounds prefetched.

    Remote rows in memory never exceed 1 + ``depth`` times the largest group.
    """

    world: World
    group: int = 1
    depth: int = 1
    new_buffer: BufferFactory = lambda shape, dtype: torch.empty(*shape, dtype=dtype)
    codec: WireCodec = field(default_factory=WireCodec)

    def __post_init__(self) -> None:
        assert self.group >= 1 and self.depth >= 0

    @property
    def local_block(self) -> int:
        return self.world.rank

    @property
    def slots(self) -> int:
        """Number of this rank's messages that may be unread: those of all posted rounds and of the previous one."""
        return (2 + self.depth) * self.group

    def run(
        self,
        tables: Sequence[RowTable],
        on_rows: OnRows,
        *,
        returns: Sequence[ReturnPath] = (),
        on_returns: OnReturns | None = None,
        fetched: FetchedRows | None = None,
        op: str = "rows",
    ) -> None:
        """Collective. Call ``on_rows`` once for every rank; what it returns arrives there in ``on_returns``.

        Tables and returns have the same widths and dtypes on all ranks. Both callbacks may use their rows only until
        they return. ``fetched`` keeps the received rows; once it is complete, rows are read from it and nothing is
        sent. ``op`` names the exchange in errors.
        """
        assert on_returns is not None or not returns, "returned rows need on_returns"
        assert all(table.rows.is_contiguous() and not table.rows.requires_grad for table in tables)
        with self.world.clock.phase(EXCHANGE, op):
            _RingPass(self, tables, on_rows, returns, on_returns if returns else None, fetched, op).run()
        if fetched is not None:
            fetched.is_complete = True

    def sum_over_ranks(self, t: Tensor) -> Tensor:
        return sum_over_ranks(self.world, t)


@dataclass(eq=False)
class _RingPass:
    """One call of ``RingExchange.run``."""

    ring: RingExchange
    tables: Sequence[RowTable]
    on_rows: OnRows
    returns: Sequence[ReturnPath]
    on_returns: OnReturns | None
    fetched: FetchedRows | None
    op: str

    def __post_init__(self) -> None:
        ring, self.world = self.ring, self.ring.world
        size = self.world.size
        self.number = ring.codec.next_exchange()
        self.sends = size > 1 and not (self.fetched is not None and self.fetched.is_complete)
        self.encoded: list[Tensor] = []
        self.table_of: list[int] = []  # the table that each encoded tensor belongs to
        for index, table in enumerate(self.tables if self.sends else ()):
            tensors = ring.codec.encode(table.rows, self.number, index)
            self.encoded += tensors
            self.table_of += [index] * len(tensors)
        self.return_shapes = [ring.codec.encoded_shapes(path.width, path.dtype) for path in self.returns]
        self.return_of = [index for index, shapes in enumerate(self.return_shapes) for _ in shapes]
        self.rounds = [range(low, min(low + ring.group, size)) for low in range(0, size, ring.group)]
        # By offset: rows that are fetched, and rows that are returned.
        self.receiving: dict[int, PendingTransfer] = {}
        self.sending: dict[int, PendingTransfer] = {}
        self.sending_returns: dict[int, PendingTransfer] = {}
        self.receiving_returns: dict[int, PendingTransfer] = {}

    def run(self) -> None:
        depth, last, posted = self.ring.depth, len(self.rounds) - 1, 0
        for number, offsets in enumerate(self.rounds):
            while posted <= min(number + depth, last):
                self._post(self.rounds[posted])
                posted += 1
            self._post_returns(offsets)
            for offset in offsets:
                self._visit(offset)
            for offset in offsets:
                _finish(self.sending, offset)
            if number >= depth:
                self._close(self.rounds[number - depth])
            if self.world.size > 1:
                self.world.traffic.add_round()
        for offsets in self.rounds[max(0, len(self.rounds) - depth) :]:
            self._close(offsets)

    def _post(self, offsets: Sequence[int]) -> None:
        """Post receives before sends: a large send completes only once its receive is posted."""
        if not self.sends:
            return
        for offset in offsets:
            source = self._source(offset)
            layout = self._fetch_layout(source)
            if offset and layout.nbytes:
                buffer = self._recv_buffer(source, layout.nbytes)
                self.receiving[offset] = receive(self.world, buffer, source, tag=_FETCH_TAG, op=f"receiving {self.op}")
        for offset in offsets:
            target = self._target(offset)
            if not offset:
                continue
            send_rows = [self.tables[index].plan.send_rows[target] for index in self.table_of]
            layout = _MessageLayout(
                [(len(rows), *_shape(table)) for rows, table in zip(send_rows, self.encoded, strict=True)]
            )
            if layout.nbytes:
                self.sending[offset] = self._send(target, layout, send_rows)

    def _send(self, target: int, layout: _MessageLayout, send_rows: Sequence[Tensor]) -> PendingTransfer:
        """Gather the rows for a rank into shared memory, or into a buffer that is sent."""
        op, shm, slot = f"sending {self.op}", self.world.shm, None
        if shm is not None and shm.can_send(target, layout.nbytes):
            slot = shm.acquire(layout.nbytes, target, max_slots=self.ring.slots, seconds=self.world.timeout)
        buffer = self.ring.new_buffer((layout.nbytes,), torch.uint8) if slot is None else slot.rows(layout.nbytes)
        for table, rows, out in zip(self.encoded, send_rows, layout.views(buffer), strict=True):
            torch.index_select(table, 0, rows, out=out)
        if shm is not None and slot is not None:
            descriptor = shm.descriptor(slot, layout.nbytes)
            return send(self.world, descriptor, target, tag=_FETCH_TAG, op=op, counted=layout.nbytes)
        return send(self.world, buffer, target, tag=_FETCH_TAG, op=op)

    def _recv_buffer(self, source: int, nbytes: int) -> Tensor:
        """A buffer for a message of a rank, or for the descriptor of one in shared memory."""
        if self.world.shm is not None and self.world.shm.can_receive(source, nbytes):
            return torch.empty(DESCRIPTOR_WORDS, dtype=torch.int64)
        return self.ring.new_buffer((nbytes,), torch.uint8)

    def _visit(self, offset: int) -> None:
        source = self._source(offset)
        rows, message = self._rows_of(offset, source)
        with self.world.clock.phase(COMPUTE, self.op):
            returned = self.on_rows(source, rows)
        if message is not None:
            returned = returned and [
                tensor.clone() if _same_memory(tensor, message.data) else tensor for tensor in returned
            ]
            message.mark_read()
        if self.on_returns is None:
            return
        assert returned is not None and len(returned) == len(self.returns), "on_rows gives one tensor per ReturnPath"
        if not offset:
            self._collect(source, list(returned))
            return
        encoded = [
            tensor
            for index, rows in enumerate(returned)
            for tensor in self.ring.codec.encode(rows, self.number, -1 - index - len(self.returns) * source)
        ]
        layout = self._return_layout([path.plan.recv_counts[source] for path in self.returns])
        if layout.nbytes:
            buffer = layout.pack(encoded, self.ring.new_buffer)
            self.sending_returns[offset] = send(self.world, buffer, source, tag=_RETURN_TAG, op=f"returning {self.op}")

    def _rows_of(self, offset: int, source: int) -> tuple[list[Tensor], ShmMessage | None]:
        """The rows of a rank, and the shared-memory message that holds them, if one does."""
        if not offset:
            return [table.rows for table in self.tables], None
        if not self.sends:
            assert self.fetched is not None
            return self.fetched.rows[source], None
        layout, message = self._fetch_layout(source), None
        buffer = torch.empty(0, dtype=torch.uint8)
        if layout.nbytes:
            buffer = self.receiving.pop(offset).wait()
            if self.world.shm is not None and self.world.shm.can_receive(source, layout.nbytes):
                message = self.world.shm.open(buffer, source)
                buffer = message.data
        rows = self._decode(layout.views(buffer), [table.rows.dtype for table in self.tables], self.table_of)
        if self.fetched is not None:
            if message is not None:
                rows = [tensor.clone() if _same_memory(tensor, message.data) else tensor for tensor in rows]
            self.fetched.rows[source] = rows
        return rows, message

    def _decode(self, encoded: list[Tensor], dtypes: Sequence[torch.dtype], owner: Sequence[int]) -> list[Tensor]:
        """One tensor per table or return path from the encoded ones, of which each belongs to ``owner``."""
        groups = [
            [tensor for tensor, index in zip(encoded, owner, strict=True) if index == n] for n in range(len(dtypes))
        ]
        return [self.ring.codec.decode(tensors, dtype) for tensors, dtype in zip(groups, dtypes, strict=True)]

    def _post_returns(self, offsets: Sequence[int]) -> None:
        for offset in offsets:
            source = self._target(offset)
            layout = self._returned_layout(source)
            if offset and layout.nbytes:
                buffer = self.ring.new_buffer((layout.nbytes,), torch.uint8)
                self.receiving_returns[offset] = receive(
                    self.world, buffer, source, tag=_RETURN_TAG, op=f"receiving returned {self.op}"
                )

    def _close(self, offsets: Sequence[int]) -> None:
        """End an earlier round: collect the rows that return to this rank, and finish those it returned."""
        for offset in offsets:
            if offset in self.receiving_returns:
                source = self._target(offset)
                encoded = self._returned_layout(source).views(self.receiving_returns.pop(offset).wait())
                self._collect(source, self._decode(encoded, [path.dtype for path in self.returns], self.return_of))
        for offset in offsets:
            _finish(self.sending_returns, offset)

    def _collect(self, source: int, rows: list[Tensor]) -> None:
        assert self.on_returns is not None
        with self.world.clock.phase(COMPUTE, self.op):
            self.on_returns(source, rows)

    def _source(self, offset: int) -> int:
        return (self.world.rank - offset) % self.world.size

    def _target(self, offset: int) -> int:
        return (self.world.rank + offset) % self.world.size

    def _fetch_layout(self, source: int) -> _MessageLayout:
        counts = [self.tables[index].plan.recv_counts[source] for index in self.table_of]
        return _MessageLayout([(count, *_shape(table)) for count, table in zip(counts, self.encoded, strict=True)])

    def _returned_layout(self, source: int) -> _MessageLayout:
        return self._return_layout([len(path.plan.send_rows[source]) for path in self.returns])

    def _return_layout(self, counts: Sequence[int]) -> _MessageLayout:
        return _MessageLayout(
            [(count, *shape) for count, shapes in zip(counts, self.return_shapes, strict=True) for shape in shapes]
        )


class _MessageLayout:
    """Positions of tensors in a message: those of wide dtypes come first, so that all are aligned."""

    def __init__(self, shapes: Sequence[tuple[int, int, torch.dtype]]) -> None:
        self.shapes = list(shapes)  # rows, columns, dtype
        self.starts = [0] * len(self.shapes)
        self.nbytes = 0
        for index in sorted(range(len(self.shapes)), key=lambda i: -self.shapes[i][2].itemsize):
            self.starts[index] = self.nbytes
            self.nbytes += self._size(index)

    def _size(self, index: int) -> int:
        rows, width, dtype = self.shapes[index]
        return rows * width * dtype.itemsize

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors as views of a message."""
        return [
            buffer[start : start + self._size(index)].view(dtype).view(rows, width)
            for index, (start, (rows, width, dtype)) in enumerate(zip(self.starts, self.shapes, strict=True))
        ]

    def pack(self, tensors: Sequence[Tensor], new_buffer: BufferFactory) -> Tensor:
        """A message of these tensors; a single tensor is sent without a copy."""
        for tensor, (rows, width, dtype) in zip(tensors, self.shapes, strict=True):
            assert tensor.shape == (rows, width) and tensor.dtype == dtype, "returned rows have the agreed shape"
        if len(tensors) == 1:
            return tensors[0].contiguous().view(-1).view(torch.uint8)
        buffer = new_buffer((self.nbytes,), torch.uint8)
        for tensor, view in zip(tensors, self.views(buffer), strict=True):
            view.copy_(tensor)
        return buffer


def _finish(transfers: dict[int, PendingTransfer], offset: int) -> None:
    if offset in transfers:
        transfers.pop(offset).wait()


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _shape(rows: Tensor) -> tuple[int, torch.dtype]:
    return int(rows.shape[1]), rows.dtype
