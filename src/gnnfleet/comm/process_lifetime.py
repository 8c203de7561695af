"""How a worker ends when it should: with its launcher, and soon after a signal, whatever it is waiting for.

A Python handler runs only between two steps of the main thread, which may be inside an exchange that never ends. So a
thread reads the signal's number from a pipe, gives the main thread a moment to clean up, and then ends the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

GRACE_PERIOD = 2.0
_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent ends, however that happens; Linux only.

    ``parent`` is who started it: when it has another one by now, the parent is gone already.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def end_soon_after_signals(stopping: Callable[[], None]) -> None:
    """From now on a stop signal raises KeyboardInterrupt here and ends the process within a few seconds.

    ``stopping`` is called at once, in another thread. Call this from the main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _STOP_SIGNALS:
        signal.signal(number, _interrupt)
    threading.Thread(target=_wait, args=(reader, stopping), name="leash", daemon=True).start()


def _wait(reader: int, stopping: Callable[[], None]) -> NoReturn:
    number = 0
    while number not in _STOP_SIGNALS:
        number = os.read(reader, 1)[0]
    threading.Thread(target=stopping, daemon=True).start()
    time.sleep(GRACE_PERIOD)
    os._exit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # Once: a second one would tear the cleaning up.
    for stop in _STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def prefer_huge_pages() -> None:
    """Let torch ask for huge pages, unless the user decided: fresh tensors then cost far fewer page faults."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
