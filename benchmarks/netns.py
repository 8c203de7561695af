"""Hosts on one machine: network namespaces on a bridge, each with an address and a cable that can be cut.

Links are held to a rate and a delay by ``tc``. Needs root and the commands ip and tc; everything that was made is
taken down again. Hosts share memory and disks, so whoever measures sets GNNFLEET_SHARED_MEMORY=0.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_MADE = itertools.count()


class NoHosts(Exception):
    """This machine makes no network namespaces; the text says why."""


@dataclass(frozen=True)
class Host:
    """One namespace. ``prefix`` goes before a command that is to run there."""

    number: int
    space: str
    near: str  # the cable's end on the bridge
    far: str  # its end in the namespace
    address: str

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.space]

    def popen(self, line: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([*self.prefix, *line], text=True, **options)

    def cut(self) -> None:
        """Take the cable out."""
        _ip("-n", self.space, "link", "set", self.far, "down")

    def mend(self) -> None:
        _ip("-n", self.space, "link", "set", self.far, "up")


@contextmanager
def hosts(size: int, *, rate: str | None = None, delay: str | None = None) -> Iterator[list[Host]]:
    """So many hosts; ``rate`` as ``200mbit``, ``delay`` as ``2ms``. Raises NoHosts where there can be none."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise NoHosts("network namespaces need root and the command ip")
    name = f"gf{os.getpid():x}x{next(_MADE) % 100}"  # several sets of hosts of one process do not meet
    made = [Host(n, f"{name}-{n}", f"{name}n{n}", f"{name}f{n}", f"10.213.7.{n + 1}") for n in range(size)]
    try:
        try:
            _make(name, made, rate, delay)
        except subprocess.CalledProcessError as error:
            raise NoHosts(f"this machine makes no network namespaces: {error.stderr.decode().strip()}") from error
        yield made
    finally:
        for host in made:
            _try("ip", "netns", "del", host.space)
            _try("ip", "link", "del", host.near)
        _try("ip", "link", "del", name)


def _make(bridge: str, wanted: list[Host], rate: str | None, delay: str | None) -> None:
    _ip("link", "add", bridge, "type", "bridge")
    _ip("link", "set", bridge, "up")
    for host in wanted:
        _ip("netns", "add", host.space)
        _ip("link", "add", host.near, "type", "veth", "peer", "name", host.far)
        _ip("link", "set", host.near, "master", bridge, "up")
        _ip("link", "set", host.far, "netns", host.space)
        _ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", host.far)
        for device in ("lo", host.far):
            _ip("-n", host.space, "link", "set", device, "up")
        _limit(host, rate, delay)


def _limit(host: Host, rate: str | None, delay: str | None) -> None:
    """A bucket for the rate, and below it a queue that waits for the delay."""
    add = ["tc", "-n", host.space, "qdisc", "add", "dev", host.far]
    if rate is not None:
        bucket = ["root", "handle", "1:", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        subprocess.run([*add, *bucket], check=True, capture_output=True)
    if delay is not None:
        place = ["root"] if rate is None else ["parent", "1:1"]
        subprocess.run([*add, *place, "netem", "delay", delay], check=True, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _try(*words: str) -> None:
    subprocess.run(words, check=False, capture_output=True)
