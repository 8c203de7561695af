"""Resuming: where a run begins, read by the first rank and shared with the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from gnnfleet.comm.collectives import broadcast_bytes, broadcast_json
from gnnfleet.comm.world import World
from gnnfleet.strategies.protocol import State
from gnnfleet.training.checkpoint import TrainState
from gnnfleet.training.run_dir import RunDirectory


@dataclass(frozen=True)
class ResumePoint:
    """Where a run begins: at the beginning, or at a checkpoint."""

    progress: TrainState
    state: State | None = None
    best: State | None = None


def find_resume_point(
    directory: RunDirectory | None, world: World, ids: Mapping[str, Tensor] | None = None
) -> ResumePoint:
    """Where a run begins; the first rank reads, others need to see its disk only where they own rows (``ids``)."""
    if directory is None:
        return ResumePoint(TrainState())
    start = read_resume_point(directory) if world.is_first else ResumePoint(TrainState())
    ids = ids or {}
    if world.size == 1 and start.state is None:
        return start
    there = start.state is not None
    private = there and directory.has_rank_local("last", world.size)
    word = broadcast_json(
        world,
        {"position": asdict(start.progress), "last": there, "best": bool(start.best), "private": private},
    )
    if not word["last"]:
        return start
    state = {**broadcast_state(world, start.state), **directory.load_sharded("last", world.rank, ids)}
    if word["private"]:
        state |= directory.load_rank_local("last", world.rank)
    best = (
        {**broadcast_state(world, start.best), **directory.load_sharded("best", world.rank, ids)}
        if word["best"]
        else None
    )
    return ResumePoint(TrainState(**word["position"]), state, best)


def read_resume_point(directory: RunDirectory) -> ResumePoint:
    """What all ranks have of where a run stands; raises RunError for a damaged checkpoint."""
    last = directory.load("last")
    if last is None:
        return ResumePoint(TrainState())
    state, position = last
    best = directory.load("best")
    if best is not None and best[1].best_epoch == position.best_epoch:
        return ResumePoint(position, state, best[0])
    # A kill between the two leaves a best from later than last. Training finds it again where it repeats itself, and
    # another where it goes by a clock; what was best before that is gone, so the next evaluation begins anew.
    return ResumePoint(replace(position, evaluated=0, best_epoch=0, best_metric=None, best_loss=None), state)


def broadcast_state(world: World, state: State | None) -> State:
    """What the first rank has; the others give None."""
    if world.size == 1:
        assert state is not None
        return state
    flat = None
    if world.is_first:
        assert state is not None
        flat = tensors_to_bytes({f"{part}/{name}": t for part, tensors in state.items() for name, t in tensors.items()})
    found: State = {}
    for key, tensor in tensors_from_bytes(broadcast_bytes(world, flat)).items():
        part, _, name = key.partition("/")
        found.setdefault(part, {})[name] = tensor
    return found
