"""End of a worker: with its launcher, and soon after a stop signal, whatever it is waiting for.

A Python signal handler runs only between bytecodes of the main thread, which may be inside an exchange that never ends.
So a thread reads the signal's number from a pipe, gives the main thread time to clean up, and then ends the process.
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
    """Let the kernel kill this process when its parent ends for any reason; Linux only.

    ``parent`` is the pid of the starter: another parent by now means that the starter has ended.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def end_soon_after_signals(stopping: Callable[[], None]) -> None:
    """Make stop signals raise KeyboardInterrupt here and end the process within a few seconds.

    ``stopping`` is called at once, in another thread. Call this from the main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _STOP_SIGNALS:
        signal.signal(number, _interrupt)
    threading.Thread(target=_wait, args=(reader, stopping), name="signals", daemon=True).start()


def _wait(reader: int, stopping: Callable[[], None]) -> NoReturn:
    number = 0
    while number not in _STOP_SIGNALS:
        number = os.read(reader, 1)[0]
    threading.Thread(target=stopping, daemon=True).start()
    time.sleep(GRACE_PERIOD)
    os._exit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # Only once: a second signal would interrupt the clean-up.
    for stop in _STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def prefer_huge_pages() -> None:
    """Let torch use huge pages unless the user decided: new tensors then cause far fewer page faults."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
