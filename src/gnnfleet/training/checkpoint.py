"""Checkpoints: safetensors under a checksummed manifest, in a directory that is swapped in whole.

A checkpoint holds everything an epoch leaves behind. Random draws are keyed by seed, epoch and step, so there is no
generator state to keep, and a continued run ends in the same bits as one that was never interrupted. Of several ranks
the first writes what all have, each the rows it owns; the directory appears when all are done. Rows are known by id, so
another number of ranks finds its own again.
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
    """How far a run has come, and its best evaluation so far."""

    epoch: int = 0  # epochs done
    step: int = 0  # optimizer steps done
    within: int = 0  # of these, steps of the epoch that is not done yet; what they came to:
    loss: float = 0.0  # summed over items
    count: int = 0  # items
    seconds: float = 0.0
    evaluated: int = 0  # epochs done at the last evaluation
    best_epoch: int = 0  # epochs done at the best evaluation; 0 before there is one
    best_metric: float | None = None
    best_loss: float | None = None


def save_checkpoint(path: Path, state: State, position: TrainState, *, seed: int, world: World | None = None) -> None:
    """Write a checkpoint in place of the one at ``path``; when writing fails that one stays. Raises RunError.

    All ranks call it. Where no rank owns anything, the first writes and the others go on.
    """
    world = world or World()
    try:
        if world.is_first:
            _write(path, state, position, seed=seed, world=world)
        elif _has_sharded(state):
            folder = Path(broadcast_bytes(world, None).decode())
            _put(folder / rank_file(world.rank), _own_file(state))
            barrier(world)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RunError(
            f"cannot write checkpoint {path}: {reason}. What was written before is kept; make room and use --resume"
        ) from error


def _write(path: Path, state: State, position: TrainState, *, seed: int, world: World) -> None:
    common = {part: tensors for part, tensors in state.items() if part not in (SHARDED, RANK_LOCAL)}
    with BundleWriter(path, kind=KIND, overwrite=True) as out:
        for part, tensors in common.items():
            _put(out.file(f"{part}.safetensors"), tensors)
        if _has_sharded(state):
            files = [out.file(rank_file(rank)) for rank in range(world.size)]
            broadcast_bytes(world, str(out.path.resolve()).encode())
            _put(files[0], _own_file(state))
            barrier(world)  # a rank that could not write has ended the run by raising
        about = {"owners": world.size if _has_sharded(state) else 0, "private": RANK_LOCAL in state}
        out.commit({"position": asdict(position), "seed": seed, "parts": list(common), **about})


def _has_sharded(state: State) -> bool:
    """Whether ranks have something of their own; the same on all of them."""
    return SHARDED in state or RANK_LOCAL in state


def _own_file(state: State) -> dict[str, Tensor]:
    return {**state.get(SHARDED, {}), **{f"{RANK_LOCAL}/{name}": t for name, t in state.get(RANK_LOCAL, {}).items()}}


def _put(file: Path, tensors: dict[str, Tensor]) -> None:
    save_file(_unshared(tensors), file)
    _to_disk(file)


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each with memory of its own: a model may have a layer twice, and safetensors writes no memory under two names."""
    found, seen = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return found


def load_checkpoint(path: Path) -> tuple[State, TrainState, int]:
    """(state, position, seed) after comparing every byte with the manifest; raises RunError unless it is whole.

    The state is what all ranks have; ``load_sharded`` adds what one owns.
    """
    with _whole(path):
        bundle = Bundle.open(path, KIND)
        bundle.verify()
        state = {part: load_file(path / f"{part}.safetensors") for part in bundle.meta["parts"]}
        return state, _position(bundle.meta["position"]), int(bundle.meta["seed"])


def _position(words: Mapping[str, Any]) -> TrainState:
    """Raises TypeError for words that are not those of a position."""
    position = TrainState(**words)
    for name, usual in asdict(TrainState()).items():
        value = getattr(position, name)
        if isinstance(value, bool) or not isinstance(value, (int, float) if usual is None else (type(usual), int)):
            if value is None and usual is None:
                continue
            raise TypeError(f"{name} is {value!r}")
    return position


def load_sharded(path: Path, *, rank: int, ids: Mapping[str, Tensor]) -> State:
    """The rows a rank owns in a checkpoint, whoever wrote them: of each name those of ``ids``, in that order.

    {} where nobody owned anything. Raises RunError when a row is missing.
    """
    with _whole(path):
        bundle = Bundle.open(path, KIND)
        owners = _owners(bundle)
        # Where the graph is cut as it was, a rank's own file has all of its rows.
        ordered = sorted(owners, key=lambda owner: owner != rank)
        picks = {name: _RowCollector(wanted) for name, wanted in ids.items()}
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
    """Whether each of so many ranks finds something that only it has a use for; there is a checkpoint."""
    with _whole(path):
        meta = Bundle.open(path, KIND).meta
        return bool(meta.get("private", False)) and meta["owners"] == size


def load_rank_local(path: Path, rank: int) -> State:
    """What only this rank has a use for."""
    with _whole(path):
        file = rank_file(rank)
        if checksum(path / file) != Bundle.open(path, KIND).files[file]["sha256"]:
            raise StoreError(f"{file} was altered")
        found = {name: tensor for name, tensor in load_file(path / file).items() if name.startswith(f"{RANK_LOCAL}/")}
        return {RANK_LOCAL: {name.removeprefix(f"{RANK_LOCAL}/"): tensor for name, tensor in found.items()}}


def sharded_ids(path: Path) -> dict[str, Tensor]:
    """The ids of all rows that ranks own in a checkpoint, ascending, by name."""
    with _whole(path):
        found: dict[str, list[Tensor]] = {}
        for rank in _owners(Bundle.open(path, KIND)):
            with safe_open(path / rank_file(rank), "pt") as tensors:
                for key in list(tensors.keys()):
                    if key.endswith(IDS_SUFFIX):
                        found.setdefault(key.removesuffix(IDS_SUFFIX), []).append(tensors.get_tensor(key))
        return {name: torch.cat(ids).sort().values for name, ids in found.items()}


def _owners(bundle: Bundle) -> range:
    """The ranks that wrote something of their own."""
    count = bundle.meta.get("owners", 0)
    if count and rank_file(count - 1) not in bundle.files:
        raise StoreError(f"the files of {count} ranks are not there")
    return range(count)


class _RowCollector:
    """Rows of one name, put together from the files of several ranks."""

    def __init__(self, wanted: Tensor) -> None:
        self._wanted, self._missing = wanted, len(wanted)
        self._tensors: dict[str, Tensor] = {}

    @property
    def is_full(self) -> bool:
        return not self._missing and bool(self._tensors)

    def add(self, file: Any, name: str) -> None:
        """From one rank's file: the rows and what the optimizer remembers of them."""
        here = file.get_tensor(f"{name}{IDS_SUFFIX}")
        of_name = [key for key in list(file.keys()) if key == name or key.startswith(f"{name}/")]
        keys = [key for key in of_name if not key.endswith(IDS_SUFFIX)]
        tensors = {key.removeprefix(name): file.get_tensor(key) for key in keys}
        if torch.equal(here, self._wanted):
            self._tensors, self._missing = tensors, 0
            return
        there, row = _matches(self._wanted, here)
        for word, tensor in tensors.items():
            if word not in self._tensors:
                self._tensors[word] = (
                    tensor if not tensor.dim() else tensor.new_empty(len(self._wanted), *tensor.shape[1:])
                )
            if tensor.dim():
                self._tensors[word][there] = tensor[row]
        self._missing -= len(there)

    def result(self, name: str) -> dict[str, Tensor]:
        return {
            f"{name}{IDS_SUFFIX}": self._wanted,
            **{f"{name}{word}": tensor for word, tensor in self._tensors.items()},
        }


def _matches(wanted: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
    """Places in ``wanted`` of ids that are ``here``, and their places there."""
    ids, order = here.sort()
    at = torch.searchsorted(ids, wanted).clamp(max=max(len(ids) - 1, 0))
    there = (ids[at] == wanted).nonzero()[:, 0] if len(ids) else at[:0]
    return there, order[at[there]]


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Whatever is wrong inside becomes one RunError about the checkpoint."""
    try:
        yield
    except (
        StoreError,
        SafetensorError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
        ArithmeticError,
        OSError,
    ) as error:
        raise RunError(
            f"checkpoint {path} is damaged: {_first_line(error)}; use another checkpoint or train again"
        ) from error


def _first_line(error: Exception) -> str:
    text = str(error).split(": make")[0].split(". Make")[0]
    return text.replace(", make it again from the source", "")


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
