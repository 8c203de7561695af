"""Untrusted files of arrays, ``.npz`` and ``.pt``, read without running pickled code.

Headers of ``.npz`` arrays are compared with the number of bytes in the file before anything is allocated.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from gnnfleet.errors import InputError
from gnnfleet.graph.ingest.relations import Array

_KINDS = "biufSUcM"  # gnnfleet uses the first six; readers report the others with the array's name


@contextmanager
def locate_errors(location: object) -> Iterator[None]:
    """Put a file, node type or edge type in front of the InputErrors raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{location}: {error}") from error


def load_pt(path: Path, classes: list[Any], unsafe_message: str) -> Any:
    """Load a ``.pt`` file of tensors, plain containers and ``classes``.

    Raises InputError, with ``unsafe_message`` when the file needs other classes.
    """
    try:
        with torch.serialization.safe_globals(classes):
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise InputError(f"no file {path}") from error
    except pickle.UnpicklingError as error:
        raise InputError(unsafe_message) from error
    except Exception as error:  # a damaged file fails in many ways inside the unpickler
        raise InputError(f"{path} cannot be read as a .pt file: {error}") from error


class ArraysFile:
    """The arrays of one ``.npz`` file by name; raises InputError for arrays that cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except FileNotFoundError as error:
            raise InputError(f"no file {path}") from error
        except Exception as error:  # a damaged zip directory fails in many ways
            raise InputError(f"{path} cannot be read as .npz, a zip file of arrays: {error}") from error
        self.names = {info.filename.removesuffix(".npy"): info for info in self._zip.infolist()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()

    def read(self, name: str) -> Array:
        """Read an array after comparing its header with the size of the file."""
        info = self.names[name]
        try:
            with self._zip.open(info) as file:
                header = _read_header(file)
                shape, dtype = header[0], header[2]
                if dtype.kind not in _KINDS or dtype.hasobject:
                    raise ValueError(f"it holds {dtype}, expected numbers or text")
                if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > info.file_size:
                    raise ValueError(f"its header declares {dtype} {list(shape)} in {info.file_size} bytes")
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
