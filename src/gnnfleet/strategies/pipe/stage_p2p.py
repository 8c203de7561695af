"""Rows on their way from stage to stage: activations forward, their gradients backward, a chunk at a time.

A message is what a layer gives, and what it carries past layers beside it. Receives are posted two chunks ahead and
sends are not waited for before the second next, so that transfer and work overlap; there is no barrier. Widths and
dtypes are told once, with the first message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.p2p import PendingTransfer, receive, send
from gnnfleet.comm.world import World
from gnnfleet.report.phase_timer import EXCHANGE

PREFETCH = 2
"""Messages posted and not waited for."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_FORM, _ROWS, _GRADS = 21, 22, 23

MessageShapes = list[tuple[int, torch.dtype]]
"""Width and dtype of each tensor of a message."""


class StageLink:
    """The stage before or after this one, of the same way."""

    def __init__(self, world: World, peer: int, code: WireCodec) -> None:
        self._world, self._peer, self._code = world, peer, code
        self._aside = world.uncounted()
        self.form: MessageShapes | None = None
        self._going: deque[list[PendingTransfer]] = deque()

    def send_shapes(self, tensors: Sequence[Tensor]) -> None:
        """What messages to this stage look like, before the first."""
        if self.form is not None:
            return
        self.form = [(int(tensor.shape[1]), tensor.dtype) for tensor in tensors]
        words = [len(self.form)] + [word for width, kind in self.form for word in (width, _DTYPES.index(kind))]
        told = torch.tensor(words + [0] * (5 - len(words)))
        send(self._aside, told, self._peer, tag=_FORM, op="form of rows").wait()

    def receive_shapes(self) -> None:
        """What messages from that stage look like."""
        if self.form is not None:
            return
        told = torch.empty(5, dtype=torch.int64)
        count, *words = receive(self._aside, told, self._peer, tag=_FORM, op="form of rows").wait().tolist()
        self.form = [(words[2 * i], _DTYPES[words[2 * i + 1]]) for i in range(count)]

    def send(self, tensors: Sequence[Tensor], *, back: bool) -> None:
        tag, doing = (_GRADS, "gradients of a chunk") if back else (_ROWS, "rows of a chunk")
        with self._world.clock.phase(EXCHANGE, doing):
            self._send(tensors, tag, doing)

    def _send(self, tensors: Sequence[Tensor], tag: int, doing: str) -> None:
        parts = [
            part
            for place, tensor in enumerate(tensors)
            for part in self._code.encode(tensor.detach().contiguous(), 0, place)
        ]
        posted = [send(self._world, part, self._peer, tag=tag, op=doing) for part in parts if part.numel()]
        self._world.traffic.add_round()
        self._going.append(posted)
        while len(self._going) > PREFETCH:
            self._drain()

    def flush(self) -> None:
        """Wait until everything is sent."""
        while self._going:
            self._drain()

    def _drain(self) -> None:
        for part in self._going.popleft():
            part.wait()

    def expect(self, counts: Sequence[int], *, back: bool) -> PendingMessages:
        """Messages of so many rows each, in this order."""
        assert self.form is not None
        return PendingMessages(self._world, self._peer, self._code, self.form, counts, back=back)


class PendingMessages:
    """Messages that are to come, some of them posted."""

    def __init__(
        self, world: World, peer: int, code: WireCodec, form: MessageShapes, counts: Sequence[int], *, back: bool
    ) -> None:
        self._world, self._peer, self._code, self._form = world, peer, code, form
        self._tag, self._doing = (_GRADS, "gradients of a chunk") if back else (_ROWS, "rows of a chunk")
        self._counts = deque(counts)
        self._posted: deque[list[list[PendingTransfer | Tensor]]] = deque()
        self._post()

    def _post(self) -> None:
        while self._counts and len(self._posted) < PREFETCH:
            count = self._counts.popleft()
            message: list[list[PendingTransfer | Tensor]] = []
            for width, dtype in self._form:
                rooms = [torch.empty(count, wide, dtype=kind) for wide, kind in self._code.encoded_shapes(width, dtype)]
                message.append([self._receive(room) if room.numel() else room for room in rooms])
            self._posted.append(message)

    def _receive(self, room: Tensor) -> PendingTransfer:
        return receive(self._world, room, self._peer, tag=self._tag, op=self._doing)

    def receive_next(self) -> list[Tensor]:
        with self._world.clock.phase(EXCHANGE, self._doing):
            return self._next()

    def _next(self) -> list[Tensor]:
        message = self._posted.popleft()
        found = []
        for parts, (_, dtype) in zip(message, self._form, strict=True):
            found.append(self._code.decode([p.wait() if isinstance(p, PendingTransfer) else p for p in parts], dtype))
        self._post()
        return found
