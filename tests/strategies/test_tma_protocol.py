"""Messages of tma are read as they were written, bit for bit and with all optional parts."""

from __future__ import annotations

import pytest
import torch

from gnnfleet.comm.message_store import MessageStore
from gnnfleet.strategies.tma.protocol import RoundStart, RunMessages, RunState, TrainerUpdate

STATE = RunState(2, 7)


@pytest.fixture
def messages() -> RunMessages:
    return RunMessages(MessageStore.serve())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("has_optional", [True, False])
def test_a_round_start_is_read_as_written(messages: RunMessages, dtype: torch.dtype, has_optional: bool) -> None:
    remote = torch.randn(2, 5, dtype=dtype) if has_optional else None
    written = RoundStart(STATE, torch.randn(11, dtype=dtype), remote, (0, 2))
    tensors = [tensor for tensor in (written.weights, remote) if tensor is not None]
    assert messages.write_round_start(written) == sum(tensor.nbytes for tensor in tensors)
    assert messages.read_state() == STATE
    start = messages.read_round_start(STATE, dtype)
    assert start is not None and (start.state, start.members) == (STATE, (0, 2))
    for name in ("weights", "remote"):
        tensor, expected = getattr(start, name), getattr(written, name)
        assert (tensor is None) if expected is None else torch.equal(tensor, expected)
    messages.remove_round(STATE)
    assert messages.read_round_start(STATE, dtype) is None


def test_an_update_is_read_as_written(messages: RunMessages) -> None:
    rows = {"a.weight": torch.randn(4, 3), "optimizer": torch.empty(0, 2)}
    written = TrainerUpdate(3, 20, 0.1, 99, torch.randn(5), rows, {"peak_rss": 8}, {"wait": 0.5})
    assert messages.write_update(STATE, 1, written) == written.nbytes
    assert messages.has_update(STATE, 1) and not messages.has_update(STATE, 0)
    update = messages.read_update(STATE, 1, torch.float32)
    assert update is not None
    figures = ("steps", "count", "loss", "edges", "memory", "seconds")
    assert [getattr(update, name) for name in figures] == [getattr(written, name) for name in figures]
    assert torch.equal(update.weights, written.weights)
    assert update.rows.keys() == rows.keys() and all(torch.equal(update.rows[name], rows[name]) for name in rows)
    messages.remove_updates(STATE)
    assert messages.read_update(STATE, 1, torch.float32) is None


def test_embedding_rows_are_read_as_written(messages: RunMessages) -> None:
    rows = {"e": torch.randn(4, 3), "f": torch.randn(2, 1)}
    assert messages.write_rows(STATE, 0, rows) == sum(tensor.nbytes for tensor in rows.values())
    read = messages.read_rows(STATE, 0, torch.float32)
    assert read is not None and list(read) == ["e", "f"] and all(torch.equal(read[name], rows[name]) for name in rows)
    assert messages.read_rows(STATE, 1, torch.float32) is None


def test_states_and_notices_are_read_as_written(messages: RunMessages) -> None:
    messages.mark_done()
    assert messages.read_state() is None, "nothing has begun"
    assert [messages.begin_incarnation(), messages.begin_incarnation()] == [1, 2]
    messages.write_state(STATE)
    messages.mark_done()
    assert messages.read_state() == RunState(2, 7, done=True)
    assert messages.collect_requested(2) == -1
    messages.request_collect(STATE)
    assert messages.collect_requested(2) == 7 and messages.collect_requested(1) == -1
    assert not messages.has_acked(STATE, 0)
    messages.write_ack(STATE, 0)
    assert messages.has_acked(STATE, 0) and not messages.has_acked(RunState(1, 7), 0)
    assert messages.holds_lease(0, "a"), "no process has taken the number"
    messages.take_lease(0, "b")
    assert messages.holds_lease(0, "b") and not messages.holds_lease(0, "a")
    messages.write_exit(0, failed=True)
    messages.write_exit(1)
    assert [messages.read_exit(trainer) for trainer in range(3)] == [True, False, None]
    messages.clear_exit(0)
    assert messages.read_exit(0) is None
    assert messages.read_checkpointed() is None
    messages.write_checkpointed(5)
    assert messages.read_checkpointed() == 5
    assert not messages.has_failed()
    messages.mark_failed()
    assert messages.has_failed()


@pytest.mark.parametrize("source", [b"", b"model = 1"])
def test_a_run_is_published_with_its_model_file(messages: RunMessages, source: bytes) -> None:
    assert messages.read_run() is None
    messages.publish_run("{}", source)
    assert messages.read_run() == ("{}", source)


def test_heartbeats_of_roles_are_counted_separately(messages: RunMessages) -> None:
    assert [messages.beat(), messages.beat(), messages.beat(0)] == [1, 2, 1]
    assert [messages.heartbeats(), messages.heartbeats(0), messages.heartbeats(1)] == [2, 1, 0]
    messages.add_steps(1, 4)
    messages.add_steps(1, 2)
    assert messages.steps(1) == 6
