"""Checkpoints of several ranks: shared tensors once, owned rows by rank, complete or not at all."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.comm.collectives import broadcast_json
from gnnfleet.comm.world import World
from gnnfleet.errors import RunError
from gnnfleet.strategies.protocol import SHARDED, State
from gnnfleet.training import checkpoint
from gnnfleet.training.checkpoint import TrainState, load_checkpoint, load_sharded, save_checkpoint, sharded_ids
from gnnfleet.training.run_dir import RunDirectory
from gnnfleet.training.run_session import find_resume_point
from tests.ranks import RankPool


def ids_of(rank: int, size: int) -> torch.Tensor:
    """Every ``size``-th of twelve nodes, in descending order."""
    return torch.arange(12)[rank::size].flip(0)


def state(world: World, value: float, *, owns_rows: bool = True) -> State:
    shared: State = {"model": {"w": torch.full((3,), value)}, "optimizer": {"w/step": torch.tensor(value)}}
    ids = ids_of(world.rank, world.size)
    rows = {"rows": ids + 100 * value, "rows/ids": ids, "rows/mean": -ids * value, "rows/step": torch.tensor(value)}
    return {**shared, SHARDED: rows} if owns_rows else shared


def save(world: World, path: Path, value: float, owns_rows: bool = True) -> None:
    save_checkpoint(path, state(world, value, owns_rows=owns_rows), TrainState(epoch=int(value)), seed=0, world=world)


def save_and_start(world: World, path: Path, owns_rows: bool) -> dict[str, Any]:
    """Save two checkpoints, then find the resume point; returns the part of this rank."""
    directory = RunDirectory(path, world=world)
    best = state(world, 1.0, owns_rows=owns_rows)
    del best["optimizer"]
    directory.save("best", best, TrainState(epoch=1, best_epoch=1, best_metric=0.5, best_loss=1.0))
    last = state(world, 2.0, owns_rows=owns_rows)
    directory.save("last", last, TrainState(epoch=2, best_epoch=1, best_metric=0.5, best_loss=1.0))
    start = find_resume_point(directory, world, {"rows": ids_of(world.rank, world.size)} if owns_rows else None)
    assert start.state is not None and start.best is not None
    return {
        "epoch": start.progress.epoch,
        "state": {part: {name: t.tolist() for name, t in tensors.items()} for part, tensors in start.state.items()},
        "best": {part: {name: t.tolist() for name, t in tensors.items()} for part, tensors in start.best.items()},
        "message": broadcast_json(world, {"rank": world.rank}),
    }


def expected(value: float, ids: torch.Tensor) -> dict[str, Any]:
    rows = {"rows": (ids + 100 * value).tolist(), "rows/ids": ids.tolist()}
    return {**rows, "rows/mean": (-ids * value).tolist(), "rows/step": value}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("owns_rows", [True, False])
def test_every_rank_resumes_with_its_own_rows(pool: RankPool, tmp_path: Path, size: int, owns_rows: bool) -> None:
    for rank, resumed in enumerate(pool.run(size, save_and_start, tmp_path, owns_rows)):
        rows, best = ({SHARDED: expected(value, ids_of(rank, size))} if owns_rows else {} for value in (2.0, 1.0))
        assert resumed["epoch"] == 2 and resumed["message"] == {"rank": 0}
        assert resumed["state"] == {"model": {"w": [2.0] * 3}, "optimizer": {"w/step": 2.0}, **rows}
        assert resumed["best"] == {"model": {"w": [1.0] * 3}, **best}
    names = sorted(p.name for p in (tmp_path / "checkpoints/last").iterdir())
    parts = [f"rank-{rank:05d}.safetensors" for rank in range(size)] if owns_rows else []
    assert names == ["checkpoint.json", "model.safetensors", "optimizer.safetensors", *parts]


def save_while_last_rank_fails(world: World, path: Path) -> None:
    """The disk is full for the last rank only."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if world.rank == world.size - 1:
        checkpoint.save_file = full
    save(world, path, 2.0)


def test_a_rank_that_cannot_write_keeps_the_previous_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "last"
    pool.run(2, save, path, 1.0)
    with pytest.raises(AssertionError, match="No space left on device"):
        pool.run(2, save_while_last_rank_fails, path, seconds=20)
    loaded, position, _ = load_checkpoint(path)
    assert position.epoch == 1 and torch.equal(loaded["model"]["w"], torch.ones(3))
    pool.run(2, save, path, 3.0)
    assert load_checkpoint(path)[1].epoch == 3
    assert [p.name for p in tmp_path.iterdir()] == ["last"]  # partial files were removed


@pytest.mark.parametrize("size", [1, 2, 5])
def test_another_number_of_ranks_loads_its_rows(pool: RankPool, tmp_path: Path, size: int) -> None:
    pool.run(3, save, tmp_path / "last", 1.0)
    for rank in range(size):
        ids = ids_of(rank, size)
        loaded = load_sharded(tmp_path / "last", rank=rank, ids={"rows": ids})[SHARDED]
        assert {name: tensor.tolist() for name, tensor in loaded.items()} == expected(1.0, ids)
    assert sharded_ids(tmp_path / "last")["rows"].tolist() == list(range(12))
    empty = load_sharded(tmp_path / "last", rank=0, ids={"rows": torch.empty(0, dtype=torch.int64)})[SHARDED]
    assert empty["rows"].shape == empty["rows/mean"].shape == (0,)
    with pytest.raises(RunError, match="last is damaged: rows has no rows for some nodes"):
        load_sharded(tmp_path / "last", rank=0, ids={"rows": torch.arange(13)})


def test_a_checkpoint_without_owned_rows_loads_none(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, save, tmp_path / "shared", 1.0, False)
    assert load_sharded(tmp_path / "shared", rank=2, ids={"rows": torch.arange(2)}) == {}
    assert sharded_ids(tmp_path / "shared") == {}


def test_one_process_loads_the_rows_of_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    pool.run(3, save, tmp_path / "checkpoints/best", 1.0)
    checkpoint_of_run = RunDirectory(tmp_path).load_weights("best")
    assert checkpoint_of_run is not None
    assert {name: tensor.tolist() for name, tensor in checkpoint_of_run[0]["model"].items()} == {
        "w": [1.0] * 3,
        "rows": [100.0 + node for node in range(12)],
    }


def test_a_damaged_file_of_a_rank_is_refused(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "last"
    pool.run(2, save, path, 1.0)
    part = path / "rank-00001.safetensors"
    broken = bytearray(part.read_bytes())
    broken[-1] ^= 1
    part.write_bytes(broken)
    first, second = ({"rows": ids_of(rank, 2)} for rank in (0, 1))
    for load in (lambda: load_checkpoint(path), lambda: load_sharded(path, rank=1, ids=second)):
        with pytest.raises(RunError, match=r"last is damaged"):
            load()
    assert load_sharded(path, rank=0, ids=first)[SHARDED]["rows"].tolist() == (first["rows"] + 100).tolist()
    assert json.loads((path / "checkpoint.json").read_text())["meta"]["owners"] == 2


def test_a_name_with_the_same_prefix_is_not_optimizer_state(tmp_path: Path) -> None:
    """``rows`` and ``rows_scale`` are in one file, each with its own ids."""
    ids = {"rows": torch.arange(3), "rows_scale": torch.arange(5)}
    sharded = {name: rows * 10 for name, rows in ids.items()} | {f"{name}/ids": rows for name, rows in ids.items()}
    save_checkpoint(tmp_path / "last", {"model": {}, SHARDED: sharded}, TrainState(), seed=0)
    for name in ids:
        row_ids = {name: torch.tensor([2, 1])}
        loaded = load_sharded(tmp_path / "last", rank=0, ids=row_ids)[SHARDED]
        assert sorted(loaded) == [name, f"{name}/ids"] and loaded[name].tolist() == [20, 10]
