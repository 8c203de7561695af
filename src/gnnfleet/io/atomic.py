"""Files and directories replaced in one step, and what killed writers left removed."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import socket
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial-"


def exchange_directories(new: Path, old: Path) -> None:
    """Swap two directories in one step, so that a kill in between loses neither."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2 is None or renameat2(here, os.fsencode(new), here, os.fsencode(old), exchange) != 0:
        # A file system or kernel without it: two renames, with a moment in which the target does not exist.
        aside = new.with_name(new.name + "-old")
        old.rename(aside)
        new.rename(old)
        aside.rename(new)


def remove_stale(target: Path) -> None:
    """Remove what killed writers of the same target on this host left behind."""
    for path in target.parent.glob(f".{target.name}{PARTIAL}*"):
        host, _, pid = path.name.split(PARTIAL, 1)[1].rpartition("-")[0].rpartition("-")
        if host == socket.gethostname() and pid.isdigit() and not _process_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that a reader sees the old or the new one, never a part."""
    partial = path.with_name(f".{path.name}{PARTIAL}{secrets.token_hex(3)}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            flush(file)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
