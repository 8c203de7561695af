"""Every example runs, stays short, and says what it does; every config resolves, to the model it is named after."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gnnfleet.run.config import read_toml, resolve

CONFIGS = sorted((Path(__file__).parents[1] / "examples" / "accuracy").glob("*.toml"))
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_resolves(path: Path) -> None:
    assert resolve(read_toml(path)).model.name == path.stem.rpartition("_")[2]
