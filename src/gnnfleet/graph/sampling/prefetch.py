"""Making the next things while the present one is used: one thread, a short queue.

An error of the thread is raised where the things are used, with its traceback. Leaving the loop, dropping the iterator
or ending the program ends the thread; nothing waits without a limit, so Ctrl-C is heard.
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

_POLL = 0.1  # seconds between looks at whether anyone is still there
_JOIN = 30.0  # seconds a thread gets to finish the thing it is making


@dataclass(frozen=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True)
class _End:
    error: BaseException | None = None


def prefetch_items(things: Generator[T], depth: int) -> Generator[T]:
    """``things``, up to ``depth`` of them made ahead in a thread of their own; 0 makes each when it is asked for.

    With those in use at most ``depth`` + 1 are in memory: the next is begun when one is taken. Close it where the loop
    may end early: one that is only dropped waits for its thread where no interrupt can be heard.
    """
    return _ahead(things, depth) if depth else things


def _ahead(things: Iterator[T], depth: int) -> Generator[T]:
    ready: queue.Queue[_Item[T] | _End] = queue.Queue()
    room, stop = threading.Semaphore(depth), threading.Event()
    # Not a daemon: the interpreter kills those inside compiled code. ``_produce`` ends with the main thread instead.
    thread = threading.Thread(target=_produce, args=(things, ready, room, stop), name="gnnfleet-prefetch")
    thread.start()
    try:
        while True:
            item = _next(ready, thread)
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            room.release()
            yield item.value
            del item
    finally:
        stop.set()
        thread.join(_JOIN)


def _next(ready: queue.Queue[_Item[T] | _End], thread: threading.Thread) -> _Item[T] | _End:
    while True:
        try:
            return ready.get(timeout=_POLL)
        except queue.Empty:
            assert thread.is_alive() or not ready.empty(), "the prefetch thread ended without a word"


def _produce(
    things: Iterator[T], ready: queue.Queue[_Item[T] | _End], room: threading.Semaphore, stop: threading.Event
) -> None:
    with single_threaded():
        try:
            while _wait(room, stop):
                thing = next(things, _NOTHING)
                if thing is _NOTHING:
                    ready.put(_End())
                    return
                ready.put(_Item(thing))  # type: ignore[arg-type]
                del thing
        except BaseException as error:
            ready.put(_End(error))


_NOTHING = object()


def _wait(room: threading.Semaphore, stop: threading.Event) -> bool:
    """Whether there is room and someone will take what is made."""
    while not stop.is_set() and threading.main_thread().is_alive():
        if room.acquire(timeout=_POLL):
            return True
    return False


def auto_depth(read: int, *, processes: int = 1) -> int:
    """How far ahead to work where each step reads some of ``read`` bytes, in each of some processes of this machine.

    A thread beside as many busy ones as there are cores makes all of them wait for it; it pays for itself where there
    is a core for it, or where most of what is read comes from the disk.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DEFAULT_DEPTH if cores > processes * torch.get_num_threads() or read > memory // 2 else 0
