"""Rows on their way from stage to stage: activations forward, their gradients backward, a chunk at a time.

A message is what a layer gives, and what it carries past layers beside it. Receives are posted two chunks ahead and
sends are not waited for before the second next, so that transfer and work overlap; there is no barrier. Widths and
dtypes are told once, with the first message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gnnfleet.comm.compression import Code
from gnnfleet.comm.p2p import Posted, receive, send
from gnnfleet.comm.world import World
from gnnfleet.report.phase_timer import EXCHANGE
from gnnfleet.report.traffic import Traffic

AHEAD = 2
"""Messages posted and not waited for."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_FORM, _ROWS, _GRADS = 21, 22, 23

Form = list[tuple[int, torch.dtype]]
"""Width and dtype of each tensor of a message."""


class Neighbour:
    """The stage before or after this one, of the same way."""

    def __init__(self, world: World, peer: int, code: Code) -> None:
        self._world, self._peer, self._code = world, peer, code
        self._aside = replace(world, traffic=Traffic())
        self.form: Form | None = None
        self._going: deque[list[Posted]] = deque()

    def tell(self, tensors: Sequence[Tensor]) -> None:
        """What messages to this stage look like, before the first."""
        if self.form is not None:
            return
        self.form = [(int(tensor.shape[1]), tensor.dtype) for tensor in tensors]
        words = [len(self.form)] + [word for width, kind in self.form for word in (width, _DTYPES.index(kind))]
        told = torch.tensor(words + [0] * (5 - len(words)))
        send(self._aside, told, self._peer, tag=_FORM, doing="form of rows").wait()

    def hear(self) -> None:
        """What messages from that stage look like."""
        if self.form is not None:
            return
        told = torch.empty(5, dtype=torch.int64)
        count, *words = receive(self._aside, told, self._peer, tag=_FORM, doing="form of rows").wait().tolist()
        self.form = [(words[2 * i], _DTYPES[words[2 * i + 1]]) for i in range(count)]

    def send(self, tensors: Sequence[Tensor], *, back: bool) -> None:
        tag, doing = (_GRADS, "gradients of a chunk") if back else (_ROWS, "rows of a chunk")
        with self._world.clock.during(EXCHANGE, doing):
            self._send(tensors, tag, doing)

    def _send(self, tensors: Sequence[Tensor], tag: int, doing: str) -> None:
        parts = [
            part
            for place, tensor in enumerate(tensors)
            for part in self._code.write(tensor.detach().contiguous(), 0, place)
        ]
        posted = [send(self._world, part, self._peer, tag=tag, doing=doing) for part in parts if part.numel()]
        self._world.traffic.met()
        self._going.append(posted)
        while len(self._going) > AHEAD:
            self._drain()

    def flush(self) -> None:
        """Wait until everything is sent."""
        while self._going:
            self._drain()

    def _drain(self) -> None:
        for part in self._going.popleft():
            part.wait()

    def expect(self, counts: Sequence[int], *, back: bool) -> Coming:
        """Messages of so many rows each, in this order."""
        assert self.form is not None
        return Coming(self._world, self._peer, self._code, self.form, counts, back=back)


class Coming:
    """Messages that are to come, some of them posted."""

    def __init__(self, world: World, peer: int, code: Code, form: Form, counts: Sequence[int], *, back: bool) -> None:
        self._world, self._peer, self._code, self._form = world, peer, code, form
        self._tag, self._doing = (_GRADS, "gradients of a chunk") if back else (_ROWS, "rows of a chunk")
        self._counts = deque(counts)
        self._posted: deque[list[list[Posted | Tensor]]] = deque()
        self._post()

    def _post(self) -> None:
        while self._counts and len(self._posted) < AHEAD:
            count = self._counts.popleft()
            message: list[list[Posted | Tensor]] = []
            for width, dtype in self._form:
                rooms = [torch.empty(count, wide, dtype=kind) for wide, kind in self._code.forms(width, dtype)]
                message.append([self._receive(room) if room.numel() else room for room in rooms])
            self._posted.append(message)

    def _receive(self, room: Tensor) -> Posted:
        return receive(self._world, room, self._peer, tag=self._tag, doing=self._doing)

    def next(self) -> list[Tensor]:
        with self._world.clock.during(EXCHANGE, self._doing):
            return self._next()

    def _next(self) -> list[Tensor]:
        message = self._posted.popleft()
        found = []
        for parts, (_, dtype) in zip(message, self._form, strict=True):
            found.append(self._code.read([p.wait() if isinstance(p, Posted) else p for p in parts], dtype))
        self._post()
        return found
