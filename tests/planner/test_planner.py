"""Plans: candidates that fit, the recommendation, trials, options passed to strategies, ``--strategy auto``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import gnnfleet as gf
from gnnfleet.errors import ConfigError, ExchangeError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.store import save_store
from gnnfleet.planner import planner as planning
from gnnfleet.planner.planner import _recommend, make_plan
from gnnfleet.planner.trial_runs import TrialRun, apply_trials, trial_candidates, trial_length
from gnnfleet.session import training
from gnnfleet.strategies.estimates import CostEstimate, TrialTiming
from gnnfleet.units import parse_rate
from tests.shell import call, run_json


def estimate(name: str, seconds: float, memory: float, kind: Any = "exact", **fields: Any) -> CostEstimate:
    return CostEstimate(settings={"name": name}, kind=kind, workers=2, memory=memory, seconds=seconds, **fields)


ESTIMATES = [
    estimate("local", 4.0, 900e6),
    estimate("sar", 2.0, 600e6),
    estimate("macrobatch", 1.0, 500e6, "sampled"),
    estimate("tma", 10.0, 400e6, "approximate", passes=20.0),
    estimate("pipe", 0.0, 0.0, refused="as many layers"),
]


@pytest.mark.parametrize(
    ("memory", "goal", "best"),
    [(None, "exact", "sar"), (None, "any", "tma"), (None, "sampled", "macrobatch"), (550 << 20, "exact", "tma")],
)
def test_the_fastest_candidate_of_the_goal_is_recommended(memory: int | None, goal: str, best: str) -> None:
    plan = _recommend(ESTIMATES, memory, goal)
    assert plan.best is not None and plan.best.name == best
    seconds = [candidate.seconds_per_pass for candidate in plan.fits]
    assert seconds == sorted(seconds)
    assert len(plan.fits) + len(plan.refused) == len(ESTIMATES)


def test_a_candidate_that_does_not_fit_says_how_much_memory_is_missing() -> None:
    plan = _recommend(ESTIMATES, 550_000_000, "exact")
    texts = {candidate.name: candidate.refused for candidate in plan.refused}
    assert texts["sar"] == "needs 572 MiB, 48 MiB more than --memory" and texts["pipe"] == "as many layers"
    nothing = _recommend(ESTIMATES, 1 << 20, "exact")
    assert nothing.best is None
    assert nothing.reasons[0].startswith("nothing fits into --memory 1 MiB; the least that any needs is 381 MiB (tma)")


@pytest.mark.parametrize(
    ("seconds", "steps", "fetch", "warmup", "timed", "epochs"),
    [
        (0.1, 1, 1, 0, 0, 3),  # a full batch: three epochs after the first
        (2.0, 1, 1, 0, 0, 1),
        (4.0, 1, 1, None, None, None),  # two of them take too long
        (100.0, 1000, 1, 4, 15, 0),  # some steps of a long epoch
        (100.0, 1000, 20, 20, 20, 0),  # whole fetches only
        (2.0, 40, 20, 20, 20, 0),
        (2.0, 30, 20, 0, 0, 1),
        (3e4, 1000, 1, None, None, None),
    ],
)
def test_trials_are_short(
    seconds: float, steps: int, fetch: int, warmup: int | None, timed: int | None, epochs: int | None
) -> None:
    length = trial_length(estimate("macrobatch", seconds, 1.0, steps=steps, batches_per_fetch=fetch))
    if warmup is None:
        assert length is None
        return
    assert length is not None
    expected = {"warmup_steps": warmup, "timed_steps": timed, "timed_epochs": epochs}
    assert {"warmup_steps": 0, "timed_steps": 0, "timed_epochs": 0, **length} == expected


def test_trials_correct_the_estimates_of_untried_candidates() -> None:
    """The three fastest of a strategy are tried, unless refused, too large or without synchronous steps."""
    sar = [estimate("sar", seconds, 600e6) for seconds in (2.0, 1.0, 1.5, 1.2)]
    estimates = [*ESTIMATES, *sar, estimate("local", 0.1, 2e9), estimate("tma", 1.0, 1.0, is_synchronous=False)]
    candidates = trial_candidates(estimates, {2: 1e9})
    assert {id(candidate) for candidate in candidates} == {id(sar[1]), id(sar[2]), id(sar[3]), id(ESTIMATES[2])}
    timings = {
        id(sar[1]): TrialTiming(2.0),
        id(sar[3]): TrialTiming(1.2),
        id(ESTIMATES[2]): TrialTiming(refused="no such layer"),
    }
    corrected = apply_trials(estimates, timings)
    assert corrected[2].refused == "no such layer" and not corrected[1].refused
    seconds = [candidate.seconds for candidate in corrected]
    assert seconds == [4.0, 3.0, 1.0, 10.0, 0.0, 3.0, 2.0, 2.25, 1.2, 0.1, 1.0]
    assert corrected[6].reasons[-1] == "trial epoch: 2 s (estimate: 1 s)" and not corrected[5].reasons


@pytest.mark.parametrize(("text", "rate"), [("1Gbit", 125e6), ("800 Mbit", 1e8), ("125MB", 125e6), ("2GiB/s", 2**31)])
def test_a_bandwidth_is_read_in_bytes_per_second(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["fast", "0Gbit", "1Gbyte", ""])
def test_a_bandwidth_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a bandwidth: write 1Gbit"):
        parse_rate(text)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "store"
    save_store(make_dataset("communities", nodes=600, mean_degree=6, features=8, classes=3), path)
    return path


MODEL = {"name": "sage", "hidden": 8, "layers": 2}


def test_options_that_no_strategy_has_are_refused(store: Path) -> None:
    graph = gf.open(store)
    for strategy, text in (
        ({"fanout": [3]}, "did you mean 'fanouts'"),
        ({"goal": "best"}, "expected exact, sampled, any"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_plan(graph, {"strategy": strategy, "model": MODEL})
    with pytest.raises(ConfigError, match="strategy 'sra' cannot be planned"):
        make_plan(graph, {"model": MODEL}, only=["sra"])
    with pytest.raises(ConfigError, match="with one worker only local is planned, found sar: pass --workers"):
        make_plan(graph, {"model": MODEL}, only=["sar"])
    with pytest.raises(ConfigError, match="workers='two'"):
        make_plan(graph, {"model": MODEL, "workers": "two"})


def test_an_option_that_a_strategy_rejects_refuses_only_that_strategy(store: Path) -> None:
    """If all strategies that are to be planned reject it, it is an error."""
    graph, config = gf.open(store), {"model": MODEL, "workers": 2}
    plan = make_plan(graph, {**config, "strategy": {"quorum": 5}}, bandwidth=1e9, only=["sar", "tma"])
    assert {candidate.name for candidate in plan.fits} == {"sar"}
    texts = {candidate.name: candidate.refused for candidate in plan.refused}
    assert "strategy.quorum=5 asks for more trainers" in texts["tma"]
    plan = make_plan(graph, {**config, "strategy": {"fanouts": "many"}}, bandwidth=1e9, only=["local", "sar"])
    texts = {candidate.name: candidate.refused for candidate in plan.refused}
    assert {candidate.name for candidate in plan.fits} == {"sar"} and "expected whole numbers" in texts["local"]
    with pytest.raises(ConfigError, match=r"strategy\.quorum=5 asks for more trainers"):
        make_plan(graph, {**config, "strategy": {"quorum": 5}}, only=["tma"])


def test_workers_come_from_the_config_file_unless_they_are_an_option(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('workers = 2\n[strategy]\nname = "tma"\ninterval = 3.0\n[model]\nhidden = 8\nlayers = 2\n')
    line = ["plan", store, "--config", file, "--strategies", "sar", "--bandwidth", "1Gbit", "-q"]
    assert {candidate["workers"] for candidate in run_json(*line)["fits"]} == {2}
    assert {candidate["workers"] for candidate in run_json(*line, "-w", "3")["fits"]} == {3}


def test_on_linked_machines_every_strategy_is_planned_and_slow_links_cost_more(store: Path) -> None:
    graph, config = gf.open(store), {"model": MODEL, "workers": 4, "strategy": {"steps": 3, "batch": 64}}
    plan = make_plan(graph, config, bandwidth=1e9)
    names = {candidate.name for candidate in plan.fits}
    assert names == {"local", "sar", "macrobatch", "tma", "pipe"}
    assert all(candidate.memory > 0 and candidate.seconds > 0 for candidate in plan.fits)
    slow = make_plan(graph, config, bandwidth=1e3, only=["sar"])
    fast = make_plan(graph, config, bandwidth=1e12, only=["sar"])
    assert min(candidate.seconds for candidate in slow.fits) > max(candidate.seconds for candidate in fast.fits)
    assert {candidate.bytes for candidate in slow.fits} == {candidate.bytes for candidate in fast.fits}


def test_trials_of_a_launch_that_dies_are_launched_one_by_one(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched: list[list[Any]] = []

    def dying(graph: Any, config: Any, trials: Sequence[TrialRun], **_: Any) -> list[TrialTiming]:
        launched.append([trial.config["strategy"] for trial in trials])
        if launched[0][0] in launched[-1]:
            raise ExchangeError("rank 1 (pid 7) was killed by SIGKILL, perhaps for want of memory; try again")
        return [TrialTiming(1e-9) for _ in trials]

    monkeypatch.setattr(planning, "launch_trials", dying)
    settings = {"model": MODEL, "workers": 2}
    caplog.set_level("INFO", "gnnfleet")
    plan = make_plan(gf.open(store), settings, only=["local", "sar"], quiet=False)
    assert len(launched[0]) > 1 and launched[1:] == [[strategy] for strategy in launched[0]]
    assert plan.best is not None and plan.best.name == "sar"
    assert "local" in {candidate.name for candidate in plan.fits}
    (refused,) = plan.refused
    assert refused.refused.startswith("its trial failed: rank 1 (pid 7) was killed by SIGKILL")
    assert refused.refused in caplog.text


def test_a_trial_that_runs_out_of_memory_in_one_process_refuses_its_candidate(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(graph: Any, trial: TrialRun) -> TrialTiming:
        if trial.config["strategy"].get("fanouts"):
            return TrialTiming(1.0)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore of it")

    monkeypatch.setattr(planning, "run_trial", run_out)
    plan = make_plan(gf.open(store), {"model": MODEL})
    reasons = [candidate.refused for candidate in plan.refused]
    assert reasons == ["its trial failed: DefaultCPUAllocator: can't allocate memory"]
    assert plan.best is not None and "none of exact full-batch strategies fits" in plan.reasons[0]


def test_auto_trains_what_is_recommended(store: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["--model", "sage", "--set", "model.hidden=8", "--set", "model.layers=2", "--set", "train.epochs=2"]
    done = call("train", store, *arguments, "--strategy", "auto", "--workers", "2", "--run-dir", run, "--json")
    assert done.returncode == 0, done.stderr
    config = json.loads((run / "config.json").read_text())["config"]
    record = json.loads(done.stdout)
    assert config["strategy"]["name"] == record["strategy"] != "auto" and config["workers"] == record["workers"]
    assert f"strategy auto: {record['strategy']}" in done.stderr
    assert "trial epoch: " in done.stderr
    resumed = call(
        "train", store, *arguments[:-1], "train.epochs=3", "--strategy", "auto", "--run-dir", run, "--resume"
    )
    assert resumed.returncode == 0, resumed.stderr


def test_restarts_have_no_effect_on_one_planned_process(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user did not choose one process, so it is a note, not an error."""
    chosen = {"strategy": {"name": "local"}, "workers": 1}
    monkeypatch.setattr(training, "_with_strategy", lambda graph, settings, location, quiet: {**settings, **chosen})
    arguments = ["--set", "model.hidden=8", "--set", "model.layers=2", "--set", "train.epochs=1", "--max-restarts", "2"]
    done = call("train", store, *arguments, "--strategy", "auto", "--run-dir", tmp_path / "run")
    assert done.returncode == 0 and "so --max-restarts has no effect" in done.stderr, done.stderr


def test_a_plan_in_which_nothing_fits_is_an_error(store: Path) -> None:
    arguments = ["plan", store, "--set", "model.hidden=8", "--set", "model.layers=2", "--memory", "1MB", "-q"]
    done = call(*arguments, "--json")
    printed = json.loads(done.stdout)
    assert done.returncode == 2 and printed["recommended"] is None and printed["refused"] and not printed["fits"]
    assert done.stderr.startswith(f"error: {printed['why'][0]}") and "nothing fits" in done.stderr
    shown = call(*arguments)
    assert shown.returncode == 2 and "rejected" in shown.stdout and "error: nothing fits" in shown.stderr


def test_auto_in_which_nothing_fits_is_an_error(store: Path) -> None:
    with pytest.raises(ConfigError, match="nothing fits into memory=1 MiB"):
        gf.train(store, strategy="auto", model=MODEL, epochs=1, memory="1MiB")


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "events"
    save_store(make_dataset("events", users=40, items=20, events=900, features=4, seed=3), path)
    return path


EVENT_WORDS = {"model": {"name": "tgn", "hidden": 8}, "strategy": {"batch": 50, "static": False, "eval_negatives": 4}}


def test_on_linked_machines_only_memory_parallel_event_layouts_are_planned(events: Path) -> None:
    plan = make_plan(gf.open(events), {**EVENT_WORDS, "workers": 2}, bandwidth=1e6)
    shapes = {(candidate.workers, candidate.settings["memory_parallel"]): candidate for candidate in plan.fits}
    assert set(shapes) == {(1, 1), (2, 2)} and {candidate.kind for candidate in plan.fits} == {"exact", "approximate"}
    assert all("on one machine" in candidate.refused for candidate in plan.refused) and len(plan.refused) == 2
    alone, copies = shapes[1, 1], shapes[2, 2]
    assert "the fastest of exact layouts that fit" in plan.reasons[0], plan.reasons
    assert alone.bytes == 0 and alone.memory > 0 and copies.steps == alone.steps // 2
    assert copies.bytes > 0 and copies.seconds / copies.steps > alone.seconds / alone.steps


def test_an_event_stream_is_planned_for_temporal_only(events: Path) -> None:
    graph = gf.open(events)
    with pytest.raises(ConfigError, match="plan it by itself"):
        make_plan(graph, EVENT_WORDS, only=["temporal", "sar"])
    with pytest.raises(ConfigError, match="no strategy has a setting 'fanouts'"):
        make_plan(graph, {"strategy": {"fanouts": [3]}})  # a stream without features: only temporal is planned
    with pytest.raises(ConfigError, match="no edges have times"):
        make_plan(make_dataset("communities", nodes=60, mean_degree=4), {"model": {"name": "tgn"}})


def test_a_round_of_tma_is_estimated_from_its_steps(store: Path) -> None:
    options = {"steps": 4, "batch": 64, "fanouts": [3, 3], "scheme": "random"}
    (candidate,) = make_plan(gf.open(store), {"model": MODEL, "workers": 2, "strategy": options}, only=["tma"]).fits
    assert any("each trainer takes 4 steps of" in reason for reason in candidate.reasons), candidate.reasons
    assert 0 < candidate.seconds < 60
