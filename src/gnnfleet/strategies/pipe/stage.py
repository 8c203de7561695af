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
from gnnfleet.strategies.job import products
from gnnfleet.strategies.pipe.schedule import Span
from gnnfleet.strategies.pipe.stage_p2p import Neighbour

Loss = Callable[[Tensor], Tensor]
"""[n, C] output of all rows of the way → what it costs."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the first layer reads, a row for every row of the way."""

    x: Tensor
    aggregated: Aggregate | None = None


@dataclass(frozen=True, eq=False)
class _Done:
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
    before: Neighbour | None
    after: Neighbour | None
    inputs: Inputs | None  # on the first stage
    precision: str

    def run(
        self, views: Sequence[ChunkView], key: DrawKey, *, loss: Loss | None, spans: list[Span] | None = None
    ) -> Tensor | None:
        """Walk the chunks of ``views`` in order, backward too where ``loss`` is given (by all stages; the last one
        calls it). Gradients of parameters are added up; the last stage gets the loss."""
        self.model.train()
        done, out = self._forward([view.at(key=key, training=True) for view in views], spans, keep=loss is not None)
        found = None
        if loss is not None:
            grads = None
            if self.after is None:
                leaf = out.requires_grad_()
                found = loss(leaf)
                found.backward()  # type: ignore[no-untyped-call]
                grads = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            self._backward(views, done, grads, spans)
        for end in (self.before, self.after):
            if end is not None:
                end.flush()
        return None if found is None else found.detach()

    @torch.no_grad()
    def infer(self, view: ChunkView) -> tuple[Tensor, Tensor]:
        """(output of all rows of the way, what the last layer read) on the last stage, elsewhere what there is."""
        self.model.eval()
        view = view.at(training=False)
        with products(self.precision):
            tensors = self._given(view, self._coming([view]))
            last = tensors[0]
            carry = tensors[1] if len(tensors) > 1 else None
            rows: Any = tensors[0]
            for index in self.layers:
                last = rows
                rows, carry = self._layer(index, view, rows, carry)
        self._hand_on([rows] if carry is None else [rows, carry])
        for end in (self.before, self.after):
            if end is not None:
                end.flush()
        return rows, last

    def _coming(self, views: Sequence[ChunkView]) -> Any:
        if self.before is None:
            return None
        self.before.hear()
        return self.before.expect([view.num_dst for view in views], back=False)

    def _given(self, view: ChunkView, coming: Any) -> list[Tensor]:
        if self.inputs is not None:
            return [self.inputs.x[view.chunk.span]]
        found: list[Tensor] = coming.next()
        return found

    def _layer(self, index: int, view: ChunkView, rows: Any, carry: Tensor | None) -> tuple[Any, Tensor | None]:
        near = None if index or self.inputs is None else self.inputs.aggregated
        span = view.chunk.span
        if isinstance(near, Mapping):
            near = {kind: each[span] for kind, each in near.items()}
        elif near is not None:
            near = near[span]
        return self.model.layer(index, view, rows, carry, aggregated=near)

    def _hand_on(self, tensors: Sequence[Tensor]) -> None:
        if self.after is not None:
            self.after.tell(tensors)
            self.after.send(tensors, back=False)

    def _forward(
        self, views: Sequence[ChunkView], spans: list[Span] | None, *, keep: bool
    ) -> tuple[list[_Done], Tensor]:
        coming, done = self._coming(views), []
        out = torch.empty(0)
        with torch.set_grad_enabled(keep):
            for view in views:
                tensors = self._given(view, coming)
                watch = _Watch()
                if keep and self.inputs is None:
                    tensors = [tensor.requires_grad_() for tensor in tensors]
                rows: Any = tensors[0]
                carry = tensors[1] if len(tensors) > 1 else None
                with products(self.precision):
                    for index in self.layers:
                        rows, carry = self._layer(index, view, rows, carry)
                made = [rows] if carry is None else [rows, carry]
                self._hand_on(made)
                if self.after is None:
                    out = out if len(out) else rows.detach().new_zeros(view.chunk.way.rows, rows.shape[1])
                    out[view.chunk.span] = rows.detach()
                done.append(_Done(tensors, made))
                self._note(spans, watch, view, back=False)
        return done, out

    def _backward(
        self, views: Sequence[ChunkView], done: list[_Done], grads: Tensor | None, spans: list[Span] | None
    ) -> None:
        turned = list(views)[::-1]
        coming = None if self.after is None else self.after.expect([view.num_dst for view in turned], back=True)
        for view in turned:
            chunk = done.pop()
            if coming is not None:
                given = coming.next()
            else:
                assert grads is not None
                given = [grads[view.chunk.span].to(chunk.made[0].dtype)]
            watch = _Watch()
            pairs = [(made, g) for made, g in zip(chunk.made, given, strict=True) if made.requires_grad]
            if pairs:
                torch.autograd.backward([made for made, _ in pairs], [g for _, g in pairs])
            if self.before is not None:
                back = [torch.zeros_like(t) if t.grad is None else t.grad for t in chunk.given]
                self.before.send(back, back=True)
            view.stream.leave(view.turn.slot)
            self._note(spans, watch, view, back=True)

    def _note(self, spans: list[Span] | None, watch: _Watch, view: ChunkView, *, back: bool) -> None:
        if spans is not None:
            turn = view.turn
            spans.append(
                Span(self.number, self.way, turn.slot, view.chunk.number, back, watch.begin, time.time(), watch.busy())
            )


class _Watch:
    """The time of one span; of all ranks of a machine by the same clock."""

    def __init__(self) -> None:
        self.begin, self._thread = time.time(), time.thread_time()

    def busy(self) -> float:
        return time.thread_time() - self._thread
