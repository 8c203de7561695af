"""Hosts on one machine: network namespaces on a bridge, each with an address and a link that can be cut.

``tc`` limits the rate and adds the delay of links. Needs root and the commands ip and tc; everything is removed at the
end. Hosts share memory and disks, so benchmarks set GNNFLEET_SHARED_MEMORY=0.
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

_COUNTER = itertools.count()


class NoHosts(Exception):
    """This machine cannot make network namespaces; the text gives the reason."""


@dataclass(frozen=True)
class Host:
    """One namespace; ``prefix`` goes before a command that runs in it."""

    number: int
    namespace: str
    bridge_end: str  # the link's end on the bridge
    host_end: str  # its end in the namespace
    address: str

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace]

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([*self.prefix, *command], text=True, **options)

    def cut(self) -> None:
        """Cut the link."""
        _ip("-n", self.namespace, "link", "set", self.host_end, "down")

    def mend(self) -> None:
        _ip("-n", self.namespace, "link", "set", self.host_end, "up")


@contextmanager
def hosts(size: int, *, rate: str | None = None, delay: str | None = None) -> Iterator[list[Host]]:
    """``size`` hosts; ``rate`` as ``200mbit``, ``delay`` as ``2ms``. Raises NoHosts if they cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise NoHosts("network namespaces need root and the command ip")
    name = f"gf{os.getpid():x}x{next(_COUNTER) % 100}"  # several sets of hosts of one process are separate
    created = [Host(n, f"{name}-{n}", f"{name}n{n}", f"{name}f{n}", f"10.213.7.{n + 1}") for n in range(size)]
    try:
        try:
            _make(name, created, rate, delay)
        except subprocess.CalledProcessError as error:
            raise NoHosts(f"this machine makes no network namespaces: {error.stderr.decode().strip()}") from error
        yield created
    finally:
        for host in created:
            _try("ip", "netns", "del", host.namespace)
            _try("ip", "link", "del", host.bridge_end)
        _try("ip", "link", "del", name)


def _make(bridge: str, hosts: list[Host], rate: str | None, delay: str | None) -> None:
    _ip("link", "add", bridge, "type", "bridge")
    _ip("link", "set", bridge, "up")
    for host in hosts:
        _ip("netns", "add", host.namespace)
        _ip("link", "add", host.bridge_end, "type", "veth", "peer", "name", host.host_end)
        _ip("link", "set", host.bridge_end, "master", bridge, "up")
        _ip("link", "set", host.host_end, "netns", host.namespace)
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.host_end)
        for device in ("lo", host.host_end):
            _ip("-n", host.namespace, "link", "set", device, "up")
        _limit(host, rate, delay)


def _limit(host: Host, rate: str | None, delay: str | None) -> None:
    """Limit the rate with a token bucket; a queue below it adds the delay."""
    add = ["tc", "-n", host.namespace, "qdisc", "add", "dev", host.host_end]
    if rate is not None:
        bucket = ["root", "handle", "1:", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        subprocess.run([*add, *bucket], check=True, capture_output=True)
    if delay is not None:
        parent = ["root"] if rate is None else ["parent", "1:1"]
        subprocess.run([*add, *parent, "netem", "delay", delay], check=True, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _try(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True)
