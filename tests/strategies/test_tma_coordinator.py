"""The coordinator of tma: an update counts once and in its own round, also if trainers are late, lost or restarted."""

from __future__ import annotations

import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gnnfleet.comm.message_store import MessageStore
from gnnfleet.graph.partition.node_assignment import NodeAssignment
from gnnfleet.strategies.tma.averaging import FlatLayout
from gnnfleet.strategies.tma.config import TmaConfig
from gnnfleet.strategies.tma.coordinator import Coordinator, EmbeddingTable, TrainerState, format_trainers
from gnnfleet.strategies.tma.protocol import RoundStart, RunMessages, RunState, TrainerUpdate
from tests.faults.trials import wait_until

LAYOUT = FlatLayout({"w": (2,)}, {"w": torch.float64}, torch.float64, 2)
NODES = {"node": 40}
Starter = Callable[..., Coordinator]


@pytest.fixture
def messages() -> RunMessages:
    return RunMessages(MessageStore.serve())


@pytest.fixture
def start(messages: RunMessages) -> Iterator[Starter]:
    """Starts a coordinator of two trainers and waits for its first weights; the test writes the trainers' messages."""
    started: list[Coordinator] = []

    def start(config: TmaConfig, last: int, **fields: Any) -> Coordinator:
        incarnation = len(started) + 1
        standard: dict[str, Any] = {
            "trainers": 2,
            "layout": LAYOUT,
            "weights": torch.zeros(2, dtype=torch.float64),
            "first": 0,
            "assignment": NodeAssignment(NODES, None),
        }
        coordinator = Coordinator(
            config=config, messages=messages.reconnect(), last=last, **{**standard, **fields}
        ).start()
        started.append(coordinator)
        wait_until(lambda: getattr(messages.read_state(), "incarnation", 0) == incarnation, 10, "first weights")
        return coordinator

    yield start
    for coordinator in started:
        coordinator.close()


def sign(number: int, trainer: int) -> torch.Tensor:
    """Weights that identify their round and their trainer."""
    return torch.tensor([1000.0 * number + trainer, 1.0], dtype=torch.float64)


def constant(value: float) -> torch.Tensor:
    return torch.full((2,), value, dtype=torch.float64)


def update_of(number: int, trainer: int, **fields: Any) -> TrainerUpdate:
    standard = {"steps": 1, "count": 1, "loss": 0.0, "edges": 1, "weights": sign(number, trainer)}
    return TrainerUpdate(**{**standard, **fields})


def send(messages: RunMessages, number: int, trainer: int, **fields: Any) -> None:
    """Send an update of the first incarnation."""
    messages.write_update(RunState(1, number), trainer, update_of(number, trainer, **fields))


def members(messages: RunMessages, number: int, incarnation: int = 1) -> tuple[int, ...]:
    """Trainers that share the nodes in a round."""
    start = messages.read_round_start(RunState(incarnation, number), torch.float64)
    assert start is not None
    return start.members


def has_rows(messages: RunMessages, number: int, trainer: int) -> bool:
    return messages.read_rows(RunState(1, number), trainer, torch.float64) is not None


def test_embedding_rows_of_a_restarted_trainer_are_kept(messages: RunMessages, start: Starter) -> None:
    """It sends none, since it does not have them yet, and receives them with the next round."""
    nodes = [NodeAssignment(NODES, None).nodes_of(worker, 2)["node"] for worker in range(2)]
    tables = {"e": EmbeddingTable("node", torch.zeros(40, 1, dtype=torch.float64))}
    coordinator = start(TmaConfig(steps=1, give_up=20), 3, tables=tables)
    for number in range(2):
        for i in range(2):
            restarted = number == 1 and i == 1
            assert has_rows(messages, number, i) == (number == 0)
            rows = {} if restarted else {"e": torch.full((len(nodes[i]), 1), 10.0 + i, dtype=torch.float64)}
            send(messages, number, i, steps=int(not restarted), rows=rows)
        _, snapshot = coordinator.wait_round()
        assert [snapshot.rows["e"][ids].unique().tolist() for ids in nodes] == [[10.0], [11.0]]
    assert has_rows(messages, 2, 1) and not has_rows(messages, 2, 0)


def test_running_statistics_are_weighted_by_items(messages: RunMessages, start: Starter) -> None:
    """The first number is a parameter, which is averaged evenly; the second is a running statistic."""
    layout = FlatLayout({"w": (1,), "mean": (1,)}, {"w": torch.float64, "mean": torch.float64}, torch.float64, 1)
    coordinator = start(TmaConfig(steps=1, give_up=20), 1, layout=layout)
    for i, count in enumerate((1, 3)):
        send(messages, 0, i, count=count, weights=constant(i))
    assert coordinator.wait_round()[1].weights.tolist() == [0.5, 0.75]


@pytest.mark.parametrize(("weighting", "mean"), [("uniform", 0.5), ("edges", 0.8), ("steps", 0.9)])
def test_trainers_are_weighted_by_their_edges_or_steps(
    messages: RunMessages, start: Starter, weighting: Any, mean: float
) -> None:
    coordinator = start(TmaConfig(steps=1, give_up=20, weighting=weighting), 1)
    for i, (steps, edges) in enumerate(((1, 10), (9, 40))):
        send(messages, 0, i, steps=steps, edges=edges, weights=constant(i))
    torch.testing.assert_close(coordinator.wait_round()[1].weights, constant(mean))


LOSSES: list[tuple[Any, bool | None, tuple[int, ...]]] = [
    ("reassign", False, (0,)),
    ("drop", False, (0, 1)),
    ("reassign", None, (0, 1)),  # only silent: it may return in the next round
    ("reassign", True, (0, 1)),  # failed: its nodes might cause the same error in another trainer
]


@pytest.mark.parametrize(("on_loss", "failed", "remaining"), LOSSES)
def test_nodes_are_reassigned_when_a_trainer_has_exited(
    messages: RunMessages, start: Starter, on_loss: Any, failed: bool | None, remaining: tuple[int, ...]
) -> None:
    coordinator = start(TmaConfig(steps=1, deadline=0.2, silence=0.2, give_up=60, on_trainer_loss=on_loss), 2)
    if failed is not None:
        messages.write_exit(1, failed=failed)
    send(messages, 0, 0)
    assert coordinator.wait_round()[0].trainers == (0,)
    assert members(messages, 1) == remaining
    coordinator.close()
    start(TmaConfig(steps=1, give_up=60, on_trainer_loss=on_loss), 2)
    assert members(messages, 0, incarnation=2) == remaining, "a restarted coordinator decides the same"


def test_nodes_are_reassigned_after_a_long_silence_and_when_it_is_over(messages: RunMessages, start: Starter) -> None:
    coordinator = start(TmaConfig(steps=1, deadline=0.1, silence=0.5, give_up=1), 4)
    for _ in range(12):
        messages.beat(0)
        time.sleep(0.1)
    for number, remaining in enumerate(((0,), (0, 1))):
        for i in range(number + 1):
            messages.beat(i)
        time.sleep(0.2)
        send(messages, number, 0)
        assert coordinator.wait_round()[0].trainers == (0,)
        assert members(messages, number + 1) == remaining


def test_a_trainer_that_returns_when_no_other_remains_has_nodes_again(messages: RunMessages, start: Starter) -> None:
    """The round without trainers counts nothing."""
    coordinator = start(TmaConfig(steps=1, deadline=0.2, silence=0.2, give_up=20), 4)
    messages.write_exit(1)
    send(messages, 0, 0)
    assert coordinator.wait_round()[0].trainers == (0,) and members(messages, 1) == (0,)
    messages.clear_exit(1)
    messages.write_exit(0)
    for _ in range(3):
        messages.beat(1)
        time.sleep(0.1)
    stats, snapshot = coordinator.wait_round()
    assert stats.trainers == () and stats.steps == 0 and torch.equal(snapshot.weights, sign(0, 0))
    assert members(messages, 2) == (1,)


def test_the_run_is_done_when_the_coordinator_is_closed(messages: RunMessages, start: Starter) -> None:
    """Not earlier: until its last checkpoint is written, a coordinator may be restarted and needs trainers."""
    coordinator = start(TmaConfig(steps=1, give_up=20), 1)
    for i in range(2):
        send(messages, 0, i)
    coordinator.wait_round()
    wait_until(lambda: messages.read_state() == RunState(1, 1), 10, "the end of the last round")
    assert members(messages, 1) == ()
    assert coordinator.close()
    assert messages.read_state() == RunState(1, 1, done=True)


def test_weights_that_are_not_finite_do_not_count(messages: RunMessages, start: Starter) -> None:
    logged: list[str] = []
    coordinator = start(TmaConfig(steps=1, give_up=20), 1, log_user=logged.append)
    for i, value in enumerate((3.0, math.inf)):
        send(messages, 0, i, weights=constant(value))
    stats, snapshot = coordinator.wait_round()
    assert snapshot.weights.tolist() == [3.0, 3.0] and stats.trainers == (0,)
    assert logged == ["Round 1: the weights of trainer 1 are not finite. They are left out of the average."]


def test_a_late_trainer_is_awaited_again_once_it_has_begun_a_round(messages: RunMessages, start: Starter) -> None:
    """Trainer 1 sends heartbeats but hangs: rounds do not wait for it, even with a long deadline."""
    coordinator = start(TmaConfig(steps=1, deadline=600, give_up=20), 3)
    coordinator._records[1].missed_deadline = True
    for number in range(2):
        messages.beat(1)
        send(messages, number, 0)
        assert coordinator.wait_round()[0].trainers == (0,)
    messages.write_ack(RunState(1, 2), 1)
    messages.beat(1)
    send(messages, 2, 0)
    time.sleep(0.2)
    send(messages, 2, 1)
    assert coordinator.wait_round()[0].trainers == (0, 1)


def test_the_state_of_a_trainer_follows_its_messages(
    messages: RunMessages, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of a trainer's life."""
    coordinator = start(TmaConfig(interval=1000, deadline=60, silence=10, give_up=300), 1)
    coordinator.close()  # the test calls it instead of its thread
    record, now, round_state = coordinator._records[1], 1000.0, RunState(1, 0)
    record.last_heard = now
    monkeypatch.setattr("gnnfleet.strategies.tma.coordinator.time.monotonic", lambda: now)

    def state() -> TrainerState:
        coordinator._heartbeats_read = 0.0
        coordinator._read_heartbeats()
        return coordinator._state_of(1, round_state)

    now += 59
    assert state() is TrainerState.JOINING and state().is_alive and state().is_awaited
    now += 2
    assert state() is TrainerState.SILENT, "it has not joined before the deadline"
    messages.beat(1)
    assert state() is TrainerState.ACTIVE and state().is_awaited
    now += 9
    assert state() is TrainerState.ACTIVE
    record.missed_deadline = True
    assert state() is TrainerState.LATE and state().is_alive and not state().is_awaited
    messages.write_ack(round_state, 1)
    assert state() is TrainerState.ACTIVE, "it has begun this round"
    now += 2
    assert state() is TrainerState.SILENT and not state().is_alive
    messages.write_exit(1)
    assert state() is TrainerState.EXITED and not state().is_alive
    messages.clear_exit(1)
    messages.beat(1)
    assert state() is TrainerState.ACTIVE


def test_a_restarted_coordinator_removes_the_messages_of_former_ones(messages: RunMessages, start: Starter) -> None:
    """Also of one that ended before its first round was closed, and updates that came after its end."""
    former = start(TmaConfig(interval=0.01, give_up=20), 4)
    for number in range(2):
        for i in range(2):
            send(messages, number, i)
        former.wait_round()
    former._stop.set()  # killed: it does not mark the run as done
    former._thread.join()
    messages.write_state(RunState(1, 2))
    messages.write_update(RunState(1, 2), 0, update_of(2, 0))
    assert messages.begin_incarnation() == 2
    messages.write_round_start(RoundStart(RunState(2, 0), sign(0, 0), None, (0, 1)))
    coordinator = Coordinator(
        config=TmaConfig(steps=1, give_up=20), trainers=2, messages=messages.reconnect(), layout=LAYOUT,
        weights=sign(1, 0), first=2, last=4, assignment=NodeAssignment(NODES, None),
    ).start()  # fmt: skip
    wait_until(lambda: messages.read_state() == RunState(3, 2), 10, "first weights")
    for i in range(2):
        messages.write_update(RunState(3, 2), i, update_of(2, i))
    coordinator.wait_round()
    coordinator.close()
    keys = messages.store._store.list_keys()
    assert not [key for key in keys if re.match(r"(weights|rows|update|collect)/[12]\b", key)]


class CountingCorrection:
    """A correction that adds 1 and counts its calls."""

    calls = 0

    def apply(self, weights: torch.Tensor, rows: Any) -> torch.Tensor:
        self.calls += 1
        return weights + 1

    def memory(self) -> dict[str, torch.Tensor]:
        return {}


def test_rounds_without_steps_are_corrected_too(messages: RunMessages, start: Starter) -> None:
    """A resumed run computes the next batches from the number of rounds."""
    correction = CountingCorrection()
    coordinator = start(TmaConfig(steps=1, give_up=20), 2, correction=correction)
    for number in range(2):
        for i in range(2):
            send(messages, number, i, steps=number, count=number)
        coordinator.wait_round()
        assert correction.calls == number + 1


@pytest.mark.parametrize("seed", range(3))
def test_no_update_counts_twice_or_in_another_round(messages: RunMessages, start: Starter, seed: int) -> None:
    """Trainers answer after random delays, twice, for closed rounds, or not at all for a while."""
    stop = threading.Event()

    def trainer(index: int) -> None:
        connection, dice = messages.reconnect(), random.Random(f"{seed}/{index}")
        while not stop.is_set():
            connection.beat(index)
            state = connection.read_state()
            if state is None:
                continue
            time.sleep(dice.uniform(0, 0.09))
            for _ in range(dice.choice([0, 1, 1, 1, 2])):
                connection.write_update(state, index, update_of(state.round, index))
            if dice.random() < 0.3 and state.round:
                closed = RunState(state.incarnation, state.round - 1)
                connection.write_update(closed, index, update_of(closed.round, index))

    threads = [threading.Thread(target=trainer, args=(index,), daemon=True) for index in range(3)]
    for thread in threads:
        thread.start()
    config = TmaConfig(interval=0.03, deadline=0.06, silence=0.4, give_up=20)
    coordinator = start(config, 22, trainers=3, first=2, assignment=NodeAssignment({"node": 9}, None))
    sizes, compared = set(), 0
    for number in range(2, 22):
        stats, snapshot = coordinator.wait_round()
        assert stats.round == number
        if snapshot.round == number:  # otherwise later rounds are closed already
            expected = torch.stack([sign(number, index) for index in stats.trainers]).mean(0)
            torch.testing.assert_close(snapshot.weights, expected)
            compared += 1
        sizes.add(len(stats.trainers))
    stop.set()
    for thread in threads:
        thread.join(5)
    assert len(sizes) > 1, "some rounds were closed without all trainers"
    assert compared > 10


def test_a_round_by_the_clock_begins_when_trainers_do(messages: RunMessages, start: Starter) -> None:
    """Trainers first build their subgraphs, which may take longer than a round."""
    coordinator = start(TmaConfig(interval=0.2, deadline=20, give_up=60), 2)
    for i in range(2):
        messages.beat(i)
    messages.write_ack(RunState(1, 0), 0)
    time.sleep(0.6)
    assert messages.collect_requested(1) == -1
    messages.write_ack(RunState(1, 0), 1)
    began = time.monotonic()
    wait_until(lambda: messages.collect_requested(1) == 0, 10, "the end of the round")
    assert time.monotonic() - began > 0.15
    for i in range(2):
        send(messages, 0, i)
    stats, _ = coordinator.wait_round()
    assert stats.seconds < 5 and time.monotonic() - began > stats.seconds, "the start is no part of the round"


def test_by_the_clock_the_loop_gets_the_newest_snapshot(messages: RunMessages, start: Starter) -> None:
    """Many rounds may be closed while the loop evaluates one: only one snapshot is in memory."""
    tables = {"e": EmbeddingTable("node", torch.zeros(40, 1, dtype=torch.float64))}
    coordinator = start(TmaConfig(interval=0.01, deadline=5, give_up=60), 4, tables=tables)
    nodes = [NodeAssignment(NODES, None).nodes_of(worker, 2)["node"] for worker in range(2)]
    for number in range(4):
        for i in range(2):
            send(messages, number, i, rows={"e": torch.full((len(nodes[i]), 1), float(number), dtype=torch.float64)})
        wait_until(lambda number=number: coordinator.newest_round == number, 10, "the end of a round")  # type: ignore[misc]
    wait_until(lambda: coordinator._results.qsize() == 4, 10, "all rounds")
    assert all(snapshot is None for _, snapshot in coordinator._results.queue)  # type: ignore[misc]
    for number in range(4):
        stats, snapshot = coordinator.wait_round()
        assert (stats.round, snapshot.round, stats.steps) == (number, 3, 2)
        assert snapshot.rows["e"].unique().tolist() == [3.0] and snapshot.weights.tolist() == [3000.5, 1.0]


def test_a_trainer_that_makes_steps_is_awaited(messages: RunMessages, start: Starter) -> None:
    """In rounds of a fixed number of steps, the deadline applies to trainers that make no step."""
    coordinator = start(TmaConfig(steps=5, deadline=0.4, silence=5, give_up=60), 1)
    send(messages, 0, 0, steps=5)
    for _ in range(12):
        messages.beat(1)
        messages.add_steps(1, 1)
        time.sleep(0.1)
    send(messages, 0, 1, steps=5)
    assert coordinator.wait_round()[0].trainers == (0, 1)


def test_a_missing_trainer_is_reported_again_after_a_while(messages: RunMessages, start: Starter) -> None:
    logged: list[str] = []
    config = TmaConfig(steps=1, deadline=0.1, silence=0.1, give_up=60, on_trainer_loss="drop")
    coordinator = start(config, 45, log_user=logged.append)
    for number in range(45):
        send(messages, number, 0)
        coordinator.wait_round()
    assert [text.split(" finished without trainer 1 (no heartbeat for ")[0] for text in logged] == [
        "Round 1",
        "Round 21",
        "Round 41",
    ]
    assert all(text.endswith(" s). Training continues.") for text in logged)


def test_numbers_of_trainers_are_formatted_for_messages() -> None:
    names = [format_trainers(numbers) for numbers in ([1], [0, 2], [0, 2, 3])]
    assert names == ["trainer 1", "trainers 0 and 2", "trainers 0, 2 and 3"]
