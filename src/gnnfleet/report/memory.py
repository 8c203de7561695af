"""Memory of this process: resident now and at its peak, and the peak of live tensors."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def rss() -> int:
    """Resident bytes now; 0 if the system does not report it."""
    return _status("VmRSS")


def peak_rss() -> int:
    """Peak of resident bytes (VmHWM)."""
    return _status("VmHWM")


def own_rss() -> int:
    """Resident anonymous bytes now: without the mapped pages of a store, which the system can drop."""
    return _status("RssAnon")


def memory_limit() -> int:
    """Bytes this process may use: those of the machine, or the limit of its control group."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _limit_files():
        with suppress(OSError, ValueError):
            limits.append(int(file.read_text()))
    return min(limits)


def _limit_files() -> list[Path]:
    """The files with the memory limits of this process's control groups, of versions 1 and 2."""
    root, files = Path("/sys/fs/cgroup"), []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            files.append(root / "memory" / path.lstrip("/") / "memory.limit_in_bytes")
        elif not controllers:
            files.append(root / path.lstrip("/") / "memory.max")
    return files


def _status(key: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(key + ":")), 0)


def peak_tensors(work: Callable[[], object]) -> int:
    """Peak of allocations minus frees while ``work`` runs, under torch's profiler. Slow: not for timing."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would announce its start and end on standard error
    from torch.profiler import ProfilerActivity, profile

    gc.collect()  # garbage freed during the measurement would be subtracted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    moves = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = highest = 0
    for _, change in moves:
        live += change
        highest = max(highest, live)
    return highest
