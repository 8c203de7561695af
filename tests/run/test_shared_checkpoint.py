"""Checkpoints of several ranks: what all have once, what each owns by rank, whole or not at all."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.comm.world import World
from gnnfleet.errors import RunError
from gnnfleet.run import checkpoint
from gnnfleet.run.checkpoint import Position, load_checkpoint, load_own, save_checkpoint
from gnnfleet.run.course import agree, find_start
from gnnfleet.run.directory import RunDirectory
from gnnfleet.strategies.base import OWN, State
from tests.ranks import Crew


def state(world: World, value: float, *, own: bool = True) -> State:
    found: State = {"model": {"w": torch.full((3,), value)}, "optimizer": {"w/step": torch.tensor(value)}}
    return {**found, OWN: {"rows": torch.full((2,), 10 * value + world.rank)}} if own else found


def save(world: World, path: Path, value: float, own: bool = True) -> None:
    save_checkpoint(path, state(world, value, own=own), Position(epoch=int(value)), seed=0, world=world)


def save_and_start(world: World, path: Path, own: bool) -> dict[str, Any]:
    """Save as ranks do, then find the start of a continued run; what this rank gets."""
    directory = RunDirectory(path, world=world)
    directory.save("best", {key: part for key, part in state(world, 1.0, own=own).items() if key != "optimizer"},
                   Position(epoch=1, best_epoch=1, best_metric=0.5, best_loss=1.0))  # fmt: skip
    directory.save("last", state(world, 2.0, own=own), Position(epoch=2, best_epoch=1, best_metric=0.5, best_loss=1.0))
    start = find_start(directory, world)
    assert start.state is not None and start.best is not None
    return {
        "epoch": start.position.epoch,
        "state": {part: {name: t.tolist() for name, t in tensors.items()} for part, tensors in start.state.items()},
        "best": {part: {name: t.tolist() for name, t in tensors.items()} for part, tensors in start.best.items()},
        "word": agree(world, {"rank": world.rank}),
    }


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("own", [True, False])
def test_every_rank_gets_its_own_back(crew: Crew, tmp_path: Path, size: int, own: bool) -> None:
    for rank, found in enumerate(crew.run(size, save_and_start, tmp_path, own)):
        mine = {OWN: {"rows": [20.0 + rank] * 2}} if own else {}
        best = {OWN: {"rows": [10.0 + rank] * 2}} if own else {}
        assert found["epoch"] == 2 and found["word"] == {"rank": 0}
        assert found["state"] == {"model": {"w": [2.0] * 3}, "optimizer": {"w/step": 2.0}, **mine}
        assert found["best"] == {"model": {"w": [1.0] * 3}, **best}
    names = sorted(p.name for p in (tmp_path / "checkpoints/last").iterdir())
    parts = [f"rank-{rank:05d}.safetensors" for rank in range(size)] if own else []
    assert names == ["checkpoint.json", "model.safetensors", "optimizer.safetensors", *parts]


def save_while_one_fails(world: World, path: Path) -> None:
    """The disk is full for the last rank only; the others wait for it."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if world.rank == world.size - 1:
        checkpoint.save_file = full
    save(world, path, 2.0)


def test_a_rank_that_cannot_write_leaves_the_checkpoint_before(crew: Crew, tmp_path: Path) -> None:
    path = tmp_path / "last"
    crew.run(2, save, path, 1.0)
    with pytest.raises(AssertionError, match="No space left on device"):
        crew.run(2, save_while_one_fails, path, seconds=20)
    loaded, position, _ = load_checkpoint(path)
    assert position.epoch == 1 and torch.equal(loaded["model"]["w"], torch.ones(3))
    crew.run(2, save, path, 3.0)
    assert load_checkpoint(path)[1].epoch == 3
    assert [p.name for p in tmp_path.iterdir()] == ["last"]  # what the failed one left was removed


def test_what_was_cut_for_others_is_refused(crew: Crew, tmp_path: Path) -> None:
    crew.run(2, save, tmp_path / "last", 1.0)
    with pytest.raises(RunError, match=r"written by 2 workers.*found 3: go on with --workers 2"):
        load_own(tmp_path / "last", rank=0, size=3)
    crew.run(2, save, tmp_path / "shared", 1.0, False)
    assert load_own(tmp_path / "shared", rank=2, size=3) == {}


def test_a_damaged_part_is_found(crew: Crew, tmp_path: Path) -> None:
    path = tmp_path / "last"
    crew.run(2, save, path, 1.0)
    part = path / "rank-00001.safetensors"
    broken = bytearray(part.read_bytes())
    broken[-1] ^= 1
    part.write_bytes(broken)
    for load in (lambda: load_checkpoint(path), lambda: load_own(path, rank=1, size=2)):
        with pytest.raises(RunError, match=r"last is damaged"):
            load()
    assert load_own(path, rank=0, size=2)[OWN]["rows"].tolist() == [10.0, 10.0]
    assert json.loads((path / "checkpoint.json").read_text())["meta"]["owners"] == 2
