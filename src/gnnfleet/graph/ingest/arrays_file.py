"""An ``.npz`` file, read without pickle and without believing it: headers are compared with the bytes there are."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any, Self

import numpy as np

from gnnfleet.errors import InputError
from gnnfleet.graph.ingest.relations import Array

_KINDS = "biufSUcM"  # of which gnnfleet uses the first six; the others are named in the messages of whoever asks


class ArraysFile:
    """The arrays of one file by name; raises InputError for whatever cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except FileNotFoundError as error:
            raise InputError(f"no file {path}") from error
        except Exception as error:  # a damaged list of members fails in many ways
            raise InputError(f"{path} cannot be read as .npz, a zip file of arrays: {error}") from error
        self.names = {info.filename.removesuffix(".npy"): info for info in self._zip.infolist()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._zip.close()

    def read(self, name: str) -> Array:
        """An array, after its header was compared with the bytes that there are: a header may promise anything."""
        info = self.names[name]
        try:
            with self._zip.open(info) as file:
                header = _read_header(file)
                shape, dtype = header[0], header[2]
                if dtype.kind not in _KINDS or dtype.hasobject:
                    raise ValueError(f"it holds {dtype}, expected numbers or text")
                if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > info.file_size:
                    raise ValueError(f"it promises {dtype} {list(shape)} in {info.file_size} bytes")
            with self._zip.open(info) as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:  # zip, zlib and numpy's headers fail in many ways
            raise InputError(f"{self.path}: {name} cannot be read: {error}") from error


def _read_header(file: Any) -> tuple[Any, Any, Any]:
    """(shape, Fortran order, dtype)."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"version {version} of numpy's format")
