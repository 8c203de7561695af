"""Workers on this machine, through torchrun's Python API: started, watched, started again, ended with the launcher.

What went wrong comes back as one error. Nothing outlives a launch: no process, no port, no signal handler.
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
from gnnfleet.launch.spec import RunSpec
from gnnfleet.training.partition_cache import error_for_exit_code

SHUTDOWN_SECONDS = 5
"""From asking workers to end until they are killed; they need two at most."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch(
    spec: RunSpec,
    *,
    folder: Path,
    workers: int,
    restarts: int = 0,
    advice: str = "go on with --resume",
    module: str = "gnnfleet.launch.worker",
) -> dict[str, Any]:
    """Run a spec on ``workers`` processes; what they answer. ``folder`` is there for as long as they are.

    Workers run ``python -m module``.

    Raises the error of the worker at fault, with ``advice`` where it died, and KeyboardInterrupt for a signal.
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
    failed: Mapping[int, Any] = {}
    try:
        with _signals_restored(), worker_environment(), _silence_torchrun():
            elastic_launch(config, sys.executable)("-m", module, str(folder / "SPEC.json"))
        return dict(json.loads(answer.read_bytes()))
    except ChildFailedError as error:
        failed = error.failures
    except SignalException:
        raise KeyboardInterrupt from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        gc.collect()  # torchrun's objects point at each other; the store's port is free when they are gone
    raise combine_failures(failed, advice)


def threads_per_worker(workers: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // workers)


def combine_failures(failures: Mapping[int, Any], advice: str) -> GnnfleetError:
    """The one error behind several failed workers; ``failures`` are torchrun's, in the order they were noticed.

    A worker that is gone takes others along, so what they say of each other counts only where none of them went first.
    """
    found = [f for f in (Failure.from_file(failure.error_file_data) for failure in failures.values()) if f is not None]
    silent = next((failure for failure in found if failure.kind is FailureKind.silent), None)
    if silent is not None:
        return _error(silent, advice)
    # Workers end themselves when they are told to; whoever dies of another signal was killed from outside or crashed.
    for rank, failure in failures.items():
        if failure.exitcode < 0 and -failure.exitcode not in _SIGNALS:
            name = failure.signal_name()
            why = ", perhaps for want of memory" if -failure.exitcode == signal.SIGKILL else ""
            return ExchangeError(f"rank {rank} (pid {failure.pid}) was killed by {name}{why}; {advice}")
    for kinds in ((FailureKind.raised,), (FailureKind.cut_off, FailureKind.stopped), (FailureKind.lost,)):
        told = [failure for failure in found if failure.kind in kinds]
        own = [failure for failure in told if failure.found_by in failure.ranks]
        if told:
            return _error((own or told)[0], advice)
    rank, failure = next(iter(failures.items()))
    return ExchangeError(f"rank {rank} (pid {failure.pid}) ended with exit code {failure.exitcode}; {advice}")


def _error(failure: Failure, advice: str) -> GnnfleetError:
    text = failure.text if failure.kind is FailureKind.raised else f"{failure.text}; {advice}"
    return failure_error(failure, text)


def failure_error(failure: Failure, text: str = "") -> GnnfleetError:
    """A failure as an error to raise."""
    error = error_for_exit_code(failure.exit_code)(text or failure.text)
    if failure.trace:
        error.add_note(failure.trace)
    return error


@contextmanager
def _signals_restored() -> Iterator[None]:
    """torchrun takes over signals, and leaves them so."""
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
    """What workers inherit: this package's place, and short questions to name servers.

    The store asks for the name behind every address that connects, and answers nobody meanwhile.
    """
    home = str(Path(gnnfleet.__file__).parents[1])
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(word for word in (home, before.get("PYTHONPATH")) if word)
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
    """Its loggers report every worker that ends; the user hears of it once, from us."""
    logger = logging.getLogger("torch.distributed")
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before
