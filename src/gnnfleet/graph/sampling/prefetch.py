"""Prefetching: the next values are computed in a thread while the present one is used.

An error of the thread is raised in the loop, with its traceback. Leaving the loop, dropping the iterator or ending the
program ends the thread. All waits have a limit, so Ctrl-C is handled.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from gnnfleet.ops.native import single_threaded

T = TypeVar("T")

DEFAULT_DEPTH = 2

_POLL_SECONDS = 0.1
_JOIN_SECONDS = 30.0  # limit for the value that the thread is computing


@dataclass(frozen=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True)
class _End:
    error: BaseException | None = None


def prefetch_items(source: Generator[T], depth: int) -> Generator[T]:
    """Yield from ``source``, which runs in a thread up to ``depth`` values ahead; with depth 0 it runs in the loop.

    At most ``depth`` + 1 values are in memory. Close the generator if the loop may end early: a generator that is only
    dropped waits for its thread where no interrupt is handled.
    """
    return _prefetch(source, depth) if depth else source


def _prefetch(source: Iterator[T], depth: int) -> Generator[T]:
    ready: queue.Queue[_Item[T] | _End] = queue.Queue()
    slots, stop = threading.Semaphore(depth), threading.Event()
    # Not a daemon: the interpreter kills those inside compiled code. ``_produce`` ends with the main thread instead.
    thread = threading.Thread(target=_produce, args=(source, ready, slots, stop), name="gnnfleet-prefetch")
    thread.start()
    try:
        while True:
            item = _next(ready, thread)
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            slots.release()
            yield item.value
            del item
    finally:
        stop.set()
        thread.join(_JOIN_SECONDS)


def _next(ready: queue.Queue[_Item[T] | _End], thread: threading.Thread) -> _Item[T] | _End:
    while True:
        try:
            return ready.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            assert thread.is_alive() or not ready.empty(), "the prefetch thread ended without a result or an error"


def _produce(
    source: Iterator[T], ready: queue.Queue[_Item[T] | _End], slots: threading.Semaphore, stop: threading.Event
) -> None:
    with single_threaded():
        try:
            while _wait(slots, stop):
                ready.put(_Item(next(source)))
        except StopIteration:
            ready.put(_End())
        except BaseException as error:
            ready.put(_End(error))


def _wait(slots: threading.Semaphore, stop: threading.Event) -> bool:
    """Wait for a free slot; False once the loop or the program has ended."""
    while not stop.is_set() and threading.main_thread().is_alive():
        if slots.acquire(timeout=_POLL_SECONDS):
            return True
    return False


def auto_depth(num_bytes: int, *, processes: int = 1) -> int:
    """Depth for steps that read some of ``num_bytes``, in each of several processes of this machine.

    A thread in addition to as many busy ones as there are cores slows all of them down. It pays off if there is a core
    for it, or if most of the bytes come from the disk.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DEFAULT_DEPTH if cores > processes * torch.get_num_threads() or num_bytes > memory // 2 else 0
