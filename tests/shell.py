"""The command line as a user sees it: a process, its two outputs, its exit code."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock


def child_environment(**variables: str) -> dict[str, str]:
    """Environment for a Python process with the import path of this one."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables}


def set_options(settings: Mapping[str, object]) -> list[str]:
    """``--set KEY=VALUE`` for every setting."""
    return [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]


def start(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gnnfleet", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(COLUMNS="200"),
        # A shell starts background jobs with Ctrl-C ignored, which children inherit; a user's terminal does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(*arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def torchrun(*arguments: str | Path, size: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a gnnfleet command as ``size`` ranks of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", "--rdzv-backend=static"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "-m", "gnnfleet", *map(str, arguments)]
    environment = child_environment(OMP_NUM_THREADS="1")
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which saves loading torch again."""
    from gnnfleet.cli import main

    out, err, sigterm_handler = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    code: Any = None
    argv = mock.patch.object(sys, "argv", ["gnnfleet", *map(str, arguments)])
    unconfigured = mock.patch.object(logging.getLogger(), "handlers", [])  # pytest adds some
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), argv, unconfigured:
        try:
            main.main()
        except SystemExit as error:
            code = error.code
    signal.signal(signal.SIGTERM, sigterm_handler)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def run_json(*arguments: str | Path) -> dict[str, Any]:
    """The object that a command prints with ``--json``, alone on standard output. Runs in this process."""
    done = call(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    printed: dict[str, Any] = json.loads(lines[0])
    return printed


def fails(*arguments: str | Path, code: int) -> str:
    """The one-line message of a command that must fail with ``code``, without traceback or output. Runs in this
    process."""
    done = call(*arguments)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr and not done.stdout.strip(), (done.stdout, done.stderr)
    message = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(message) == 1, done.stderr
    return message[0]
