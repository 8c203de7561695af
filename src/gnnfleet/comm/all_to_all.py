"""All-to-all exchange of messages whose size only the sender knows, and their packing.

One exchange is one round: sizes first, then contents. Large messages to ranks of the same machine go through shared
memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnfleet.comm.p2p import PendingTransfer, receive, send
from gnnfleet.comm.shm_transport import DESCRIPTOR_WORDS
from gnnfleet.comm.world import World
from gnnfleet.report.phase_timer import EXCHANGE

_SIZE_TAG, _CONTENT_TAG = 4, 5

_EMPTY = torch.empty(0, dtype=torch.uint8)


def all_to_all_bytes(world: World, messages: Sequence[Tensor], *, op: str) -> list[Tensor]:
    """Collective. The messages of all ranks for this one, by rank.

    ``messages`` [n] uint8 are by receiving rank; the one to itself is returned as it is. ``op`` is for errors.
    """
    assert len(messages) == world.size and all(message.dtype == torch.uint8 for message in messages)
    with world.clock.phase(EXCHANGE, op):
        return _all_to_all(world, messages, op)


def _all_to_all(world: World, messages: Sequence[Tensor], op: str) -> list[Tensor]:
    peers = [(world.rank + offset) % world.size for offset in range(1, world.size)]
    receiving, sending = f"receiving {op}", f"sending {op}"
    incoming_sizes = {
        peer: receive(world, torch.empty(1, dtype=torch.int64), peer, tag=_SIZE_TAG, op=receiving) for peer in peers
    }
    transfers = [send(world, torch.tensor([len(messages[peer])]), peer, tag=_SIZE_TAG, op=sending) for peer in peers]
    contents: dict[int, PendingTransfer] = {}
    sizes = {peer: int(size.wait()) for peer, size in incoming_sizes.items()}
    for peer, nbytes in sizes.items():
        if nbytes:
            contents[peer] = receive(world, _recv_buffer(world, peer, nbytes), peer, tag=_CONTENT_TAG, op=receiving)
    transfers += [_send(world, messages[peer], peer, sending) for peer in peers if len(messages[peer])]
    received = [_EMPTY] * world.size
    received[world.rank] = messages[world.rank]
    for peer, content in contents.items():
        received[peer] = _read(world, content.wait(), peer, sizes[peer])
    for transfer in transfers:
        transfer.wait()
    if world.size > 1:
        world.traffic.add_round()
    return received


def _recv_buffer(world: World, peer: int, nbytes: int) -> Tensor:
    if world.shm is not None and world.shm.can_receive(peer, nbytes):
        return torch.empty(DESCRIPTOR_WORDS, dtype=torch.int64)
    return torch.empty(nbytes, dtype=torch.uint8)


def _send(world: World, message: Tensor, peer: int, op: str) -> PendingTransfer:
    shm, nbytes = world.shm, len(message)
    if shm is None or not shm.can_send(peer, nbytes):
        return send(world, message, peer, tag=_CONTENT_TAG, op=op)
    slot = shm.acquire(nbytes, peer, max_slots=2 * world.size, seconds=world.timeout)
    slot.rows(nbytes).copy_(message)
    return send(world, shm.descriptor(slot, nbytes), peer, tag=_CONTENT_TAG, op=op, counted=nbytes)


def _read(world: World, message: Tensor, peer: int, nbytes: int) -> Tensor:
    if world.shm is None or not world.shm.can_receive(peer, nbytes):
        return message
    in_shm = world.shm.open(message, peer)
    copy = in_shm.data.clone()
    in_shm.mark_read()
    return copy


class ByteBuffer:
    """Packs tensors into a message or unpacks one; the reader knows counts and dtypes.

    Every tensor begins at a multiple of 8 bytes, so that it can be viewed in place.
    """

    def __init__(self, message: Tensor | None = None) -> None:
        self._parts: list[Tensor] = []
        self._message, self._position = message, 0

    def write(self, tensor: Tensor) -> None:
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        self._parts.append(raw)
        if pad := -len(raw) % 8:
            self._parts.append(torch.zeros(pad, dtype=torch.uint8))

    @property
    def message(self) -> Tensor:
        return torch.cat(self._parts) if self._parts else _EMPTY

    def read(self, count: int, dtype: torch.dtype, width: int | None = None) -> Tensor:
        """The next [count], or [count, width], numbers."""
        assert self._message is not None
        nbytes = count * (1 if width is None else width) * dtype.itemsize
        values = self._message[self._position : self._position + nbytes].view(dtype)
        self._position += nbytes + -nbytes % 8
        return values if width is None else values.view(count, width)


def all_to_all_lists(
    world: World, lists: Sequence[Sequence[Tensor]], dtype: torch.dtype, *, op: str
) -> list[list[Tensor]]:
    """Collective. The lists of all ranks for this one, by rank; ``lists`` has as many [·] ``dtype`` for each rank."""
    messages = []
    for outgoing in lists:
        buffer = ByteBuffer()
        buffer.write(torch.tensor(list(map(len, outgoing)), dtype=torch.int64))
        for values in outgoing:
            buffer.write(values)
        messages.append(buffer.message)
    received = []
    for message in all_to_all_bytes(world, messages, op=op):
        buffer = ByteBuffer(message)
        lengths = buffer.read(len(lists[world.rank]), torch.int64).tolist()
        received.append([buffer.read(length, dtype) for length in lengths])
    return received
