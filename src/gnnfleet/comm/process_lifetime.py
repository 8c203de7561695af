"""Start and end of a worker process: it ends with its launcher, and soon after a stop signal even if it is waiting.

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
from contextlib import suppress
from types import FrameType
from typing import NoReturn

GRACE_PERIOD = 2.0
"""Seconds between a stop signal and the end of the process."""

_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def set_up_worker(parent: int | None, threads: int | None) -> None:
    """Prepare a process that a launcher started, before torch is imported: its end, its output, threads, memory."""
    die_with_parent(parent)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output is for the launcher's result
    prefer_huge_pages()
    if threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # lost peers are reported by gnnfleet


def exit_process(code: int) -> NoReturn:
    """End the process without exit handlers: threads may be waiting inside network code."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def interrupt_code(interrupt: KeyboardInterrupt) -> int:
    """The exit code after a stop signal, or Ctrl-C."""
    return 128 + int(interrupt.args[0]) if interrupt.args else 130


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent ends for any reason; Linux only.

    ``parent`` is the pid of the starter. If the parent is another process by now, the starter has ended.
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
    # Only once: a second signal would interrupt the cleanup.
    for stop in _STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def prefer_huge_pages() -> None:
    """Let torch use huge pages unless the user decided: new tensors then cause far fewer page faults."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
