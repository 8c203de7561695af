"""What the demo shows; training itself is left out here, it takes minutes."""

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


def test_every_strategy_and_every_partitioner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[RunConfig] = []

    def pretend(store: Path, config: RunConfig, run_dir: Path, **_: Any) -> None:
        trained.append(config)
        write_run(run_dir, strategy=config.strategy.name, workers=config.workers)

    monkeypatch.setattr(compare, "_train", pretend)
    monkeypatch.setattr(compare, "_difference", lambda one, two: 1e-12)
    for _ in range(2):  # another demo replaces what the first has left
        found = run_json("demo", "-o", tmp_path / "demo", "--set", "nodes=400", "-q")
    names = ["local", "sar", "macrobatch", "tma", "pipe", "temporal"]
    assert [run["strategy"] for run in found["runs"]] == names
    assert [run["workers"] for run in found["runs"]][:5] == [1, 2, 2, 2, 2]
    main = [config for config in trained if config.precision == "float32" and config.strategy.name != "temporal"]
    assert all((each.model, each.seed, each.train) == (main[0].model, main[0].seed, main[0].train) for each in main)
    assert [run.get("equals_local") for run in found["runs"]] == [False, True, True, False, True, False]
    page = Path(found["page"]).read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [run["name"] for run in data["runs"]] == names
    assert [cut["method"] for cut in data["partitions"]] == list(PARTITIONERS)


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    for name in ("communities", "thesis.tex"):  # the first might be a store of the user's own
        (tmp_path / name).mkdir()
        assert "not empty" in fails("demo", "-o", tmp_path, "-q", code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["communities", "thesis.tex"]
