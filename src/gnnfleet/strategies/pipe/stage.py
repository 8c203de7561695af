"""One stage of a partition: consecutive layers, computed chunk by chunk, first forward and then backward.

Each chunk has an autograd graph of its own, which ends at the stage and at the tables of the history.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnfleet.nn.base import Aggregate, Model
from gnnfleet.ops.draws import DrawKey
from gnnfleet.sharded.pipeline.chunk_view import ChunkView
from gnnfleet.strategies.job import autocast
from gnnfleet.strategies.pipe.schedule import ChunkSpan
from gnnfleet.strategies.pipe.stage_p2p import StageLink

LossFn = Callable[[Tensor], Tensor]
"""[n, C] output of all rows of the partition → loss."""

_ChunkGraph = tuple[list[Tensor], list[Tensor]]
"""Inputs and outputs of an autograd graph."""


@dataclass(frozen=True, eq=False)
class Stage:
    model: Model
    layers: range
    number: int
    partition: int
    precision: str
    x: Tensor | None = None  # [n, F] features, on the first stage
    aggregated: Aggregate | None = None  # of the first layer, if it is cached
    previous_link: StageLink | None = None
    next_link: StageLink | None = None

    def run(
        self, views: Sequence[ChunkView], key: DrawKey, spans: list[ChunkSpan], *, backward: bool, loss: LossFn | None
    ) -> float:
        """Compute the chunks in order; with ``backward`` add to the gradients. Only the last stage has a ``loss``."""
        self.model.train()
        views = [view.with_step(key=key, training=True) for view in views]
        graphs, out = self._forward(views, spans, keeps_graphs=backward)
        total = 0.0
        if backward:
            if loss is not None:
                value = loss(out.requires_grad_())
                value.backward()  # type: ignore[no-untyped-call]
                total = float(value.detach())
            self._backward(views, graphs, torch.zeros_like(out) if out.grad is None else out.grad, spans)
        self._flush()
        return total

    @torch.no_grad()
    def infer(self, view: ChunkView) -> tuple[Tensor, Tensor]:
        """(output, input of the last layer) of all rows on the last stage; other stages return theirs."""
        self.model.eval()
        view = view.with_step(training=False)
        (tensors,) = self._receive_inputs([view])
        outputs, last_input = self._run_layers(view, tensors)
        if self.next_link is not None:
            self.next_link.send_activations(outputs)
        self._flush()
        return outputs[0], last_input

    def _receive_inputs(self, views: Sequence[ChunkView]) -> Iterator[list[Tensor]]:
        """Input of each chunk: features on the first stage, activations of the previous stage on others."""
        if self.previous_link is not None:
            return self.previous_link.receive_activations([view.num_dst for view in views])
        assert self.x is not None
        x = self.x
        return ([x[view.chunk.span]] for view in views)

    def _run_layers(self, view: ChunkView, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """([output, the carried tensor if any], input of the last layer)."""
        rows: Any = tensors[0]
        carry = tensors[1] if len(tensors) > 1 else None
        last_input = rows
        with autocast(self.precision):
            for index in self.layers:
                last_input = rows
                aggregated = None if index else self._aggregated_rows(view.chunk.span)
                rows, carry = self.model.layer(index, view, rows, carry, aggregated=aggregated)
        return [rows] if carry is None else [rows, carry], last_input

    def _aggregated_rows(self, rows: slice) -> Aggregate | None:
        if isinstance(self.aggregated, Mapping):
            return {kind: table[rows] for kind, table in self.aggregated.items()}
        return None if self.aggregated is None else self.aggregated[rows]

    def _flush(self) -> None:
        for link in (self.previous_link, self.next_link):
            if link is not None:
                link.flush()

    def _forward(
        self, views: Sequence[ChunkView], spans: list[ChunkSpan], *, keeps_graphs: bool
    ) -> tuple[list[_ChunkGraph], Tensor]:
        """(the graph of every chunk, [n, C] output of all rows on the last stage)."""
        graphs, out = [], torch.empty(0)
        with torch.set_grad_enabled(keeps_graphs):
            for view, inputs in zip(views, self._receive_inputs(views), strict=True):
                with self._record(spans, view, is_backward=False):
                    if keeps_graphs and self.x is None:
                        inputs = [tensor.requires_grad_() for tensor in inputs]
                    outputs, _ = self._run_layers(view, inputs)
                    if self.next_link is not None:
                        self.next_link.send_activations(outputs)
                    else:
                        rows = outputs[0].detach()
                        out = out if len(out) else rows.new_zeros(view.chunk.partition.rows, rows.shape[1])
                        out[view.chunk.span] = rows
                    graphs.append((inputs, outputs))
        return graphs, out

    def _backward(
        self, views: Sequence[ChunkView], graphs: list[_ChunkGraph], out_grad: Tensor, spans: list[ChunkSpan]
    ) -> None:
        """Compute gradients in reverse order; ``out_grad`` [n, C] is that of the loss, for the last stage."""
        views = views[::-1]
        if self.next_link is not None:
            grads_by_chunk = self.next_link.receive_grads([view.num_dst for view in views])
        else:
            grads_by_chunk = ([out_grad[view.chunk.span]] for view in views)
        for view, grads in zip(views, grads_by_chunk, strict=True):
            inputs, outputs = graphs.pop()
            with self._record(spans, view, is_backward=True):
                pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
                if pairs:
                    tensor_grads = [grad.to(output.dtype) for output, grad in pairs]
                    torch.autograd.backward([output for output, _ in pairs], tensor_grads)
                if self.previous_link is not None:
                    self.previous_link.send_grads([torch.zeros_like(t) if t.grad is None else t.grad for t in inputs])
                view.history.restore(view.slot.slot)

    @contextmanager
    def _record(self, spans: list[ChunkSpan], view: ChunkView, *, is_backward: bool) -> Iterator[None]:
        """Append the time of the block to ``spans``."""
        begin, begin_cpu = time.time(), time.thread_time()
        yield
        times = begin, time.time(), time.thread_time() - begin_cpu
        spans.append(ChunkSpan(self.number, self.partition, view.slot.slot, view.chunk.number, is_backward, *times))
