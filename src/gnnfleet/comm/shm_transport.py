"""Messages between ranks of one machine through shared memory: the sender fills it, the receiver reads it in place.

A socket carries only a descriptor of the message; a semaphore in the memory reports that it was read. The memory is
anonymous (memfd), so nothing is left behind however a rank ends, and the size of /dev/shm does not matter.
Ranks that cannot map each other's memory (other machine, container or user) use sockets alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gnnfleet.errors import ExchangeError

MIN_BYTES = 1 << 16
"""Smaller messages go through sockets: the descriptor would cost as much."""

DESCRIPTOR_WORDS = 5
"""Integers of a descriptor: slot, file, generation, size, bytes of the message."""

_HEADER_BYTES = mmap.PAGESIZE
"""In front of the rows: a semaphore that the reader posts when it has read them."""

_libc = ctypes.CDLL(None)


@dataclass(eq=False)
class ShmSlot:
    """A piece of shared memory that this rank writes."""

    index: int
    fd: int = -1
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    generation: int = 0  # times memory was allocated for this slot: a new one makes readers map it again
    is_unread: bool = False
    reader: int = -1

    @property
    def capacity(self) -> int:
        return max(0, len(self.memory) - _HEADER_BYTES)

    @property
    def is_free(self) -> bool:
        # The semaphore also orders memory: the reader's loads come before our next stores, on every architecture.
        if self.is_unread and _libc.sem_trywait(_semaphore(self.memory)) == 0:
            self.is_unread = False
        return not self.is_unread

    def rows(self, nbytes: int) -> Tensor:
        return self.memory[_HEADER_BYTES : _HEADER_BYTES + nbytes]

    def resize(self, nbytes: int) -> None:
        """Allocate more memory; the old one is freed when the last reader unmaps it."""
        self.close()
        size = _HEADER_BYTES + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = create_memory(size)
        self.memory, self.generation = map_memory(self.fd, size), self.generation + 1
        _libc.sem_init(_semaphore(self.memory), 1, 0)  # 1: between processes

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, eq=False)
class ShmMessage:
    """A message in the memory of another rank."""

    data: Tensor
    memory: Tensor

    def mark_read(self) -> None:
        """Allow the sender to overwrite it. Call it exactly once."""
        _libc.sem_post(_semaphore(self.memory))


def _semaphore(memory: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(memory.data_ptr())


@dataclass(eq=False)
class ShmTransport:
    """Slots that this rank writes, and its mappings of the slots of others. Both lists have an entry per rank:
    ``pids`` the process whose memory can be read from here, ``readers`` the one that reads this rank's, or None."""

    rank: int
    pids: Sequence[int | None]
    readers: Sequence[int | None]
    min_bytes: int = MIN_BYTES
    _slots: list[ShmSlot] = field(default_factory=list)
    _mappings: dict[tuple[int, int], tuple[int, Tensor]] = field(default_factory=dict)

    def can_send(self, peer: int, nbytes: int) -> bool:
        """True if a message of this size to a rank goes through shared memory."""
        return nbytes >= self.min_bytes and self.readers[peer] is not None

    def can_receive(self, peer: int, nbytes: int) -> bool:
        """True if a message of this size from a rank comes through shared memory."""
        return nbytes >= self.min_bytes and self.pids[peer] is not None

    def acquire(self, nbytes: int, peer: int, *, max_slots: int, seconds: float) -> ShmSlot:
        """A slot for a message to a rank.

        If ``max_slots`` slots are unread, wait up to ``seconds`` for one of them; raises ExchangeError if none is read.
        """
        free = [slot for slot in self._slots if slot.is_free]
        if not free and len(self._slots) >= max_slots:
            free = [self._wait_until_read(self._slots, seconds)]
        fitting = [slot for slot in free if slot.capacity >= nbytes]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.capacity)
        elif free:
            slot = max(free, key=lambda slot: slot.capacity)
        else:
            slot = ShmSlot(len(self._slots))
            self._slots.append(slot)
        if slot.capacity < nbytes:
            try:
                slot.resize(nbytes)
            except OSError as error:
                raise ExchangeError(
                    f"rank {self.rank} cannot allocate {nbytes} bytes of shared memory: {error}"
                ) from error
        slot.is_unread, slot.reader = True, peer
        return slot

    def descriptor(self, slot: ShmSlot, nbytes: int) -> Tensor:
        """[DESCRIPTOR_WORDS] where the reader finds the message of a filled slot."""
        return torch.tensor([slot.index, slot.fd, slot.generation, len(slot.memory), nbytes])

    def open(self, descriptor: Tensor, peer: int) -> ShmMessage:
        """The message of a rank that its descriptor names."""
        index, fd, generation, size, nbytes = descriptor.tolist()
        mapping = self._mappings.get((peer, index))
        if mapping is None or mapping[0] != generation:
            opened = open_memory(self.pids[peer], fd)
            try:
                mapping = generation, map_memory(opened, size)
            finally:
                os.close(opened)
            self._mappings[peer, index] = mapping
        memory = mapping[1]
        return ShmMessage(memory[_HEADER_BYTES : _HEADER_BYTES + nbytes], memory)

    def subgroup(self, ranks: Sequence[int]) -> ShmTransport:
        """A transport with slots of its own between some of the ranks, numbered as listed."""
        return ShmTransport(
            ranks.index(self.rank),
            [self.pids[rank] for rank in ranks],
            [self.readers[rank] for rank in ranks],
            self.min_bytes,
        )

    def close(self, seconds: float) -> None:
        """Release all memory once its messages have been read."""
        for slot in self._slots:
            self._wait_until_read([slot], seconds).close()
        self._slots.clear()
        self._mappings.clear()

    def _wait_until_read(self, slots: Sequence[ShmSlot], seconds: float) -> ShmSlot:
        """The first of some slots whose message has been read."""
        deadline, pause = time.monotonic() + seconds, 1e-4
        while True:
            for slot in slots:
                if slot.is_free:
                    return slot
            gone = next((s.reader for s in slots if not Path(f"/proc/{self.readers[s.reader]}").exists()), None)
            if gone is not None or time.monotonic() > deadline:
                lost = slots[0].reader if gone is None else gone
                raise ExchangeError(
                    f"rank {self.rank} lost rank {lost} (rows to be read). Look at that rank's output, then --resume"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)


def open_shm_transport(
    rank: int, pids: Sequence[int | None], all_reduce: Callable[[Tensor], Tensor]
) -> ShmTransport | None:
    """Collective. A transport to the ranks whose memory this one can map; None without any in either direction.

    ``pids`` has the process of every rank in this one's pid namespace, None for others and for itself.
    ``all_reduce`` sums a tensor over ranks. A rank without candidates allocates no probe, so nobody maps it either.
    """
    probe = _probe(rank) if any(pid is not None for pid in pids) else -1
    try:
        count = len(pids)
        fds = torch.zeros(count, dtype=torch.int64)
        fds[rank] = probe
        fds = all_reduce(fds)
        seen = torch.zeros(count, count, dtype=torch.int64)
        for peer, pid in enumerate(pids):
            both_probe = min(probe, int(fds[peer])) >= 0
            seen[rank, peer] = int(pid is not None and both_probe and _can_map(pid, int(fds[peer]), peer))
        seen = all_reduce(seen)
    finally:
        if probe >= 0:
            os.close(probe)
    if not int(seen[rank].sum() + seen[:, rank].sum()):
        return None
    readable = [pid if seen[rank, peer] else None for peer, pid in enumerate(pids)]
    return ShmTransport(rank, readable, [pid if seen[peer, rank] else None for peer, pid in enumerate(pids)])


def _probe(rank: int) -> int:
    """A file descriptor of memory that identifies this rank; -1 if it cannot be had, as in some sandboxes."""
    try:
        probe = create_memory(mmap.PAGESIZE)
    except OSError:
        return -1
    os.pwrite(probe, (rank + 1).to_bytes(8, "little"), 0)
    return probe


def _can_map(pid: int, fd: int, peer: int) -> bool:
    try:
        opened = open_memory(pid, fd)
    except OSError:
        return False
    try:
        return os.pread(opened, 8, 0) == (peer + 1).to_bytes(8, "little")
    except OSError:
        return False
    finally:
        os.close(opened)


def create_memory(size: int) -> int:
    """Anonymous memory that another process can open; its pages are allocated now, so that writing cannot fail."""
    fd = os.memfd_create("gnnfleet", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_memory(pid: int | None, fd: int) -> int:
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def map_memory(fd: int, size: int) -> Tensor:
    """[size] uint8: the memory itself, shared with every process that maps it."""
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
