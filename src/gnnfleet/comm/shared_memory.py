"""Memory that all ranks of a World have in common; they are of one machine and see each other's processes."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from gnnfleet.comm.collectives import barrier, broadcast_bytes, sum_over_ranks
from gnnfleet.comm.shm_transport import create_memory, map_memory, open_memory
from gnnfleet.comm.world import World
from gnnfleet.errors import ExchangeError


def share_memory(world: World, nbytes: int) -> Tensor:
    """[nbytes] uint8: what one rank writes the others read. It goes with the last of them. All ranks call it together;
    raises ExchangeError where there is no such memory."""
    if world.size == 1 or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    assert world.shm is not None, "ranks of one machine"
    try:
        if world.is_first:
            fd = create_memory(nbytes)
            broadcast_bytes(world, str(fd).encode())
        else:
            fd = open_memory(world.shm.pids[0], int(broadcast_bytes(world, None)))
        memory = map_memory(fd, nbytes)
    except OSError as error:
        raise ExchangeError(f"rank {world.rank} has no {nbytes} bytes for rows that are kept: {error}") from error
    barrier(world)  # all have mapped it: it needs no descriptor any more
    os.close(fd)
    return memory


def ranks_by_host(world: World) -> list[list[int]]:
    """The ranks by whose memory they share, in order; those that do not all agree are by themselves. All ranks call it
    together."""
    sees = torch.zeros(world.size, world.size, dtype=torch.int64)
    sees[world.rank, world.rank] = 1
    if world.shm is not None:
        for q in range(world.size):
            if world.shm.pids[q] is not None and world.shm.readers[q] is not None:
                sees[world.rank, q] = 1
    sees = sum_over_ranks(world, sees)
    found: list[list[int]] = []
    for rank in range(world.size):
        here: list[int] = sees[rank].nonzero()[:, 0].tolist()
        agreed = all(torch.equal(sees[q], sees[rank]) for q in here)
        if not agreed:
            found.append([rank])
        elif here[0] == rank:
            found.append(here)
    return found


def ranks_on_this_host(world: World) -> list[int]:
    """The ranks that share this one's memory, itself included, in order; itself alone where they do not all agree."""
    return next(ranks for ranks in ranks_by_host(world) if world.rank in ranks)
