"""Post: letters of any size between processes that may come, go and come back, through one small server.

A letter is a few words and perhaps tensors as bytes; it is there as a whole or not at all. The server is torch's
TCPStore, which drops values above 8 MiB, so bodies go in pieces. Nobody waits inside the server: whoever waits looks
again; and nobody waits for a link that is cut: the connection counts as lost within seconds, so that a new one is there
soon after the link is. Serves one thread; threads open connections of their own.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gnnfleet.comm.store_server import local_address, serve_store
from gnnfleet.errors import ExchangeError, first_line

PIECE_BYTES = 4 << 20
"""Bytes of a body that go in one value."""

UNFINISHED = "#unfinished"
"""Suffix of the key under which a writer lists the pieces that are to be removed if it does not finish."""

CONNECT_TIMEOUT = 30.0
"""Seconds a connection may take to be made."""

READ_TIMEOUT = 2.0
"""Seconds a value may take to be there."""

TCP_USER_TIMEOUT = 3.0
"""Seconds for which a link may carry nothing of what was sent before its connection counts as lost. TCP itself waits
twice as long after every try, so that after a cut of ten seconds it is silent for another ten."""

PROBE_TIMEOUT = 1.5
"""Seconds a server may take to answer whoever had a connection before: one packet may be lost."""


RETRY_INTERVAL = 0.1
"""Before a lost connection is made again."""

MAX_PORT = 65535


@dataclass(frozen=True)
class Address:
    """Where the server is."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ValueError for anything but HOST:PORT."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or int(port) > MAX_PORT:
            raise ValueError(f"expected HOST:PORT with a port up to {MAX_PORT}, found {text!r}")
        return cls(host, int(port))


@dataclass(frozen=True, eq=False)
class StoredMessage:
    """Words, and bytes."""

    fields: Mapping[str, Any]
    body: Tensor  # [n] uint8


P = ParamSpec("P")
R = TypeVar("R")


def _retried(method: Callable[Concatenate[MessageStore, P], R]) -> Callable[Concatenate[MessageStore, P], R]:
    """Done again on another connection where this one was lost, for as long as the post has patience."""

    @wraps(method)
    def call(self: MessageStore, /, *args: P.args, **words: P.kwargs) -> R:
        until = time.monotonic() + self._connect_timeout
        while True:
            try:
                return method(self, *args, **words)
            except ExchangeError:
                if time.monotonic() >= until:
                    raise
            time.sleep(RETRY_INTERVAL)
            with suppress(ExchangeError):
                self._store = self.reconnect()._store

    return call


class MessageStore:
    """A connection to the server; raises ExchangeError when it is lost, ``patience`` seconds after it was where it
    could not be made again. A number that was counted then may have been counted twice."""

    def __init__(self, address: Address, store: TCPStore, *, connect_timeout: float = 0.0) -> None:
        self.address, self._store, self._connect_timeout = address, store, connect_timeout
        store.set_timeout(timedelta(seconds=READ_TIMEOUT))  # of a value that was taken away since it was seen

    @classmethod
    def serve(cls, host: str = "127.0.0.1", port: int = 0) -> MessageStore:
        """Start a server, which lives as long as this object, and connect to it. Raises OSError."""
        store, bound = serve_store(host, port, seconds=CONNECT_TIMEOUT)
        return cls(Address(host, bound), store)

    @classmethod
    def connect(cls, address: Address) -> MessageStore:
        with _connection_lost(address):
            store = TCPStore(
                address.host,
                address.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=CONNECT_TIMEOUT),
            )
        _detect_dead_connections(address.port)
        return cls(address, store)

    def reconnect(self, *, connect_timeout: float = 0.0) -> MessageStore:
        """A connection of its own, for another thread or in place of one that was lost; not made where nobody answers
        at once."""
        with _connection_lost(self.address):
            socket.create_connection((local_address(self.address.host), self.address.port), PROBE_TIMEOUT).close()
        made = MessageStore.connect(self.address)
        made._connect_timeout = connect_timeout
        return made

    @_retried
    def has(self, key: str) -> bool:
        with _connection_lost(self.address):
            return bool(self._store.check([key]))

    def write(self, key: str, fields: Mapping[str, Any], body: Tensor | None = None) -> None:
        """Publish a message in place of a former one. One writer per key at a time.

        A reader that is in the middle of the former message finds none.
        """
        pieces = () if body is None or not len(body) else torch.split(body, PIECE_BYTES)
        # Named once, so that a repeated attempt overwrites what the interrupted one has left.
        names = [f"{key}#{secrets.token_hex(4)}#{index}" for index in range(len(pieces))]
        self._write(key, dict(fields), dict(zip(names, pieces, strict=True)))

    @_retried
    def _write(self, key: str, fields: Mapping[str, Any], pieces: Mapping[str, Tensor]) -> None:
        with _connection_lost(self.address):
            obsolete = sorted(set(self._pieces(key)) - pieces.keys())
            if pieces or obsolete:
                # A writer that is killed from here on leaves a list of what the next one has to remove.
                self._store.set(key + UNFINISHED, json.dumps([*obsolete, *pieces]))
            for name, piece in pieces.items():
                self._store.set(name, piece.numpy().tobytes())  # type: ignore[arg-type]
            nbytes = sum(len(piece) for piece in pieces.values())
            self._store.set(key, json.dumps({"fields": fields, "pieces": list(pieces), "bytes": nbytes}))
            for name in obsolete:
                self._store.delete_key(name)
            if pieces or obsolete:
                self._store.delete_key(key + UNFINISHED)
            else:
                self._store.check([key])  # the server does not answer to set, so wait until it has come to this

    @_retried
    def read(self, key: str) -> StoredMessage | None:
        """A letter, None where there is none."""
        with _connection_lost(self.address):
            head = self._head(key)
            if head is None:
                return None
            body = torch.empty(head["bytes"], dtype=torch.uint8)
            for room, name in zip(torch.split(body, PIECE_BYTES), head["pieces"], strict=False):
                piece = self._value(name)
                if len(piece) != len(room):
                    return None  # it was taken away while it was read
                room.copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
        return StoredMessage(head["fields"], body)

    @_retried
    def remove(self, key: str) -> None:
        """Take a letter away."""
        with _connection_lost(self.address):
            for name in (*self._pieces(key), key, key + UNFINISHED):  # the lists last: removal may be interrupted, too
                self._store.delete_key(name)

    def _pieces(self, key: str) -> list[str]:
        """Names of all pieces of a message, those of interrupted writers included."""
        head, unfinished = self._head(key), self._value(key + UNFINISHED)
        return [*([] if head is None else head["pieces"]), *(json.loads(unfinished) if unfinished else [])]

    def _head(self, key: str) -> dict[str, Any] | None:
        value = self._value(key)
        return dict(json.loads(value)) if value else None

    def _value(self, key: str) -> bytes:
        """What lies there; of a value that is not there, or is taken away meanwhile, nothing."""
        try:
            return bytes(self._store.get(key)) if self._store.check([key]) else b""
        except torch.distributed.DistStoreError:
            return b""

    @_retried
    def count(self, key: str, more: int = 1) -> int:
        """Add to a number and get it; it begins with 0."""
        with _connection_lost(self.address):
            return int(self._store.add(key, more))


class HeartbeatReader:
    """Measures for how long a counter of heartbeats has stood still; a predecessor left it at ``after``."""

    def __init__(self, *, after: int = 0) -> None:
        self._after, self._beats, self._last_change = after, after, time.monotonic()

    def silent_seconds(self, beats: int) -> float:
        """Take a reading of the counter; 0 until it has moved for the first time, since starting takes its time."""
        now = time.monotonic()
        if beats != self._beats or beats == self._after:
            self._beats, self._last_change = beats, now
        return now - self._last_change

    @property
    def has_moved(self) -> bool:
        return self._beats != self._after


@contextmanager
def _connection_lost(address: Address) -> Iterator[None]:
    try:
        yield
    except (torch.distributed.DistError, RuntimeError, OSError) as error:
        raise ExchangeError(f"lost the coordinator's server at {address}: {first_line(error)}") from error


def _detect_dead_connections(port: int) -> None:
    """Tell the connections of this process to a port to give up soon; torch does not hand out its sockets."""
    if not sys.platform.startswith("linux"):
        return
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as twin:
                if twin.family in (socket.AF_INET, socket.AF_INET6) and twin.getpeername()[1] == port:
                    twin.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    twin.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
                    twin.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
                    twin.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * TCP_USER_TIMEOUT))
