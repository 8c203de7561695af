"""``gnnfleet report``, ``gnnfleet watch`` and ``gnnfleet train --trace``."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from gnnfleet.graph.store import save_store
from gnnfleet.report.metrics import read_metrics
from tests.graphs import communities
from tests.report.runs import write_run
from tests.shell import call, fails, run_json, start

OPTIONS = ("--set", "model.hidden=8", "--set", "model.layers=2", "--set", "train.epochs=3", "-q")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two workers, traced."""
    folder = tmp_path_factory.mktemp("report")
    save_store(communities(), folder / "store")
    run_json(
        "train",
        folder / "store",
        *OPTIONS,
        "--strategy",
        "sar",
        "--workers",
        "2",
        "--trace",
        "--run-dir",
        folder / "run",
    )
    return folder / "run"


def test_measurements_of_ranks_are_saved(trained: Path) -> None:
    rows, split = read_metrics(trained / "metrics.jsonl"), read_metrics(trained / "ranks.jsonl")
    assert [row["epoch"] for row in split] == [row["epoch"] for row in rows] == [1, 2, 3]
    assert [row["step"] for row in rows] == [1, 2, 3]
    record, totals = json.loads((trained / "record.json").read_text()), json.loads((trained / "ranks.json").read_text())
    assert [sum(row) for row in totals["bytes"]] == record["traffic"]["bytes_sent"]
    assert totals["rounds"] == record["traffic"]["rounds"]
    assert [totals["bytes"][rank][rank] for rank in range(2)] == [0, 0] and totals["bytes"][0][1] > 0
    assert json.loads((trained / "parts.json").read_text())["quality"]["parts"] == 2


def test_the_trace_has_steps_and_waits_of_both_ranks(trained: Path) -> None:
    events = [e for e in json.loads((trained / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in range(2):
        of_rank = [event for event in events if event["pid"] == rank]
        assert [e["name"] for e in of_rank if e["cat"] == "epoch"] == ["epoch 1", "epoch 2", "epoch 3"]
        assert {"step", "exchange", "wait", "beside"} <= {event["cat"] for event in of_rank}
        steps = [event for event in of_rank if event["cat"] == "step"]
        waits = [event for event in of_rank if event["cat"] == "wait"]
        assert any(s["ts"] <= w["ts"] and w["ts"] + w["dur"] <= s["ts"] + s["dur"] for w in waits for s in steps)
    begins = [min(e["ts"] for e in events if e["pid"] == rank and e["cat"] == "epoch") for rank in range(2)]
    assert abs(begins[0] - begins[1]) < 5e6


def test_report_shows_one_run_or_two(trained: Path, tmp_path: Path) -> None:
    result = run_json("report", trained, "-o", tmp_path / "page.html", "-q")
    assert result["runs"][0]["state"] == "finished" and result["runs"][0]["epochs"] == 3
    other = write_run(tmp_path / "run")
    run_json("report", trained, other, "-o", tmp_path / "page.html", "-q")
    data = json.loads((tmp_path / "page.html").read_text().split('id="data">')[1].split("</script>")[0])
    assert len({run["name"] for run in data["runs"]}) == 2, (
        "directories with the same name have different names on the page"
    )


def test_report_and_watch_refuse_wrong_paths(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert "not a run" in fails("report", tmp_path, "-o", tmp_path / "page.html", code=7)
    assert "twice" in fails("report", run, run, code=2)
    assert "choose another" in fails("report", run, "-o", tmp_path / "nowhere" / "page.html", code=2)
    assert "--serve" in fails("report", run, "--serve", "-o", tmp_path / "page.html", code=2)
    assert "not a run" in fails("watch", tmp_path, code=7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_watch_shows_a_finished_run_once(tmp_path: Path) -> None:
    done = call("watch", write_run(tmp_path / "run"))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-2:] == ["epoch 4/4  loss 0.5000  val 0.8750  0.50 s", "run: finished"]


def test_a_served_page_is_reachable_from_this_machine_only(tmp_path: Path) -> None:
    process = start("report", write_run(tmp_path / "run"), "--serve")
    try:
        assert process.stderr is not None
        url = next(text for text in process.stderr.readline().split() if text.startswith("http"))
        page = urllib.request.urlopen(url, timeout=20).read().decode()
        assert page.startswith("<!doctype html>")
        data = json.loads(urllib.request.urlopen(url + "data.json", timeout=20).read())
        assert data["runs"][0]["summary"]["test"] == 0.86 and data["live"] is False
        for path, host, code in (("config.json", None, 404), ("", "evil.example", 403)):
            request = urllib.request.Request(url + path, headers={"Host": host} if host else {})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=20)
            assert refused.value.code == code
            refused.value.close()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 0
