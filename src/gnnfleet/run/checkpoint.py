"""Checkpoints: safetensors under a checksummed manifest, in a directory that is swapped in whole.

A checkpoint holds everything an epoch leaves behind. Random draws are keyed by seed, epoch and step, so there is no
generator state to keep, and a continued run ends in the same bits as one that was never interrupted.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gnnfleet.errors import RunError, StoreError
from gnnfleet.graph.bundle import Bundle, BundleWriter
from gnnfleet.strategies.base import State

KIND = "checkpoint"


@dataclass(frozen=True)
class Position:
    """How far a run has come, and its best evaluation so far."""

    epoch: int = 0  # epochs done
    step: int = 0  # optimizer steps done
    best_epoch: int = 0  # epochs done at the best evaluation; 0 before there is one
    best_metric: float | None = None
    best_loss: float | None = None


def save_checkpoint(path: Path, state: State, position: Position, *, seed: int) -> None:
    """Write a checkpoint in place of the one at ``path``; when writing fails that one stays. Raises RunError."""
    try:
        with BundleWriter(path, kind=KIND, overwrite=True) as out:
            for part, tensors in state.items():
                file = out.file(f"{part}.safetensors")
                save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)
                _to_disk(file)
            out.commit({"position": asdict(position), "seed": seed, "parts": list(state)})
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RunError(
            f"cannot write checkpoint {path}: {reason}. What was written before is kept; make room and use --resume"
        ) from error


def load_checkpoint(path: Path) -> tuple[State, Position, int]:
    """(state, position, seed) after comparing every byte with the manifest; raises RunError unless it is whole."""
    try:
        bundle = Bundle.open(path, KIND)
        bundle.verify()
        state = {part: load_file(path / f"{part}.safetensors") for part in bundle.meta["parts"]}
        return state, Position(**bundle.meta["position"]), int(bundle.meta["seed"])
    except (StoreError, SafetensorError, KeyError, TypeError, OSError) as error:
        raise RunError(
            f"checkpoint {path} is damaged: {_short(error)}; use another checkpoint or train again"
        ) from error


def checkpoint_exists(path: Path) -> bool:
    """Whether there is anything at ``path`` that was once a whole checkpoint."""
    return path.is_dir()


def _short(error: Exception) -> Any:
    text = str(error).split(": make")[0].split(". Make")[0]
    return text.replace(", make it again from the source", "")


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
