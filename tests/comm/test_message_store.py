"""The message store: messages are complete, leave nothing behind, and a lost connection is detected."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from gnnfleet.comm import message_store
from gnnfleet.comm.message_store import PIECE_BYTES, TCP_USER_TIMEOUT, Address, HeartbeatReader, MessageStore
from gnnfleet.errors import ExchangeError


def test_a_message_above_the_limit_of_the_server_is_complete_at_once() -> None:
    server = MessageStore.serve()
    writer, reader = server.reconnect(), server.reconnect()
    body = torch.arange(2 * PIECE_BYTES + 5, dtype=torch.int32).view(torch.uint8)
    writer.write("large", {"number": 3}, body)
    message = reader.read("large")
    assert message is not None and message.fields == {"number": 3} and torch.equal(message.body, body)
    reader.remove("large")
    assert writer.read("large") is None and not writer.has("large")
    for number in range(8):  # the server does not answer to set, so a message might still be on its way
        writer.write(f"large{number}", {"number": number}, body)
        assert reader.has(f"large{number}")
        reader.remove(f"large{number}")


def test_messages_are_replaced_and_counters_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_store, "PIECE_BYTES", 10)
    server = MessageStore.serve()
    other = MessageStore.connect(server.address)
    body = torch.arange(35, dtype=torch.uint8)
    other.write("a", {"n": 1}, body)
    message = server.read("a")
    assert message is not None and message.fields == {"n": 1} and torch.equal(message.body, body)
    other.write("a", {"n": 2}, body[:3])
    message = server.read("a")
    assert message is not None and message.fields == {"n": 2} and len(message.body) == 3
    server.remove("a")
    assert other.read("a") is None and not other.has("a")
    assert [server.count("k"), other.count("k", 2), server.count("k", 0)] == [1, 3, 3]


def test_the_server_listens_on_its_address_only() -> None:
    server = MessageStore.serve()
    connections = psutil.Process().net_connections("tcp")
    assert {c.laddr.ip for c in connections if c.laddr.port == server.address.port} == {"127.0.0.1"}


def test_a_wrong_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        Address.parse("29500")
    monkeypatch.setattr(message_store, "CONNECT_TIMEOUT", 1.0)
    with pytest.raises(ExchangeError, match=r"lost the coordinator's server at 127\.0\.0\.1:1"):
        MessageStore.connect(Address("127.0.0.1", 1))


def test_a_message_that_is_replaced_is_never_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of the previous head reads its pieces or none, never those of the new message."""
    monkeypatch.setattr(message_store, "PIECE_BYTES", 4)
    server = MessageStore.serve()
    pieces = []
    for value in (1, 2):
        server.write("a", {"n": value}, torch.full((16,), value, dtype=torch.uint8))
        pieces.append(server._pieces("a"))
    assert len(pieces[0]) == len(pieces[1]) == 4 and not set(pieces[0]) & set(pieces[1])
    assert not any(server.has(name) for name in pieces[0]), "nothing of the previous message remains"
    server.remove("a")
    assert not any(server.has(name) for name in pieces[1])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="sockets of this process are found in /proc")
def test_connections_without_acknowledgements_time_out() -> None:
    server = MessageStore.serve()
    client = server.reconnect()
    timeouts = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as duplicate:
            if duplicate.getpeername()[1] == server.address.port:
                timeouts.append(duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    assert timeouts and set(timeouts) == {round(1000 * TCP_USER_TIMEOUT)} and not client.has("anything")


def test_a_lost_server_is_an_error_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", unused.getsockname()[1])
    server = MessageStore.serve()
    lost = MessageStore(address, server._store)
    started = time.monotonic()
    with pytest.raises(ExchangeError, match="lost the coordinator's server at 127"):
        lost.reconnect()
    assert time.monotonic() - started < 5


def test_a_heartbeat_is_not_silent_before_it_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted process needs time; without a predecessor's count, any heartbeat is its own."""
    now = 100.0
    monkeypatch.setattr("gnnfleet.comm.message_store.time.monotonic", lambda: now)
    successor, unknown = HeartbeatReader(after=3), HeartbeatReader()
    assert successor.silent_seconds(3) == 0 and not successor.has_moved
    now = 160.0
    assert successor.silent_seconds(3) == 0
    assert successor.silent_seconds(4) == 0 and successor.has_moved
    now = 167.0
    assert successor.silent_seconds(4) == 7
    assert unknown.silent_seconds(4) == 0
    now = 170.0
    assert unknown.silent_seconds(4) == 3


def test_a_connection_with_retries_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    server = MessageStore.serve()
    single, retrying = server.reconnect(), server.reconnect(retry_seconds=10)
    server.write("a", {"n": 1})

    class Cut:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("reset by peer")

    for store in (single, retrying):
        monkeypatch.setattr(store, "_store", Cut())
    with pytest.raises(ExchangeError, match="reset by peer"):
        single.read("a")
    message = retrying.read("a")
    assert message is not None and message.fields == {"n": 1}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """A body of five pieces."""
    monkeypatch.setattr(message_store, "PIECE_BYTES", 4)
    return torch.arange(18, dtype=torch.uint8)


def test_a_message_without_a_body_removes_the_pieces_of_the_previous_one(small_pieces: torch.Tensor) -> None:
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
    """After any call: when it writes again, when another writer does, or when the message is removed."""
    server = MessageStore.serve()
    keys = server._store.num_keys()
    for again in ("same", "other", "none"):
        writer = server.reconnect(retry_seconds=10 if again == "same" else 0)
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
