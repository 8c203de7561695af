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

from gnnfleet.comm.halo_exchange import FetchedRows, OnReturns, OnRows, ReturnPath, RowTable
from gnnfleet.ops.gather import gather
from gnnfleet.sharded.full_batch.grad_accumulator import add_rows
from gnnfleet.sharded.pipeline.chunked_partition import LOCAL, REMOTE, Chunk, ChunkedPartition, ChunkExchangePlan
from gnnfleet.sharded.pipeline.stage_halo import ReceivedRows, StageHalo

GradientRule = Literal["double", "stale", "control_variate"]

HistoryKey = tuple[int, int, int]
"""Layer, number of the verb in it, number of the table of the verb."""

_IDLE = 1e30  # in place of what a row is not proportional to, where the row is not there: 0 times it is 0


@dataclass(frozen=True)
class PipelineSlot:
    """Who works in a slot: the chunk of every way, −1 for all rows of it."""

    slot: int
    chunks: tuple[int, ...]


@dataclass(eq=False)
class _Pass:
    """What belongs to one walk over all chunks."""

    slots: dict[str, Tensor]  # by direction: when each row and mirror is worked on
    updates_history: bool  # whether history is replaced by the rows of this pass
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)  # verbs so far, by slot and layer
    undo: dict[int, list[tuple[HistoryKey, Tensor | slice, Tensor]]] = field(default_factory=dict)  # by slot
    fresh: list[tuple[HistoryKey, Tensor | slice, Tensor]] = field(default_factory=list)
    grads: dict[HistoryKey, Tensor] = field(default_factory=dict)  # gradients of destinations, weighed
    previous_grads: dict[HistoryKey, Tensor] = field(
        default_factory=dict
    )  # those of the pass before, with the sign they count with
    latest_grads: dict[HistoryKey, Tensor] = field(default_factory=dict)  # gradients of this pass as they are
    source_grads: dict[HistoryKey, Tensor] = field(
        default_factory=dict
    )  # gradients of sources, added up where they will be fetched
    pulled_grads: dict[tuple[HistoryKey, int], Tensor] = field(
        default_factory=dict
    )  # what each chunk made for its rest


class HistoryStore:
    """The tables of one way and stage."""

    def __init__(
        self, way: ChunkedPartition, mirrors: StageHalo, gradient: GradientRule = "double", *, remembers: bool = True
    ) -> None:
        self.partition, self.halo, self.gradient = way, mirrors, gradient
        self.is_enabled = remembers
        self.history: dict[HistoryKey, Tensor] = {}  # [n + m, F]
        self.gradients: dict[HistoryKey, Tensor] = {}  # of the pass before, of destinations
        self.pulled_gradients: dict[tuple[HistoryKey, int], Tensor] = {}  # and of the rest of each chunk
        self._pass = _Pass({}, updates_history=False)

    def begin(self, slots: Tensor, *, adopts: bool = False) -> None:
        """A pass begins; ``slots`` says for every place of the layout when it is worked on."""
        here = slots[self.partition.low : self.partition.high]
        both = {way: torch.cat([here, slots[places]]) for way, places in self.partition.halo.items()}
        self._pass = _Pass(both, adopts)

    def new_exchange(self, chunk: Chunk, turn: PipelineSlot, layer: int) -> ChunkExchange:
        """The next verb of a layer."""
        numbers, key = self._pass.numbers, (turn.slot, layer)
        numbers[key] = numbers.get(key, -1) + 1
        return ChunkExchange(self, chunk, turn, layer, numbers[key])

    # -- history --

    def table(self, key: HistoryKey, like: Tensor) -> Tensor:
        """The source rows of a verb; made of zeros when first asked for."""
        if not self.is_enabled:
            return like.new_empty(self.partition.num_rows_with_halo("in"), like.shape[1])
        if key not in self.history:
            self.history[key] = like.new_zeros(self.partition.num_rows_with_halo("in"), like.shape[1])
        return self.history[key]

    def write(self, key: HistoryKey, slot: int, table: Tensor, rows: slice | Tensor, values: Tensor) -> None:
        if self.is_enabled:
            self._pass.undo.setdefault(slot, []).append((key, rows, table[rows].clone()))
        table[rows] = values

    def restore(self, slot: int) -> None:
        """The chunk of a slot is done in backward: its rows in the tables are history again."""
        for key, rows, before in self._pass.undo.pop(slot, ()):
            table = self.history[key]
            if self._pass.updates_history:
                self._pass.fresh.append((key, rows, table[rows].clone()))
            table[rows] = before

    def finish(self) -> None:
        """The pass is over. Without a backward, the rows it wrote stay."""
        done = self._pass
        for key, rows, values in done.fresh:
            self.history[key][rows] = values
        if not done.updates_history:
            for slot in list(done.undo):
                self.restore(slot)
        if done.latest_grads:
            self.gradients = done.latest_grads
        if done.pulled_grads:
            self.pulled_gradients = done.pulled_grads
        self._pass = _Pass({}, updates_history=False)

    # -- gradients of destinations --

    def correct_gradient(self, g: Tensor, before: Tensor | None) -> Tensor:
        """What an edge to a chunk that has been worked on counts with."""
        if self.gradient == "stale":
            return g
        return 2 * g if self.gradient == "double" or before is None else torch.sub(2 * g, before)

    @property
    def uses_previous_gradients(self) -> bool:
        return self.gradient != "double"

    def gradient_table(self, key: HistoryKey, like: Tensor, linear: int, *, mixed: bool) -> Tensor:
        """Gradients of destinations as they count: at first none, or those of the pass before unless ``mixed``: then
        these have a table of their own."""
        tables = self._pass.grads
        if key not in tables:
            fresh = like.new_zeros(self.partition.num_rows_with_halo("out"), like.shape[1])
            fresh[:, :linear] = _IDLE
            if not mixed and self.uses_previous_gradients and key in self.gradients:
                fresh.copy_(self.gradients[key])
            tables[key] = fresh
        return tables[key]

    def previous_gradient(self, key: HistoryKey) -> Tensor | None:
        """The gradients of the pass before, for tables that are not proportional to all of their columns."""
        if not self.uses_previous_gradients or key not in self.gradients:
            return None
        if key not in self._pass.previous_grads:
            self._pass.previous_grads[key] = self.gradients[key].clone()
        return self._pass.previous_grads[key]

    def latest_gradient(self, key: HistoryKey, like: Tensor) -> Tensor | None:
        if not (self.uses_previous_gradients and self.is_enabled):
            return None
        if key not in self._pass.latest_grads:
            self._pass.latest_grads[key] = like.new_zeros(self.partition.num_rows_with_halo("out"), like.shape[1])
        return self._pass.latest_grads[key]

    # -- gradients that go home to sources --

    def source_gradient(self, key: HistoryKey, form: ReturnPath) -> Tensor:
        tables = self._pass.source_grads
        if key not in tables:
            tables[key] = torch.zeros(self.partition.num_rows_with_halo("in"), form.width, dtype=form.dtype)
            for (known, number), made in self.pulled_gradients.items() if self.uses_previous_gradients else ():
                if known == key:
                    self._pull(self.partition.chunks[number], tables[key], made)
        return tables[key]

    def _pull(self, chunk: Chunk, table: Tensor, made: Tensor) -> None:
        """Readers that had history: what they made for it in the pass before."""
        rows, when = self._rest(chunk)
        stale = when > self._slot_of(chunk)
        add_rows(table, rows[stale], made[stale])

    def accumulate_remote(self, key: HistoryKey, chunk: Chunk, slot: int, table: Tensor, made: Tensor) -> None:
        """What a chunk makes for the rows of its rest."""
        rows, when = self._rest(chunk)
        same, earlier = when == slot, when < slot
        if bool(same.any()):
            add_rows(table, rows[same], made[same])
        before = self.pulled_gradients.get((key, chunk.number)) if self.uses_previous_gradients else None
        weighed = self.correct_gradient(made[earlier], None if before is None else before[earlier])
        add_rows(table, rows[earlier], weighed)
        if self.uses_previous_gradients and self.is_enabled and chunk.number >= 0:
            self._pass.pulled_grads[key, chunk.number] = made.clone()

    def _rest(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """(rows and mirrors that a chunk reads, when each is worked on; its own, which it does not read, never)."""
        rest, slots = chunk.remote_rows("in"), self._pass.slots["in"]
        if rest is not None:
            return rest, slots[rest]
        when = slots.clone()
        when[chunk.span] = torch.iinfo(torch.int64).max
        return torch.arange(len(slots)), when

    def _slot_of(self, chunk: Chunk) -> int:
        return int(self._pass.slots["in"][chunk.low]) if chunk.rows else 0

    def row_bytes(self) -> tuple[int, int, int]:
        """Bytes of a row of the tables of this pass as they travel: of sources, of destinations in backward, and of
        what goes home."""

        def total(tables: dict[HistoryKey, Tensor]) -> int:
            return sum(self.halo.code.row_bytes(table) for table in tables.values())

        return total(self.history), total(self._pass.grads), total(self._pass.source_grads)

    # -- what a run that goes on needs --

    def state_dict(self) -> dict[str, Tensor]:
        found = {f"history/{_key_name(key)}": table for key, table in self.history.items()}
        found |= {f"gradient/{_key_name(key)}": table for key, table in self.gradients.items()}
        return found | {
            f"pulled/{_key_name(key)}/{chunk}": made for (key, chunk), made in self.pulled_gradients.items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """What ``state_dict`` gave; nothing of what was known before stays."""
        self.history, self.gradients, self.pulled_gradients = {}, {}, {}
        for name, tensor in state.items():
            sort, word, *chunk = name.split("/")
            layer, number, place = map(int, word.split("."))
            key = layer, number, place
            if sort == "pulled":
                self.pulled_gradients[key, int(chunk[0])] = tensor.clone()
            else:
                (self.history if sort == "history" else self.gradients)[key] = tensor.clone()


@dataclass(eq=False)
class ChunkExchange:
    """One verb of one chunk: forward once, then perhaps backward."""

    stream: HistoryStore
    chunk: Chunk
    slot: PipelineSlot
    layer: int
    number: int
    is_backward: bool = False

    @property
    def local_block(self) -> int:
        return LOCAL

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
        """See ``RingExchange.run``: the chunk's own rows first, then the rest of its way."""
        assert fetched is None, "rows stay in the tables"
        if not self.is_backward:
            self.is_backward = True
            self._forward(tables, on_rows, op)
        elif tables and isinstance(tables[0].plan, ChunkExchangePlan) and tables[0].plan.direction == "out":
            self._by_source(tables, on_rows, op)
        else:
            self._again(tables, on_rows, returns, on_returns, op)

    def _key(self, place: int) -> HistoryKey:
        return self.layer, self.number, place

    def _forward(self, lanes: Sequence[RowTable], visit: OnRows, what: str) -> None:
        stream, chunk = self.stream, self.chunk
        swap = stream.halo.send_rows("in", chunk, self.slot.chunks, [lane.rows for lane in lanes], what)
        visit(LOCAL, [lane.rows for lane in lanes])
        came = swap.wait()
        if not stream.is_enabled and not chunk.reads("in"):
            return
        tables = [stream.table(self._key(place), lane.rows) for place, lane in enumerate(lanes)]
        came.append((chunk.span, [lane.rows for lane in lanes]))
        for rows, values in came:
            for place, (table, value) in enumerate(zip(tables, values, strict=True)):
                stream.write(self._key(place), self.slot.slot, table, rows, value)
        if chunk.reads("in"):
            visit(REMOTE, self._rest("in", tables))

    def _rest(self, direction: str, tables: Sequence[Tensor]) -> list[Tensor]:
        rest = self.chunk.remote_rows(direction)
        return [table if rest is None else gather(table, rest) for table in tables]

    def _by_source(self, lanes: Sequence[RowTable], visit: OnRows, what: str) -> None:
        """Gradients of this chunk's destinations are there now; its sources get what those of all chunks make."""
        stream, chunk = self.stream, self.chunk
        swap = stream.halo.send_rows("out", chunk, self.slot.chunks, [lane.rows for lane in lanes], what)
        visit(LOCAL, [lane.rows for lane in lanes])
        came = swap.wait()
        if not stream.is_enabled and not chunk.reads("out"):
            return
        # Where a row is not proportional to all of its columns, gradients of the pass before have tables of their own.
        mixed = any(lane.linear for lane in lanes)
        now = [
            stream.gradient_table(self._key(place), lane.rows, lane.linear, mixed=mixed)
            for place, lane in enumerate(lanes)
        ]
        past = [stream.previous_gradient(self._key(place)) if mixed else table for place, table in enumerate(now)]
        kept = self._unpack(came, lanes, now, past)
        if chunk.reads("out"):
            visit(REMOTE, self._rest("out", now))
            if mixed and all(table is not None for table in past):
                visit(REMOTE, self._rest("out", [table for table in past if table is not None]))
        came.append((chunk.span, [lane.rows for lane in lanes]))
        kept.append([None if table is None else table[chunk.span].clone() for table in past])
        for (rows, values), before in zip(came, kept, strict=True):
            self._correct(lanes, rows, values, before)

    def _unpack(
        self, came: ReceivedRows, lanes: Sequence[RowTable], now: list[Tensor], past: Sequence[Tensor | None]
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

    def _correct(
        self, lanes: Sequence[RowTable], rows: slice | Tensor, values: Sequence[Tensor], before: Sequence[Tensor | None]
    ) -> None:
        """From now on these destinations count with what the rule makes of their gradients."""
        stream, mixed = self.stream, any(lane.linear for lane in lanes)
        for place, (lane, value, old) in enumerate(zip(lanes, values, before, strict=True)):
            key, first = self._key(place), lane.linear
            table = stream.gradient_table(key, value, first, mixed=mixed)
            table[rows] = value
            table[rows, first:] = stream.correct_gradient(
                value[:, first:], None if mixed or old is None else old[:, first:]
            )
            latest = stream.latest_gradient(key, value)
            if latest is not None:
                latest[rows] = value
            signed = stream.previous_gradient(key) if mixed else None
            if signed is not None and old is not None:
                signed[rows, first:] = -old[:, first:] if stream.gradient == "control_variate" else 0.0

    def _again(
        self, lanes: Sequence[RowTable], visit: OnRows, home: Sequence[ReturnPath], collect: OnReturns | None, what: str
    ) -> None:
        """Sources as they were in forward; what is made for them is added up where their chunk will fetch it."""
        stream, chunk, slot = self.stream, self.chunk, self.slot.slot
        own = visit(LOCAL, [lane.rows for lane in lanes])
        tables = [stream.source_gradient(self._key(place), form) for place, form in enumerate(home)]
        if chunk.reads("in"):
            history = [stream.history[self._key(place)] for place in range(len(lanes))] if stream.is_enabled else []
            made = visit(REMOTE, self._rest("in", history))
            for place, (table, rows) in enumerate(zip(tables, made or (), strict=True)):
                stream.accumulate_remote(self._key(place), chunk, slot, table, rows.to(table.dtype))
        for places, values in stream.halo.return_grads(chunk, self.slot.chunks, tables, what).wait():
            for table, value in zip(tables, values, strict=True):
                assert isinstance(places, Tensor)
                add_rows(table, places, value)
        if collect is not None and home:
            assert own is not None
            collect(LOCAL, list(own))
            collect(REMOTE, [table[chunk.span] for table in tables])


def _key_name(key: HistoryKey) -> str:
    return ".".join(map(str, key))
