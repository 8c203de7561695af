"""The silence limit of the config reaches the failure detector of every rank, however the rank was started."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError
from gnnfleet.launch import rank_main, worker
from gnnfleet.launch.spec import RunSpec
from gnnfleet.session import torchrun
from gnnfleet.session.prepare import RunLocation
from gnnfleet.training.run_dir import RunDirectory

SAR = {"strategy": {"name": "sar"}, "workers": 2}


def test_limits_below_three_seconds_are_refused() -> None:
    with pytest.raises(ConfigError, match="silence_limit"):
        resolve({**SAR, "silence_limit": 1})


def test_ranks_of_torchrun_read_it_from_options_or_the_resumed_run(tmp_path: Path) -> None:
    location = RunLocation(run_dir=tmp_path / "run", resume=True)
    assert torchrun._silence_limit(SAR, location) == 10
    graph: Any = SimpleNamespace(store=None)
    (tmp_path / "run").mkdir()
    RunDirectory(tmp_path / "run").initialize(resolve({**SAR, "silence_limit": 30}), graph, None)
    assert torchrun._silence_limit(SAR, location) == 30
    assert torchrun._silence_limit({**SAR, "silence_limit": 20}, location) == 20
    assert torchrun._silence_limit({**SAR, "silence_limit": "long"}, location) == 10


def test_workers_read_it_from_their_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve({**SAR, "silence_limit": 30}).model_dump(mode="json")
    spec = RunSpec(store="s", digest="d", partition="p", run_dir="r", config=config)
    (tmp_path / "spec.json").write_text(spec.as_json())
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path / "spec.json"), "gnnfleet.launch.rank_main:train_rank"])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker, "set_up_worker", lambda parent, threads: None)
    passed: dict[str, Any] = {}
    monkeypatch.setattr(rank_main, "run_rank", lambda *_, **options: passed.update(options))
    worker.main()
    assert passed["silence_limit"] == 30
