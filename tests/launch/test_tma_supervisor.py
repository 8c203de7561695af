"""A tma run as a user starts it: the record, the same bits with Ray, restarts, and numbers of trainers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gnnfleet import api
from gnnfleet.api import train
from gnnfleet.cli.train import parse_numbers
from gnnfleet.comm.failure import Failure
from gnnfleet.comm.message_store import Address, MessageStore
from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.store import save_store
from gnnfleet.launch import tma_ray, tma_supervisor
from gnnfleet.launch.spec import RunSpec
from gnnfleet.launch.tma_process import open_assignment, process_failure
from gnnfleet.launch.tma_supervisor import check_trainers_free, exited_cleanly, reachable_address, restart_failed
from gnnfleet.report.metrics import read_metrics
from gnnfleet.report.run_record import RunRecord
from gnnfleet.session.training import TrainingResult
from gnnfleet.strategies.tma.protocol import RunMessages
from tests.graphs import assert_same_checkpoint, communities
from tests.shell import call

STRATEGY: dict[str, Any] = {"name": "tma", "steps": 3, "fanouts": [3, 2], "batch": 8}
MODEL: dict[str, Any] = {"name": "sage", "hidden": 8, "layers": 2}


def test_trainer_numbers_are_parsed() -> None:
    assert parse_numbers("4-6, 9") == [4, 5, 6, 9] and parse_numbers("0") == [0]
    for text in ("", "a", "3-1", "1,1", "-2"):
        with pytest.raises(ConfigError, match="--trainers takes"):
            parse_numbers(text)


def test_the_record_has_all_rounds_and_one_entry_per_process(tmp_path: Path) -> None:
    record = train(
        communities(),
        strategy=STRATEGY,
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
    remaining = sorted(str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run" / ".trainers").glob("*/*"))
    assert remaining == [".trainers/0/3.safetensors", ".trainers/1/3.safetensors"], "more rounds start from these"
    memory = record.summary.memory  # trainers have no epoch that could be repeated for a measurement
    assert "peak_tensors" not in memory and len(memory["peak_rss"]) == 3 and min(memory["peak_rss"]) > 0


def test_ray_gives_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    for launcher in ("process", "ray"):
        settings = {**STRATEGY, "launcher": launcher}
        train(communities(), strategy=settings, workers=2, model=MODEL, epochs=3, run_dir=tmp_path / launcher)
    assert_same_checkpoint(tmp_path / "ray/checkpoints/last", tmp_path / "process/checkpoints/last")


@pytest.mark.parametrize(
    ("host", "local", "remote"),
    [
        ("0.0.0.0", "127.0.0.1:7", "10.0.0.5:7"),
        ("::", "127.0.0.1:7", "10.0.0.5:7"),
        ("10.0.0.2", "10.0.0.2:7", "10.0.0.2:7"),
        ("127.0.0.1", "127.0.0.1:7", "127.0.0.1:7"),
    ],
)
def test_a_server_on_all_interfaces_is_reached_by_its_machine(host: str, local: str, remote: str) -> None:
    assert (reachable_address(Address(host, 7)), reachable_address(Address(host, 7), "10.0.0.5")) == (local, remote)


def test_actors_get_an_address_that_other_machines_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a fake Ray that records its calls."""
    calls: list[tuple[str, int]] = []
    actor = SimpleNamespace(train=SimpleNamespace(remote=lambda spec, address, number: calls.append((address, number))))
    actor_class = SimpleNamespace(remote=lambda: actor)
    ray = SimpleNamespace(
        is_initialized=lambda: True,
        util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.5"),
        remote=lambda kind: SimpleNamespace(options=lambda **options: actor_class),
        nodes=lambda: [{"NodeManagerAddress": f"10.0.0.{host}", "Alive": host < 7} for host in (5, 6, 7)],
    )
    monkeypatch.setattr(tma_ray, "_ray", lambda: ray)
    spec = RunSpec(store="s", digest="d", partition="", run_dir="r", config={"strategy": {"launcher": "ray"}})
    assert len(tma_supervisor._start_trainers(spec, tmp_path, Address("0.0.0.0", 29500), 2, 0)) == 2
    assert calls == [("10.0.0.5:29500", 0), ("10.0.0.5:29500", 1)]
    with pytest.raises(ConfigError, match=r"cluster has 2 machines, .* strategy.listen=0\.0\.0\.0"):
        tma_supervisor._start_trainers(spec, tmp_path, Address("127.0.0.1", 29500), 2, 0)


def test_join_refuses_an_address_without_a_port(tmp_path: Path) -> None:
    process = call("join", "nowhere", tmp_path, "--trainers", "1")
    assert process.returncode == 2
    assert "expected HOST:PORT with a port up to 65535, found 'nowhere'" in process.stderr


class FailingTrainer:
    """A trainer that exits after every start."""

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
    """They are numbered as in records: the coordinator first."""
    failure = process_failure(ValueError("rows"), role)
    name = role if role == "coordinator" else f"trainer {role}"
    assert failure.text.startswith(f"unexpected ValueError on {name}: rows") and failure.ranks == (number,)


def test_a_trainer_is_restarted_until_it_has_no_restarts_left() -> None:
    """Each time with the same message and the traceback of its error; then its exit is published."""
    messages, shown = RunMessages(MessageStore.serve()), list[str]()
    try:
        raise KeyError("rows")
    except KeyError as error:
        trainer = FailingTrainer(2, process_failure(error, "1"))
    assert not exited_cleanly(trainer)
    lost = [restart_failed([trainer], messages, shown.append) for _ in range(3)]
    assert lost == [{}, {}, {"1": "trainer 1 was lost"}]
    assert messages.read_exit(1) is True
    restarted, left_out = "trainer 1 was lost. It is restarted.", "trainer 1 was lost. Training continues without it."
    assert shown[::2] == [restarted, restarted, left_out]
    assert all("Traceback" in text and "KeyError: 'rows'" in text for text in shown[1::2])


def test_a_trainer_number_is_used_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = RunMessages(MessageStore.serve())
    monkeypatch.setattr(tma_supervisor.time, "sleep", lambda seconds: messages.beat(1))
    check_trainers_free(messages, [0, 2], 3)
    with pytest.raises(ConfigError, match="trainer 1 is already running: choose another number"):
        check_trainers_free(messages, [0, 1], 3)
    with pytest.raises(ConfigError, match="trainer 3 does not exist: the run has trainers 0 to 2"):
        check_trainers_free(messages, [2, 3], 3)


def test_the_record_names_lost_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = RunRecord(
        strategy="tma", workers=2, model="sage", seed=0, epochs=1, steps=1, seconds_per_epoch=[1.0], metrics={}
    )
    assert "lost" not in summary.as_json()
    lost = replace(summary, lost=["trainer 1 (pid 7) was killed by SIGKILL"])
    assert lost.as_json()["lost"] == ["trainer 1 (pid 7) was killed by SIGKILL"]
    trained = TrainingResult(lost, resolve({}), lambda: pytest.fail("no query"))
    monkeypatch.setattr(api, "run_training", lambda *args, **kwargs: trained)
    with pytest.warns(RuntimeWarning, match="continued without a trainer: trainer 1 .* killed by SIGKILL"):
        assert train(communities(), strategy=STRATEGY).summary.lost == lost.lost


def test_the_seed_of_a_run_decides_the_assignment_of_nodes(tmp_path: Path) -> None:
    graph = save_store(make_dataset("communities", nodes=200, seed=1), tmp_path / "store")
    assert graph.store is not None
    store, run = str(tmp_path / "store"), str(tmp_path / "run")
    spec = RunSpec(store=store, digest=graph.store.digest, partition="", run_dir=run, config={})
    first, again, other = (open_assignment(spec, seed)[1].nodes_of(0, 3)["node"].tolist() for seed in (4, 4, 5))
    assert first == again != other


def test_a_coordinator_that_restarts_has_time_and_one_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    messages = RunMessages(MessageStore.serve())
    watchdog = tma_supervisor._CoordinatorWatchdog(messages, give_up=20.0)
    messages.beat()
    assert watchdog.overdue_seconds() is None
    now = 111.0
    assert watchdog.overdue_seconds() is None, "one read may be late"
    assert watchdog.overdue_seconds() == 11.0
    watchdog.begin()
    before = messages.heartbeats()
    for _ in range(15):
        now += 2.0
        assert watchdog.overdue_seconds() is None
    assert messages.heartbeats() == before + 15, "trainers receive heartbeats meanwhile"
    now += 11.0
    assert watchdog.overdue_seconds() == 41.0, "it hangs while it starts"
    watchdog.begin()
    messages.beat()
    assert watchdog.overdue_seconds() is None
    now += 11.0
    assert watchdog.overdue_seconds() is None and watchdog.overdue_seconds() == 11.0
