"""Rows for ranks of the same machine lie on a shelf: memory that both map, filled by one, read in place by the other.

What travels between them is a word that says where; that it was read is noted in the memory itself. The memory has no
name in any file system (memfd), so nothing is left behind however a rank ends, and a small /dev/shm does not matter.
Ranks that cannot see each other's memory (another machine, container or user) talk through sockets as ever.
"""

from __future__ import annotations

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
"""Smaller messages go through sockets: a word about them would cost as much."""

DESCRIPTOR_WORDS = 6
"""Numbers in a word: place, file, issue, size, serial, bytes."""

_HEAD = mmap.PAGESIZE
"""In front of the rows: the serial number of the last message that was read."""


@dataclass(eq=False)
class ShmSlot:
    """A piece of memory on this rank's shelf."""

    place: int
    fd: int = -1
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    generation: int = 0  # how often memory was taken for this place: readers map it anew when that changes
    serial: int = 0  # of the last message
    reader: int = -1

    @property
    def capacity(self) -> int:
        return max(0, len(self.memory) - _HEAD)

    @property
    def is_free(self) -> bool:
        return self.fd < 0 or _head(self.memory) == self.serial

    def rows(self, nbytes: int) -> Tensor:
        return self.memory[_HEAD : _HEAD + nbytes]

    def resize(self, nbytes: int) -> None:
        """Take more memory; what was there is given back when the last reader lets go of it."""
        self.close()
        size = _HEAD + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = create_memory(size)
        self.memory, self.generation, self.serial = map_memory(self.fd, size), self.generation + 1, 0

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, eq=False)
class ShmMessage:
    """A message where another rank laid it."""

    data: Tensor
    memory: Tensor
    serial: int

    def mark_read(self) -> None:
        """It was read: its bytes may change from now on."""
        self.memory[:8].view(torch.int64)[0] = self.serial


@dataclass(eq=False)
class ShmTransport:
    """What this rank lays out for others, and its view of theirs. ``pids`` has a place for every rank: the process
    whose memory can be read from here, or None; ``readers`` has the process that reads this one's, or None."""

    rank: int
    pids: Sequence[int | None]
    readers: Sequence[int | None]
    min_bytes: int = MIN_BYTES
    _slots: list[ShmSlot] = field(default_factory=list)
    _maps: dict[tuple[int, int], tuple[int, Tensor]] = field(default_factory=dict)

    def can_send(self, peer: int, nbytes: int) -> bool:
        """Whether a message to a rank goes by the shelf."""
        return nbytes >= self.min_bytes and self.readers[peer] is not None

    def can_receive(self, peer: int, nbytes: int) -> bool:
        """Whether a message from a rank comes by its shelf."""
        return nbytes >= self.min_bytes and self.pids[peer] is not None

    def acquire(self, nbytes: int, peer: int, *, max_slots: int, seconds: float) -> ShmSlot:
        """Memory for a message to a rank. Where ``most`` slots wait to be read it waits for one of them, at most so
        long; raises ExchangeError when nobody reads them."""
        free = [slot for slot in self._slots if slot.is_free]
        if not free and len(self._slots) >= max_slots:
            free = [self._await(self._slots, seconds)]
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
                raise ExchangeError(f"rank {self.rank} has no memory for {nbytes} bytes of rows: {error}") from error
        slot.serial, slot.reader = slot.serial + 1, peer
        return slot

    def descriptor(self, slot: ShmSlot, nbytes: int) -> Tensor:
        """[WORDS] what the reader of a filled slot has to know."""
        return torch.tensor([slot.place, slot.fd, slot.generation, len(slot.memory), slot.serial, nbytes])

    def open(self, word: Tensor, peer: int) -> ShmMessage:
        """The message that a word of a rank is about."""
        place, fd, issue, size, serial, nbytes = word.tolist()
        known = self._maps.get((peer, place))
        if known is None or known[0] != issue:
            opened = open_memory(self.pids[peer], fd)
            try:
                known = issue, map_memory(opened, size)
            finally:
                os.close(opened)
            self._maps[peer, place] = known
        return ShmMessage(known[1][_HEAD : _HEAD + nbytes], known[1], serial)

    def subgroup(self, ranks: Sequence[int]) -> ShmTransport:
        """A shelf of its own for some of the ranks, numbered as listed."""
        own = ranks.index(self.rank)
        return ShmTransport(
            own, [self.pids[rank] for rank in ranks], [self.readers[rank] for rank in ranks], self.min_bytes
        )

    def close(self, seconds: float) -> None:
        """Let go of everything, once it was read."""
        for slot in self._slots:
            self._await([slot], seconds).close()
        self._slots.clear()
        self._maps.clear()

    def _await(self, slots: Sequence[ShmSlot], seconds: float) -> ShmSlot:
        """The first of some slots to be read."""
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


def open_shm_transport(rank: int, pids: Sequence[int | None], agree: Callable[[Tensor], Tensor]) -> ShmTransport | None:
    """A shelf for ranks whose processes this one may see; None where it sees none or nobody sees it.

    ``pids`` has the process of every rank in this one's namespace, None for others and for itself. ``agree`` sums a
    tensor over all ranks, which call this together. Who may see nobody takes no memory, so nobody sees it either.
    """
    probe = _probe(rank) if any(pid is not None for pid in pids) else -1
    try:
        count = len(pids)
        fds = torch.zeros(count, dtype=torch.int64)
        fds[rank] = probe
        fds = agree(fds)
        seen = torch.zeros(count, count, dtype=torch.int64)
        for peer, pid in enumerate(pids):
            is_there = min(probe, int(fds[peer])) >= 0
            seen[rank, peer] = int(pid is not None and is_there and _can_map(pid, int(fds[peer]), peer))
        seen = agree(seen)
    finally:
        if probe >= 0:
            os.close(probe)
    if not int(seen[rank].sum() + seen[:, rank].sum()):
        return None
    readable = [pid if seen[rank, peer] else None for peer, pid in enumerate(pids)]
    return ShmTransport(rank, readable, [pid if seen[peer, rank] else None for peer, pid in enumerate(pids)])


def _probe(rank: int) -> int:
    """Memory for others to look at; -1 where there is none to be had, as in a sandbox that forbids it."""
    try:
        probe = create_memory(mmap.PAGESIZE)
    except OSError:
        return -1
    os.pwrite(probe, (rank + 1).to_bytes(8, "little"), 0)
    return probe


def _can_map(pid: int, fd: int, peer: int) -> bool:
    try:
        found = open_memory(pid, fd)
    except OSError:
        return False
    try:
        return os.pread(found, 8, 0) == (peer + 1).to_bytes(8, "little")
    except OSError:
        return False
    finally:
        os.close(found)


def create_memory(size: int) -> int:
    """Anonymous memory that another process can open; its pages are taken now, so that filling it cannot fail."""
    fd = os.memfd_create("gnnfleet", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_memory(pid: int | None, fd: int) -> int:
    """Memory that another process took."""
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def map_memory(fd: int, size: int) -> Tensor:
    """[size] uint8: the memory itself, shared with whoever maps it too."""
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)


def _head(memory: Tensor) -> int:
    return int(memory[:8].view(torch.int64)[0])
