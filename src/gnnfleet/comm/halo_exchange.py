"""Rows move between ranks: in rounds of rotating pairs, some rounds ahead of the one that is worked on.

In the round of offset r rank p receives from p − r and sends to p + r; offset 0 is the rank itself, without traffic.
A message holds the rows of all lanes for one peer. Empty ones are not sent: both sides know the counts. Blocks are
visited, and what comes home is collected, in the fixed order of offsets, so that sums have one order.
N ranks, F columns.
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

# Rows on their way out and rows on their way home may pass between the same two ranks in any order.
_OUT, _HOME = 1, 2

OnRows = Callable[[int, list[Tensor]], Sequence[Tensor] | None]
"""(q, rows of q for each lane) → what goes home to q, one tensor for each ``ReturnPath``."""
OnReturns = Callable[[int, list[Tensor]], None]
"""(p, what p sends home, one tensor for each ``ReturnPath``)."""


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """Who gets which rows; both lists have a place for every rank, empty for this one."""

    send_rows: tuple[Tensor, ...]  # rows of this rank that go to q, int32 or int64
    recv_counts: tuple[int, ...]  # how many rows come from q


@dataclass(frozen=True, eq=False)
class RowTable:
    """Rows of this rank ([n, F], contiguous, detached, any dtype) that others fetch along the routes."""

    plan: ExchangePlan
    rows: Tensor
    linear: int = 0  # from this column on, what is made of a row is proportional to it: a gradient is from 0 on


@dataclass(frozen=True, eq=False)
class ReturnPath:
    """The way back along the same routes: for rows needed from q, as many rows of ``width`` go home to q."""

    plan: ExchangePlan
    width: int
    dtype: torch.dtype


class BufferFactory(Protocol):
    """Where buffers come from."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


@dataclass(eq=False)
class FetchedRows:
    """Rows of other ranks as they came, so that a later visit needs no message for them."""

    rows: dict[int, list[Tensor]] = field(default_factory=dict)
    is_complete: bool = False


class RowExchange(Protocol):
    """Whoever hands over rows block by block; see ``RingExchange``."""

    @property
    def world(self) -> World: ...

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
    """Visits the rows of all ranks, ``group`` of them in a round, ``depth`` rounds fetched ahead.

    Rows of other ranks in memory never exceed 1 + ``depth`` times the largest group.
    """

    world: World
    group: int = 1
    depth: int = 1
    new_buffer: BufferFactory = field(default=_empty)
    codec: WireCodec = field(default_factory=WireCodec)

    def __post_init__(self) -> None:
        assert self.group >= 1 and self.depth >= 0

    @property
    def slots(self) -> int:
        """Messages of this rank that may wait to be read: those of all posted rounds, and of the one before."""
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
        """Call ``visit`` once for every rank; what it returns arrives there in ``collect``. ``what`` is for errors.

        All ranks call it together, with lanes and homes of the same widths and dtypes. Rows handed to ``visit`` and
        ``collect`` are theirs only until they return. What came is noted in ``keep``; when that is full, lanes are
        taken from there and nothing comes.
        """
        assert on_returns is not None or not returns, "what goes home is collected"
        assert all(lane.rows.is_contiguous() and not lane.rows.requires_grad for lane in tables)
        with self.world.clock.phase(EXCHANGE, op):
            _RingPass(self, tables, on_rows, returns, on_returns if returns else None, fetched, op).run()
        if fetched is not None:
            fetched.is_complete = True

    def sum_over_ranks(self, t: Tensor) -> Tensor:
        """``sum_over_ranks``."""
        return sum_over_ranks(self.world, t)


class _RingPass:
    """One call of ``RingExchange.run``."""

    def __init__(
        self,
        ring: RingExchange,
        lanes: Sequence[RowTable],
        visit: OnRows,
        home: Sequence[ReturnPath],
        collect: OnReturns | None,
        keep: FetchedRows | None,
        what: str,
    ) -> None:
        self.ring, self.world, self.lanes, self.home = ring, ring.world, lanes, home
        self._visit, self._collect, self.keep, self.what = visit, collect, keep, what
        size = self.world.size
        self.number = ring.codec.next_exchange()
        self.travels = size > 1 and not (keep is not None and keep.is_complete)
        self.written: list[Tensor] = []  # lanes as they travel, and for each of these which lane it belongs to
        self.lane_of: list[int] = []
        for place, lane in enumerate(lanes if self.travels else ()):
            found = ring.codec.encode(lane.rows, self.number, place)
            self.written += found
            self.lane_of += [place] * len(found)
        self.rounds = [range(low, min(low + ring.group, size)) for low in range(0, size, ring.group)]
        # By offset: rows that come and go, gradients that go home and come.
        self.arriving: dict[int, PendingTransfer] = {}
        self.leaving: dict[int, PendingTransfer] = {}
        self.homing: dict[int, PendingTransfer] = {}
        self.returning: dict[int, PendingTransfer] = {}

    def run(self) -> None:
        depth, last, posted = self.ring.depth, len(self.rounds) - 1, 0
        for number, offsets in enumerate(self.rounds):
            while posted <= min(number + depth, last):
                self._post(self.rounds[posted])
                posted += 1
            self._expect_home(offsets)
            for offset in offsets:
                self._work_on(offset)
            for offset in offsets:
                self._sent(self.leaving, offset)
            if number >= depth:
                self._close(self.rounds[number - depth])
            if self.world.size > 1:
                self.world.traffic.add_round()
        for offsets in self.rounds[max(0, len(self.rounds) - depth) :]:
            self._close(offsets)

    def _post(self, offsets: Sequence[int]) -> None:
        """Receives before sends: a large send completes only when its receive is there."""
        if not self.travels:
            return
        for offset in offsets:
            source = self._before(offset)
            form = self._form(source)
            if offset and form.nbytes:
                buffer = self._room(source, form.nbytes)
                self.arriving[offset] = receive(self.world, buffer, source, tag=_OUT, op=f"{self.what}, coming")
        for offset in offsets:
            target = self._after(offset)
            if not offset:
                continue
            given = [self.lanes[lane].plan.send_rows[target] for lane in self.lane_of]
            form = _MessageLayout([(len(g), *_shape(rows)) for g, rows in zip(given, self.written, strict=True)])
            if form.nbytes:
                self.leaving[offset] = self._send(target, form, given)

    def _send(self, target: int, form: _MessageLayout, given: Sequence[Tensor]) -> PendingTransfer:
        """Gather the rows for a rank where it reads them, or where they are sent from."""
        doing, shelf, slot = f"{self.what}, going", self.world.shm, None
        if shelf is not None and shelf.can_send(target, form.nbytes):
            slot = shelf.acquire(form.nbytes, target, max_slots=self.ring.slots, seconds=self.world.timeout)
        buffer = self.ring.new_buffer((form.nbytes,), torch.uint8) if slot is None else slot.rows(form.nbytes)
        for rows, which, place in zip(self.written, given, form.parts(buffer), strict=True):
            torch.index_select(rows, 0, which, out=place)
        if shelf is not None and slot is not None:
            word = shelf.descriptor(slot, form.nbytes)
            return send(self.world, word, target, tag=_OUT, op=doing, counted=form.nbytes)
        return send(self.world, buffer, target, tag=_OUT, op=doing)

    def _room(self, source: int, nbytes: int) -> Tensor:
        """What a message from a rank is received in: all of it, or where it lies."""
        if self.world.shm is not None and self.world.shm.can_receive(source, nbytes):
            return torch.empty(DESCRIPTOR_WORDS, dtype=torch.int64)
        return self.ring.new_buffer((nbytes,), torch.uint8)

    def _work_on(self, offset: int) -> None:
        source = self._before(offset)
        rows, found = self._rows_of(offset, source)
        with self.world.clock.phase(COMPUTE, self.what):
            back = self._visit(source, rows)
        if found is not None:
            back = back and [tensor.clone() if _same_memory(tensor, found.data) else tensor for tensor in back]
            found.mark_read()
        if self._collect is None:
            return
        assert back is not None and len(back) == len(self.home), "visit returns what goes home"
        if not offset:
            self.collect(source, list(back))
            return
        written = [
            tensor
            for place, rows in enumerate(back)
            for tensor in self.ring.codec.encode(rows, self.number, -1 - place - len(self.home) * source)
        ]
        form = self._home_form([home.plan.recv_counts[source] for home in self.home])
        if form.nbytes:
            message = form.pack(written, self.ring.new_buffer)
            self.homing[offset] = send(self.world, message, source, tag=_HOME, op=f"{self.what}, going home")

    def _rows_of(self, offset: int, source: int) -> tuple[list[Tensor], ShmMessage | None]:
        """The rows of a rank, and where they lie if it is on that rank's shelf."""
        if not offset:
            return [lane.rows for lane in self.lanes], None
        if not self.travels:
            assert self.keep is not None
            return self.keep.rows[source], None
        form, found = self._form(source), None
        message = torch.empty(0, dtype=torch.uint8, device=self.world.device)
        if form.nbytes:
            message = self.arriving.pop(offset).wait()
            if self.world.shm is not None and self.world.shm.can_receive(source, form.nbytes):
                found = self.world.shm.open(message, source)
                message = found.data
        rows = self._read(form.parts(message), [lane.rows.dtype for lane in self.lanes], self.lane_of)
        if self.keep is not None:
            held = None if found is None else found.data
            self.keep.rows[source] = rows = [
                each.clone() if held is not None and _same_memory(each, held) else each for each in rows
            ]
        return rows, found

    def _read(self, written: list[Tensor], dtypes: Sequence[torch.dtype], owner: Sequence[int]) -> list[Tensor]:
        """Tensors as they travel back into one for each lane or home."""
        each = [
            [tensor for tensor, place in zip(written, owner, strict=True) if place == n] for n in range(len(dtypes))
        ]
        return [self.ring.codec.decode(tensors, dtype) for tensors, dtype in zip(each, dtypes, strict=True)]

    def _expect_home(self, offsets: Sequence[int]) -> None:
        for offset in offsets:
            source = self._after(offset)
            form = self._homecoming(source)
            if offset and form.nbytes:
                buffer = self.ring.new_buffer((form.nbytes,), torch.uint8)
                self.returning[offset] = receive(self.world, buffer, source, tag=_HOME, op=f"{self.what}, coming home")

    def _close(self, offsets: Sequence[int]) -> None:
        """End a round of the past: take what comes home, let go of what went."""
        for offset in offsets:
            if offset in self.returning:
                source = self._after(offset)
                form = self._homecoming(source)
                written = form.parts(self.returning.pop(offset).wait())
                self.collect(source, self._read(written, [home.dtype for home in self.home], self._home_owner()))
        for offset in offsets:
            self._sent(self.homing, offset)

    def collect(self, source: int, rows: list[Tensor]) -> None:
        assert self._collect is not None
        with self.world.clock.phase(COMPUTE, self.what):
            self._collect(source, rows)

    def _sent(self, messages: dict[int, PendingTransfer], offset: int) -> None:
        if offset in messages:
            messages.pop(offset).wait()

    def _before(self, offset: int) -> int:
        return (self.world.rank - offset) % self.world.size

    def _after(self, offset: int) -> int:
        return (self.world.rank + offset) % self.world.size

    def _form(self, source: int) -> _MessageLayout:
        counts = [self.lanes[lane].plan.recv_counts[source] for lane in self.lane_of]
        return _MessageLayout([(count, *_shape(rows)) for count, rows in zip(counts, self.written, strict=True)])

    def _homecoming(self, source: int) -> _MessageLayout:
        return self._home_form([len(home.plan.send_rows[source]) for home in self.home])

    def _home_form(self, counts: Sequence[int]) -> _MessageLayout:
        forms = [self.ring.codec.encoded_shapes(home.width, home.dtype) for home in self.home]
        return _MessageLayout([(count, *form) for count, each in zip(counts, forms, strict=True) for form in each])

    def _home_owner(self) -> list[int]:
        forms = [self.ring.codec.encoded_shapes(home.width, home.dtype) for home in self.home]
        return [place for place, each in enumerate(forms) for _ in each]


class _MessageLayout:
    """How a message is laid out: tensors one after the other, those of wide numbers first, so that all are aligned."""

    def __init__(self, shapes: Sequence[tuple[int, int, torch.dtype]]) -> None:
        self.shapes = list(shapes)  # rows, columns, dtype
        self.starts = [0] * len(self.shapes)
        self.nbytes = 0
        for place in sorted(range(len(self.shapes)), key=lambda i: -self.shapes[i][2].itemsize):
            self.starts[place] = self.nbytes
            self.nbytes += self._size(place)

    def _size(self, place: int) -> int:
        rows, width, dtype = self.shapes[place]
        return rows * width * dtype.itemsize

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """The tensors as views of a message."""
        return [
            buffer[start : start + self._size(place)].view(dtype).view(rows, width)
            for place, (start, (rows, width, dtype)) in enumerate(zip(self.starts, self.shapes, strict=True))
        ]

    def pack(self, tensors: Sequence[Tensor], empty: BufferFactory) -> Tensor:
        """A message of these tensors; a single one is sent from where it lies."""
        for tensor, (rows, width, dtype) in zip(tensors, self.shapes, strict=True):
            assert tensor.shape == (rows, width) and tensor.dtype == dtype, "what goes home has the form agreed on"
        if len(tensors) == 1:
            return tensors[0].contiguous().view(-1).view(torch.uint8)
        buffer = empty((self.nbytes,), torch.uint8)
        for tensor, place in zip(tensors, self.parts(buffer), strict=True):
            place.copy_(tensor)
        return buffer


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _shape(rows: Tensor) -> tuple[int, torch.dtype]:
    return int(rows.shape[1]), rows.dtype
