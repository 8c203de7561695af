"""``gnnfleet doctor``: check whether this machine is ready for training."""

from __future__ import annotations

import mmap
import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import typer

from gnnfleet.cli.options import JsonFlag
from gnnfleet.cli.output import print_result, table

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class CheckResult:
    """``level`` is ok, warn (works, but slower or only at small scale) or fail (a run will not work)."""

    check: str
    level: str
    found: str
    advice: str = ""


def run_checks() -> list[CheckResult]:
    """Run every check; one that cannot run is a warning, never an exception."""
    results: list[CheckResult] = []
    for check in CHECKS:
        try:
            results.extend(check())
        except Exception as error:
            reason = f"could not be checked: {type(error).__name__}: {error}"
            results.append(CheckResult(check.__name__.strip("_"), WARN, reason))
    return results


def _result(check: str, found: str, advice: str = "") -> CheckResult:
    """A warning if there is advice."""
    return CheckResult(check, WARN if advice else OK, found, advice)


def _versions() -> Iterator[CheckResult]:
    import torch

    system = f"{platform.machine()}, {platform.system()} {platform.release()}"
    yield _result("python", f"{platform.python_version()} on {system}")
    device = f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "CPU"
    yield _result("torch", f"{torch.__version__}, {device}, {torch.get_num_threads()} threads")
    yield _result("gnnfleet", metadata.version("gnnfleet"))


def _kernels() -> Iterator[CheckResult]:
    from gnnfleet.ops.native import _native

    available = _native.isas().split()
    advice = "" if _native.isa() == available[0] else f"{available[0]} is available and would be faster"
    yield _result("kernels", f"{_native.isa()} in use; this CPU offers {', '.join(available)}", advice)


def _bfloat16() -> Iterator[CheckResult]:
    """Check for bfloat16 instructions: without them bf16 saves memory, but no time in dense products."""
    from gnnfleet.ops.native import has_bf16

    has = has_bf16()
    text = "the CPU multiplies bfloat16" if has else "the CPU has no bfloat16 instructions"
    advice = "--precision bf16 halves the rows in memory here; products stay as fast as in float32"
    yield CheckResult("bf16", OK, text, "" if has else advice)


def _openmp() -> Iterator[CheckResult]:
    """Count OpenMP runtimes: two in one process compete for the cores."""
    import gnnfleet.ops.native  # noqa: F401

    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    runtimes = ("gomp", "libomp", "iomp")
    names = sorted(Path(path).name for path in mapped if any(name in path for name in runtimes))
    count = "one runtime" if len(names) == 1 else f"{len(names)} runtimes"
    advice = "" if len(names) == 1 else "build gnnfleet with the compiler that torch was built with"
    yield _result("openmp", f"{count}: {', '.join(names) or 'none'}", advice)


def _cores() -> Iterator[CheckResult]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield _result("machine", f"{len(os.sched_getaffinity(0))} cores usable, {memory:.1f} GiB memory")
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if pages.exists():
        mode = pages.read_text().split("[")[1].split("]")[0]
        yield _result("huge pages", mode, f"echo madvise > {pages}" if mode == "never" else "")


def _shared_memory() -> Iterator[CheckResult]:
    """Ranks on one host read each other's rows in memory without a name; the size of /dev/shm does not matter."""
    from gnnfleet.comm.shm_transport import create_memory, open_memory

    try:
        descriptor = create_memory(mmap.PAGESIZE)
        try:
            os.close(open_memory(os.getpid(), descriptor))
        finally:
            os.close(descriptor)
        yield _result("shared memory", "processes can map each other's (memfd)")
    except OSError as error:
        advice = "ranks on one host will exchange through sockets, which is slower"
        yield _result("shared memory", f"memory of a process cannot be created or opened: {error}", advice)


def _ports() -> Iterator[CheckResult]:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        client.settimeout(2)
        client.connect(server.getsockname())
        yield _result("ports", f"loopback connects (tried port {server.getsockname()[1]})")


def _network() -> Iterator[CheckResult]:
    """Check backends and interfaces. The host name is not resolved: ranks use the interface that reaches the store."""
    import torch.distributed as dist

    if not dist.is_available():
        yield CheckResult("torch.distributed", FAIL, "not in this torch build", "install an official build of torch")
        return
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    backends = ", ".join(name for name in available if available[name])
    yield CheckResult("backends", OK if available["gloo"] else FAIL, backends or "none")
    interfaces = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    missing = [name for name in chosen.split(",") if name and name not in interfaces]
    advice = f"GLOO_SOCKET_IFNAME={chosen}: there is no {missing[0]}, name one of these or unset it" if missing else ""
    yield _result("interface", ", ".join(interfaces), advice)


def _limits() -> Iterator[CheckResult]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = "ulimit -n 65536: stores with many relations and runs with many ranks open many files"
    yield _result("open files", f"{soft:,} (at most {hard:,})", advice if soft < 4096 else "")
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield _result("disk", f"{free:,.1f} GiB free here", "" if free > 5 else "imports and partitions need more space")


CHECKS = (_versions, _kernels, _bfloat16, _openmp, _cores, _shared_memory, _ports, _network, _limits)


def doctor(as_json: JsonFlag = False) -> None:
    """Check torch, kernels, OpenMP, shared memory, ports, network interface and limits of this machine.

    The exit code is 1 if a problem prevents training.
    """
    findings = run_checks()
    is_fit = all(finding.level != FAIL for finding in findings)
    record = {"fit": is_fit, "checks": [asdict(finding) for finding in findings]}
    rows = [(f.check, f.level, f.found, f.advice) for f in findings]
    print_result(record, as_json=as_json, human=[table(None, ("check", "", "found", "advice"), rows)])
    if not is_fit:
        raise typer.Exit(1)
