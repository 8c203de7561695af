"""Shared memory between all ranks of a World on one machine, and which ranks share a host."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from gnnfleet.comm.collectives import barrier, broadcast_bytes, sum_over_ranks
from gnnfleet.comm.shm_transport import create_memory, map_memory, open_memory
from gnnfleet.comm.world import World
from gnnfleet.errors import ExchangeError


def share_memory(world: World, nbytes: int) -> Tensor:
    """Collective. [nbytes] uint8 that all ranks read and write, freed with the last of them.

    Raises ExchangeError if it cannot be allocated.
    """
    if world.size == 1 or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    assert world.shm is not None, "ranks are on one machine"
    try:
        if world.is_first:
            fd = create_memory(nbytes)
            broadcast_bytes(world, str(fd).encode())
        else:
            fd = open_memory(world.shm.pids[0], int(broadcast_bytes(world, None)))
        memory = map_memory(fd, nbytes)
    except OSError as error:
        raise ExchangeError(f"rank {world.rank} cannot allocate {nbytes} bytes of shared memory: {error}") from error
    barrier(world)  # all ranks have mapped it, so the descriptor can go
    os.close(fd)
    return memory


def ranks_by_host(world: World) -> list[list[int]]:
    """Collective. The ranks grouped by shared memory, in order; a rank is alone if its group does not agree."""
    reaches = torch.zeros(world.size, world.size, dtype=torch.int64)
    reaches[world.rank, world.rank] = 1
    if world.shm is not None:
        for q in range(world.size):
            if world.shm.pids[q] is not None and world.shm.readers[q] is not None:
                reaches[world.rank, q] = 1
    reaches = sum_over_ranks(world, reaches)
    hosts: list[list[int]] = []
    for rank in range(world.size):
        local: list[int] = reaches[rank].nonzero()[:, 0].tolist()
        if not all(torch.equal(reaches[q], reaches[rank]) for q in local):
            hosts.append([rank])
        elif local[0] == rank:
            hosts.append(local)
    return hosts


def ranks_on_this_host(world: World) -> list[int]:
    """Collective. The group of ``ranks_by_host`` that this rank is in."""
    return next(ranks for ranks in ranks_by_host(world) if world.rank in ranks)
