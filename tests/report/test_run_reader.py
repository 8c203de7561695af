"""Run directories are read during and after training; missing and damaged files are left out."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from gnnfleet.cli.report import epoch_lines_since, live_view, sparkline, summary_table
from gnnfleet.errors import RunError
from gnnfleet.report.page import page_data, render_page
from gnnfleet.report.run_reader import mean_phase_seconds, read_run, summarize, worker_names
from tests.report.runs import write_run


def test_a_finished_run_is_summarized(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "one"))
    summary = summarize(run)
    assert (run["state"], run["strategy"], run["store"]) == ("finished", "sar", "shop")
    assert (summary["epochs"], summary["test"], summary["epoch_seconds"], summary["seconds"]) == (4, 0.86, 0.5, 2.0)
    assert summary["bytes"] == 1000 * (1 + 2) + (1 + 0) + 2 * 64 and summary["rounds"] == 7
    assert (
        mean_phase_seconds(run)
        == [{"compute": pytest.approx(0.3), "exchange": pytest.approx(0.1), "wait": pytest.approx(0.1)}] * 2
    )


def test_events_are_shown_beside_edgebank(tmp_path: Path) -> None:
    assert summarize(read_run(write_run(tmp_path / "one")))["baseline"] is None
    metrics = {"test": 0.4, "name": "mrr", "beside": {"test": {"ap": 0.9, "edgebank": 0.2, "edgebank_window": 0.3}}}
    run = read_run(write_run(tmp_path / "two", strategy="temporal", record={"metrics": metrics}))
    assert summarize(run)["baseline"] == 0.3
    columns = [column.header for column in summary_table([run]).columns]
    assert columns.index("EdgeBank") == columns.index("test mrr") + 1


def test_workers_of_tma_are_a_coordinator_and_trainers(tmp_path: Path) -> None:
    assert worker_names(read_run(write_run(tmp_path / "one", strategy="tma"))) == [
        "coordinator",
        "trainer 0",
        "trainer 1",
    ]


def test_a_run_is_running_while_its_lock_is_held(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one", record=None)
    assert read_run(path)["state"] == "stopped"
    with (path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(path)["state"] == "running"
        with pytest.raises(BlockingIOError), (path / ".lock").open() as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert read_run(path)["state"] == "stopped"


def test_a_run_without_epochs_is_read(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one", record=None, metrics=None, ranks=None, totals=None, parts=None)
    run = read_run(path)
    assert summarize(run)["epochs"] == 0 and mean_phase_seconds(run) == []
    assert "<main>" in render_page(page_data([run], title="x"))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"config": 3}', "\x00\xff"])
def test_a_directory_without_a_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RunError, match="not a run"):
        read_run(tmp_path)


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one")
    for name in ("ranks.json", "record.json", "parts.json"):
        (path / name).write_text('["nonsense"]')
    with (path / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"epoch": "two"}\n{"torn')
    run = read_run(path)
    assert run["totals"] is None and run["record"] is None and run["parts"] is None
    assert [row["epoch"] for row in run["rows"]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "files",
    [
        {"config": {"config": {"strategy": [], "model": 3, "train": [], "workers": 2}, "store": "shop"}},
        {"record": {"metrics": [], "traffic": [1], "memory": 3}},
        {"record": {"metrics": {"test": "good", "name": 3, "beside": [1]}, "traffic": {"bytes_sent": "x"}}},
        {"totals": {"bytes": [["a"]], "rounds": ["b"], "peak_rss": ["c"]}},
        {"totals": {"bytes": [1], "rounds": [], "peak_rss": []}, "parts": {"quality": 3}},
        {"metrics": [{"epoch": 1, "seconds": "x", "train_loss": "y", "val": None}], "remarks": [{"text": 3}]},
        {"ranks": [{"epoch": 1, "compute": [1], "exchange": [], "wait": [1, 2]}]},
    ],
)
def test_other_types_than_expected_are_left_out(tmp_path: Path, files: dict[str, Any]) -> None:
    run = read_run(write_run(tmp_path / "one", **files))
    assert "<main>" in render_page(page_data([run], title="x"))
    assert summary_table([run]).row_count == 1 and live_view(run) is not None


@pytest.mark.parametrize("fields", [{"workers": "two"}, {"workers": None}, {"train": {"epochs": []}}])
def test_a_config_without_numbers_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    path = write_run(tmp_path / "one", config={"config": {"strategy": {"name": "sar"}, **fields}})
    with pytest.raises(RunError, match="not a run"):
        read_run(path)


def test_text_of_users_stays_inside_the_embedded_json(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--"
    run = read_run(write_run(tmp_path / "one", remarks=[{"text": evil}]), name=evil)
    page = render_page(page_data([run], title=evil))
    assert "<script>alert" not in page and page.count("</script>") == 2 and page.count("<!--") == 0
    data = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data)["runs"][0]["name"] == evil


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one")
    (path / "metrics.jsonl").write_text('{"epoch": 1, "train_loss": NaN, "val": Infinity, "seconds": 1.0}\n')
    page = render_page(page_data([read_run(path)], title="x"))
    assert "NaN" not in page.split('id="data">')[1].split("</script>")[0]


def test_epoch_lines_and_sparklines_have_their_defined_text(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "one"))
    assert epoch_lines_since(run, 3) == ["epoch 4/4  loss 0.5000  val 0.8750  0.50 s"]
    assert (
        sparkline([0.0, 1.0, 7.0]) == "▁▂█" and sparkline([2.0, 2.0]) == "▁▁" and len(sparkline(list(range(99)))) == 40
    )


def test_measures_per_class_are_checked(tmp_path: Path) -> None:
    column: list[Any] = [0.5, 0.25]
    report = {"classes": ["a", "b"], **dict.fromkeys(("precision", "recall", "f1", "support"), column)}
    good = {**report, "confusion": [[1, 2], [0, 3]]}
    bad = [
        {**good, "f1": [0.5]},
        {**good, "confusion": [[1, 2]]},
        {**good, "recall": ["<b>", 1]},
        {**good, "classes": 3},
    ]
    for number, content in enumerate([good, report, *bad]):
        run = read_run(write_run(tmp_path / str(number), record={"metrics": {"per_class": content}}))
        assert bool(summarize(run)["classes"]) is (number < 2)
