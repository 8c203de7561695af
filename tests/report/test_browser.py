"""The page in a real browser: it loads without errors, draws all sections, sorts, hides runs and refreshes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gnnfleet.report.page import PageServer, page_data, render_page
from gnnfleet.report.run_reader import read_run
from tests.report.browser import Browser
from tests.report.runs import write_run

SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 40 10"><script>document.title="x"</script>'
    '<rect width="9" height="9"/></svg>'
)
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def runs(tmp_path: Path) -> list[dict[str, Any]]:
    """One run of each kind, and one without epochs."""
    counts, names = [[6, 1, 0], [2, 4, 0], [0, 0, 0]], ["a long name of a class", EVIL, "c"]
    report = {"classes": names, "precision": [0.75, 0.8, 0.0], "recall": [0.86, 0.67, 0.0], "f1": [0.8, 0.73, 0.0]}
    metrics = {"name": "accuracy", "test": 0.77, "per_class": {**report, "support": [7, 6, 0], "confusion": counts}}
    rates = [{"epoch": e, "step": e, "train_loss": 1.0, "seconds": 0.1, "val": 0.5, "lr": 0.1 / e} for e in (1, 2)]
    paths = {
        "classes": write_run(tmp_path / "classes", strategy="local", metrics=rates, record={"metrics": metrics}),
        "local": write_run(tmp_path / "local", strategy="local", workers=1, epochs=60, parts=None),
        "sar": write_run(tmp_path / "sar", epochs=12),
        EVIL: write_run(tmp_path / "tma", strategy="tma", parts=None, remarks=[{"text": EVIL}]),
        "pipe": write_run(tmp_path / "pipe", strategy="pipe", workers=4, parts=None),
        "temporal": write_run(tmp_path / "temporal", strategy="temporal", parts=None),
        "new": write_run(tmp_path / "new", metrics=None, ranks=None, totals=None, parts=None, record=None),
    }
    (tmp_path / "pipe" / "schedule.svg").write_text(SVG)
    (tmp_path / "temporal" / "lanes.svg").write_text(SVG)
    return [read_run(path, name) for name, path in paths.items()]


PLOTS = "[...document.querySelectorAll('[data-plot]')].map(node => node.dataset.plot)"
FIRST = "[...document.querySelectorAll('#runs tbody tr')].map(row => row.cells[%d].textContent)"


def click(key: str) -> str:
    return f"document.querySelector('#runs th[data-key={key}]').click()"


def test_the_page_draws_all_sections(browser: Browser, runs: list[dict[str, Any]], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    balance = {"nodes": 1.0, "edges": 1.2, "train": 1.0}
    cuts = [
        {
            "name": "g",
            "method": "random",
            "parts": 2,
            "kept_share": 0.5,
            "volume": 10,
            "replication": 1.5,
            "balance": balance,
        }
    ]
    page.write_text(render_page(page_data(runs, title="all", equals={"sar": "yes (1e-13)"}, partitions=cuts)))
    browser.open(page.as_uri())
    drawn = browser.run(PLOTS)
    for name in (
        *(f"{what} over {across}" for what in ("Training loss", "Val accuracy") for across in ("steps", "seconds")),
        *("confusion classes", "Learning rate over steps"),
        *("time split", "memory", "bytes sar", "bytes pipe", f"rounds {EVIL}"),
        *("schedule of the last epoch", "batches of trainers in the last epoch"),
    ):
        assert name in drawn, (name, drawn)
    headings = browser.run("[...document.querySelectorAll('h2')].map(node => node.textContent)")
    assert headings[0] == "Runs" and {"Partitions", "Rounds", "Schedules", "Settings", "Messages"} <= set(headings)
    assert browser.run("document.querySelectorAll('img:not([data-plot])').length") == 0, "text of users is text"
    assert browser.run("document.title") == "all" and browser.problems == []


def test_a_click_on_a_heading_sorts_the_table(browser: Browser, runs: list[dict[str, Any]], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render_page(page_data(runs, title="all")))
    browser.open(page.as_uri())
    names = [run["name"] for run in runs]
    assert browser.run(FIRST % 0) == names
    browser.run(click("name"))
    ascending = browser.run(FIRST % 0)
    assert sorted(ascending) == sorted(names) and ascending != names
    browser.run(click("name"))
    assert browser.run(FIRST % 0) == ascending[::-1]
    browser.run(click("workers"))
    workers = [int(text) for text in browser.run(FIRST % 2)]
    assert workers == sorted(workers) == [1, 2, 2, 2, 2, 2, 4]
    assert browser.problems == []


def test_runs_are_hidden_by_a_click_and_explained_on_hover(
    browser: Browser, runs: list[dict[str, Any]], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text(render_page(page_data(runs, title="all")))
    browser.open(page.as_uri())
    lines = "document.querySelector('[data-plot=\"Training loss over steps\"]').querySelectorAll('path').length"
    before = browser.run(lines)
    browser.run("document.querySelector('.legend button').click()")
    assert browser.run(lines) == before - 1
    browser.run(
        "(() => { const box = document.querySelector('[data-plot=\"Training loss over steps\"]');"
        "const r = box.getBoundingClientRect();"
        "box.dispatchEvent(new MouseEvent('mousemove', {clientX: r.left + r.width / 2, clientY: r.top + 20})); })()"
    )
    tooltip = browser.run("document.querySelector('.tip').textContent")
    assert "sar: " in tooltip and "epoch" in tooltip and browser.problems == []


def test_labels_do_not_overlap_and_lie_inside_their_plot(
    browser: Browser, runs: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Applies to all labels of every plot."""
    page = tmp_path / "page.html"
    page.write_text(render_page(page_data(runs, title="all")))
    browser.open(page.as_uri())
    boxes = json.loads(
        browser.run(
            "JSON.stringify([...document.querySelectorAll('svg.plot')].map(plot => ({name: plot.dataset.plot, "
            "all: box(plot), texts: [...plot.querySelectorAll('text')].map(box)})));"
            "function box(node) { const r = node.getBoundingClientRect();"
            "return [r.left, r.top, r.right, r.bottom, node.tagName === 'text' ? node.textContent : '']; }"
        )
    )
    assert boxes
    for plot in boxes:
        left, top, right, bottom, _ = plot["all"]
        for text in plot["texts"]:
            assert left - 1 <= text[0] and text[2] <= right + 1 and top - 2 <= text[1] and text[3] <= bottom + 2, (
                plot["name"],
                text,
            )
        for i, a in enumerate(plot["texts"]):
            for b in plot["texts"][:i]:
                apart = a[0] >= b[2] - 1 or b[0] >= a[2] - 1 or a[1] >= b[3] - 2 or b[1] >= a[3] - 2
                assert apart, (plot["name"], a, b)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")


def test_coinciding_curves_have_different_dashes(browser: Browser, runs: list[dict[str, Any]], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render_page(page_data(runs, title="all")))
    browser.open(page.as_uri())
    dashes = "[...document.querySelectorAll('%s')].map(node => node.getAttribute('stroke-dasharray'))"
    drawn = browser.run(dashes % '[data-plot="Training loss over steps"] path')
    assert drawn[0] is None and len(set(drawn)) == len(drawn) == len(runs)
    assert browser.run(dashes % ".legend .sample line") == drawn, "the legend shows the same"


def test_pictures_do_not_touch(browser: Browser, runs: list[dict[str, Any]], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render_page(page_data(runs, title="all")))
    browser.open(page.as_uri())
    first, second = browser.run(
        "[...document.querySelectorAll('img.picture')].map(node => node.closest('.card').getBoundingClientRect())"
        ".map(box => [box.top, box.bottom])"
    )
    assert second[0] - first[1] >= 10


def test_val_curves_of_events_name_their_candidates(
    browser: Browser, runs: list[dict[str, Any]], tmp_path: Path
) -> None:
    events = next(run for run in runs if run["name"] == "temporal")
    events["config"] |= {"strategy.eval_negatives": 49, "task": "link"}
    page = tmp_path / "page.html"
    notes = (
        "[...document.querySelectorAll('.card')].filter(node => node.querySelector('[data-plot^=Val]'))"
        ".map(node => node.querySelector('p')?.textContent ?? '')"
    )
    for shown, expected in ((runs, True), ([run for run in runs if run is not events], False)):
        page.write_text(render_page(page_data(shown, title="all")))
        browser.open(page.as_uri())
        texts = browser.run(notes)
        note = "temporal: curves rank among 49 sampled destinations"
        assert len(texts) == 2 and all((note in text) is expected for text in texts)


def test_a_served_page_draws_new_epochs(browser: Browser, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", epochs=2)
    live = [True]
    server = PageServer(lambda: page_data([read_run(path)], title="live", live=live[0]), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        browser.open(server.url)
        assert browser.run(FIRST % 4) == ["2"]
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"epoch": 3, "step": 6, "train_loss": 0.1, "seconds": 0.5, "val": 0.9}\n')
        live[0] = False
        waiting = "new Promise(done => { const look = () => data.live ? setTimeout(look, 50) : done(true); look(); })"
        assert browser.run(waiting)
        assert browser.run(FIRST % 4) == ["3"] and browser.problems == []
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
