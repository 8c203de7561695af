"""Runs cases of a subject in processes that may die, and collects the problems."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile

from tests.ranks import ROOT, python_path

START_SECONDS = 300.0
CASE_SECONDS = 60.0
"""Limit of a case on a busy machine; most take 0.01 s."""


def problems(subject: str, count: int, first: int = 0) -> list[str]:
    """Problems in cases ``first`` … ``first + count − 1``: one line each, with the number of the case."""
    lines: list[str] = []
    next_case = first
    while next_case < first + count:
        next_case = _run_cases(subject, next_case, first + count - next_case, lines)
    return lines


def _run_cases(subject: str, first: int, count: int, problems: list[str]) -> int:
    """Run cases until all are done or the process is lost; return the number of the next case."""
    env = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    case, damage, is_running = first - 1, "none", False
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.child", subject, str(first), str(count)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdout is not None
        with process.stdout as out:
            buffer = b""
            while True:
                seconds = CASE_SECONDS if is_running or case >= first else START_SECONDS
                if not select.select([out], [], [], seconds)[0]:
                    process.kill()
                    process.wait()
                    problems.append(f"{subject} {case}: hung, damage: {damage}")
                    return case + 1
                chunk = os.read(out.fileno(), 1 << 16)
                if not chunk:
                    break
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    case, is_running = message["case"], "damage" in message
                    if is_running:
                        damage = message["damage"]
                    elif message["problem"] is not None:
                        problems.append(f"{subject} {case}: damage {damage}: {message['problem']}")
        code = process.wait()
        if code == 0:
            return first + count
        errors.seek(0)
        if case < first:
            raise AssertionError(f"{subject}: the undamaged one cannot be made: {errors.read()[-2000:]}")
        problems.append(f"{subject} {case}: damage {damage}: the process ended with {code}: {errors.read()[-500:]}")
        return case + 1
