"""Memory of this process: resident now and at its highest, and the highest sum of live tensors."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def rss() -> int:
    """Resident bytes now; 0 where the system does not say."""
    return _status("VmRSS")


def peak_rss() -> int:
    """The most resident bytes this process has had (VmHWM)."""
    return _status("VmHWM")


def own_rss() -> int:
    """Resident bytes now that are this process's own: without the mapped pages of a store, which can be taken back."""
    return _status("RssAnon")


def memory_limit() -> int:
    """Bytes this process may use: the machine's, or what its control group leaves of them."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for place in _groups():
        with suppress(OSError, ValueError):
            found.append(int(place.read_text()))
    return min(found)


def _groups() -> list[Path]:
    """Where the limits of this process's control groups are written, of both kinds."""
    root, found = Path("/sys/fs/cgroup"), []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append(root / "memory" / path.lstrip("/") / "memory.limit_in_bytes")
        elif not controllers:
            found.append(root / path.lstrip("/") / "memory.max")
    return found


def _status(word: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    found = next((line for line in lines if line.startswith(word + ":")), None)
    return 1024 * int(found.split()[1]) if found else 0


def peak_tensors(work: Callable[[], object]) -> int:
    """The highest sum of allocations minus frees while ``work`` runs, under torch's profiler. Slow: not for timing."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would say on standard error that it starts and ends
    from torch.profiler import ProfilerActivity, profile

    gc.collect()  # circles of an earlier time that were freed meanwhile would be taken off
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    moves = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = highest = 0
    for _, change in moves:
        live += change
        highest = max(highest, live)
    return highest
