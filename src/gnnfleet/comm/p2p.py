"""Messages between two ranks, and the one place where a failure of the network becomes an ExchangeError.

A wait that times out or fails is final: gloo closes the connection for good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from gnnfleet.comm.world import World
from gnnfleet.errors import ExchangeError
from gnnfleet.report.phase_timer import WAIT


@dataclass(frozen=True, eq=False)
class Posted:
    """A message under way. ``tensor`` must not be touched, nor its memory given back, until ``wait`` returns."""

    world: World
    tensor: Tensor
    peer: int
    doing: str  # as in "rows of aggregate"
    work: Any

    def wait(self) -> Tensor:
        """The tensor, sent or filled; raises ExchangeError naming the peer."""
        translate(self.world, self.peer, self.doing, lambda: finish(self.world, self.work, self.doing))
        return self.tensor


def send(world: World, tensor: Tensor, peer: int, *, tag: int, doing: str, counted: int | None = None) -> Posted:
    """Post a contiguous tensor to a rank; its bytes are counted here, or those it stands for."""
    work = translate(world, peer, doing, lambda: group_of(world).send([tensor], peer, tag))
    world.traffic.sent(tensor.nbytes if counted is None else counted, world.known_as(peer))
    return Posted(world, tensor, peer, doing, work)


def receive(world: World, tensor: Tensor, peer: int, *, tag: int, doing: str) -> Posted:
    """Post a contiguous tensor to be filled by a rank. Messages of one pair and tag arrive in the order posted."""
    work = translate(world, peer, doing, lambda: group_of(world).recv([tensor], peer, tag))
    return Posted(world, tensor, peer, doing, work)


def group_of(world: World) -> ProcessGroup:
    assert world.group is not None, "there is nobody else"
    return world.group


def finish(world: World, work: Any, doing: str) -> None:
    """Wait for anything the group does."""
    with world.clock.during(WAIT, doing):
        work.wait(timedelta(seconds=world.timeout))


def translate(world: World, peer: int | None, doing: str, call: Callable[[], Any]) -> Any:
    """``call()``, with what the network throws put into words; ``peer`` None means all ranks together."""
    try:
        return call()
    except RuntimeError as error:
        whom = "the other ranks" if peer is None else f"rank {peer}"
        raise ExchangeError(
            f"rank {world.rank} lost {whom} ({doing}): {_first_line(error)}. Look at that rank's output, then --resume"
        ) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(". ") if text else type(error).__name__
