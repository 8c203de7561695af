"""Runs cases of a subject in processes that may die, and collects what went wrong."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
START = 300.0
CASE = 60.0
"""Seconds that a case may take on a busy machine; most take a hundredth of one."""


def problems(subject: str, count: int, first: int = 0) -> list[str]:
    """What went wrong in cases ``first`` … ``first + count − 1``: one line each, with the number to try it again."""
    wrong: list[str] = []
    at = first
    while at < first + count:
        at = _some(subject, at, first + count - at, wrong)
    return wrong


def _some(subject: str, first: int, count: int, wrong: list[str]) -> int:
    """Cases until all are done or the process is lost; the number of the next."""
    python = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": python, "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    at, did, asked = first - 1, "made the good one", False
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
                patience = CASE if asked or at >= first else START
                if not select.select([out], [], [], patience)[0]:
                    process.kill()
                    process.wait()
                    wrong.append(f"{subject} {at}: hung after it {did}")
                    return at + 1
                piece = os.read(out.fileno(), 1 << 16)
                if not piece:
                    break
                *lines, buffer = (buffer + piece).split(b"\n")
                for line in lines:
                    word = json.loads(line)
                    at, asked = word["case"], "did" in word
                    if asked:
                        did = word["did"]
                    elif word["problem"] is not None:
                        wrong.append(f"{subject} {at}: {did}: {word['problem']}")
        code = process.wait()
        if code == 0:
            return first + count
        errors.seek(0)
        if at < first:
            raise AssertionError(f"{subject}: the good one cannot be made: {errors.read()[-2000:]}")
        wrong.append(f"{subject} {at}: {did}: the process ended with {code}: {errors.read()[-500:]}")
        return at + 1
