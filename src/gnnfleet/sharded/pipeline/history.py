"""Chunks of a way one after the other: what the ones before have computed is fresh, the rest is remembered.

*Forward.* Each verb of a layer has a table of its source rows. A chunk writes its rows into it and reads its neighbours
there: fresh where their chunk came earlier in this pass, history where it comes later. *Backward* goes the other way
round: when a chunk is worked on, those that read it fresh have been worked on before. Edges whose source was history
in forward have no gradient yet: what stands for it is the gradient rule. g is a gradient of this pass, o that of the
pass before, for an edge between different chunks:

    double           fresh 2 g       history 0     the mean over random orders is g, for one hop
    stale            fresh g         history o
    control_variate  fresh 2 g − o   history o     the mean is g, for one hop, with less variance

Edges inside a chunk count once, with g; so do edges between chunks of different ways in the same slot. Backward undoes
what forward wrote, chunk by chunk, so that a chunk sees in backward what it saw in forward, and history is whole again
at the end: it then stays, or is replaced by the rows of this pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from gnnfleet.comm.halo_exchange import Collect, Home, Kept, Lane, Visit
from gnnfleet.comm.world import World
from gnnfleet.ops.gather import gather
from gnnfleet.sharded.full_batch.grad_accumulator import add_rows
from gnnfleet.sharded.pipeline.chunked_partition import OWN, REST, Chunk, ChunkRoutes, Way
from gnnfleet.sharded.pipeline.stage_halo import Came, Mirrors

Gradient = Literal["double", "stale", "control_variate"]

Key = tuple[int, int, int]
"""Layer, number of the verb in it, number of the table of the verb."""

_IDLE = 1e30  # in place of what a row is not proportional to, where the row is not there: 0 times it is 0


@dataclass(frozen=True)
class Turn:
    """Who works in a slot: the chunk of every way, −1 for all rows of it."""

    slot: int
    chunks: tuple[int, ...]


@dataclass(eq=False)
class _Pass:
    """What belongs to one walk over all chunks."""

    slots: dict[str, Tensor]  # by direction: when each row and mirror is worked on
    adopts: bool  # whether history is replaced by the rows of this pass
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)  # verbs so far, by slot and layer
    undo: dict[int, list[tuple[Key, Tensor | slice, Tensor]]] = field(default_factory=dict)  # by slot
    fresh: list[tuple[Key, Tensor | slice, Tensor]] = field(default_factory=list)
    now: dict[Key, Tensor] = field(default_factory=dict)  # gradients of destinations, weighed
    before: dict[Key, Tensor] = field(default_factory=dict)  # those of the pass before, with the sign they count with
    latest: dict[Key, Tensor] = field(default_factory=dict)  # gradients of this pass as they are
    home: dict[Key, Tensor] = field(default_factory=dict)  # gradients of sources, added up where they will be fetched
    pulled: dict[tuple[Key, int], Tensor] = field(default_factory=dict)  # what each chunk made for its rest


class Stream:
    """The tables of one way and stage."""

    world = World(rank=OWN, size=2)  # blocks take the place of ranks

    def __init__(self, way: Way, mirrors: Mirrors, gradient: Gradient = "double", *, remembers: bool = True) -> None:
        self.way, self.mirrors, self.gradient = way, mirrors, gradient
        self.remembers = remembers
        self.history: dict[Key, Tensor] = {}  # [n + m, F]
        self.gradients: dict[Key, Tensor] = {}  # of the pass before, of destinations
        self.pulled: dict[tuple[Key, int], Tensor] = {}  # and of the rest of each chunk
        self._pass = _Pass({}, adopts=False)

    def begin(self, slots: Tensor, *, adopts: bool = False) -> None:
        """A pass begins; ``slots`` says for every place of the layout when it is worked on."""
        here = slots[self.way.low : self.way.high]
        both = {way: torch.cat([here, slots[places]]) for way, places in self.way.mirrors.items()}
        self._pass = _Pass(both, adopts)

    def call(self, chunk: Chunk, turn: Turn, layer: int) -> Call:
        """The next verb of a layer."""
        numbers, key = self._pass.numbers, (turn.slot, layer)
        numbers[key] = numbers.get(key, -1) + 1
        return Call(self, chunk, turn, layer, numbers[key])

    # -- history --

    def table(self, key: Key, like: Tensor) -> Tensor:
        """The source rows of a verb; made of zeros when first asked for."""
        if not self.remembers:
            return like.new_empty(self.way.size("in"), like.shape[1])
        if key not in self.history:
            self.history[key] = like.new_zeros(self.way.size("in"), like.shape[1])
        return self.history[key]

    def write(self, key: Key, slot: int, table: Tensor, rows: slice | Tensor, values: Tensor) -> None:
        if self.remembers:
            self._pass.undo.setdefault(slot, []).append((key, rows, table[rows].clone()))
        table[rows] = values

    def leave(self, slot: int) -> None:
        """The chunk of a slot is done in backward: its rows in the tables are history again."""
        for key, rows, before in self._pass.undo.pop(slot, ()):
            table = self.history[key]
            if self._pass.adopts:
                self._pass.fresh.append((key, rows, table[rows].clone()))
            table[rows] = before

    def finish(self) -> None:
        """The pass is over. Without a backward, the rows it wrote stay."""
        done = self._pass
        for key, rows, values in done.fresh:
            self.history[key][rows] = values
        if not done.adopts:
            for slot in list(done.undo):
                self.leave(slot)
        if done.latest:
            self.gradients = done.latest
        if done.pulled:
            self.pulled = done.pulled
        self._pass = _Pass({}, adopts=False)

    # -- gradients of destinations --

    def weigh(self, g: Tensor, before: Tensor | None) -> Tensor:
        """What an edge to a chunk that has been worked on counts with."""
        if self.gradient == "stale":
            return g
        return 2 * g if self.gradient == "double" or before is None else torch.sub(2 * g, before)

    @property
    def looks_back(self) -> bool:
        return self.gradient != "double"

    def now(self, key: Key, like: Tensor, linear: int, *, mixed: bool) -> Tensor:
        """Gradients of destinations as they count: at first none, or those of the pass before unless ``mixed``: then
        these have a table of their own."""
        tables = self._pass.now
        if key not in tables:
            fresh = like.new_zeros(self.way.size("out"), like.shape[1])
            fresh[:, :linear] = _IDLE
            if not mixed and self.looks_back and key in self.gradients:
                fresh.copy_(self.gradients[key])
            tables[key] = fresh
        return tables[key]

    def before(self, key: Key) -> Tensor | None:
        """The gradients of the pass before, for tables that are not proportional to all of their columns."""
        if not self.looks_back or key not in self.gradients:
            return None
        if key not in self._pass.before:
            self._pass.before[key] = self.gradients[key].clone()
        return self._pass.before[key]

    def latest(self, key: Key, like: Tensor) -> Tensor | None:
        if not (self.looks_back and self.remembers):
            return None
        if key not in self._pass.latest:
            self._pass.latest[key] = like.new_zeros(self.way.size("out"), like.shape[1])
        return self._pass.latest[key]

    # -- gradients that go home to sources --

    def home(self, key: Key, form: Home) -> Tensor:
        tables = self._pass.home
        if key not in tables:
            tables[key] = torch.zeros(self.way.size("in"), form.width, dtype=form.dtype)
            for (known, number), made in self.pulled.items() if self.looks_back else ():
                if known == key:
                    self._pull(self.way.chunks[number], tables[key], made)
        return tables[key]

    def _pull(self, chunk: Chunk, table: Tensor, made: Tensor) -> None:
        """Readers that had history: what they made for it in the pass before."""
        rows, when = self._rest(chunk)
        stale = when > self._slot_of(chunk)
        add_rows(table, rows[stale], made[stale])

    def push(self, key: Key, chunk: Chunk, slot: int, table: Tensor, made: Tensor) -> None:
        """What a chunk makes for the rows of its rest."""
        rows, when = self._rest(chunk)
        same, earlier = when == slot, when < slot
        if bool(same.any()):
            add_rows(table, rows[same], made[same])
        before = self.pulled.get((key, chunk.number)) if self.looks_back else None
        weighed = self.weigh(made[earlier], None if before is None else before[earlier])
        add_rows(table, rows[earlier], weighed)
        if self.looks_back and self.remembers and chunk.number >= 0:
            self._pass.pulled[key, chunk.number] = made.clone()

    def _rest(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """(rows and mirrors that a chunk reads, when each is worked on; its own, which it does not read, never)."""
        rest, slots = chunk.rest("in"), self._pass.slots["in"]
        if rest is not None:
            return rest, slots[rest]
        when = slots.clone()
        when[chunk.span] = torch.iinfo(torch.int64).max
        return torch.arange(len(slots)), when

    def _slot_of(self, chunk: Chunk) -> int:
        return int(self._pass.slots["in"][chunk.low]) if chunk.rows else 0

    def widths(self) -> tuple[int, int, int]:
        """Bytes of a row of the tables of this pass as they travel: of sources, of destinations in backward, and of
        what goes home."""

        def total(tables: dict[Key, Tensor]) -> int:
            return sum(self.mirrors.code.row_bytes(table) for table in tables.values())

        return total(self.history), total(self._pass.now), total(self._pass.home)

    # -- what a run that goes on needs --

    def state_dict(self) -> dict[str, Tensor]:
        found = {f"history/{_word(key)}": table for key, table in self.history.items()}
        found |= {f"gradient/{_word(key)}": table for key, table in self.gradients.items()}
        return found | {f"pulled/{_word(key)}/{chunk}": made for (key, chunk), made in self.pulled.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """What ``state_dict`` gave; nothing of what was known before stays."""
        self.history, self.gradients, self.pulled = {}, {}, {}
        for name, tensor in state.items():
            sort, word, *chunk = name.split("/")
            layer, number, place = map(int, word.split("."))
            key = layer, number, place
            if sort == "pulled":
                self.pulled[key, int(chunk[0])] = tensor.clone()
            else:
                (self.history if sort == "history" else self.gradients)[key] = tensor.clone()


@dataclass(eq=False)
class Call:
    """One verb of one chunk: forward once, then perhaps backward."""

    stream: Stream
    chunk: Chunk
    turn: Turn
    layer: int
    number: int
    is_back: bool = False

    @property
    def world(self) -> World:
        return self.stream.world

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
        """See ``Ring.visit``: the chunk's own rows first, then the rest of its way."""
        assert keep is None, "rows stay in the tables"
        if not self.is_back:
            self.is_back = True
            self._forward(lanes, visit, what)
        elif lanes and isinstance(lanes[0].routes, ChunkRoutes) and lanes[0].routes.direction == "out":
            self._by_source(lanes, visit, what)
        else:
            self._again(lanes, visit, home, collect, what)

    def _key(self, place: int) -> Key:
        return self.layer, self.number, place

    def _forward(self, lanes: Sequence[Lane], visit: Visit, what: str) -> None:
        stream, chunk = self.stream, self.chunk
        swap = stream.mirrors.out("in", chunk, self.turn.chunks, [lane.rows for lane in lanes], what)
        visit(OWN, [lane.rows for lane in lanes])
        came = swap.finish()
        if not stream.remembers and not chunk.reads("in"):
            return
        tables = [stream.table(self._key(place), lane.rows) for place, lane in enumerate(lanes)]
        came.append((chunk.span, [lane.rows for lane in lanes]))
        for rows, values in came:
            for place, (table, value) in enumerate(zip(tables, values, strict=True)):
                stream.write(self._key(place), self.turn.slot, table, rows, value)
        if chunk.reads("in"):
            visit(REST, self._rest("in", tables))

    def _rest(self, direction: str, tables: Sequence[Tensor]) -> list[Tensor]:
        rest = self.chunk.rest(direction)
        return [table if rest is None else gather(table, rest) for table in tables]

    def _by_source(self, lanes: Sequence[Lane], visit: Visit, what: str) -> None:
        """Gradients of this chunk's destinations are there now; its sources get what those of all chunks make."""
        stream, chunk = self.stream, self.chunk
        swap = stream.mirrors.out("out", chunk, self.turn.chunks, [lane.rows for lane in lanes], what)
        visit(OWN, [lane.rows for lane in lanes])
        came = swap.finish()
        if not stream.remembers and not chunk.reads("out"):
            return
        # Where a row is not proportional to all of its columns, gradients of the pass before have tables of their own.
        mixed = any(lane.linear for lane in lanes)
        now = [stream.now(self._key(place), lane.rows, lane.linear, mixed=mixed) for place, lane in enumerate(lanes)]
        past = [stream.before(self._key(place)) if mixed else table for place, table in enumerate(now)]
        kept = self._take_in(came, lanes, now, past)
        if chunk.reads("out"):
            visit(REST, self._rest("out", now))
            if mixed and all(table is not None for table in past):
                visit(REST, self._rest("out", [table for table in past if table is not None]))
        came.append((chunk.span, [lane.rows for lane in lanes]))
        kept.append([None if table is None else table[chunk.span].clone() for table in past])
        for (rows, values), before in zip(came, kept, strict=True):
            self._weigh(lanes, rows, values, before)

    def _take_in(
        self, came: Came, lanes: Sequence[Lane], now: list[Tensor], past: Sequence[Tensor | None]
    ) -> list[list[Tensor | None]]:
        """Mirrors of this slot count once, and with nothing of the pass before; what there was of that."""
        kept: list[list[Tensor | None]] = []
        for rows, values in came:
            kept.append([None if table is None else table[rows].clone() for table in past])
            for lane, table, value, before in zip(lanes, now, values, past, strict=True):
                if before is not None:
                    before[rows, lane.linear :] = 0
                table[rows] = value
        return kept

    def _weigh(
        self, lanes: Sequence[Lane], rows: slice | Tensor, values: Sequence[Tensor], before: Sequence[Tensor | None]
    ) -> None:
        """From now on these destinations count with what the rule makes of their gradients."""
        stream, mixed = self.stream, any(lane.linear for lane in lanes)
        for place, (lane, value, old) in enumerate(zip(lanes, values, before, strict=True)):
            key, first = self._key(place), lane.linear
            table = stream.now(key, value, first, mixed=mixed)
            table[rows] = value
            table[rows, first:] = stream.weigh(value[:, first:], None if mixed or old is None else old[:, first:])
            latest = stream.latest(key, value)
            if latest is not None:
                latest[rows] = value
            signed = stream.before(key) if mixed else None
            if signed is not None and old is not None:
                signed[rows, first:] = -old[:, first:] if stream.gradient == "control_variate" else 0.0

    def _again(
        self, lanes: Sequence[Lane], visit: Visit, home: Sequence[Home], collect: Collect | None, what: str
    ) -> None:
        """Sources as they were in forward; what is made for them is added up where their chunk will fetch it."""
        stream, chunk, slot = self.stream, self.chunk, self.turn.slot
        own = visit(OWN, [lane.rows for lane in lanes])
        tables = [stream.home(self._key(place), form) for place, form in enumerate(home)]
        if chunk.reads("in"):
            history = [stream.history[self._key(place)] for place in range(len(lanes))] if stream.remembers else []
            made = visit(REST, self._rest("in", history))
            for place, (table, rows) in enumerate(zip(tables, made or (), strict=True)):
                stream.push(self._key(place), chunk, slot, table, rows.to(table.dtype))
        for places, values in stream.mirrors.home(chunk, self.turn.chunks, tables, what).finish():
            for table, value in zip(tables, values, strict=True):
                assert isinstance(places, Tensor)
                add_rows(table, places, value)
        if collect is not None and home:
            assert own is not None
            collect(OWN, list(own))
            collect(REST, [table[chunk.span] for table in tables])


def _word(key: Key) -> str:
    return ".".join(map(str, key))
