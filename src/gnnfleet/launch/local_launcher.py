"""Workers on this machine through torchrun's Python API: started, watched, restarted, ended with the launcher.

Failures of several workers become one error. No process, port or signal handler outlives a launch.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gnnfleet
from gnnfleet.comm.failure import Failure, FailureKind
from gnnfleet.errors import ExchangeError, GnnfleetError
from gnnfleet.launch.live_module import inherited_by_workers
from gnnfleet.launch.spec import RunSpec
from gnnfleet.training.partition_cache import error_for_exit_code

SHUTDOWN_SECONDS = 5
"""Seconds between asking workers to end and killing them; they need two at most."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch(
    spec: RunSpec,
    *,
    folder: Path,
    workers: int,
    restarts: int = 0,
    advice: str = "continue with --resume",
    function: str = "gnnfleet.launch.rank_main:train_rank",
) -> dict[str, Any]:
    """Call ``function`` (module:name) with a spec in ``workers`` processes; returns the answer of the first rank.

    ``folder`` exists while they run. Raises the error of the worker at fault, with ``advice`` if it died, and
    KeyboardInterrupt for a signal.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from gnnfleet.launch import loopback_rendezvous

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    answer = folder / "answer.json"
    spec = replace(spec, parent=os.getpid(), threads=threads_per_worker(workers), answer=str(answer))
    (folder / "SPEC.json").write_text(spec.as_json())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=secrets.token_hex(6),
        rdzv_backend=loopback_rendezvous.register(),
        max_restarts=restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    failures: Mapping[int, Any] = {}
    try:
        with _signals_restored(), worker_environment(), _silence_torchrun(), inherited_by_workers(spec.module_fd):
            elastic_launch(config, sys.executable)("-m", "gnnfleet.launch.worker", str(folder / "SPEC.json"), function)
        return dict(json.loads(answer.read_bytes()))
    except ChildFailedError as error:
        failures = error.failures
    except SignalException:
        raise KeyboardInterrupt from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        gc.collect()  # torchrun's objects refer to each other, and the store's port is free once they are gone
    raise combine_failures(failures, advice)


def threads_per_worker(workers: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // workers)


def combine_failures(failures: Mapping[int, Any], advice: str) -> GnnfleetError:
    """Find the one error behind several failed workers; ``failures`` are torchrun's, in the order they were noticed.

    A lost worker ends the others, so their reports about each other count only if there is no better explanation.
    """
    files = (Failure.from_file(failure.error_file_data) for failure in failures.values())
    reports = [report for report in files if report is not None]
    silent = next((report for report in reports if report.kind is FailureKind.silent), None)
    if silent is not None:
        return _error(silent, advice)
    # Workers exit by themselves when they are asked to: any other signal came from outside, or was a crash.
    for rank, failure in failures.items():
        if failure.exitcode < 0 and -failure.exitcode not in _SIGNALS:
            name = failure.signal_name()
            hint = ", perhaps for lack of memory" if -failure.exitcode == signal.SIGKILL else ""
            return ExchangeError(f"rank {rank} (pid {failure.pid}) was killed by {name}{hint}; {advice}")
    for kinds in ((FailureKind.raised,), (FailureKind.cut_off, FailureKind.stopped), (FailureKind.lost,)):
        matching = [report for report in reports if report.kind in kinds]
        first_hand = [report for report in matching if report.found_by in report.ranks]
        if matching:
            return _error((first_hand or matching)[0], advice)
    rank, failure = next(iter(failures.items()))
    return ExchangeError(f"rank {rank} (pid {failure.pid}) exited with code {failure.exitcode}; {advice}")


def _error(failure: Failure, advice: str) -> GnnfleetError:
    text = failure.text if failure.kind is FailureKind.raised else f"{failure.text}; {advice}"
    return failure_error(failure, text)


def failure_error(failure: Failure, text: str = "") -> GnnfleetError:
    error = error_for_exit_code(failure.exit_code)(text or failure.text)
    if failure.trace:
        error.add_note(failure.trace)
    return error


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Restore the signal handlers that torchrun replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: it was not set from Python
                signal.signal(number, handler)


@contextmanager
def worker_environment() -> Iterator[None]:
    """Set the environment that workers inherit: the path of this package, and short timeouts of name servers.

    The store looks up the name of every address that connects, and does not answer meanwhile.
    """
    package_root = str(Path(gnnfleet.__file__).parents[1])
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, before.get("PYTHONPATH"))))
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    try:
        yield
    finally:
        for name in ("PYTHONPATH", "RES_OPTIONS", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


@contextmanager
def _silence_torchrun() -> Iterator[None]:
    """Silence torchrun's report of every worker that ends: the launcher reports one error."""
    logger = logging.getLogger("torch.distributed")
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before
