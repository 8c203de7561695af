"""World: the ranks that train together, as a value. One process is a World of size 1.

It is made in one place (``init_world``) and handed down; there is no process group behind anyone's back.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from gnnfleet.comm.rendezvous import Rendezvous
from gnnfleet.comm.shm_transport import ShmTransport, open_shm_transport
from gnnfleet.errors import ConfigError, ExchangeError, first_line
from gnnfleet.report.phase_timer import PhaseTimer
from gnnfleet.report.traffic import TrafficCounter

EXCHANGE_TIMEOUT = 1800.0
"""What a single wait may take: a slow peer is healthy. Who is dead is found by the heartbeat, much earlier."""

GroupFactory = Callable[[str, int, int], ProcessGroup]
"""(name that all of its ranks give it, rank in it, size) → a group."""


@dataclass(frozen=True, eq=False)
class World:
    """Rank ``rank`` of ``size``. ``group`` is None exactly when there is nobody else."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: ProcessGroup | None = None
    timeout: float = EXCHANGE_TIMEOUT
    traffic: TrafficCounter = field(default_factory=TrafficCounter)
    clock: PhaseTimer = field(default_factory=PhaseTimer)
    new_group: GroupFactory | None = None
    shm: ShmTransport | None = None  # memory that ranks of this machine read in place
    global_ranks: tuple[int, ...] | None = None  # its ranks as the World numbers them that it is a part of

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: files, progress, the record."""
        return self.rank == 0

    def global_rank(self, rank: int) -> int:
        """The number of a rank in the whole World."""
        return rank if self.global_ranks is None else self.global_ranks[rank]

    def uncounted(self) -> World:
        """The same ranks with a traffic counter of their own, for messages that are not part of training."""
        return replace(self, traffic=TrafficCounter())

    def subgroup(self, name: str, ranks: Sequence[int]) -> World:
        """A World of some ranks of this one, numbered as listed; all of them call it with the same words.

        What it sends is counted with what this one sends.
        """
        assert self.rank in ranks and len(set(ranks)) == len(ranks), (self.rank, ranks)
        rank, size = ranks.index(self.rank), len(ranks)
        group = None
        if size > 1:
            assert self.new_group is not None, "a World of several ranks is made by join"
            group = self.new_group(f"{name}/{'-'.join(map(str, ranks))}", rank, size)
        shelf = None if self.shm is None else self.shm.subgroup(ranks)
        whole = tuple(self.global_rank(each) for each in ranks)
        return replace(self, rank=rank, size=size, group=group, new_group=None, shm=shelf, global_ranks=whole)


@contextmanager
def init_world(
    meeting: Rendezvous, *, device: torch.device | None = None, timeout: float = EXCHANGE_TIMEOUT
) -> Iterator[World]:
    """The World of a meeting: gloo sockets between all ranks, on cuda nccl beside them."""
    device = device or torch.device("cpu")
    seat = meeting.env
    if seat.size == 1:
        yield World(device=device, timeout=timeout)
        return
    made: list[ProcessGroup] = []
    uses: dict[str, int] = {}  # of each name
    addresses = _listen_addresses(meeting)

    def make(name: str, rank: int, size: int) -> ProcessGroup:
        # A second group of a name would find the addresses of the first in the store. All ranks count alike.
        number = uses[name] = uses.get(name, -1) + 1
        store = PrefixStore(f"group/{name}/{number}", meeting.store)
        made.append(_make_group(store, rank, size, addresses=addresses, device=device, timeout=timeout))
        return made[-1]

    try:
        group = make("all", seat.rank, seat.size)
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {seat.rank} cannot connect to the others: {first_line(error)}. "
            "GLOO_SOCKET_IFNAME=eth0 names the network to use"
        ) from error
    world = World(seat.rank, seat.size, device, group, timeout, new_group=make)
    world = replace(world, shm=_open_shm(world, meeting))
    yield world
    if world.shm is not None:
        world.shm.close(timeout)
    for group in reversed(made):
        group.shutdown()


def _open_shm(world: World, meeting: Rendezvous) -> ShmTransport | None:
    own = meeting.members[world.rank]
    shares = world.device.type == "cpu" and meeting.env.shares_memory
    pids = [
        member.pid if shares and rank != world.rank and member.pids == own.pids else None
        for rank, member in enumerate(meeting.members)
    ]

    def total(t: torch.Tensor) -> torch.Tensor:
        assert world.group is not None
        world.group.allreduce([t]).wait(timedelta(seconds=world.timeout))
        return t

    return open_shm_transport(world.rank, pids, total)


def _make_group(
    store: Store,
    rank: int,
    size: int,
    *,
    addresses: Sequence[ProcessGroupGloo.Device],
    device: torch.device,
    timeout: float,
) -> ProcessGroup:
    """A group that torch.distributed does not know of: it is used through its own methods or passed by name."""
    group = ProcessGroup(store, rank, size)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = list(addresses)
    options._timeout = timedelta(seconds=timeout)
    gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        nccl_options = ProcessGroupNCCL.Options()
        nccl_options._timeout = timedelta(seconds=timeout)
        nccl = ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, nccl_options)
        group._register_backend(device, ProcessGroup.BackendType.NCCL, nccl)
    return group


def _listen_addresses(meeting: Rendezvous) -> list[ProcessGroupGloo.Device]:
    """The addresses this rank listens on: loopback when all ranks are on one machine, whatever interface is named;
    else the named interfaces, or the address that leads to the store."""
    if meeting.on_one_machine:
        return [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    if meeting.env.interface is not None:
        try:
            return [ProcessGroupGloo.create_device(interface=name) for name in meeting.env.interface.split(",")]
        except RuntimeError as error:
            raise ConfigError(f"GLOO_SOCKET_IFNAME={meeting.env.interface}: this machine has no such one") from error
    return [ProcessGroupGloo.create_device(hostname=_own_address(meeting))]


def _own_address(meeting: Rendezvous) -> str:
    """The address others see this machine under. Its own name often means 127.0.1.1, so that is not asked."""
    seat = meeting.env
    family, kind, _, _, target = socket.getaddrinfo(seat.host, seat.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # connecting a datagram socket sends nothing, it only finds the way
        probe.connect(target)
        found = str(probe.getsockname()[0])
    if found.startswith("127.") or found == "::1":
        raise ConfigError(
            f"{seat.host} is loopback on this machine, but ranks run on several: give torchrun its address as "
            "--master-addr, or set GLOO_SOCKET_IFNAME"
        )
    return found
