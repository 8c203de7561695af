"""A directory of plain arrays with one checksummed manifest: the format of stores and partitions on disk.

Nothing is pickled. A bundle is written to a sibling directory whose name marks it as partial, the manifest last, and
then renamed, so an incomplete directory can never be opened. Opening checks the size and header of every file;
``verify`` reads every byte.

A manifest may be damaged, or written by an attacker who wants a reader to open other files or to allocate too much
memory. So names must stay inside the directory, sizes must match the files, and a digest covers the whole manifest.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Self, cast

import numpy as np
import torch
from torch import Tensor

from gnnfleet.errors import StoreError
from gnnfleet.io.atomic import PARTIAL, exchange_directories, flush, partial_path, sync_directory, write_atomically

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


# numpy parses headers as Python expressions, and Python 3.11 cannot do that in several threads at once.
_HEADER_LOCK = threading.Lock()

# Name in the manifest → (torch dtype, numpy dtype in the .npy file). numpy has no bfloat16: bits are stored as uint16.
DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "float64": (torch.float64, "<f8"),
    "float32": (torch.float32, "<f4"),
    "float16": (torch.float16, "<f2"),
    "bfloat16": (torch.bfloat16, "<u2"),
    "int64": (torch.int64, "<i8"),
    "int32": (torch.int32, "<i4"),
    "int8": (torch.int8, "|i1"),
    "uint8": (torch.uint8, "|u1"),
}
_NAME_OF = {torch_dtype: name for name, (torch_dtype, _) in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The manifest's name of a dtype; raises StoreError for a dtype that cannot be stored."""
    if dtype not in _NAME_OF:
        raise StoreError(f"arrays of {dtype} cannot be stored; expected one of {', '.join(DTYPES)}")
    return _NAME_OF[dtype]


class Bundle:
    """A complete directory, opened for reading. Arrays are memory-mapped copy-on-write, so files never change."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.meta: dict[str, Any] = manifest["meta"]
        self.files: dict[str, dict[str, Any]] = manifest["files"]
        self.digest: str = manifest["digest"]
        self._mapped: dict[str, Tensor] = {}

    @classmethod
    def open(cls, path: str | Path, kind: str) -> Self:
        """Read ``<kind>.json`` and check the size of every file; raises StoreError for a damaged directory."""
        path = Path(path)
        if PARTIAL in path.name:
            raise StoreError(
                f"{path} is the partial output of an interrupted command, not a {kind}: remove it and run the command "
                "again"
            )
        manifest = read_manifest(path, kind)
        for name, entry in manifest["files"].items():
            _check_extent(path / name, entry)
        return cls(path, manifest)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def tensor(self, name: str) -> Tensor:
        """Map an array as a tensor; writing to it changes memory, never the file."""
        if name not in self._mapped:
            self._mapped[name] = self._map(name)
        return self._mapped[name]

    def _map(self, name: str) -> Tensor:
        entry = self.files[name]
        torch_dtype, numpy_dtype = DTYPES[entry["dtype"]]
        shape = tuple(entry["shape"])
        if 0 in shape:
            return torch.empty(shape, dtype=torch_dtype)
        try:
            with _HEADER_LOCK:
                array = np.load(self.path / name, mmap_mode="c", allow_pickle=False)
        except Exception as error:  # numpy's header parser fails in many ways
            raise StoreError(
                f"{self.path / name} cannot be read as an array ({error}): make it again from the source"
            ) from error
        if array.shape != shape or array.dtype.str != numpy_dtype:
            raise StoreError(
                f"{self.path / name} was altered: expected {entry['dtype']} {list(shape)}, "
                f"found {array.dtype} {list(array.shape)}. Make it again from the source."
            )
        tensor = torch.from_numpy(np.asarray(array))
        return tensor.view(torch_dtype) if torch_dtype is torch.bfloat16 else tensor

    def array_file(self, name: str) -> tuple[Path, int, np.dtype[Any]]:
        """Locate an array's bytes for buffered readers: path, offset, dtype."""
        return self.path / name, ArrayWriter.HEADER, np.dtype(DTYPES[self.files[name]["dtype"]][1])

    def verify(self, advance: Callable[[int], None] = lambda _: None, *, names: Collection[str] | None = None) -> None:
        """Compare files (by default all) with their checksums; raises StoreError naming all that differ."""
        chosen = list(self.files if names is None else names)
        with ThreadPoolExecutor(max_workers=2) as pool:
            sums = pool.map(lambda name: checksum(self.path / name, advance), chosen)
            altered = [name for name, sha in zip(chosen, sums, strict=True) if sha != self.files[name]["sha256"]]
        if altered:
            raise StoreError(
                f"{self.path}: altered since it was written: {', '.join(altered)}. Make it again from the source."
            )

    @property
    def nbytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.files.values())


class ArrayWriter:
    """One ``.npy`` file that grows by rows; its header is written last, with the final number of rows."""

    HEADER = 128  # bytes; numpy pads headers to a multiple of 64

    def __init__(self, path: Path, dtype: torch.dtype, columns: tuple[int, ...] = ()) -> None:
        self.path = path
        self.dtype = dtype
        self.columns = columns
        self.rows = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("wb")
        self._file.seek(self.HEADER)

    def append(self, rows: Tensor) -> None:
        """Append ``rows`` ([n, *columns]), cast to the array's dtype."""
        assert tuple(rows.shape[1:]) == self.columns, (rows.shape, self.columns)
        rows = rows.detach().to(device="cpu", dtype=self.dtype).contiguous()
        raw = rows.view(torch.uint16) if self.dtype is torch.bfloat16 else rows
        self._file.write(raw.numpy().reshape(-1).view(np.uint8).data if raw.numel() else b"")
        self.rows += rows.shape[0]

    def close(self) -> None:
        """Write the header and flush the file to disk."""
        head = io.BytesIO()
        fields = {"descr": DTYPES[dtype_name(self.dtype)][1], "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(head, fields)
        text = head.getvalue()
        assert len(text) <= self.HEADER, "the header exceeds its reserved space"
        if len(text) < self.HEADER:  # version 1.0: magic, two bytes of length, text padded with spaces, newline
            text = text[:8] + (self.HEADER - 10).to_bytes(2, "little") + text[10:-1].ljust(self.HEADER - 11) + b"\n"
        self._file.seek(0)
        self._file.write(text)
        flush(self._file)
        self._file.close()

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.columns)

    def abort(self) -> None:
        self._file.close()


class BundleWriter:
    """Collects arrays and files in a partial directory; ``commit`` completes it, exit without ``commit`` removes it.

    >>> with BundleWriter("shop", kind="graph") as out:
    ...     out.put("nodes/user/x.npy", x)
    ...     out.commit({"nodes": ...})
    """

    def __init__(self, path: str | Path, *, kind: str, overwrite: bool = False) -> None:
        self.target = Path(path)
        self.kind = kind
        self.overwrite = overwrite
        check_target(self.target, kind, overwrite)
        self.path = partial_path(self.target)
        self._arrays: dict[str, ArrayWriter] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        self._read: dict[str, Tensor] = {}
        self._is_committed = False

    def __enter__(self) -> Self:
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        except OSError as error:  # name the target, not the partial directory
            reason = f"{error.strerror}, the directory cannot be created"
            raise OSError(error.errno, reason, str(self.target)) from error
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_committed:
            for writer in self._arrays.values():
                writer.abort()
            shutil.rmtree(self.path, ignore_errors=True)

    def array(self, name: str, dtype: torch.dtype, columns: tuple[int, ...] = ()) -> ArrayWriter:
        """Open a growing array; ``commit`` closes it."""
        writer = ArrayWriter(self.path / name, dtype, columns)
        self._arrays[name] = writer
        return writer

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a whole array."""
        writer = self.array(name, tensor.dtype, tuple(tensor.shape[1:]))
        writer.append(tensor)
        self._close(name)

    def file(self, name: str) -> Path:
        """Register a file that the caller writes (Parquet) before ``commit``; returns its path."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._entries[name] = {}
        return path

    def scratch_dir(self) -> Path:
        """A directory for temporary files, removed by ``commit`` or on failure."""
        path = self.path / "scratch"
        path.mkdir(exist_ok=True)
        return path

    def written(self, name: str) -> Tensor:
        """Map an array that was written before, for a later stage of the same import."""
        if name in self._arrays:
            self._close(name)
        if name not in self._read:
            entry = {**self._entries[name], "bytes": 0}
            self._read[name] = Bundle(self.path, {"meta": {}, "files": {name: entry}, "digest": ""}).tensor(name)
        return self._read[name]

    def commit(self, meta: Mapping[str, Any]) -> None:
        """Compute checksums, write the manifest and rename the directory into place."""
        for name in list(self._arrays):
            self._close(name)
        shutil.rmtree(self.path / "scratch", ignore_errors=True)
        names = sorted(self._entries)
        with ThreadPoolExecutor(max_workers=2) as pool:
            sums = list(pool.map(lambda name: checksum(self.path / name), names))
        files = {
            name: {**self._entries[name], "bytes": (self.path / name).stat().st_size, "sha256": sha}
            for name, sha in zip(names, sums, strict=True)
        }
        body: dict[str, Any] = {"kind": self.kind, "version": VERSION, "meta": dict(meta), "files": files}
        body["digest"] = manifest_digest(body)
        write_atomically(self.path / f"{self.kind}.json", json.dumps(body, indent=1).encode())
        self._move_into_place()
        self._is_committed = True

    def _close(self, name: str) -> None:
        writer = self._arrays.pop(name)
        writer.close()
        self._entries[name] = {"dtype": dtype_name(writer.dtype), "shape": list(writer.shape)}

    def _move_into_place(self) -> None:
        check_target(self.target, self.kind, self.overwrite)
        if self.target.exists():
            exchange_directories(self.path, self.target)  # self.path is the old bundle from here on
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.rename(self.target)
        sync_directory(self.target.parent)


def check_target(target: Path, kind: str, overwrite: bool) -> None:
    """Raise StoreError unless the target is free, or a bundle of the same kind that may be overwritten."""
    if not target.exists():
        return
    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()
        return
    if not (target / f"{kind}.json").exists():
        raise StoreError(f"{target} exists and is not a {kind}: choose another output or remove it")
    if not overwrite:
        raise StoreError(f"{target} already exists: choose another output or pass --overwrite")


def checksum(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def _check_extent(path: Path, entry: Mapping[str, Any]) -> None:
    """Raise StoreError unless the size of a .npy file matches its dtype and shape in the manifest."""
    if path.suffix != ".npy":
        return
    if entry["dtype"] not in DTYPES:
        raise StoreError(
            f"{path} has dtype {entry['dtype'][:40]!r}, expected one of {', '.join(DTYPES)}: make it again"
        )
    size = math.prod(entry["shape"]) * np.dtype(DTYPES[entry["dtype"]][1]).itemsize
    if size + ArrayWriter.HEADER != entry["bytes"] or max(entry["shape"], default=0) >= 1 << 48:
        raise StoreError(
            f"{path} has {entry['bytes']} bytes, which do not hold {entry['dtype']} {entry['shape']}: "
            "the manifest is damaged, make it again from the source"
        )
