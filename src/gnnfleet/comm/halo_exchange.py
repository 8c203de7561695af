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
from gnnfleet.comm.compression import Code
from gnnfleet.comm.p2p import Posted, receive, send
from gnnfleet.comm.shm_transport import WORDS, Found
from gnnfleet.comm.world import World
from gnnfleet.report.phase_timer import COMPUTE, EXCHANGE

# Rows on their way out and rows on their way home may pass between the same two ranks in any order.
_OUT, _HOME = 1, 2

Visit = Callable[[int, list[Tensor]], Sequence[Tensor] | None]
"""(q, rows of q for each lane) → what goes home to q, one tensor for each ``Home``."""
Collect = Callable[[int, list[Tensor]], None]
"""(p, what p sends home, one tensor for each ``Home``)."""


@dataclass(frozen=True, eq=False)
class Routes:
    """Who gets which rows; both lists have a place for every rank, empty for this one."""

    give: tuple[Tensor, ...]  # rows of this rank that go to q, int32 or int64
    need: tuple[int, ...]  # how many rows come from q


@dataclass(frozen=True, eq=False)
class Lane:
    """Rows of this rank ([n, F], contiguous, detached, any dtype) that others fetch along the routes."""

    routes: Routes
    rows: Tensor
    linear: int = 0  # from this column on, what is made of a row is proportional to it: a gradient is from 0 on


@dataclass(frozen=True, eq=False)
class Home:
    """The way back along the same routes: for rows needed from q, as many rows of ``width`` go home to q."""

    routes: Routes
    width: int
    dtype: torch.dtype


class Empty(Protocol):
    """Where buffers come from."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


@dataclass(eq=False)
class Kept:
    """Rows of other ranks as they came, so that a later visit needs no message for them."""

    rows: dict[int, list[Tensor]] = field(default_factory=dict)
    is_full: bool = False


class Visits(Protocol):
    """Whoever hands over rows block by block; see ``Ring``."""

    @property
    def world(self) -> World: ...

    def visit(
        self,
        lanes: Sequence[Lane],
        visit: Visit,
        *,
        home: Sequence[Home] = (),
        collect: Collect | None = None,
        keep: Kept | None = None,
        what: str = "rows",
    ) -> None: ...


@dataclass(frozen=True, eq=False)
class Ring:
    """Visits the rows of all ranks, ``group`` of them in a round, ``depth`` rounds fetched ahead.

    Rows of other ranks in memory never exceed 1 + ``depth`` times the largest group.
    """

    world: World
    group: int = 1
    depth: int = 1
    empty: Empty = field(default=_empty)
    code: Code = field(default_factory=Code)

    def __post_init__(self) -> None:
        assert self.group >= 1 and self.depth >= 0

    @property
    def slots(self) -> int:
        """Messages of this rank that may wait to be read: those of all posted rounds, and of the one before."""
        return (2 + self.depth) * self.group

    def visit(
        self,
        lanes: Sequence[Lane],
        visit: Visit,
        *,
        home: Sequence[Home] = (),
        collect: Collect | None = None,
        keep: Kept | None = None,
        what: str = "rows",
    ) -> None:
        """Call ``visit`` once for every rank; what it returns arrives there in ``collect``. ``what`` is for errors.

        All ranks call it together, with lanes and homes of the same widths and dtypes. Rows handed to ``visit`` and
        ``collect`` are theirs only until they return. What came is noted in ``keep``; when that is full, lanes are
        taken from there and nothing comes.
        """
        assert collect is not None or not home, "what goes home is collected"
        assert all(lane.rows.is_contiguous() and not lane.rows.requires_grad for lane in lanes)
        with self.world.clock.during(EXCHANGE, what):
            _Tour(self, lanes, visit, home, collect if home else None, keep, what).run()
        if keep is not None:
            keep.is_full = True

    def total(self, t: Tensor) -> Tensor:
        """``sum_over_ranks``."""
        return sum_over_ranks(self.world, t)


class _Tour:
    """One call of ``Ring.visit``."""

    def __init__(
        self,
        ring: Ring,
        lanes: Sequence[Lane],
        visit: Visit,
        home: Sequence[Home],
        collect: Collect | None,
        keep: Kept | None,
        what: str,
    ) -> None:
        self.ring, self.world, self.lanes, self.home = ring, ring.world, lanes, home
        self._visit, self._collect, self.keep, self.what = visit, collect, keep, what
        size = self.world.size
        self.number = ring.code.next()
        self.travels = size > 1 and not (keep is not None and keep.is_full)
        self.written: list[Tensor] = []  # lanes as they travel, and for each of these which lane it belongs to
        self.lane_of: list[int] = []
        for place, lane in enumerate(lanes if self.travels else ()):
            found = ring.code.write(lane.rows, self.number, place)
            self.written += found
            self.lane_of += [place] * len(found)
        self.rounds = [range(low, min(low + ring.group, size)) for low in range(0, size, ring.group)]
        # By offset: rows that come and go, gradients that go home and come.
        self.arriving: dict[int, Posted] = {}
        self.leaving: dict[int, Posted] = {}
        self.homing: dict[int, Posted] = {}
        self.returning: dict[int, Posted] = {}

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
                self.world.traffic.met()
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
                self.arriving[offset] = receive(self.world, buffer, source, tag=_OUT, doing=f"{self.what}, coming")
        for offset in offsets:
            target = self._after(offset)
            if not offset:
                continue
            given = [self.lanes[lane].routes.give[target] for lane in self.lane_of]
            form = _Form([(len(g), *_shape(rows)) for g, rows in zip(given, self.written, strict=True)])
            if form.nbytes:
                self.leaving[offset] = self._send(target, form, given)

    def _send(self, target: int, form: _Form, given: Sequence[Tensor]) -> Posted:
        """Gather the rows for a rank where it reads them, or where they are sent from."""
        doing, shelf, slot = f"{self.what}, going", self.world.shelf, None
        if shelf is not None and shelf.gives(target, form.nbytes):
            slot = shelf.lay(form.nbytes, target, most=self.ring.slots, seconds=self.world.timeout)
        buffer = self.ring.empty((form.nbytes,), torch.uint8) if slot is None else slot.rows(form.nbytes)
        for rows, which, place in zip(self.written, given, form.parts(buffer), strict=True):
            torch.index_select(rows, 0, which, out=place)
        if shelf is not None and slot is not None:
            word = shelf.word(slot, form.nbytes)
            return send(self.world, word, target, tag=_OUT, doing=doing, counted=form.nbytes)
        return send(self.world, buffer, target, tag=_OUT, doing=doing)

    def _room(self, source: int, nbytes: int) -> Tensor:
        """What a message from a rank is received in: all of it, or where it lies."""
        if self.world.shelf is not None and self.world.shelf.takes(source, nbytes):
            return torch.empty(WORDS, dtype=torch.int64)
        return self.ring.empty((nbytes,), torch.uint8)

    def _work_on(self, offset: int) -> None:
        source = self._before(offset)
        rows, found = self._rows_of(offset, source)
        with self.world.clock.during(COMPUTE, self.what):
            back = self._visit(source, rows)
        if found is not None:
            back = back and [tensor.clone() if _same_memory(tensor, found.bytes) else tensor for tensor in back]
            found.done()
        if self._collect is None:
            return
        assert back is not None and len(back) == len(self.home), "visit returns what goes home"
        if not offset:
            self.collect(source, list(back))
            return
        written = [
            tensor
            for place, rows in enumerate(back)
            for tensor in self.ring.code.write(rows, self.number, -1 - place - len(self.home) * source)
        ]
        form = self._home_form([home.routes.need[source] for home in self.home])
        if form.nbytes:
            message = form.pack(written, self.ring.empty)
            self.homing[offset] = send(self.world, message, source, tag=_HOME, doing=f"{self.what}, going home")

    def _rows_of(self, offset: int, source: int) -> tuple[list[Tensor], Found | None]:
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
            if self.world.shelf is not None and self.world.shelf.takes(source, form.nbytes):
                found = self.world.shelf.look(message, source)
                message = found.bytes
        rows = self._read(form.parts(message), [lane.rows.dtype for lane in self.lanes], self.lane_of)
        if self.keep is not None:
            held = None if found is None else found.bytes
            self.keep.rows[source] = rows = [
                each.clone() if held is not None and _same_memory(each, held) else each for each in rows
            ]
        return rows, found

    def _read(self, written: list[Tensor], dtypes: Sequence[torch.dtype], owner: Sequence[int]) -> list[Tensor]:
        """Tensors as they travel back into one for each lane or home."""
        each = [
            [tensor for tensor, place in zip(written, owner, strict=True) if place == n] for n in range(len(dtypes))
        ]
        return [self.ring.code.read(tensors, dtype) for tensors, dtype in zip(each, dtypes, strict=True)]

    def _expect_home(self, offsets: Sequence[int]) -> None:
        for offset in offsets:
            source = self._after(offset)
            form = self._homecoming(source)
            if offset and form.nbytes:
                buffer = self.ring.empty((form.nbytes,), torch.uint8)
                self.returning[offset] = receive(
                    self.world, buffer, source, tag=_HOME, doing=f"{self.what}, coming home"
                )

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
        with self.world.clock.during(COMPUTE, self.what):
            self._collect(source, rows)

    def _sent(self, messages: dict[int, Posted], offset: int) -> None:
        if offset in messages:
            messages.pop(offset).wait()

    def _before(self, offset: int) -> int:
        return (self.world.rank - offset) % self.world.size

    def _after(self, offset: int) -> int:
        return (self.world.rank + offset) % self.world.size

    def _form(self, source: int) -> _Form:
        counts = [self.lanes[lane].routes.need[source] for lane in self.lane_of]
        return _Form([(count, *_shape(rows)) for count, rows in zip(counts, self.written, strict=True)])

    def _homecoming(self, source: int) -> _Form:
        return self._home_form([len(home.routes.give[source]) for home in self.home])

    def _home_form(self, counts: Sequence[int]) -> _Form:
        forms = [self.ring.code.forms(home.width, home.dtype) for home in self.home]
        return _Form([(count, *form) for count, each in zip(counts, forms, strict=True) for form in each])

    def _home_owner(self) -> list[int]:
        forms = [self.ring.code.forms(home.width, home.dtype) for home in self.home]
        return [place for place, each in enumerate(forms) for _ in each]


class _Form:
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

    def pack(self, tensors: Sequence[Tensor], empty: Empty) -> Tensor:
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
