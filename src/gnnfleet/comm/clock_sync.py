"""How far a rank's clock is from the first rank's, by asking it what time it is."""

from __future__ import annotations

from time import perf_counter

import torch

from gnnfleet.comm.p2p import receive, send
from gnnfleet.comm.world import World

_ASK, _ANSWER = 6, 7
_TRIES = 8


def clock_offset(world: World) -> float:
    """Seconds to add to this rank's perf_counter; all ranks call it together, the first gives 0.

    Of several answers the quickest counts, and it is taken to have been on its way as long as the question.
    """
    if world.is_first:
        for peer in range(1, world.size):
            for _ in range(_TRIES):
                receive(world, torch.empty(1), peer, tag=_ASK, op="asked for the time").wait()
                now = torch.tensor([perf_counter()], dtype=torch.float64)
                send(world, now, peer, tag=_ANSWER, op="the time, going").wait()
        return 0.0
    best, found = float("inf"), 0.0
    for _ in range(_TRIES):
        answer = receive(world, torch.empty(1, dtype=torch.float64), 0, tag=_ANSWER, op="the time, coming")
        asked = perf_counter()
        send(world, torch.zeros(1), 0, tag=_ASK, op="asking for the time").wait()
        theirs, heard = float(answer.wait()), perf_counter()
        if heard - asked < best:
            best, found = heard - asked, theirs - (asked + heard) / 2
    return found
