"""The manifest of a bundle, validated before use.

A manifest may be damaged, or written by an attacker who wants a reader to open other files or to allocate too much
memory. So names must stay inside the directory, sizes must match the files, and a digest covers the whole manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, cast

from gnnfleet.errors import StoreError

VERSION = 1
MAX_BYTES = 1 << 28
"""The largest accepted manifest. It holds class names, but nothing that grows with the number of nodes or edges."""


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    """Read ``<kind>.json`` of a directory; raises StoreError unless it is valid and matches the files."""
    file = path / f"{kind}.json"
    if not path.is_dir():
        raise StoreError(f"no {kind} at {path}: the directory does not exist")
    if not file.is_file():
        raise StoreError(f"{path} is not a complete {kind}: {file.name} is missing")
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
        manifest = json.loads(file.read_bytes())
        actual_kind, version, digest = manifest["kind"], manifest["version"], manifest["digest"]
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise StoreError(f"{file} is damaged ({error}): make the {kind} again from its source") from error
    if actual_kind != kind or version != VERSION:
        raise StoreError(
            f"{file} is a {str(actual_kind)[:40]} of version {str(version)[:40]}, this gnnfleet reads {kind} version "
            f"{VERSION}: make it again"
        )
    if manifest_digest(manifest) != digest:
        raise StoreError(f"{file} was altered since it was written: make the {kind} again from its source")
    if not isinstance(manifest.get("meta"), dict) or not isinstance(manifest.get("files"), dict):
        raise StoreError(f"{file} is damaged (no meta or files): make the {kind} again from its source")
    for name, entry in manifest["files"].items():
        if (problem := _problem(name, entry)) is not None:
            raise StoreError(f"{file} is damaged ({name[:80]!r} {problem}): make the {kind} again from its source")
        check_size(path / name, entry["bytes"])
    return cast(dict[str, Any], manifest)


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its digest."""
    body = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def check_size(path: Path, expected: int) -> None:
    """Raise StoreError unless the path is a regular file of that size; opening a pipe would block for ever."""
    try:
        info = path.stat()
    except OSError as error:
        raise StoreError(f"{path} is missing: the directory is damaged, make it again from the source") from error
    if not stat.S_ISREG(info.st_mode):
        raise StoreError(f"{path} is not a regular file: the directory is damaged, make it again from the source")
    if info.st_size != expected:
        raise StoreError(
            f"{path} has {info.st_size} bytes, expected {expected}: the file is damaged, make it again from the source"
        )


def _problem(name: str, entry: Any) -> str | None:
    """The first problem with a file's name or entry, if any."""
    pure = PurePosixPath(name)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\0" in name:
        return "is not a name inside the directory"
    if not isinstance(entry, dict) or not _is_count(entry.get("bytes")):
        return "has no size"
    if not isinstance(entry.get("sha256"), str) or not re.fullmatch("[0-9a-f]{64}", entry["sha256"]):
        return "has no checksum"
    if name.endswith(".npy"):
        shape = entry.get("shape")
        if not isinstance(entry.get("dtype"), str) or not isinstance(shape, list) or not all(map(_is_count, shape)):
            return "has no dtype or shape"
    return None


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 62
