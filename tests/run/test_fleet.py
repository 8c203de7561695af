"""A fleet as its user starts it: the record, the same bits by Ray, numbers of trainers, words that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gnnfleet.errors import ConfigError
from gnnfleet.report.metrics import read_metrics
from gnnfleet.run.api import train
from gnnfleet.run.commands.join import parse_numbers
from tests.run.graphs import assert_same_checkpoint, communities
from tests.run.shell import call

WORDS: dict[str, Any] = {"name": "tma", "steps": 3, "fanouts": [3, 2], "batch": 8}
MODEL: dict[str, Any] = {"name": "sage", "hidden": 8, "layers": 2}


def test_numbers_of_trainers() -> None:
    assert parse_numbers("4-6, 9") == [4, 5, 6, 9] and parse_numbers("0") == [0]
    for wrong in ("", "a", "3-1", "1,1", "-2"):
        with pytest.raises(ConfigError, match="--trainers takes"):
            parse_numbers(wrong)


def test_a_run_and_its_record(tmp_path: Path) -> None:
    record = train(
        communities(), strategy=WORDS, workers=2, model=MODEL, epochs=3, run_dir=tmp_path / "run", checkpoint_seconds=0
    )
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert record.summary.strategy == "tma" and record.summary.workers == 2 and record.summary.epochs == 3
    assert record.summary.steps == sum(row["steps"] for row in rows) == 18
    assert [row["trainers"] for row in rows] == [2, 2, 2] and record.metrics["test"] > 0
    assert len(record.predict(["n0", "n1"])) == 2
    assert not (tmp_path / "run" / ".launch").exists()


def test_ray_gives_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    for launcher in ("process", "ray"):
        words = {**WORDS, "launcher": launcher}
        train(communities(), strategy=words, workers=2, model=MODEL, epochs=3, run_dir=tmp_path / launcher)
    assert_same_checkpoint(tmp_path / "ray/checkpoints/last", tmp_path / "process/checkpoints/last")


def test_what_is_refused(tmp_path: Path) -> None:
    done = call("join", "nowhere", tmp_path, "--trainers", "1")
    assert done.returncode == 2 and "expected HOST:PORT, found 'nowhere'" in done.stderr
