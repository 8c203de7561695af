"""Output of the demo. Training, which takes minutes, is replaced by written run directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gnnfleet.analysis import compare
from gnnfleet.config.schema import RunConfig
from gnnfleet.graph.partition.assign import PARTITIONERS
from tests.report.runs import write_run
from tests.shell import fails, run_json


def test_the_demo_shows_every_strategy_and_partitioner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[RunConfig] = []

    def write_fake_run(store: Path, config: RunConfig, run_dir: Path, **_: Any) -> None:
        trained.append(config)
        write_run(run_dir, strategy=config.strategy.name, workers=config.workers)

    monkeypatch.setattr(compare, "_train", write_fake_run)
    monkeypatch.setattr(compare, "_largest_difference", lambda *_: 1e-12)
    for _ in range(2):  # the second demo replaces the first
        result = run_json("demo", "-o", tmp_path / "demo", "--set", "nodes=400", "-q")
    names = ["local", "sar", "macrobatch", "tma", "pipe", "temporal"]
    assert [run["strategy"] for run in result["runs"]] == names
    assert [run["workers"] for run in result["runs"]][:5] == [1, 2, 2, 2, 2]
    configs = [config for config in trained if config.precision == "float32" and config.strategy.name != "temporal"]
    first = configs[0]
    assert all((c.model, c.seed, c.train) == (first.model, first.seed, first.train) for c in configs)
    assert [run.get("equals_local") for run in result["runs"]] == [False, True, True, False, True, False]
    page = Path(result["page"]).read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [run["name"] for run in data["runs"]] == names
    assert [partition["method"] for partition in data["partitions"]] == list(PARTITIONERS)


def test_a_directory_with_foreign_files_is_not_replaced(tmp_path: Path) -> None:
    for name in ("communities", "thesis.tex"):  # the first might be a store of the user
        (tmp_path / name).mkdir()
        assert "not empty" in fails("demo", "-o", tmp_path, "-q", code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["communities", "thesis.tex"]
