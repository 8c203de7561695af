"""Messages between stages: activations forward and their gradients backward, one chunk at a time.

A message holds the output of a layer and, if the model has one, the tensor carried past layers. Receives are posted
two chunks ahead, and a send is waited for after the second next one, so that transfers overlap with computation.
Widths and dtypes are sent once, before the first message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.p2p import PendingTransfer, receive, send
from gnnfleet.comm.world import World
from gnnfleet.report.phase_timer import EXCHANGE
from gnnfleet.sharded.pipeline.stage_halo import PendingTables, TableShapes, send_tables, table_shapes

PREFETCH = 2
"""Messages in flight."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SHAPES_TAG = 21
_ACTIVATIONS, _GRADS = (22, "rows of a chunk"), (23, "gradients of a chunk")  # tag and name of the messages


class StageLink:
    """The connection to the previous or the next stage of the same partition."""

    def __init__(self, world: World, peer: int, codec: WireCodec) -> None:
        self._world, self._peer, self._codec = world, peer, codec
        self.shapes: TableShapes | None = None  # of all messages in both directions
        self._sending: deque[list[PendingTransfer]] = deque()

    def send_activations(self, tensors: Sequence[Tensor]) -> None:
        if self.shapes is None:
            self._send_shapes(table_shapes(tensors))
        self._send(tensors, *_ACTIVATIONS)

    def send_grads(self, tensors: Sequence[Tensor]) -> None:
        self._send(tensors, *_GRADS)

    def receive_activations(self, counts: Sequence[int]) -> Iterator[list[Tensor]]:
        """Messages of ``counts`` rows."""
        if self.shapes is None:
            self._receive_shapes()
        return self._receive(counts, *_ACTIVATIONS)

    def receive_grads(self, counts: Sequence[int]) -> Iterator[list[Tensor]]:
        """Messages of ``counts`` rows."""
        return self._receive(counts, *_GRADS)

    def flush(self) -> None:
        """Wait until everything is sent."""
        self._wait_until_pending(0)

    def _send_shapes(self, shapes: TableShapes) -> None:
        self.shapes = shapes
        fields = [len(shapes)] + [field for width, dtype in shapes for field in (width, _DTYPES.index(dtype))]
        message = torch.tensor(fields + [0] * (5 - len(fields)))
        send(self._world.uncounted(), message, self._peer, tag=_SHAPES_TAG, op="shapes of rows").wait()

    def _receive_shapes(self) -> None:
        message = torch.empty(5, dtype=torch.int64)
        pending = receive(self._world.uncounted(), message, self._peer, tag=_SHAPES_TAG, op="shapes of rows")
        count, *fields = pending.wait().tolist()
        self.shapes = [(fields[2 * index], _DTYPES[fields[2 * index + 1]]) for index in range(count)]

    def _send(self, tensors: Sequence[Tensor], tag: int, op: str) -> None:
        tables = [tensor.detach() for tensor in tensors]
        with self._world.clock.phase(EXCHANGE, op):
            self._sending.append(send_tables(self._world, self._codec, self._peer, tables, tag=tag, op=op))
            self._world.traffic.add_round()
            self._wait_until_pending(PREFETCH)

    def _wait_until_pending(self, messages: int) -> None:
        while len(self._sending) > messages:
            for transfer in self._sending.popleft():
                transfer.wait()

    def _receive(self, counts: Sequence[int], tag: int, op: str) -> Iterator[list[Tensor]]:
        def post(count: int) -> PendingTables:
            assert self.shapes is not None
            return PendingTables(self._world, self._codec, self._peer, count, self.shapes, tag=tag, op=op)

        pending = deque(map(post, counts[:PREFETCH]))
        for index in range(len(counts)):
            with self._world.clock.phase(EXCHANGE, op):
                tables = pending.popleft().wait()
                pending.extend(map(post, counts[index + PREFETCH : index + PREFETCH + 1]))
            yield tables
