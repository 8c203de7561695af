"""Processors that workers share, and the threads of those that wait."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gnnfleet.comm.collectives import all_gather_rows
from gnnfleet.comm.rendezvous import ProcessInfo
from gnnfleet.comm.world import World


@dataclass(frozen=True)
class CpuShare:
    """What a worker computes on."""

    count: int  # processors it may use
    threads: int  # that it was started with
    ranks_sharing: int  # threads of all workers with the same processors, its own included

    @classmethod
    def detect(cls, world: World) -> CpuShare:
        """All ranks call it."""
        able = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        # Simulated hosts of one machine share its processors; containers have limits of their own.
        words = f"{ProcessInfo.current().pids} {list(able)}".encode()
        own = [int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "big"), torch.get_num_threads()]
        every = torch.cat(all_gather_rows(world, torch.tensor([own])))
        return cls(len(able), own[1], int(every[every[:, 0] == own[0], 1].sum()))

    @property
    def oversubscription(self) -> float:
        """How many times as long work takes at least while all of them compute."""
        return max(1.0, self.ranks_sharing / self.count)

    @property
    def free(self) -> int:
        """Threads that a worker may have while the others wait."""
        return max(self.threads, min(self.count, self.ranks_sharing))


@contextmanager
def limit_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
