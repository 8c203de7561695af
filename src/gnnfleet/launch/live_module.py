"""A module of the user's program for worker processes: pickled into sealed, anonymous memory that only they inherit.

Nothing is unpickled from a path, a socket or a message: a process reads the descriptor that its parent passed to it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import pickletools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch

from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError, first_line
from gnnfleet.launch.spec import RunSpec
from gnnfleet.nn.custom_model import live_modules

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_ADVICE = "import its classes and functions from a file, or use model='file.py:factory'; one worker trains any module"
_received: list[torch.nn.Module] = []  # a worker keeps its module until it ends


@contextmanager
def share_module(config: RunConfig) -> Iterator[int]:
    """Descriptor of the pickled module of a run, for ``RunSpec.module_fd``."""
    fd = os.memfd_create("gnnfleet-module", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(_pickled(live_modules[config.model.name], config.model.label))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        yield fd
    finally:
        os.close(fd)


def _pickled(module: torch.nn.Module, label: str) -> bytes:
    try:
        content = pickle.dumps(module)
        if any(argument == "__main__" for _, argument, _ in pickletools.genops(content)):
            raise pickle.PicklingError("it uses a class or function of the main script or notebook")
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{label} cannot be sent to worker processes ({first_line(error)}): {_ADVICE}") from error
    return pickle.dumps(sys.path) + content


def receive_module(spec: RunSpec) -> None:
    """In a worker: register the module that the parent shared, if any; raises ConfigError if it cannot be loaded."""
    if spec.module_fd is None:
        return
    if fcntl.fcntl(spec.module_fd, fcntl.F_GET_SEALS) != _SEALS:
        raise ConfigError("the module of a run is read from sealed memory of its launcher only, found something else")
    name = spec.config["model"]["name"]
    with mmap.mmap(spec.module_fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as shared:
        sys.path += [folder for folder in pickle.load(shared) if folder not in sys.path]
        try:
            _received.append(pickle.load(shared))
        except Exception as error:
            raise ConfigError(f"{name} cannot be loaded by workers ({first_line(error)}): {_ADVICE}") from error
    live_modules[name] = _received[-1]


@contextmanager
def inherited_by_workers(fd: int | None) -> Iterator[None]:
    """Let the workers that torchrun starts inherit a descriptor: its handler of processes passes none on."""
    if fd is None:
        yield
        return
    handler: Any = import_module("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler")
    popen = handler.Popen
    handler.Popen = partial(popen, pass_fds=(fd,))
    try:
        yield
    finally:
        handler.Popen = popen
