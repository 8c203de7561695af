"""Post: letters of any size between processes that may come, go and come back, through one small server.

A letter is a few words and perhaps tensors as bytes; it is there as a whole or not at all. The server is torch's
TCPStore, which drops values above 8 MiB, so bodies go in pieces. Nobody waits inside the server: whoever waits looks
again. Serves one thread; threads open connections of their own.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gnnfleet.errors import ExchangeError

PIECE = 4 << 20
"""Bytes of a body that go in one value."""

PATIENCE = 30.0
"""Seconds a connection may take to be made."""

ANSWER = 2.0
"""Seconds a value may take to be there."""


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
        if not host or not port.isdigit():
            raise ValueError(f"expected HOST:PORT, found {text!r}")
        return cls(host, int(port))


@dataclass(frozen=True, eq=False)
class Letter:
    """Words, and bytes."""

    words: Mapping[str, Any]
    body: Tensor  # [n] uint8


class Post:
    """A connection to the server; raises ExchangeError when it is lost."""

    def __init__(self, address: Address, store: TCPStore) -> None:
        self.address, self._store = address, store
        store.set_timeout(timedelta(seconds=ANSWER))  # of a value that was taken away since it was seen

    @classmethod
    def serve(cls, host: str = "127.0.0.1", port: int = 0) -> Post:
        """Start a server, which lives as long as this object, and connect to it. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as ears:  # torch's own would listen on every interface
            ears.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            ears.bind((host, port))
            ears.listen(128)
            place = ears.getsockname()[1]
            near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            store = TCPStore(
                near,
                place,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=PATIENCE),
                master_listen_fd=os.dup(ears.fileno()),
            )
        return cls(Address(host, place), store)

    @classmethod
    def connect(cls, address: Address) -> Post:
        with _lost(address):
            store = TCPStore(
                address.host,
                address.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=PATIENCE),
            )
        return cls(address, store)

    def another(self) -> Post:
        """A connection of its own, for another thread."""
        return Post.connect(self.address)

    def has(self, key: str) -> bool:
        with _lost(self.address):
            return bool(self._store.check([key]))

    def write(self, key: str, words: Mapping[str, Any], body: Tensor | None = None) -> None:
        """Leave a letter; one that is there already is replaced."""
        body = torch.empty(0, dtype=torch.uint8) if body is None else body
        pieces = torch.split(body, PIECE) if len(body) else ()
        with _lost(self.address):
            for place, piece in enumerate(pieces):
                self._store.set(f"{key}#{place}", piece.numpy().tobytes())  # type: ignore[arg-type]
            self._store.set(key, json.dumps({"words": dict(words), "pieces": len(pieces), "bytes": len(body)}))

    def read(self, key: str) -> Letter | None:
        """A letter, None where there is none."""
        if not self.has(key):
            return None
        with _lost(self.address):
            try:
                head = json.loads(self._store.get(key))
                body = torch.empty(head["bytes"], dtype=torch.uint8)
                for place in range(head["pieces"]):
                    if not self._store.check([f"{key}#{place}"]):
                        return None  # it was taken away while it was read
                    piece = self._store.get(f"{key}#{place}")
                    body[place * PIECE : place * PIECE + len(piece)] = torch.frombuffer(
                        bytearray(piece), dtype=torch.uint8
                    )
            except torch.distributed.DistStoreError:
                return None
        return Letter(head["words"], body)

    def remove(self, key: str) -> None:
        """Take a letter away."""
        with _lost(self.address):
            if self._store.check([key]):
                pieces = json.loads(self._store.get(key))["pieces"]
                self._store.delete_key(key)
                for place in range(pieces):
                    self._store.delete_key(f"{key}#{place}")

    def count(self, key: str, more: int = 1) -> int:
        """Add to a number and get it; it begins with 0."""
        with _lost(self.address):
            return int(self._store.add(key, more))


@contextmanager
def _lost(address: Address) -> Iterator[None]:
    try:
        yield
    except torch.distributed.DistStoreError:
        raise
    except (torch.distributed.DistError, RuntimeError) as error:
        raise ExchangeError(f"lost the coordinator's server at {address}: {str(error).splitlines()[0]}") from error
