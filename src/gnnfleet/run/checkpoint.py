"""Checkpoints: safetensors under a checksummed manifest, in a directory that is swapped in whole.

A checkpoint holds everything an epoch leaves behind. Random draws are keyed by seed, epoch and step, so there is no
generator state to keep, and a continued run ends in the same bits as one that was never interrupted. Of several ranks
the first writes what all have, each what it owns; the directory appears when all are done.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gnnfleet.comm.reduce import share, sum_over_ranks
from gnnfleet.comm.world import World
from gnnfleet.errors import RunError, StoreError
from gnnfleet.graph.bundle import Bundle, BundleWriter, checksum
from gnnfleet.strategies.base import OWN, State

KIND = "checkpoint"


@dataclass(frozen=True)
class Position:
    """How far a run has come, and its best evaluation so far."""

    epoch: int = 0  # epochs done
    step: int = 0  # optimizer steps done
    best_epoch: int = 0  # epochs done at the best evaluation; 0 before there is one
    best_metric: float | None = None
    best_loss: float | None = None


def save_checkpoint(path: Path, state: State, position: Position, *, seed: int, world: World | None = None) -> None:
    """Write a checkpoint in place of the one at ``path``; when writing fails that one stays. Raises RunError.

    All ranks call it. Where no rank owns anything, the first writes and the others go on.
    """
    world = world or World()
    try:
        if world.is_first:
            _write(path, state, position, seed=seed, world=world)
        elif OWN in state:
            folder = Path(share(world, None).decode())
            _put(folder / rank_file(world.rank), state[OWN])
            _all_wrote(world)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RunError(
            f"cannot write checkpoint {path}: {reason}. What was written before is kept; make room and use --resume"
        ) from error


def _write(path: Path, state: State, position: Position, *, seed: int, world: World) -> None:
    common = {part: tensors for part, tensors in state.items() if part != OWN}
    with BundleWriter(path, kind=KIND, overwrite=True) as out:
        for part, tensors in common.items():
            _put(out.file(f"{part}.safetensors"), tensors)
        if OWN in state:
            files = [out.file(rank_file(rank)) for rank in range(world.size)]
            share(world, str(out.path.resolve()).encode())
            _put(files[0], state[OWN])
            _all_wrote(world)
        owners = world.size if OWN in state else 0
        out.commit({"position": asdict(position), "seed": seed, "parts": list(common), "owners": owners})


def _put(file: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)
    _to_disk(file)


def _all_wrote(world: World) -> None:
    """Wait for the last: a rank that could not write has ended the run by raising."""
    sum_over_ranks(world, torch.ones(1))


def load_checkpoint(path: Path) -> tuple[State, Position, int]:
    """(state, position, seed) after comparing every byte with the manifest; raises RunError unless it is whole.

    The state is what all ranks have; ``load_own`` adds what one owns.
    """
    with _whole(path):
        bundle = Bundle.open(path, KIND)
        bundle.verify()
        state = {part: load_file(path / f"{part}.safetensors") for part in bundle.meta["parts"]}
        return state, Position(**bundle.meta["position"]), int(bundle.meta["seed"])


def load_own(path: Path, *, rank: int, size: int) -> State:
    """What a rank owns in a checkpoint: nothing, or one part. Raises RunError when it was cut for others."""
    with _whole(path):
        bundle = Bundle.open(path, KIND)
        owners = bundle.meta.get("owners", 0)
        if not owners:
            return {}
        if owners != size:
            raise RunError(
                f"checkpoint {path} was written by {owners} workers, each with a part of the state, found {size}: "
                f"go on with --workers {owners}"
            )
        file = rank_file(rank)
        if checksum(path / file) != bundle.files[file]["sha256"]:
            raise StoreError(f"{file} was altered")
        return {OWN: load_file(path / file)}


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Whatever is wrong inside becomes one RunError about the checkpoint."""
    try:
        yield
    except (StoreError, SafetensorError, KeyError, TypeError, OSError) as error:
        raise RunError(
            f"checkpoint {path} is damaged: {_short(error)}; use another checkpoint or train again"
        ) from error


def _short(error: Exception) -> str:
    text = str(error).split(": make")[0].split(". Make")[0]
    return text.replace(", make it again from the source", "")


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
