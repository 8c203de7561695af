"""Resuming: rank 0 reads the last checkpoint and shares it with the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from gnnfleet.comm.collectives import broadcast_bytes, broadcast_json
from gnnfleet.comm.world import World
from gnnfleet.strategies.protocol import State
from gnnfleet.training.checkpoint import TrainState, has_rank_local, load_rank_local, load_sharded
from gnnfleet.training.run_dir import RunDirectory


@dataclass(frozen=True)
class ResumePoint:
    """Start of a run: epoch 0, or a checkpoint."""

    progress: TrainState
    state: State | None = None
    best: State | None = None


def find_resume_point(
    directory: RunDirectory | None, world: World, ids: Mapping[str, Tensor] | None = None
) -> ResumePoint:
    """Collective. The start of a run. Rank 0 reads; other ranks read files only for rows they own (``ids``)."""
    if directory is None:
        return ResumePoint(TrainState())
    start = read_resume_point(directory) if world.is_first else ResumePoint(TrainState())
    ids = ids or {}
    if world.size == 1 and start.state is None:
        return start
    last, has_last = directory.checkpoint("last"), start.state is not None
    has_local = has_last and has_rank_local(last, world.size)
    summary = broadcast_json(
        world, {"position": asdict(start.progress), "last": has_last, "best": bool(start.best), "rank_local": has_local}
    )
    if not summary["last"]:
        return start
    state = {**broadcast_state(world, start.state), **load_sharded(last, rank=world.rank, ids=ids)}
    if summary["rank_local"]:
        state |= load_rank_local(last, world.rank)
    best = None
    if summary["best"]:
        sharded = load_sharded(directory.checkpoint("best"), rank=world.rank, ids=ids)
        best = {**broadcast_state(world, start.best), **sharded}
    return ResumePoint(TrainState(**summary["position"]), state, best)


def read_resume_point(directory: RunDirectory) -> ResumePoint:
    """The part of a resume point that all ranks share; raises RunError for a damaged checkpoint."""
    last = directory.load("last")
    if last is None:
        return ResumePoint(TrainState())
    state, position = last
    best = directory.load("best")
    if best is not None and best[1].best_epoch == position.best_epoch:
        return ResumePoint(position, state, best[0])
    # A kill between the two writes leaves a best that is newer than last. The best before it is overwritten, so
    # the search for the best epoch starts again; training that is deterministic finds the same one.
    return ResumePoint(replace(position, evaluated=0, best_epoch=0, best_metric=None, best_loss=None), state)


def broadcast_state(world: World, state: State | None) -> State:
    """Collective. The state of rank 0; the others pass None."""
    if world.size == 1:
        assert state is not None
        return state
    flat = None
    if world.is_first:
        assert state is not None
        flat = tensors_to_bytes({f"{part}/{name}": t for part, tensors in state.items() for name, t in tensors.items()})
    received: State = {}
    for key, tensor in tensors_from_bytes(broadcast_bytes(world, flat)).items():
        part, _, name = key.partition("/")
        received.setdefault(part, {})[name] = tensor
    return received
