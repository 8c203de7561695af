"""``gf.launch`` and torchrun: a result, one error with its place, a lost worker named, the examples."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gnnfleet as gf
from gnnfleet.errors import ConfigError, ExchangeError
from tests.fleet.scripts import loop
from tests.shell import child_environment, free_port

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_function_runs_on_workers_and_its_errors_are_named() -> None:
    assert gf.launch(loop, "", 3, workers=2) == {"size": 2, "again": 2, "total": 300.0, "classes": 10}
    with pytest.raises(ConfigError, match=r"scripts\.py, line \d+: ValueError: a bad batch") as raised:
        gf.launch(loop, "raise", 3, workers=2)
    assert 'raise ValueError("a bad batch")' in "".join(raised.value.__notes__)
    assert gf.launch(loop, "", 2, workers=1)["size"] == 1


def test_a_killed_worker_is_named_soon() -> None:
    started = time.monotonic()
    with pytest.raises(ExchangeError, match=r"rank 1 \(pid \d+\) was killed by SIGKILL.*fleet\.save"):
        gf.launch(loop, "kill", 3, workers=2)
    assert time.monotonic() - started < 60


def test_functions_that_workers_cannot_find_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="top level of a file"):
        gf.launch(lambda: None, workers=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="without torchrun"):
        gf.launch(loop, "", 3, workers=2)


def test_the_example_under_torchrun_has_the_losses_of_one_process(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=static"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", str(EXAMPLES / "own_loop.py")]
    outputs = []
    for number, arguments in enumerate(([str(EXAMPLES / "own_loop_single.py")], torchrun)):
        folder = tmp_path / str(number)
        folder.mkdir()
        environment = child_environment(OMP_NUM_THREADS="1")
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=folder, timeout=240
        )
        assert done.returncode == 0, done.stderr
        outputs.append([float(value) for value in re.findall(r": loss ([0-9.]+)", done.stdout)])
    assert len(outputs[0]) == 10 and outputs[1] == pytest.approx(outputs[0], abs=2e-4)
    assert (tmp_path / "1/predictions.parquet").is_file() and (tmp_path / "1/model").is_dir()


def test_the_distributed_loop_is_at_most_twenty_lines_longer() -> None:
    single, distributed = (
        len((EXAMPLES / name).read_text().splitlines()) for name in ("own_loop_single.py", "own_loop.py")
    )
    assert distributed - single <= 20
