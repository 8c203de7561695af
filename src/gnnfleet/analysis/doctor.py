"""Is this machine fit to train on? Each check looks at one thing that has made a run fail, and says what to do."""

from __future__ import annotations

import mmap
import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class CheckResult:
    """``level`` is ok, warn (works, slower or at small scale only) or fail (a run will not work)."""

    check: str
    level: str
    found: str
    advice: str = ""


def run_checks() -> list[CheckResult]:
    """Run every check; one that cannot run is a warning, never an exception."""
    findings: list[CheckResult] = []
    for check in CHECKS:
        try:
            findings.extend(check())
        except Exception as error:
            findings.append(
                CheckResult(check.__name__.strip("_"), WARN, f"could not be checked: {type(error).__name__}: {error}")
            )
    return findings


def as_record(findings: list[CheckResult]) -> dict[str, Any]:
    return {"fit": all(f.level != FAIL for f in findings), "checks": [asdict(f) for f in findings]}


def _versions() -> Iterator[CheckResult]:
    yield CheckResult(
        "python", OK, f"{platform.python_version()} on {platform.machine()}, {platform.system()} {platform.release()}"
    )
    import torch

    cuda = f", CUDA {torch.version.cuda}" if torch.cuda.is_available() else ", CPU"
    yield CheckResult("torch", OK, f"{torch.__version__}{cuda}, {torch.get_num_threads()} threads")
    yield CheckResult("gnnfleet", OK, metadata.version("gnnfleet"))


def _kernels() -> Iterator[CheckResult]:
    from gnnfleet.ops.native import _native

    available = _native.isas().split()
    advice = "" if _native.isa() == available[0] else f"{available[0]} is available and would be faster"
    yield CheckResult(
        "kernels", OK if not advice else WARN, f"{_native.isa()} in use; this CPU offers {', '.join(available)}", advice
    )


def _bfloat16() -> Iterator[CheckResult]:
    """Without instructions of its own for it, bf16 saves memory but no time in dense products."""
    from gnnfleet.ops.native import has_bf16

    if has_bf16():
        yield CheckResult("bf16", OK, "the CPU multiplies bfloat16")
    else:
        advice = "--precision bf16 halves the rows in memory here; products stay as fast as in float32"
        yield CheckResult("bf16", OK, "the CPU has no bfloat16 instructions", advice)


def _openmp() -> Iterator[CheckResult]:
    """Two OpenMP runtimes in one process fight over the cores."""
    import gnnfleet.ops.native  # noqa: F401

    maps = Path("/proc/self/maps")
    if not maps.exists():
        yield CheckResult("openmp", WARN, "cannot be seen on this system")
        return
    mapped = {
        line.split()[-1]
        for line in maps.read_text().splitlines()
        if "gomp" in line or "libomp" in line or "iomp" in line
    }
    names = ", ".join(sorted(Path(path).name for path in mapped)) or "none"
    if len(mapped) == 1:
        yield CheckResult("openmp", OK, f"one runtime: {names}")
    else:
        yield CheckResult(
            "openmp", WARN, f"{len(mapped)} runtimes: {names}", "build gnnfleet with the compiler torch was built with"
        )


def _cores() -> Iterator[CheckResult]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield CheckResult("machine", OK, f"{usable} cores usable, {memory:.1f} GiB memory")
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if pages.exists():
        mode = pages.read_text().split("[")[1].split("]")[0]
        advice = "" if mode != "never" else "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield CheckResult("huge pages", WARN if advice else OK, mode, advice)


def _shared_memory() -> Iterator[CheckResult]:
    """Ranks of one host read each other's rows in memory without a name; the size of /dev/shm does not matter."""
    from gnnfleet.comm.shm_transport import create_memory, open_memory

    try:
        taken = create_memory(mmap.PAGESIZE)
        try:
            os.close(open_memory(os.getpid(), taken))
        finally:
            os.close(taken)
        yield CheckResult("shared memory", OK, "processes can map each other's (memfd)")
    except OSError as error:
        advice = "ranks on one host will exchange through sockets, which is slower"
        yield CheckResult("shared memory", WARN, f"memory of a process cannot be taken or opened: {error}", advice)


def _ports() -> Iterator[CheckResult]:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        client.settimeout(2)
        client.connect(server.getsockname())
        yield CheckResult("ports", OK, f"loopback connects (tried port {server.getsockname()[1]})")


def _interface() -> Iterator[CheckResult]:
    """gloo listens on the address the host name resolves to, unless told otherwise."""
    import torch.distributed as dist

    if not dist.is_available():
        yield CheckResult("torch.distributed", FAIL, "not in this torch build", "install an official build of torch")
        return
    backends = [
        name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there
    ]
    yield CheckResult("backends", OK if "gloo" in backends else FAIL, ", ".join(backends) or "none")
    names = ", ".join(name for _, name in socket.if_nameindex())
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        advice = "several machines: set GLOO_SOCKET_IFNAME to the interface they share"
        yield CheckResult("interface", WARN, f"the host name does not resolve; interfaces: {names}", advice)
        return
    advice = (
        "several machines: set GLOO_SOCKET_IFNAME to the interface they share" if address.startswith("127.") else ""
    )
    yield CheckResult("interface", OK, f"host name resolves to {address}; interfaces: {names}", advice)


def _limits() -> Iterator[CheckResult]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = (
        "" if soft >= 4096 else "ulimit -n 65536: stores with many relations and runs with many ranks open many files"
    )
    yield CheckResult("open files", WARN if advice else OK, f"{soft:,} (at most {hard:,})", advice)
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield CheckResult(
        "disk",
        OK if free > 5 else WARN,
        f"{free:,.1f} GiB free here",
        "" if free > 5 else "imports and partitions need room",
    )


CHECKS: tuple[Callable[[], Iterator[CheckResult]], ...] = (
    _versions,
    _kernels,
    _bfloat16,
    _openmp,
    _cores,
    _shared_memory,
    _ports,
    _interface,
    _limits,
)
