"""Messages between two ranks; network failures become ExchangeErrors here and nowhere else.

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
from gnnfleet.errors import ExchangeError, first_line
from gnnfleet.report.phase_timer import WAIT


@dataclass(frozen=True, eq=False)
class PendingTransfer:
    """A message in flight. ``tensor`` must not be changed or freed until ``wait`` returns."""

    world: World
    tensor: Tensor
    peer: int
    op: str  # as in "rows of aggregate"
    work: Any

    def wait(self) -> Tensor:
        """The tensor, sent or received; raises ExchangeError with the name of the peer."""
        wrap_errors(self.world, self.peer, self.op, lambda: wait_work(self.world, self.work, self.op))
        return self.tensor


def send(world: World, tensor: Tensor, peer: int, *, tag: int, op: str, counted: int | None = None) -> PendingTransfer:
    """Start to send a contiguous tensor; counts its bytes, or ``counted`` if it is a descriptor."""
    work = wrap_errors(world, peer, op, lambda: require_group(world).send([tensor], peer, tag))
    world.traffic.add_bytes(tensor.nbytes if counted is None else counted, world.global_rank(peer))
    return PendingTransfer(world, tensor, peer, op, work)


def receive(world: World, tensor: Tensor, peer: int, *, tag: int, op: str) -> PendingTransfer:
    """Start to receive into a contiguous tensor. Messages of one pair and tag arrive in the order sent."""
    work = wrap_errors(world, peer, op, lambda: require_group(world).recv([tensor], peer, tag))
    return PendingTransfer(world, tensor, peer, op, work)


def require_group(world: World) -> ProcessGroup:
    assert world.group is not None, "a World of one rank has no group"
    return world.group


def wait_work(world: World, work: Any, op: str) -> None:
    with world.clock.phase(WAIT, op):
        work.wait(timedelta(seconds=world.timeout))


def wrap_errors(world: World, peer: int | None, op: str, call: Callable[[], Any]) -> Any:
    """Run ``call`` and turn network errors into ExchangeError; ``peer`` None means a collective."""
    try:
        return call()
    except RuntimeError as error:
        lost = "the other ranks" if peer is None else f"rank {peer}"
        raise ExchangeError(
            f"rank {world.rank} lost {lost} ({op}): {first_line(error)}. Look at that rank's output, then --resume"
        ) from error
