"""Clock offset of a rank to the first rank, from timed requests."""

from __future__ import annotations

from time import perf_counter

import torch

from gnnfleet.comm.p2p import receive, send
from gnnfleet.comm.world import World

_REQUEST_TAG, _REPLY_TAG = 6, 7
_REQUESTS = 8


def clock_offset(world: World) -> float:
    """Collective. Seconds to add to this rank's perf_counter to get the first rank's; 0 on the first rank.

    The reply with the shortest round trip counts; request and reply are assumed to take equally long.
    """
    if world.is_first:
        for peer in range(1, world.size):
            for _ in range(_REQUESTS):
                receive(world, torch.empty(1), peer, tag=_REQUEST_TAG, op="receiving clock request").wait()
                now = torch.tensor([perf_counter()], dtype=torch.float64)
                send(world, now, peer, tag=_REPLY_TAG, op="sending clock reply").wait()
        return 0.0
    shortest, offset = float("inf"), 0.0
    for _ in range(_REQUESTS):
        reply = receive(world, torch.empty(1, dtype=torch.float64), 0, tag=_REPLY_TAG, op="receiving clock reply")
        start = perf_counter()
        send(world, torch.zeros(1), 0, tag=_REQUEST_TAG, op="sending clock request").wait()
        first_rank, end = float(reply.wait()), perf_counter()
        if end - start < shortest:
            shortest, offset = end - start, first_rank - (start + end) / 2
    return offset
