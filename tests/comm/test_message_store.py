"""Post: letters are whole, and a connection notices that its link is cut or its server gone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.comm import message_store
from gnnfleet.comm.message_store import PIECE_BYTES, TCP_USER_TIMEOUT, Address, HeartbeatReader, MessageStore
from gnnfleet.errors import ExchangeError


def test_letters_of_several_pieces() -> None:
    server = MessageStore.serve()
    mine, other = server.reconnect(), server.reconnect()
    body = torch.arange(2 * PIECE_BYTES + 5, dtype=torch.int32).view(torch.uint8)
    mine.write("large", {"number": 3}, body)
    letter = other.read("large")
    assert letter is not None and letter.fields == {"number": 3} and torch.equal(letter.body, body)
    other.remove("large")
    assert mine.read("large") is None and not mine.has("large")
    for number in range(8):  # no answer comes to a set, so a letter might still be under way when it is written
        mine.write(f"large{number}", {"number": number}, body)
        assert other.has(f"large{number}")
        other.remove(f"large{number}")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="sockets of this process are found in /proc")
def test_connections_give_up_links_that_carry_nothing() -> None:
    server = MessageStore.serve()
    post = server.reconnect()
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as twin:
            if twin.getpeername()[1] == server.address.port:
                found.append(twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    assert found and set(found) == {round(1000 * TCP_USER_TIMEOUT)} and not post.has("anything")


def test_nobody_waits_for_a_server_that_is_gone() -> None:
    with socket.socket() as ears:
        ears.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", ears.getsockname()[1])
    server = MessageStore.serve()
    lost = MessageStore(address, server._store)
    started = time.monotonic()
    with pytest.raises(ExchangeError, match="lost the coordinator's server at 127"):
        lost.reconnect()
    assert time.monotonic() - started < 5


def test_a_pulse_that_has_not_moved_since_its_predecessor_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("gnnfleet.comm.message_store.time.monotonic", lambda: now)
    post = MessageStore.serve()
    post.count("beat", 3)  # of somebody who has ended
    pulse = HeartbeatReader("beat", after=3)
    assert pulse.silent_seconds(post) == 0
    now = 160.0
    assert pulse.silent_seconds(post) == 0, "whoever is started again takes its time"
    post.count("beat")
    assert pulse.silent_seconds(post) == 0
    now = 167.0
    assert pulse.silent_seconds(post) == 7
    other = HeartbeatReader("beat")  # no predecessor is known: whoever has beaten is the one
    assert other.silent_seconds(post) == 0
    now = 170.0
    assert other.silent_seconds(post) == 3


def test_a_post_with_patience_outlives_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    server = MessageStore.serve()
    hasty, patient = server.reconnect(), server.reconnect(connect_timeout=10)
    server.write("a", {"n": 1})

    class Cut:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("reset by peer")

    for post in (hasty, patient):
        monkeypatch.setattr(post, "_store", Cut())
    with pytest.raises(ExchangeError, match="reset by peer"):
        hasty.read("a")
    letter = patient.read("a")
    assert letter is not None and letter.fields == {"n": 1}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """A body of five pieces."""
    monkeypatch.setattr(message_store, "PIECE_BYTES", 4)
    return torch.arange(18, dtype=torch.uint8)


def test_a_message_without_a_body_removes_the_pieces_of_the_former_one(small_pieces: torch.Tensor) -> None:
    server = MessageStore.serve()
    keys = server._store.num_keys()
    server.write("a", {"n": 1}, small_pieces)
    server.write("a", {"n": 2})
    message = server.read("a")
    assert message is not None and message.fields == {"n": 2} and not len(message.body)
    assert server._store.num_keys() == keys + 1
    server.remove("a")
    assert server._store.num_keys() == keys


class Interrupted:
    """A connection that is lost after some values were set or deleted."""

    def __init__(self, store: Any, calls: int) -> None:
        self._store, self._calls = store, calls

    def _count(self, change: Callable[..., Any], *args: Any) -> Any:
        if not self._calls:
            raise RuntimeError("reset by peer")
        self._calls -= 1
        return change(*args)

    def set(self, *args: Any) -> Any:
        return self._count(self._store.set, *args)

    def delete_key(self, *args: Any) -> Any:
        return self._count(self._store.delete_key, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("calls", range(14))
def test_an_interrupted_writer_leaves_nothing_behind(
    small_pieces: torch.Tensor, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Wherever it was interrupted: when it writes again, when another one writes, when the message is removed."""
    server = MessageStore.serve()
    keys = server._store.num_keys()
    for again in ("same", "other", "none"):
        writer = server.reconnect(connect_timeout=10 if again == "same" else 0)
        server.write("a", {"n": 0}, small_pieces[:9])
        monkeypatch.setattr(writer, "_store", Interrupted(writer._store, calls))
        with suppress(ExchangeError):
            writer.write("a", {"n": 1}, small_pieces)
        if again == "other":
            server.write("a", {"n": 1}, small_pieces)
        if again != "none":
            message = server.read("a")
            assert message is not None and message.fields == {"n": 1} and torch.equal(message.body, small_pieces)
            assert server._store.num_keys() == keys + 1 + 5
        server.remove("a")
        assert server._store.num_keys() == keys
