"""World: the ranks that train together, as a value. A single process is a World of size 1.

It is created in one place (``init_world``) and passed down; there is no global process group.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from threading import Lock

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from gnnfleet.comm.rendezvous import Rendezvous
from gnnfleet.comm.shm_transport import ShmTransport, open_shm_transport
from gnnfleet.errors import ConfigError, ExchangeError, first_line
from gnnfleet.report.phase_timer import PhaseTimer

EVERYONE = -1
"""Receiver of the bytes of all-reduces and broadcasts."""


@dataclass
class TrafficCounter:
    """Counts payload bytes as they are sent; may be used from several threads."""

    bytes_sent: int = 0
    rounds: int = 0
    bytes_by_peer: dict[int, int] = field(default_factory=dict)  # by global rank
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add_bytes(self, nbytes: int, to: int = EVERYONE) -> None:
        with self._lock:
            self.bytes_sent += nbytes
            self.bytes_by_peer[to] = self.bytes_by_peer.get(to, 0) + nbytes

    def add_round(self) -> None:
        with self._lock:
            self.rounds += 1


EXCHANGE_TIMEOUT = 1800.0
"""Limit of a single wait. A slow peer is healthy; the heartbeat finds a dead one much earlier."""

GroupFactory = Callable[[str, int, int], ProcessGroup]
"""(name, the same on all its ranks; rank in the group; size) → a group."""


@dataclass(frozen=True, eq=False)
class World:
    """Rank ``rank`` of ``size``. ``group`` is None if and only if there are no other ranks."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    timeout: float = EXCHANGE_TIMEOUT
    traffic: TrafficCounter = field(default_factory=TrafficCounter)
    clock: PhaseTimer = field(default_factory=PhaseTimer)
    new_group: GroupFactory | None = None
    shm: ShmTransport | None = None  # to ranks of this machine
    global_ranks: tuple[int, ...] | None = None  # of a subgroup: its ranks in the World it is part of

    @property
    def is_first(self) -> bool:
        """True on the rank that writes files, progress and the record."""
        return self.rank == 0

    def global_rank(self, rank: int) -> int:
        """The number of a rank in the World that this one is a subgroup of."""
        return rank if self.global_ranks is None else self.global_ranks[rank]

    def uncounted(self) -> World:
        """The same ranks with a traffic counter of their own, for messages that are not part of training."""
        return replace(self, traffic=TrafficCounter())

    def subgroup(self, name: str, ranks: Sequence[int]) -> World:
        """Collective. A World of some ranks of this one, numbered as listed; its traffic counts as this one's."""
        assert self.rank in ranks and len(set(ranks)) == len(ranks), (self.rank, ranks)
        rank, size = ranks.index(self.rank), len(ranks)
        group = None
        if size > 1:
            assert self.new_group is not None, "a World of several ranks comes from init_world"
            group = self.new_group(f"{name}/{'-'.join(map(str, ranks))}", rank, size)
        shm = None if self.shm is None else self.shm.subgroup(ranks)
        global_ranks = tuple(self.global_rank(member) for member in ranks)
        return replace(self, rank=rank, size=size, group=group, new_group=None, shm=shm, global_ranks=global_ranks)


@contextmanager
def init_world(rendezvous: Rendezvous) -> Iterator[World]:
    """Collective. The World of all ranks, with gloo between them."""
    env = rendezvous.env
    if env.size == 1:
        yield World()
        return
    groups: list[ProcessGroup] = []
    uses: dict[str, int] = {}  # of each name
    addresses = _listen_addresses(rendezvous)

    def new_group(name: str, rank: int, size: int) -> ProcessGroup:
        # A second group of the same name would read the addresses of the first. All ranks count alike.
        number = uses[name] = uses.get(name, -1) + 1
        store = PrefixStore(f"group/{name}/{number}", rendezvous.store)
        groups.append(_make_group(store, rank, size, addresses))
        return groups[-1]

    try:
        group = new_group("all", env.rank, env.size)
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {env.rank} cannot connect to the others: {first_line(error)}. "
            "Set GLOO_SOCKET_IFNAME to the network interface to use, for example eth0"
        ) from error
    world = World(env.rank, env.size, group, new_group=new_group)
    world = replace(world, shm=_open_shm(world, rendezvous))
    yield world
    if world.shm is not None:
        world.shm.close(world.timeout)
    for group in reversed(groups):
        group.shutdown()


def _open_shm(world: World, rendezvous: Rendezvous) -> ShmTransport | None:
    own = rendezvous.members[world.rank]
    pids = [
        member.pid if rendezvous.env.shares_memory and rank != world.rank and member.pids == own.pids else None
        for rank, member in enumerate(rendezvous.members)
    ]

    def all_reduce(t: torch.Tensor) -> torch.Tensor:
        assert world.group is not None
        world.group.allreduce([t]).wait(timedelta(seconds=world.timeout))
        return t

    return open_shm_transport(world.rank, pids, all_reduce)


def _make_group(store: Store, rank: int, size: int, addresses: Sequence[ProcessGroupGloo.Device]) -> ProcessGroup:
    """Create a group outside torch.distributed's registry; it is used through its own methods."""
    group = ProcessGroup(store, rank, size)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = list(addresses)
    options._timeout = timedelta(seconds=EXCHANGE_TIMEOUT)
    gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    return group


def _listen_addresses(rendezvous: Rendezvous) -> list[ProcessGroupGloo.Device]:
    """The addresses this rank listens on: loopback if all ranks are on one machine; else the interfaces of
    GLOO_SOCKET_IFNAME, or the address with which this machine reaches the store."""
    if rendezvous.on_one_machine:
        return [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    if rendezvous.env.interface is not None:
        try:
            return [ProcessGroupGloo.create_device(interface=name) for name in rendezvous.env.interface.split(",")]
        except RuntimeError as error:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME={rendezvous.env.interface}: this machine has no such interface"
            ) from error
    return [ProcessGroupGloo.create_device(hostname=_own_address(rendezvous))]


def _own_address(rendezvous: Rendezvous) -> str:
    """The address at which others reach this machine. Its host name is not used: it often resolves to 127.0.1.1."""
    env = rendezvous.env
    family, kind, _, _, target = socket.getaddrinfo(env.host, env.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # connecting a datagram socket sends nothing, it only picks a route
        probe.connect(target)
        address = str(probe.getsockname()[0])
    if address.startswith("127.") or address == "::1":
        raise ConfigError(
            f"{env.host} is a loopback address, but ranks run on several machines: pass torchrun as --master-addr an "
            "address that all of them reach, or set GLOO_SOCKET_IFNAME"
        )
    return address
