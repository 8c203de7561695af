"""A checkpoint comes back bit for bit, or is refused; a failed write keeps the one before."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.errors import RunError
from gnnfleet.report.metrics import MetricsFile, read_metrics
from gnnfleet.strategies.optim import load_optimizer, make_optimizer, optimizer_tensors
from gnnfleet.strategies.protocol import State
from gnnfleet.tasks.train_options import TrainConfig
from gnnfleet.training import checkpoint
from gnnfleet.training.checkpoint import TrainState, load_checkpoint, save_checkpoint


def state(seed: int = 0) -> State:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 3, generator=draw).t()
    moment = torch.randn(3, 5, generator=draw).double()
    return {
        "model": {"a.weight": weight, "steps": torch.tensor(7), "none": torch.empty(0, 4)},
        "optimizer": {"a.weight/step": torch.tensor(3.0), "a.weight/exp_avg": moment},
    }


POSITION = TrainState(epoch=3, step=9, best_epoch=2, best_metric=0.1 + 0.2, best_loss=1 / 3)


def test_round_trip(tmp_path: Path) -> None:
    for seed in (1, 2):  # the second replaces the first
        save_checkpoint(tmp_path / "last", state(seed), POSITION, seed=11)
    found, position, seed = load_checkpoint(tmp_path / "last")
    assert position == POSITION and seed == 11
    for part, tensors in state(2).items():
        for name, tensor in tensors.items():
            assert torch.equal(found[part][name], tensor) and found[part][name].dtype == tensor.dtype
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


def test_damage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "last"
    save_checkpoint(path, state(), POSITION, seed=0)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 23)):
            broken = bytearray(whole)
            broken[at] ^= 0x10
            file.write_bytes(broken)
            with pytest.raises(RunError, match="is damaged"):
                load_checkpoint(path)
        for content in (whole[:-1], b""):
            file.write_bytes(content)
            with pytest.raises(RunError, match="is damaged"):
                load_checkpoint(path)
        file.unlink()
        with pytest.raises(RunError, match="is damaged"):
            load_checkpoint(path)
        file.write_bytes(whole)
    load_checkpoint(path)


@pytest.mark.parametrize("place", ["save_file", "_to_disk"])
def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "last"
    save_checkpoint(path, state(1), POSITION, seed=0)
    monkeypatch.setattr(checkpoint, place, full)
    with pytest.raises(RunError, match=r"cannot write checkpoint .*No space left on device.*--resume"):
        save_checkpoint(path, state(2), POSITION, seed=0)
    assert torch.equal(load_checkpoint(path)[0]["model"]["a.weight"], state(1)["model"]["a.weight"])
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_optimizers_go_on_where_they_were(name: Any) -> None:
    def work(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    train = TrainConfig(optimizer=name, lr=0.1)
    one, two = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    first, second = make_optimizer(one, train), make_optimizer(two, train)
    for _ in range(3):
        work(one, first)
    two.load_state_dict(one.state_dict())
    load_optimizer(two, second, optimizer_tensors(one, first))
    for _ in range(3):
        work(one, first)
        work(two, second)
    assert torch.equal(one.weight, two.weight) and torch.equal(one.bias, two.bias)


def test_metrics_go_on_without_doubles_or_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for epoch in range(1, 6):
        file.write({"epoch": epoch})
    file.close()
    with path.open("a") as torn:
        torn.write('{"epoch": 6, "tr')
    assert [row["epoch"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]
    file = MetricsFile(path, epochs=3)
    assert [row["epoch"] for row in file.rows] == [1, 2, 3]
    file.write({"epoch": 4})
    file.close()
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
