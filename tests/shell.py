"""The command line as a user meets it: a process, its two outputs, its exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock


def start(*words: str | Path, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "COLUMNS": "200"}
    return subprocess.Popen(
        [sys.executable, "-m", "gnnfleet", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # A shell starts background jobs with Ctrl-C ignored, which children inherit; a user's terminal does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(*words: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    process = start(*words)
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def torchrun(*words: str | Path, size: int = 2) -> subprocess.CompletedProcess[str]:
    """A command of gnnfleet's in ``size`` processes that torchrun starts."""
    line = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", "--rdzv-backend=static"]
    line += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "-m", "gnnfleet", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120, check=False)


def call(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The same in this process, which spares the seconds that a new one takes to load torch."""
    from gnnfleet.cli import main

    out, err, before = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    code: Any = None
    typed = mock.patch.object(sys, "argv", ["gnnfleet", *map(str, words)])
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), typed:
        try:
            main.main()
        except SystemExit as ended:
            code = ended.code
    signal.signal(signal.SIGTERM, before)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def run_json(*words: str | Path) -> dict[str, Any]:
    """The object a command prints with ``--json``; it must be the only thing on standard output. In this process."""
    done = call(*words, "--json")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    found: dict[str, Any] = json.loads(lines[0])
    return found


def fails(*words: str | Path, code: int) -> str:
    """The one-line message of a command that must fail with ``code``, without a traceback and without output. In this
    process."""
    done = call(*words)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr and not done.stdout.strip(), (done.stdout, done.stderr)
    message = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(message) == 1, done.stderr
    return message[0]
