"""Plans: what fits and what is recommended, words that go to strategies, ``auto`` settled before a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import gnnfleet as gf
from gnnfleet.errors import ConfigError, ExchangeError, InputError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.store import save_store
from gnnfleet.planner import planner as planning
from gnnfleet.planner.planner import _recommend, make_plan
from gnnfleet.planner.trial_runs import TrialOutcome, TrialRun, apply_trials, trial_candidates, trial_length
from gnnfleet.session import training
from gnnfleet.strategies.estimates import CostEstimate
from gnnfleet.units import parse_rate
from tests.shell import call, run_json


def forecast(name: str, seconds: float, memory: float, kind: Any = "exact", **more: Any) -> CostEstimate:
    return CostEstimate(words={"name": name}, kind=kind, workers=2, memory=memory, seconds=seconds, **more)


EVERY = [
    forecast("local", 4.0, 900e6),
    forecast("sar", 2.0, 600e6),
    forecast("macrobatch", 1.0, 500e6, "sampled"),
    forecast("tma", 10.0, 400e6, "approximate", passes=20.0),
    forecast("pipe", 0.0, 0.0, refused="as many layers"),
]


@pytest.mark.parametrize(
    ("memory", "goal", "best"),
    [(None, "exact", "sar"), (None, "any", "tma"), (None, "sampled", "macrobatch"), (550 << 20, "exact", "tma")],
)
def test_the_fastest_of_what_is_asked_for(memory: int | None, goal: str, best: str) -> None:
    plan = _recommend(EVERY, memory, goal)
    assert plan.best is not None and plan.best.name == best
    assert [each.seconds_per_pass for each in plan.fits] == sorted(each.seconds_per_pass for each in plan.fits)
    assert len(plan.fits) + len(plan.refused) == len(EVERY)


def test_what_does_not_fit_says_by_how_much() -> None:
    plan = _recommend(EVERY, 550_000_000, "exact")
    texts = {each.name: each.refused for each in plan.refused}
    assert texts["sar"] == "needs 572 MiB, 48 MiB more than --memory" and texts["pipe"] == "as many layers"
    nothing = _recommend(EVERY, 1 << 20, "exact")
    assert nothing.best is None
    assert nothing.why[0].startswith("nothing fits into --memory 1 MiB; the least that any needs is 381 MiB (tma)")


@pytest.mark.parametrize(
    ("seconds", "steps", "relay", "length"),
    [
        (0.1, 1, 1, (0, 3)),  # a full batch: three epochs after the first
        (2.0, 1, 1, (0, 1)),
        (4.0, 1, 1, None),  # two of them take too long
        (100.0, 1000, 1, (4, 15)),  # some steps of a long epoch
        (100.0, 1000, 20, (20, 20)),  # never a piece of a relay
        (2.0, 40, 20, (20, 20)),
        (2.0, 30, 20, (0, 1)),
        (3e4, 1000, 1, None),
    ],
)
def test_trials_are_short(seconds: float, steps: int, relay: int, length: tuple[int, int] | None) -> None:
    assert trial_length(forecast("macrobatch", seconds, 1.0, steps=steps, relay=relay)) == length


def test_what_is_tried_corrects_the_others() -> None:
    """Three of a strategy are tried, the fastest; what is refused, takes too much or has its own clock is not."""
    sar = [forecast("sar", seconds, 600e6) for seconds in (2.0, 1.0, 1.5, 1.2)]
    every = [*EVERY, *sar, forecast("local", 0.1, 2e9), forecast("tma", 1.0, 1.0, is_walk=False)]
    chosen = trial_candidates(every, {2: 1e9})
    assert {id(each) for each in chosen} == {id(sar[1]), id(sar[2]), id(sar[3]), id(EVERY[2])}
    made = apply_trials(every, {id(sar[1]): 2.0, id(sar[3]): 1.2, id(EVERY[2]): "no such layer"})
    assert made[2].refused == "no such layer" and not made[1].refused
    assert [each.seconds for each in made] == [4.0, 3.0, 1.0, 10.0, 0.0, 3.0, 2.0, 2.25, 1.2, 0.1, 1.0]
    assert made[6].reasons[-1] == "an epoch was tried: 2 s; foreseen were 1 s" and not made[5].reasons


@pytest.mark.parametrize(("text", "rate"), [("1Gbit", 125e6), ("800 Mbit", 1e8), ("125MB", 125e6), ("2GiB/s", 2**31)])
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["fast", "0Gbit", "1Gbyte", ""])
def test_no_rates(text: str) -> None:
    with pytest.raises(ConfigError, match="a bandwidth reads as 1Gbit"):
        parse_rate(text)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "store"
    save_store(make_dataset("communities", nodes=600, mean_degree=6, features=8, classes=3), path)
    return path


MODEL = {"name": "sage", "hidden": 8, "layers": 2}


def test_words(store: Path) -> None:
    graph = gf.open(store)
    for strategy, text in (
        ({"fanout": [3]}, "did you mean fanouts"),
        ({"goal": "best"}, "expected exact, sampled, any"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_plan(graph, {"strategy": strategy, "model": MODEL})
    with pytest.raises(ConfigError, match="no forecast of a strategy 'sra'"):
        make_plan(graph, {"model": MODEL}, only=["sra"])
    with pytest.raises(ConfigError, match="with one worker only local is planned, found sar: pass --workers"):
        make_plan(graph, {"model": MODEL}, only=["sar"])
    with pytest.raises(ConfigError, match="workers='two'"):
        make_plan(graph, {"model": MODEL, "workers": "two"})


def test_a_word_that_a_strategy_refuses_is_a_row(store: Path) -> None:
    """The others are planned; where all that are asked for refuse it, it is an error."""
    graph, words = gf.open(store), {"model": MODEL, "workers": 2}
    plan = make_plan(graph, {**words, "strategy": {"quorum": 5}}, bandwidth=1e9, only=["sar", "tma"])
    assert {each.name for each in plan.fits} == {"sar"}
    texts = {each.name: each.refused for each in plan.refused}
    assert "strategy.quorum=5 asks for more trainers" in texts["tma"]
    plan = make_plan(graph, {**words, "strategy": {"fanouts": "many"}}, bandwidth=1e9, only=["local", "sar"])
    texts = {each.name: each.refused for each in plan.refused}
    assert {each.name for each in plan.fits} == {"sar"} and "expected whole numbers" in texts["local"]
    with pytest.raises(ConfigError, match=r"strategy\.quorum=5 asks for more trainers"):
        make_plan(graph, {**words, "strategy": {"quorum": 5}}, only=["tma"])


def test_workers_of_a_config(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('workers = 2\n[strategy]\nname = "tma"\ninterval = 3.0\n[model]\nhidden = 8\nlayers = 2\n')
    line = ["plan", store, "--config", file, "--strategies", "sar", "--bandwidth", "1Gbit", "-q"]
    assert {each["workers"] for each in run_json(*line)["fits"]} == {2}
    assert {each["workers"] for each in run_json(*line, "-w", "3")["fits"]} == {3}


def test_machines_with_links(store: Path) -> None:
    """Four workers that are not here: every strategy, slower links cost more, wrong grids are refused in words."""
    graph, words = gf.open(store), {"model": MODEL, "workers": 4, "strategy": {"steps": 3, "batch": 64}}
    plan = make_plan(graph, words, bandwidth=1e9)
    names = {each.name for each in plan.fits}
    assert names == {"local", "sar", "macrobatch", "tma", "pipe"}
    assert all(each.memory > 0 and each.seconds > 0 for each in plan.fits)
    slow = make_plan(graph, words, bandwidth=1e3, only=["sar"])
    fast = make_plan(graph, words, bandwidth=1e12, only=["sar"])
    assert min(each.seconds for each in slow.fits) > max(each.seconds for each in fast.fits)
    assert {each.bytes for each in slow.fits} == {each.bytes for each in fast.fits}


def test_a_trial_that_dies_takes_no_other_along(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that were to be tried with it are tried by themselves; what cannot be rehearsed is a row as well."""
    launched: list[list[Any]] = []

    def dying(graph: Any, config: Any, trials: Sequence[TrialRun], **_: Any) -> list[TrialOutcome]:
        launched.append([trial.config["strategy"] for trial in trials])
        if launched[0][0] in launched[-1]:
            raise ExchangeError("rank 1 (pid 7) was killed by SIGKILL, perhaps for want of memory; try again")
        return [1e-9 for _ in trials]

    def dead(*_: Any, **__: Any) -> Any:
        raise InputError("no rows")

    monkeypatch.setattr(planning, "run_epoch_trials", dying)
    monkeypatch.setattr(planning, "run_strategy_trials", dead)
    words = {"model": MODEL, "workers": 2}
    plan = make_plan(gf.open(store), words, only=["local", "sar", "pipe"], quiet=False)
    assert len(launched[0]) > 1 and launched[1:] == [[each] for each in launched[0]]
    assert plan.best is not None and plan.best.name == "sar" and "local" in {each.name for each in plan.fits}
    texts = {each.name: each.refused for each in plan.refused}
    assert len(plan.refused) == 2 and texts["pipe"] == "a rehearsal of it failed: no rows"
    assert texts["sar"].startswith("a trial of it failed: rank 1 (pid 7) was killed by SIGKILL")
    assert texts["sar"] in capsys.readouterr().err


def test_one_process_without_memory_for_a_trial(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(graph: Any, trial: TrialRun) -> TrialOutcome:
        if "fanouts" in trial.config["strategy"] and trial.config["strategy"]["fanouts"]:
            return 1.0
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore of it")

    monkeypatch.setattr(planning, "run_trial", full)
    plan = make_plan(gf.open(store), {"model": MODEL})
    assert [each.refused for each in plan.refused] == [
        "a trial of it failed: DefaultCPUAllocator: can't allocate memory"
    ]
    assert plan.best is not None and "of exact full batch nothing fits" in plan.why[0]


def test_auto_trains_what_is_recommended(store: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--model", "sage", "--set", "model.hidden=8", "--set", "model.layers=2", "--set", "train.epochs=2"]
    done = call("train", store, *words, "--strategy", "auto", "--workers", "2", "--run-dir", run, "--json")
    assert done.returncode == 0, done.stderr
    config = json.loads((run / "config.json").read_text())["config"]
    record = json.loads(done.stdout)
    assert config["strategy"]["name"] == record["strategy"] != "auto" and config["workers"] == record["workers"]
    assert f"strategy auto: {record['strategy']}" in done.stderr
    assert "an epoch was tried: " in done.stderr
    more = call("train", store, *words[:-1], "train.epochs=3", "--strategy", "auto", "--run-dir", run, "--resume")
    assert more.returncode == 0, more.stderr


def test_restarts_of_one_process_that_was_chosen(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked for one process: it is a remark, not an error."""
    chosen = {"strategy": {"name": "local"}, "workers": 1}
    monkeypatch.setattr(training, "_with_strategy", lambda graph, words, place, quiet: {**words, **chosen})
    words = ["--set", "model.hidden=8", "--set", "model.layers=2", "--set", "train.epochs=1", "--max-restarts", "2"]
    done = call("train", store, *words, "--strategy", "auto", "--run-dir", tmp_path / "run")
    assert done.returncode == 0 and "one process was chosen, which nobody starts again" in done.stderr, done.stderr


def test_a_plan_in_which_nothing_fits_is_an_error(store: Path) -> None:
    words = ["plan", store, "--set", "model.hidden=8", "--set", "model.layers=2", "--memory", "1MB", "-q"]
    done = call(*words, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 2 and found["recommended"] is None and found["refused"] and not found["fits"]
    assert done.stderr.startswith(f"error: {found['why'][0]}") and "nothing fits" in done.stderr
    shown = call(*words)
    assert shown.returncode == 2 and "does not fit" in shown.stdout and "error: nothing fits" in shown.stderr


def test_auto_that_does_not_fit(store: Path) -> None:
    with pytest.raises(ConfigError, match="nothing fits into --memory 1 MiB"):
        gf.train(store, strategy="auto", model=MODEL, epochs=1, memory="1MiB")


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "events"
    save_store(make_dataset("events", users=40, items=20, events=900, features=4, seed=3), path)
    return path


EVENT_WORDS = {"model": {"name": "tgn", "hidden": 8}, "strategy": {"batch": 50, "static": False, "eval_negatives": 4}}


def test_events_on_machines_with_links(events: Path) -> None:
    """Only copies of the memory may be on several machines; gradients travel."""
    plan = make_plan(gf.open(events), {**EVENT_WORDS, "workers": 2}, bandwidth=1e6)
    shapes = {(each.workers, each.words["memory_parallel"]): each for each in plan.fits}
    assert set(shapes) == {(1, 1), (2, 2)} and {each.kind for each in plan.fits} == {"exact", "approximate"}
    assert all("of one machine" in each.refused for each in plan.refused) and len(plan.refused) == 2
    alone, copies = shapes[1, 1], shapes[2, 2]
    assert "the fastest of exact arrangements that fit" in plan.why[0], plan.why
    assert alone.bytes == 0 and alone.memory > 0 and copies.steps == alone.steps // 2
    assert copies.bytes > 0 and copies.seconds / copies.steps > alone.seconds / alone.steps


def test_words_of_events(events: Path) -> None:
    graph = gf.open(events)
    with pytest.raises(ConfigError, match="plan it by itself"):
        make_plan(graph, EVENT_WORDS, only=["temporal", "sar"])
    with pytest.raises(ConfigError, match="no strategy has a setting 'fanouts'"):
        make_plan(graph, {"strategy": {"fanouts": [3]}})  # a stream without features: nothing else is thought of
    with pytest.raises(ConfigError, match="no edges with times"):
        make_plan(make_dataset("communities", nodes=60, mean_degree=4), {"model": {"name": "tgn"}})


def test_steps_of_trainers_are_tried(store: Path) -> None:
    words = {"model": MODEL, "workers": 2, "strategy": {"steps": 4, "batch": 64, "fanouts": [3, 3], "scheme": "random"}}
    (found,) = make_plan(gf.open(store), words, only=["tma"]).fits
    assert any("(tried; foreseen were" in reason for reason in found.reasons), found.reasons
    assert 0 < found.seconds < 60
