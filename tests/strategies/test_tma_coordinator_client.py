"""A trainer's view of the coordinator: a lost coordinator, and a trainer number that another process has taken."""

from __future__ import annotations

import time

import pytest

from gnnfleet.comm.message_store import MessageStore
from gnnfleet.strategies.tma.protocol import CoordinatorClient, RunMessages
from tests.faults.trials import wait_until


@pytest.fixture
def messages() -> RunMessages:
    return RunMessages(MessageStore.serve())


def test_a_coordinator_without_heartbeats_is_lost_though_the_store_answers(messages: RunMessages) -> None:
    errors: list[str] = []
    with CoordinatorClient(messages.reconnect(), 1, give_up=1, on_lost=errors.append):
        for _ in range(3):
            messages.beat()
            time.sleep(0.3)
        messages.write_exit(1)  # of a process that had this number before
        assert not errors
        wait_until(lambda: bool(errors), 15, "the end")
    assert "trainer 1 has received no heartbeat of the coordinator" in errors[0] and messages.read_exit(1) is None


def test_the_last_process_to_take_a_number_is_the_trainer(messages: RunMessages) -> None:
    """A process that was silent and has been replaced notices it and sends no more heartbeats."""
    errors: list[str] = []
    with CoordinatorClient(messages.reconnect(), 1, give_up=20, on_lost=errors.append) as first:
        wait_until(lambda: messages.heartbeats(1) > 0, 10, "a heartbeat")
        with CoordinatorClient(messages.reconnect(), 1, give_up=20, on_lost=errors.append) as second:
            wait_until(lambda: first.replaced, 10, "the end of the first")
            assert not second.replaced
    assert not errors
