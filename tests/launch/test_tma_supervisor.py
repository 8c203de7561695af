"""A fleet as its user starts it: the record, the same bits by Ray, numbers of trainers, words that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gnnfleet import api
from gnnfleet.api import train
from gnnfleet.cli.join import parse_numbers
from gnnfleet.comm.failure import Failure
from gnnfleet.comm.message_store import Address, MessageStore
from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError
from gnnfleet.launch import tma_ray, tma_supervisor
from gnnfleet.launch.spec import RunSpec
from gnnfleet.launch.tma_process import process_failure
from gnnfleet.launch.tma_supervisor import check_trainers_free, exited_cleanly, reachable_address, restart_failed
from gnnfleet.report.metrics import read_metrics
from gnnfleet.report.run_record import RunRecord
from gnnfleet.session.training import TrainingResult
from gnnfleet.strategies.tma.protocol import COORDINATOR_HEARTBEAT
from tests.graphs import assert_same_checkpoint, communities
from tests.shell import call

WORDS: dict[str, Any] = {"name": "tma", "steps": 3, "fanouts": [3, 2], "batch": 8}
MODEL: dict[str, Any] = {"name": "sage", "hidden": 8, "layers": 2}


def test_numbers_of_trainers() -> None:
    assert parse_numbers("4-6, 9") == [4, 5, 6, 9] and parse_numbers("0") == [0]
    for wrong in ("", "a", "3-1", "1,1", "-2"):
        with pytest.raises(ConfigError, match="--trainers takes"):
            parse_numbers(wrong)


def test_a_run_and_its_record(tmp_path: Path) -> None:
    record = train(
        communities(),
        strategy=WORDS,
        workers=2,
        model=MODEL,
        epochs=3,
        run_dir=tmp_path / "run",
        checkpoint_seconds=0,
        **{"report.memory": True},
    )
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert record.summary.strategy == "tma" and record.summary.workers == 2 and record.summary.epochs == 3
    assert record.summary.steps == sum(row["steps"] for row in rows) == 18
    assert [row["trainers"] for row in rows] == [2, 2, 2] and record.metrics["test"] > 0
    assert len(record.predict(["n0", "n1"])) == 2
    assert not (tmp_path / "run" / ".launch").exists()
    kept = sorted(str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run" / ".trainers").glob("*/*"))
    assert kept == [".trainers/0/3.safetensors", ".trainers/1/3.safetensors"], "only what another round would need"
    memory = record.summary.memory  # trainers have no epoch to be measured in once more
    assert "peak_tensors" not in memory and len(memory["peak_rss"]) == 3 and min(memory["peak_rss"]) > 0


def test_ray_gives_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    for launcher in ("process", "ray"):
        words = {**WORDS, "launcher": launcher}
        train(communities(), strategy=words, workers=2, model=MODEL, epochs=3, run_dir=tmp_path / launcher)
    assert_same_checkpoint(tmp_path / "ray/checkpoints/last", tmp_path / "process/checkpoints/last")


@pytest.mark.parametrize(
    ("host", "here", "elsewhere"),
    [
        ("0.0.0.0", "127.0.0.1:7", "10.0.0.5:7"),
        ("::", "127.0.0.1:7", "10.0.0.5:7"),
        ("10.0.0.2", "10.0.0.2:7", "10.0.0.2:7"),
        ("127.0.0.1", "127.0.0.1:7", "127.0.0.1:7"),
    ],
)
def test_where_a_server_is_found(host: str, here: str, elsewhere: str) -> None:
    assert (reachable_address(Address(host, 7)), reachable_address(Address(host, 7), "10.0.0.5")) == (here, elsewhere)


def test_actors_are_given_an_address_that_other_nodes_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a Ray that only writes down what it is asked."""
    told: list[tuple[str, int]] = []
    actor = SimpleNamespace(train=SimpleNamespace(remote=lambda spec, address, number: told.append((address, number))))
    made = SimpleNamespace(remote=lambda: actor)
    ray = SimpleNamespace(
        is_initialized=lambda: True,
        util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.5"),
        remote=lambda kind: SimpleNamespace(options=lambda **words: made),
        nodes=lambda: [{"NodeManagerAddress": f"10.0.0.{place}", "Alive": place < 7} for place in (5, 6, 7)],
    )
    monkeypatch.setattr(tma_ray, "_ray", lambda: ray)
    spec = RunSpec(store="s", digest="d", partition="", run_dir="r", config={"strategy": {"launcher": "ray"}})
    assert len(tma_supervisor._start_trainers(spec, tmp_path, Address("0.0.0.0", 29500), 2, 0)) == 2
    assert told == [("10.0.0.5:29500", 0), ("10.0.0.5:29500", 1)]
    with pytest.raises(ConfigError, match=r"any of the 2 machines .* strategy.listen=0\.0\.0\.0"):
        tma_supervisor._start_trainers(spec, tmp_path, Address("127.0.0.1", 29500), 2, 0)


def test_what_is_refused(tmp_path: Path) -> None:
    done = call("join", "nowhere", tmp_path, "--trainers", "1")
    assert done.returncode == 2 and "expected HOST:PORT with a port up to 65535, found 'nowhere'" in done.stderr


class Member:
    """One that ends as often as it is started."""

    def __init__(self, restarts: int, failure: Failure | None = None) -> None:
        self.role, self.restarts, self.failure = "1", restarts, failure

    @property
    def is_running(self) -> bool:
        return False

    def exit_status(self) -> str | None:
        return "trainer 1 was lost"

    def restart(self) -> bool:
        self.restarts -= 1
        return self.restarts >= 0


@pytest.mark.parametrize(("role", "number"), [("coordinator", 0), ("0", 1), ("2", 3)])
def test_an_unexpected_error_names_the_coordinator_or_the_trainer(role: str, number: int) -> None:
    """Numbered as in records: the coordinator first."""
    failure = process_failure(ValueError("rows"), role)
    name = role if role == "coordinator" else f"trainer {role}"
    assert failure.text.startswith(f"unexpected ValueError on {name}: rows") and failure.ranks == (number,)


def test_whoever_is_lost_again_is_started_again(tmp_path: Path) -> None:
    """In the same words each time; when it may not be, everybody is told, and what it raised is shown."""
    post, said = MessageStore.serve(), list[str]()
    try:
        raise KeyError("rows")
    except KeyError as error:
        member = Member(2, Failure.from_error(error, 1))
    assert not exited_cleanly(member)
    found = [restart_failed([member], post, said.append) for _ in range(3)]
    assert found == [{}, {}, {"1": "trainer 1 was lost"}] and post.has("gone/1")
    assert said[::2] == ["trainer 1 was lost; it is started again"] * 2 + [
        "trainer 1 was lost; the run goes on without it"
    ]
    assert all("Traceback" in text and "KeyError: 'rows'" in text for text in said[1::2])


def test_a_number_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    post = MessageStore.serve()
    monkeypatch.setattr(tma_supervisor.time, "sleep", lambda seconds: post.count("beat/1"))
    check_trainers_free(post, [0, 2], 3)
    with pytest.raises(ConfigError, match="trainer 1 runs already: choose another number"):
        check_trainers_free(post, [0, 1], 3)
    with pytest.raises(ConfigError, match="the run has trainers 0 to 2, found --trainers 3"):
        check_trainers_free(post, [2, 3], 3)


def test_the_record_says_who_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = RunRecord(
        strategy="tma", workers=2, model="sage", seed=0, epochs=1, steps=1, seconds_per_epoch=[1.0], metrics={}
    )
    assert "lost" not in summary.as_json()
    lost = replace(summary, lost=["trainer 1 (pid 7) was killed by SIGKILL"])
    assert lost.as_json()["lost"] == ["trainer 1 (pid 7) was killed by SIGKILL"]
    trained = TrainingResult(lost, resolve({}), lambda: pytest.fail("nothing is asked"))
    monkeypatch.setattr(api, "run_training", lambda *words, **more: trained)
    with pytest.warns(RuntimeWarning, match="went on without a trainer: trainer 1 .* killed by SIGKILL"):
        assert train(communities(), strategy=WORDS).summary.lost == lost.lost


def test_the_seed_of_a_run_deals_its_nodes(tmp_path: Path) -> None:
    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.store import save_store
    from gnnfleet.launch.tma_process import open_assignment

    graph = save_store(make_dataset("communities", nodes=200, seed=1), tmp_path / "store")
    assert graph.store is not None
    store, run = str(tmp_path / "store"), str(tmp_path / "run")
    spec = RunSpec(store=store, digest=graph.store.digest, partition="", run_dir=run, config={})
    first, again, other = (open_assignment(spec, seed)[1].nodes_of(0, 3)["node"].tolist() for seed in (4, 4, 5))
    assert first == again != other


def test_a_coordinator_that_starts_again_takes_its_time_and_one_that_hangs_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    post = MessageStore.serve()
    vigil = tma_supervisor._CoordinatorWatchdog(post, give_up=20.0)
    post.count(COORDINATOR_HEARTBEAT)
    assert vigil.is_overdue() is None
    now = 111.0
    assert vigil.is_overdue() is None, "one look may come late"
    assert vigil.is_overdue() == 11.0
    vigil.begin()
    before = post.count(COORDINATOR_HEARTBEAT, 0)
    for _ in range(15):
        now += 2.0
        assert vigil.is_overdue() is None
    assert post.count(COORDINATOR_HEARTBEAT, 0) == before + 15, "trainers hear of it meanwhile"
    now += 11.0
    assert vigil.is_overdue() == 41.0, "and then it hangs"
    vigil.begin()
    post.count(COORDINATOR_HEARTBEAT)
    assert vigil.is_overdue() is None
    now += 11.0
    assert vigil.is_overdue() is None and vigil.is_overdue() == 11.0
