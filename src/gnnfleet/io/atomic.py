"""Atomic replacement of files and directories, and removal of what killed writers left behind."""

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
    at_fdcwd, rename_exchange = -100, 2
    if renameat2 is None or renameat2(at_fdcwd, os.fsencode(new), at_fdcwd, os.fsencode(old), rename_exchange) != 0:
        # Some file systems and kernels lack it: after the first rename the target does not exist for a moment.
        backup = new.with_name(new.name + "-old")
        old.rename(backup)
        new.rename(old)
        backup.rename(new)


def partial_path(target: Path) -> Path:
    """A new path for the partial output of ``target``, after removing partial outputs of killed writers."""
    remove_stale(target)
    return target.parent / f".{target.name}{PARTIAL}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def remove_stale(target: Path) -> None:
    """Remove partial outputs of ``target`` by killed writers on this host."""
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
        pass  # it belongs to another user
    return True


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that a reader sees the old or the new content, never a part."""
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
