"""Every example runs, stays short and prints its outcome; every config resolves, to the model it is named after."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gnnfleet.config.resolve import read_toml, resolve
from tests.shell import child_environment

FOLDER = Path(__file__).parents[1] / "examples"
CONFIGS = sorted(FOLDER.rglob("*.toml"))
EXAMPLES = sorted(FOLDER.glob("*.py"))


# Half of the examples in each of two processes, which load torch once; each example in a directory of its own.
RUN_ALL = """
import contextlib, io, os, runpy, sys
for path in sys.argv[1:]:
    name = os.path.basename(path)
    os.mkdir(name)
    os.chdir(name)
    output = io.StringIO()
    print("begins", name, flush=True)
    with contextlib.redirect_stdout(output):
        sys.argv = [path]
        runpy.run_path(path, run_name="__main__")
    os.chdir("..")
    assert output.getvalue().strip(), f"{name} prints nothing"
"""


def test_examples_run(tmp_path: Path) -> None:
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 60, path
    # torch_geometric uses torch.jit, which warns.
    command = [sys.executable, "-W", "error", "-W", "ignore:`torch.jit.script` is deprecated", "-c", RUN_ALL]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options |= {"cwd": tmp_path, "env": child_environment()}
    halves = [EXAMPLES[::2], EXAMPLES[1::2]]
    processes = [subprocess.Popen([*command, *map(str, half)], **options) for half in halves]
    try:
        for half, process in zip(halves, processes, strict=True):
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0 and output.count("begins") == len(half), output
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_example_configs_resolve(path: Path) -> None:
    config = resolve(read_toml(path))
    assert config.task == ("link" if path.parent.name == "link" else "node")
    if path.parent.name == "accuracy":
        assert config.model.name == path.stem.rpartition("_")[2]
