"""The compiled kernels, or an error that says how to build them.

torch is imported first, so that the extension binds to torch's OpenMP runtime.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from gnnfleet.errors import NativeError

try:
    from gnnfleet import _native
except ImportError as error:
    raise NativeError(
        f"the compiled kernels of gnnfleet cannot be loaded ({error}). "
        "Build them: make build, or pip install -e . in a checkout"
    ) from error

__all__ = ["_native", "has_bf16", "num_threads", "single_threaded"]


# With less work (in multiply-adds) waking a second thread takes longer than it saves.
_SMALL = 1 << 17


class _Local(threading.local):
    single_threaded = False


_local = _Local()


def num_threads(work: int = _SMALL) -> int:
    """Number of threads for a kernel: torch's setting, passed on because OpenMP's own is per calling thread."""
    if _local.single_threaded:
        return 1
    return torch.get_num_threads() if work >= _SMALL else 1


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run kernels of this thread single-threaded: background threads would each start their own OpenMP team."""
    before, _local.single_threaded = _local.single_threaded, True
    try:
        yield
    finally:
        _local.single_threaded = before


@cache
def has_bf16() -> bool:
    """True if the CPU multiplies bfloat16 natively; otherwise torch emulates it, slower than float32."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    flags = f" {text} ".replace("\n", " ")
    return any(f" {flag} " in flags for flag in ("amx_bf16", "avx512_bf16", "bf16"))
