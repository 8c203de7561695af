"""Every example runs, stays short, and says what it does; every config resolves, to the model it is named after."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gnnfleet.config.resolve import read_toml, resolve

CONFIGS = sorted((Path(__file__).parents[1] / "examples" / "accuracy").glob("*.toml"))
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


# Half of them in each of two processes, which load torch once; each in a directory of its own.
RUN_ALL = """
import contextlib, io, os, runpy, sys
for path in sys.argv[1:]:
    name = os.path.basename(path)
    os.mkdir(name)
    os.chdir(name)
    said = io.StringIO()
    print("begins", name, flush=True)
    with contextlib.redirect_stdout(said):
        sys.argv = [path]
        runpy.run_path(path, run_name="__main__")
    os.chdir("..")
    assert said.getvalue().strip(), f"{name} says nothing"
"""


def test_examples_run(tmp_path: Path) -> None:
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 60, path
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-W", "error", "-c", RUN_ALL]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    halves = [EXAMPLES[::2], EXAMPLES[1::2]]
    running = [subprocess.Popen([*line, *map(str, half)], cwd=tmp_path, env=environment, **pipes) for half in halves]
    try:
        for half, process in zip(halves, running, strict=True):
            said, _ = process.communicate(timeout=300)
            assert process.returncode == 0 and said.count("begins") == len(half), said
    finally:
        for process in running:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_resolves(path: Path) -> None:
    assert resolve(read_toml(path)).model.name == path.stem.rpartition("_")[2]
