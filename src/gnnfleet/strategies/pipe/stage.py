"""One stage of a way: some consecutive layers, walked chunk by chunk, forward and then backward.

Each chunk is an autograd graph of its own, cut at the stage's ends and at the tables of the stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnfleet.nn.base import Aggregate, Model
from gnnfleet.ops.draws import DrawKey
from gnnfleet.sharded.pipeline.chunk_view import ChunkView
from gnnfleet.strategies.job import autocast
from gnnfleet.strategies.pipe.schedule import ChunkSpan
from gnnfleet.strategies.pipe.stage_p2p import PendingMessages, StageLink

LossFn = Callable[[Tensor], Tensor]
"""[n, C] output of all rows of the way → what it costs."""


@dataclass(frozen=True, eq=False)
class StageInputs:
    """What the first layer reads, a row for every row of the way."""

    x: Tensor
    aggregated: Aggregate | None = None


@dataclass(frozen=True, eq=False)
class _ForwardResult:
    """A chunk between its forward and its backward."""

    given: list[Tensor]  # what came from the stage before
    made: list[Tensor]


@dataclass(frozen=True, eq=False)
class Stage:
    """Layers of a model at a place in the grid."""

    model: Model
    layers: range
    number: int
    way: int
    previous_link: StageLink | None
    next_link: StageLink | None
    inputs: StageInputs | None  # on the first stage
    precision: str

    def run(
        self, views: Sequence[ChunkView], key: DrawKey, *, loss: LossFn | None, spans: list[ChunkSpan] | None = None
    ) -> Tensor | None:
        """Walk the chunks of ``views`` in order, backward too where ``loss`` is given (by all stages; the last one
        calls it). Gradients of parameters are added up; the last stage gets the loss."""
        self.model.train()
        done, out = self._forward(
            [view.with_step(key=key, training=True) for view in views], spans, keep=loss is not None
        )
        found = None
        if loss is not None:
            grads = None
            if self.next_link is None:
                leaf = out.requires_grad_()
                found = loss(leaf)
                found.backward()  # type: ignore[no-untyped-call]
                grads = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            self._backward(views, done, grads, spans)
        for end in (self.previous_link, self.next_link):
            if end is not None:
                end.flush()
        return None if found is None else found.detach()

    @torch.no_grad()
    def infer(self, view: ChunkView) -> tuple[Tensor, Tensor]:
        """(output of all rows of the way, what the last layer read) on the last stage, elsewhere what there is."""
        self.model.eval()
        view = view.with_step(training=False)
        with autocast(self.precision):
            tensors = self._receive_input(view, self._pending_messages([view]))
            last = tensors[0]
            carry = tensors[1] if len(tensors) > 1 else None
            rows: Any = tensors[0]
            for index in self.layers:
                last = rows
                rows, carry = self._layer(index, view, rows, carry)
        self._send_output([rows] if carry is None else [rows, carry])
        for end in (self.previous_link, self.next_link):
            if end is not None:
                end.flush()
        return rows, last

    def _pending_messages(self, views: Sequence[ChunkView]) -> PendingMessages | None:
        if self.previous_link is None:
            return None
        self.previous_link.receive_shapes()
        return self.previous_link.expect([view.num_dst for view in views], back=False)

    def _receive_input(self, view: ChunkView, coming: PendingMessages | None) -> list[Tensor]:
        if self.inputs is not None:
            return [self.inputs.x[view.chunk.span]]
        assert coming is not None
        return coming.receive_next()

    def _layer(self, index: int, view: ChunkView, rows: Any, carry: Tensor | None) -> tuple[Any, Tensor | None]:
        near = None if index or self.inputs is None else self.inputs.aggregated
        span = view.chunk.span
        if isinstance(near, Mapping):
            near = {kind: each[span] for kind, each in near.items()}
        elif near is not None:
            near = near[span]
        return self.model.layer(index, view, rows, carry, aggregated=near)

    def _send_output(self, tensors: Sequence[Tensor]) -> None:
        if self.next_link is not None:
            self.next_link.send_shapes(tensors)
            self.next_link.send(tensors, back=False)

    def _forward(
        self, views: Sequence[ChunkView], spans: list[ChunkSpan] | None, *, keep: bool
    ) -> tuple[list[_ForwardResult], Tensor]:
        coming, done = self._pending_messages(views), []
        out = torch.empty(0)
        with torch.set_grad_enabled(keep):
            for view in views:
                tensors = self._receive_input(view, coming)
                watch = _SpanTimer()
                if keep and self.inputs is None:
                    tensors = [tensor.requires_grad_() for tensor in tensors]
                rows: Any = tensors[0]
                carry = tensors[1] if len(tensors) > 1 else None
                with autocast(self.precision):
                    for index in self.layers:
                        rows, carry = self._layer(index, view, rows, carry)
                made = [rows] if carry is None else [rows, carry]
                self._send_output(made)
                if self.next_link is None:
                    out = out if len(out) else rows.detach().new_zeros(view.chunk.partition.rows, rows.shape[1])
                    out[view.chunk.span] = rows.detach()
                done.append(_ForwardResult(tensors, made))
                self._record_span(spans, watch, view, back=False)
        return done, out

    def _backward(
        self,
        views: Sequence[ChunkView],
        done: list[_ForwardResult],
        grads: Tensor | None,
        spans: list[ChunkSpan] | None,
    ) -> None:
        turned = list(views)[::-1]
        coming = None if self.next_link is None else self.next_link.expect([view.num_dst for view in turned], back=True)
        for view in turned:
            chunk = done.pop()
            if coming is not None:
                given = coming.receive_next()
            else:
                assert grads is not None
                given = [grads[view.chunk.span].to(chunk.made[0].dtype)]
            watch = _SpanTimer()
            pairs = [(made, g) for made, g in zip(chunk.made, given, strict=True) if made.requires_grad]
            if pairs:
                torch.autograd.backward([made for made, _ in pairs], [g for _, g in pairs])
            if self.previous_link is not None:
                back = [torch.zeros_like(t) if t.grad is None else t.grad for t in chunk.given]
                self.previous_link.send(back, back=True)
            view.history.restore(view.slot.slot)
            self._record_span(spans, watch, view, back=True)

    def _record_span(self, spans: list[ChunkSpan] | None, watch: _SpanTimer, view: ChunkView, *, back: bool) -> None:
        if spans is not None:
            turn = view.slot
            spans.append(
                ChunkSpan(
                    self.number, self.way, turn.slot, view.chunk.number, back, watch.begin, time.time(), watch.busy()
                )
            )


class _SpanTimer:
    """The time of one span; of all ranks of a machine by the same clock."""

    def __init__(self) -> None:
        self.begin, self._thread = time.time(), time.thread_time()

    def busy(self) -> float:
        return time.thread_time() - self._thread
