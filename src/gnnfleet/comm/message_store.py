"""A message store: messages of any size between processes that may leave and return, through one small server.

A message has JSON fields and perhaps a body of bytes; readers get all of it or nothing. The server is torch's TCPStore,
which drops values above 8 MiB, so bodies are split. No call waits inside the server: callers poll.
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
"""Bytes of a body in one value of the server."""

# Seconds until an attempt to connect, or a read, fails; and between attempts to reconnect.
CONNECT_TIMEOUT, READ_TIMEOUT, RETRY_INTERVAL = 30.0, 2.0, 0.1

TCP_USER_TIMEOUT = 3.0
"""Seconds without an acknowledgement after which a connection counts as lost. TCP itself doubles its waits: after a cut
of ten seconds it would be silent for another ten."""

PROBE_TIMEOUT = 1.5
"""Seconds in which a server has to answer a client that reconnects: one packet may be lost."""

MAX_PORT = 65535


@dataclass(frozen=True)
class Address:
    """Host and port of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse HOST:PORT; raises ValueError for anything else."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or int(port) > MAX_PORT:
            raise ValueError(f"expected HOST:PORT with a port up to {MAX_PORT}, found {text!r}")
        return cls(host, int(port))


@dataclass(frozen=True, eq=False)
class StoredMessage:
    """Fields and body of a message."""

    fields: Mapping[str, Any]
    body: Tensor  # [n] uint8


P = ParamSpec("P")
R = TypeVar("R")


def _retried(method: Callable[Concatenate[MessageStore, P], R]) -> Callable[Concatenate[MessageStore, P], R]:
    """Repeat a call on a new connection after a lost one, for up to ``retry_seconds`` seconds."""

    @wraps(method)
    def call(self: MessageStore, /, *args: P.args, **kwargs: P.kwargs) -> R:
        until = time.monotonic() + self._retry_seconds
        while True:
            try:
                return method(self, *args, **kwargs)
            except ExchangeError:
                if time.monotonic() >= until:
                    raise
            time.sleep(RETRY_INTERVAL)
            with suppress(ExchangeError):
                self._store = self.reconnect()._store

    return call


class MessageStore:
    """A connection to the server, for one thread.

    Calls raise ExchangeError if the connection is lost and cannot be replaced within ``retry_seconds`` seconds.
    A repeated call of ``count`` may count twice.
    """

    def __init__(self, address: Address, store: TCPStore, *, retry_seconds: float = 0.0) -> None:
        self.address, self._store, self._retry_seconds = address, store, retry_seconds
        store.set_timeout(timedelta(seconds=READ_TIMEOUT))  # a value may be removed just before it is read

    @classmethod
    def serve(cls, host: str = "127.0.0.1", port: int = 0) -> MessageStore:
        """Start a server that lives as long as this object, and connect to it. Raises OSError."""
        store, bound = serve_store(host, port, seconds=CONNECT_TIMEOUT)
        return cls(Address(host, bound), store)

    @classmethod
    def connect(cls, address: Address, *, retry_seconds: float = 0.0) -> MessageStore:
        with _connection_lost(address):
            store = TCPStore(
                address.host,
                address.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=CONNECT_TIMEOUT),
            )
        _detect_dead_connections(address.port)
        return cls(address, store, retry_seconds=retry_seconds)

    def reconnect(self, *, retry_seconds: float = 0.0) -> MessageStore:
        """Open another connection, for another thread or in place of a lost one; the server has to answer at once."""
        with _connection_lost(self.address):
            socket.create_connection((local_address(self.address.host), self.address.port), PROBE_TIMEOUT).close()
        return MessageStore.connect(self.address, retry_seconds=retry_seconds)

    @_retried
    def has(self, key: str) -> bool:
        with _connection_lost(self.address):
            return bool(self._store.check([key]))

    def write(self, key: str, fields: Mapping[str, Any], body: Tensor | None = None) -> None:
        """Publish a message in place of a previous one. A reader of the previous message may find none meanwhile.

        A key has one writer at a time.
        """
        pieces = () if body is None or not len(body) else torch.split(body, PIECE_BYTES)
        # Named once, so that a repeated attempt overwrites the pieces of the interrupted one.
        names = [f"{key}#{secrets.token_hex(4)}#{index}" for index in range(len(pieces))]
        self._write(key, dict(fields), dict(zip(names, pieces, strict=True)))

    @_retried
    def _write(self, key: str, fields: Mapping[str, Any], pieces: Mapping[str, Tensor]) -> None:
        with _connection_lost(self.address):
            obsolete = [name for name in self._pieces(key) if name not in pieces]
            for name, piece in pieces.items():
                self._store.set(name, piece.numpy().tobytes())  # type: ignore[arg-type]
            nbytes = sum(len(piece) for piece in pieces.values())
            self._store.set(key, json.dumps({"fields": fields, "pieces": list(pieces), "bytes": nbytes}))
            for name in obsolete:
                self._store.delete_key(name)
            self._store.check([key])  # the server does not answer to set: wait until it has handled it

    @_retried
    def read(self, key: str) -> StoredMessage | None:
        """Read a message; None if there is none."""
        with _connection_lost(self.address):
            value = self._value(key)
            if not value:
                return None
            head = json.loads(value)
            body = torch.empty(head["bytes"], dtype=torch.uint8)
            for target, name in zip(torch.split(body, PIECE_BYTES), head["pieces"], strict=False):
                piece = self._value(name)
                if len(piece) != len(target):
                    return None  # the message was replaced or removed meanwhile
                target.copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
        return StoredMessage(head["fields"], body)

    @_retried
    def remove_where(self, is_obsolete: Callable[[str], bool]) -> None:
        """Remove all messages whose keys match, also those whose writer was interrupted."""
        with _connection_lost(self.address):
            for name in self._store.list_keys():
                if is_obsolete(name.partition("#")[0]):
                    self._store.delete_key(name)

    def remove(self, key: str) -> None:
        self.remove_where(lambda other: other == key)

    def _pieces(self, key: str) -> list[str]:
        """Names of all pieces of a message, also of those that interrupted writers have left."""
        return [name for name in self._store.list_keys() if name.startswith(f"{key}#")]

    def _value(self, key: str) -> bytes:
        """Read a value; empty if there is none."""
        try:
            return bytes(self._store.get(key)) if self._store.check([key]) else b""
        except torch.distributed.DistStoreError:
            return b""

    @_retried
    def count(self, key: str, more: int = 1) -> int:
        """Add to a counter that starts at 0, and return it."""
        with _connection_lost(self.address):
            return int(self._store.add(key, more))


class HeartbeatReader:
    """Measures how long a counter of heartbeats has not changed. A previous process left it at ``after``."""

    def __init__(self, *, after: int = 0) -> None:
        self._after, self._beats, self._last_change = after, after, time.monotonic()

    def silent_seconds(self, beats: int) -> float:
        """Seconds since the counter changed; 0 until its first change, since a process takes time to start."""
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
    """Set timeouts on the connections of this process to a port; torch does not give access to its sockets."""
    if not sys.platform.startswith("linux"):
        return
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as duplicate:
                if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.getpeername()[1] == port:
                    duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
                    duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
                    duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * TCP_USER_TIMEOUT))
