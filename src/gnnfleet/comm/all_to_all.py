"""Messages whose size only the sender knows: every rank tells every other one something, all at once.

A relay is one round: sizes first, then what is to be said. Large messages for a rank of the same machine lie in memory
that both map.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnfleet.comm.p2p import PendingTransfer, receive, send
from gnnfleet.comm.shm_transport import DESCRIPTOR_WORDS
from gnnfleet.comm.world import World
from gnnfleet.report.phase_timer import EXCHANGE

_HEAD, _BODY = 4, 5

_NONE = torch.empty(0, dtype=torch.uint8)


def all_to_all_bytes(world: World, messages: Sequence[Tensor], *, what: str) -> list[Tensor]:
    """What every rank has for this one, by rank; ``messages`` [n] uint8 are by rank, this one's own is given back.

    All ranks call it together. ``what`` is for errors.
    """
    assert len(messages) == world.size and all(message.dtype == torch.uint8 for message in messages)
    with world.clock.phase(EXCHANGE, what):
        return _all_to_all(world, messages, what)


def _all_to_all(world: World, messages: Sequence[Tensor], what: str) -> list[Tensor]:
    others = [(world.rank + offset) % world.size for offset in range(1, world.size)]
    coming, going = f"{what}, coming", f"{what}, going"
    heads = {peer: receive(world, torch.empty(1, dtype=torch.int64), peer, tag=_HEAD, op=coming) for peer in others}
    sent = [send(world, torch.tensor([len(messages[peer])]), peer, tag=_HEAD, op=going) for peer in others]
    bodies: dict[int, PendingTransfer] = {}
    sizes = {peer: int(head.wait()) for peer, head in heads.items()}
    for peer, nbytes in sizes.items():
        if nbytes:
            bodies[peer] = receive(world, _recv_buffer(world, peer, nbytes), peer, tag=_BODY, op=coming)
    sent += [_send(world, messages[peer], peer, going) for peer in others if len(messages[peer])]
    found = [_NONE] * world.size
    found[world.rank] = messages[world.rank]
    for peer, body in bodies.items():
        found[peer] = _read(world, body.wait(), peer, sizes[peer])
    for message in sent:
        message.wait()
    if world.size > 1:
        world.traffic.add_round()
    return found


def _recv_buffer(world: World, peer: int, nbytes: int) -> Tensor:
    by_shelf = world.shm is not None and world.shm.can_receive(peer, nbytes)
    return torch.empty(DESCRIPTOR_WORDS, dtype=torch.int64) if by_shelf else torch.empty(nbytes, dtype=torch.uint8)


def _send(world: World, message: Tensor, peer: int, doing: str) -> PendingTransfer:
    shelf, nbytes = world.shm, len(message)
    if shelf is None or not shelf.can_send(peer, nbytes):
        return send(world, message, peer, tag=_BODY, op=doing)
    slot = shelf.acquire(nbytes, peer, max_slots=2 * world.size, seconds=world.timeout)
    slot.rows(nbytes).copy_(message)
    return send(world, shelf.descriptor(slot, nbytes), peer, tag=_BODY, op=doing, counted=nbytes)


def _read(world: World, message: Tensor, peer: int, nbytes: int) -> Tensor:
    if world.shm is None or not world.shm.can_receive(peer, nbytes):
        return message
    found = world.shm.open(message, peer)
    copy = found.data.clone()
    found.mark_read()
    return copy


class ByteBuffer:
    """A message put together from tensors, or taken apart again; whoever reads knows what comes next.

    Every tensor begins at a multiple of 8 bytes, so that it can be read where it lies.
    """

    def __init__(self, message: Tensor | None = None) -> None:
        self._parts: list[Tensor] = []
        self._message, self._at = message, 0

    def write(self, tensor: Tensor) -> None:
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        self._parts.append(raw)
        if pad := -len(raw) % 8:
            self._parts.append(torch.zeros(pad, dtype=torch.uint8))

    @property
    def message(self) -> Tensor:
        return torch.cat(self._parts) if self._parts else _NONE

    def read(self, count: int, dtype: torch.dtype, width: int | None = None) -> Tensor:
        """The next [count], or [count, width], numbers."""
        assert self._message is not None
        nbytes = count * (1 if width is None else width) * dtype.itemsize
        piece = self._message[self._at : self._at + nbytes].view(dtype)
        self._at += nbytes + -nbytes % 8
        return piece if width is None else piece.view(count, width)
