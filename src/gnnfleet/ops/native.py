"""The compiled kernels, or a clear word on how to build them.

torch is imported first, so that the extension binds to the OpenMP runtime torch has loaded.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gnnfleet.errors import NativeError

try:
    from gnnfleet import _native
except ImportError as error:
    raise NativeError(
        f"the compiled kernels of gnnfleet cannot be loaded ({error}). "
        "Build them: make build, or pip install -e . in a checkout"
    ) from error

__all__ = ["_native", "alone", "threads"]


# Below this much work (multiply-adds, say) waking a second thread takes longer than doing it alone.
_SMALL = 1 << 17


class _Local(threading.local):
    alone = False


_local = _Local()


def threads(work: int = _SMALL) -> int:
    """How many threads a kernel may use: torch's setting, passed on because OpenMP's own is per calling thread."""
    if _local.alone:
        return 1
    return torch.get_num_threads() if work >= _SMALL else 1


@contextmanager
def alone() -> Iterator[None]:
    """Kernels called from this thread use no other: threads in the background would each get a team of their own."""
    before, _local.alone = _local.alone, True
    try:
        yield
    finally:
        _local.alone = before
