"""The page, the view in the terminal and the trace of a run as users ask for them."""

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

WORDS = ("--set", "model.hidden=8", "--set", "model.layers=2", "--set", "train.epochs=3", "-q")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two workers, traced."""
    folder = tmp_path_factory.mktemp("report")
    save_store(communities(), folder / "store")
    run_json(
        "train", folder / "store", *WORDS, "--strategy", "sar", "--workers", "2", "--trace", "--run-dir", folder / "run"
    )
    return folder / "run"


def test_what_ranks_measured_is_kept(trained: Path) -> None:
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
        own = [event for event in events if event["pid"] == rank]
        assert [e["name"] for e in own if e["cat"] == "epoch"] == ["epoch 1", "epoch 2", "epoch 3"]
        assert {"step", "exchange", "wait", "beside"} <= {event["cat"] for event in own}
        steps = [event for event in own if event["cat"] == "step"]
        waits = [event for event in own if event["cat"] == "wait"]
        assert any(s["ts"] <= w["ts"] and w["ts"] + w["dur"] <= s["ts"] + s["dur"] for w in waits for s in steps)
    begins = [min(e["ts"] for e in events if e["pid"] == rank and e["cat"] == "epoch") for rank in range(2)]
    assert abs(begins[0] - begins[1]) < 5e6


def test_a_page_of_one_run_and_of_two(trained: Path, tmp_path: Path) -> None:
    found = run_json("report", trained, "-o", tmp_path / "page.html", "-q")
    assert found["runs"][0]["state"] == "finished" and found["runs"][0]["epochs"] == 3
    other = write_run(tmp_path / "run")
    run_json("report", trained, other, "-o", tmp_path / "page.html", "-q")
    data = json.loads((tmp_path / "page.html").read_text().split('id="data">')[1].split("</script>")[0])
    assert len({run["name"] for run in data["runs"]}) == 2, "two directories of one name are told apart"


def test_mistakes_of_report(tmp_path: Path) -> None:
    one = write_run(tmp_path / "run")
    assert "not a run" in fails("report", tmp_path, "-o", tmp_path / "page.html", code=7)
    assert "twice" in fails("report", one, one, code=2)
    assert "choose another" in fails("report", one, "-o", tmp_path / "nowhere" / "page.html", code=2)
    assert "--serve" in fails("report", one, "--serve", "-o", tmp_path / "page.html", code=2)
    assert "not a run" in fails("watch", tmp_path, code=7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_watch_shows_a_run_that_has_ended(tmp_path: Path) -> None:
    done = call("watch", write_run(tmp_path / "run"))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-2:] == ["epoch 4/4  loss 0.5000  val 0.8750  0.50 s", "run: finished"]


def test_a_served_page_is_for_this_machine(tmp_path: Path) -> None:
    process = start("report", write_run(tmp_path / "run"), "--serve")
    try:
        assert process.stderr is not None
        url = next(word for word in process.stderr.readline().split() if word.startswith("http"))
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
