"""Checkpoints: safetensors under a checksummed manifest, in a directory that is swapped in whole.

Random draws are keyed by seed, epoch and step, so there is no generator state. A resumed run ends with the same bits
as an uninterrupted one. Rank 0 writes what all ranks share, every rank the rows it owns; the directory appears
when all are done. Rows are stored by id, so another number of ranks can load them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gnnfleet.comm.collectives import barrier, broadcast_bytes
from gnnfleet.comm.world import World
from gnnfleet.errors import RunError, StoreError
from gnnfleet.io.bundle import Bundle, BundleWriter, checksum
from gnnfleet.strategies.protocol import IDS_SUFFIX, RANK_LOCAL, SHARDED, State

KIND = "checkpoint"


@dataclass(frozen=True)
class TrainState:
    """Progress of a run and its best evaluation so far."""

    epoch: int = 0  # epochs done
    step: int = 0  # optimizer steps done
    within: int = 0  # steps done of the unfinished epoch, and their sums:
    loss: float = 0.0  # summed over items
    count: int = 0  # items
    seconds: float = 0.0
    evaluated: int = 0  # epochs done at the last evaluation
    best_epoch: int = 0  # epochs done at the best evaluation; 0 before there is one
    best_metric: float | None = None
    best_loss: float | None = None
    lr_scale: float = 1.0  # reduction of the learning rate on a plateau
    lr_epoch: int = 0  # epochs done at the last reduction


def save_checkpoint(path: Path, state: State, position: TrainState, *, seed: int, world: World | None = None) -> None:
    """Collective. Replace the checkpoint at ``path``; if writing fails the old one stays. Raises RunError.

    If no rank owns rows, rank 0 writes and the others return at once.
    """
    world = world or World()
    try:
        if world.is_first:
            _write(path, state, position, seed=seed, world=world)
        elif _has_sharded(state):
            folder = Path(broadcast_bytes(world, None).decode())
            _put(folder / rank_file(world.rank), _rank_tensors(state))
            barrier(world)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RunError(
            f"cannot write checkpoint {path}: {reason}. The previous one is kept; free some space and use --resume"
        ) from error


def _write(path: Path, state: State, position: TrainState, *, seed: int, world: World) -> None:
    common = {part: tensors for part, tensors in state.items() if part not in (SHARDED, RANK_LOCAL)}
    with BundleWriter(path, kind=KIND, overwrite=True) as out:
        for part, tensors in common.items():
            _put(out.file(f"{part}.safetensors"), tensors)
        if _has_sharded(state):
            files = [out.file(rank_file(rank)) for rank in range(world.size)]
            broadcast_bytes(world, str(out.path.resolve()).encode())
            _put(files[0], _rank_tensors(state))
            barrier(world)  # a rank that could not write has ended the run by raising
        about = {"owners": world.size if _has_sharded(state) else 0, "private": RANK_LOCAL in state}
        out.commit({"position": asdict(position), "seed": seed, "parts": list(common), **about})


def _has_sharded(state: State) -> bool:
    """True if ranks have tensors of their own; equal on all ranks."""
    return SHARDED in state or RANK_LOCAL in state


def _rank_tensors(state: State) -> dict[str, Tensor]:
    return {**state.get(SHARDED, {}), **{f"{RANK_LOCAL}/{name}": t for name, t in state.get(RANK_LOCAL, {}).items()}}


def _put(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(unshared(tensors), path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory: safetensors refuses them, and a model may use a layer twice."""
    separate, addresses = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        address = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if address in addresses else tensor
        addresses.add(address)
    return separate


def load_checkpoint(path: Path) -> tuple[State, TrainState, int]:
    """(state, position, seed), after verifying all checksums; raises RunError for a damaged checkpoint.

    The state is what all ranks share; ``load_sharded`` reads the rows of one rank.
    """
    with _as_run_error(path):
        bundle = Bundle.open(path, KIND)
        bundle.verify()
        state = {part: load_file(path / f"{part}.safetensors") for part in bundle.meta["parts"]}
        return state, _position(bundle.meta["position"]), int(bundle.meta["seed"])


def _position(fields: Mapping[str, Any]) -> TrainState:
    """Position from its JSON fields; raises TypeError for wrong fields or types."""
    position = TrainState(**fields)
    for name, default in asdict(TrainState()).items():
        value = getattr(position, name)
        if isinstance(value, bool) or not isinstance(value, (int, float) if default is None else (type(default), int)):
            if value is None and default is None:
                continue
            raise TypeError(f"{name} is {value!r}")
    return position


def load_sharded(path: Path, *, rank: int, ids: Mapping[str, Tensor]) -> State:
    """Load the rows ``ids`` of every name, in that order, from the files of all ranks that wrote some.

    {} without ids, or if no rank owned rows. Raises RunError if a row is missing.
    """
    if not ids:
        return {}
    with _as_run_error(path):
        bundle = Bundle.open(path, KIND)
        owners = _owners(bundle)
        # With an unchanged partition, the file of this rank has all of its rows.
        ordered = sorted(owners, key=lambda owner: owner != rank)
        picks = {name: _RowCollector(row_ids) for name, row_ids in ids.items()}
        for file in map(rank_file, ordered):
            if all(pick.is_full for pick in picks.values()):
                break
            if checksum(path / file) != bundle.files[file]["sha256"]:
                raise StoreError(f"{file} was altered")
            with safe_open(path / file, "pt") as tensors:
                for name, pick in picks.items():
                    pick.add(tensors, name)
        if not owners:
            return {}
        for name, pick in picks.items():
            if not pick.is_full:
                raise StoreError(f"{name} has no rows for some nodes")
        return {SHARDED: {key: tensor for name, pick in picks.items() for key, tensor in pick.result(name).items()}}


def has_rank_local(path: Path, size: int) -> bool:
    """True if an existing checkpoint has rank-local tensors for each of ``size`` ranks."""
    with _as_run_error(path):
        meta = Bundle.open(path, KIND).meta
        return bool(meta.get("private", False)) and meta["owners"] == size


def load_rank_local(path: Path, rank: int) -> State:
    with _as_run_error(path):
        file = rank_file(rank)
        if checksum(path / file) != Bundle.open(path, KIND).files[file]["sha256"]:
            raise StoreError(f"{file} was altered")
        prefix = f"{RANK_LOCAL}/"
        tensors = load_file(path / file).items()
        return {RANK_LOCAL: {name.removeprefix(prefix): t for name, t in tensors if name.startswith(prefix)}}


def sharded_ids(path: Path) -> dict[str, Tensor]:
    """Ascending ids of all rows that ranks own in a checkpoint, by name."""
    with _as_run_error(path):
        ids_by_name: dict[str, list[Tensor]] = {}
        for rank in _owners(Bundle.open(path, KIND)):
            with safe_open(path / rank_file(rank), "pt") as tensors:
                for key in list(tensors.keys()):
                    if key.endswith(IDS_SUFFIX):
                        ids_by_name.setdefault(key.removesuffix(IDS_SUFFIX), []).append(tensors.get_tensor(key))
        return {name: torch.cat(ids).sort().values for name, ids in ids_by_name.items()}


def _owners(bundle: Bundle) -> range:
    """Ranks that wrote a file."""
    count = bundle.meta.get("owners", 0)
    if count and rank_file(count - 1) not in bundle.files:
        raise StoreError(f"files of some of the {count} ranks are missing")
    return range(count)


class _RowCollector:
    """Rows of one name, collected from the files of several ranks."""

    def __init__(self, ids: Tensor) -> None:
        self._ids, self._missing = ids, len(ids)
        self._tensors: dict[str, Tensor] = {}

    @property
    def is_full(self) -> bool:
        return not self._missing and bool(self._tensors)

    def add(self, file: Any, name: str) -> None:
        """Add rows and optimizer state from the file of one rank."""
        file_ids = file.get_tensor(f"{name}{IDS_SUFFIX}")
        of_name = [key for key in list(file.keys()) if key == name or key.startswith(f"{name}/")]
        keys = [key for key in of_name if not key.endswith(IDS_SUFFIX)]
        tensors = {key.removeprefix(name): file.get_tensor(key) for key in keys}
        if torch.equal(file_ids, self._ids):
            self._tensors, self._missing = tensors, 0
            return
        positions, file_rows = _matches(self._ids, file_ids)
        for suffix, tensor in tensors.items():
            if suffix not in self._tensors:
                shape = (len(self._ids), *tensor.shape[1:])
                self._tensors[suffix] = tensor.new_empty(shape) if tensor.dim() else tensor
            if tensor.dim():
                self._tensors[suffix][positions] = tensor[file_rows]
        self._missing -= len(positions)

    def result(self, name: str) -> dict[str, Tensor]:
        return {
            f"{name}{IDS_SUFFIX}": self._ids,
            **{f"{name}{suffix}": tensor for suffix, tensor in self._tensors.items()},
        }


def _matches(ids: Tensor, file_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in ``ids`` and in ``file_ids`` of the ids that both have."""
    ascending, order = file_ids.sort()
    nearest = torch.searchsorted(ascending, ids).clamp(max=max(len(ascending) - 1, 0))
    positions = (ascending[nearest] == ids).nonzero()[:, 0] if len(ascending) else nearest[:0]
    return positions, order[nearest[positions]]


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


@contextmanager
def _as_run_error(path: Path) -> Iterator[None]:
    """Turn any error inside into one RunError about the checkpoint."""
    damage = (StoreError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError, ArithmeticError, OSError)
    try:
        yield
    except damage as error:
        raise RunError(
            f"checkpoint {path} is damaged: {_first_line(error)}; use another checkpoint or train again"
        ) from error


def _first_line(error: Exception) -> str:
    text = str(error).split(": make")[0].split(". Make")[0]
    return text.replace(", make it again from the source", "")
