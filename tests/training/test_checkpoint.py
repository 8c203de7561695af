"""A checkpoint is read back bit for bit, or refused; a failed write keeps the previous one."""

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


def test_a_checkpoint_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    for seed in (1, 2):  # the second replaces the first
        save_checkpoint(tmp_path / "last", state(seed), POSITION, seed=11)
    loaded, position, seed = load_checkpoint(tmp_path / "last")
    assert position == POSITION and seed == 11
    for part, tensors in state(2).items():
        for name, tensor in tensors.items():
            assert torch.equal(loaded[part][name], tensor) and loaded[part][name].dtype == tensor.dtype
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "last"
    save_checkpoint(path, state(), POSITION, seed=0)
    for file in sorted(path.iterdir()):
        original = file.read_bytes()
        for position in range(0, len(original), max(1, len(original) // 23)):
            broken = bytearray(original)
            broken[position] ^= 0x10
            file.write_bytes(broken)
            with pytest.raises(RunError, match="is damaged"):
                load_checkpoint(path)
        for content in (original[:-1], b""):
            file.write_bytes(content)
            with pytest.raises(RunError, match="is damaged"):
                load_checkpoint(path)
        file.unlink()
        with pytest.raises(RunError, match="is damaged"):
            load_checkpoint(path)
        file.write_bytes(original)
    load_checkpoint(path)


@pytest.mark.parametrize("function", ["save_file", "os.fsync"])
def test_a_full_disk_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "last"
    save_checkpoint(path, state(1), POSITION, seed=0)
    monkeypatch.setattr(f"gnnfleet.training.checkpoint.{function}", full)
    with pytest.raises(RunError, match=r"cannot write checkpoint .*No space left on device.*--resume"):
        save_checkpoint(path, state(2), POSITION, seed=0)
    assert torch.equal(load_checkpoint(path)[0]["model"]["a.weight"], state(1)["model"]["a.weight"])
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_optimizers_continue_from_saved_tensors(name: Any) -> None:
    def step(layer: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        layer(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    train = TrainConfig(optimizer=name, lr=0.1)
    model, copy = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    first, second = make_optimizer(model, train), make_optimizer(copy, train)
    for _ in range(3):
        step(model, first)
    copy.load_state_dict(model.state_dict())
    load_optimizer(copy, second, optimizer_tensors(model, first))
    for _ in range(3):
        step(model, first)
        step(copy, second)
    assert torch.equal(model.weight, copy.weight) and torch.equal(model.bias, copy.bias)


def test_resumed_metrics_have_no_epoch_twice_and_no_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for epoch in range(1, 6):
        file.write({"epoch": epoch})
    file.close()
    with path.open("a") as incomplete:
        incomplete.write('{"epoch": 6, "tr')
    assert [row["epoch"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]
    file = MetricsFile(path, epochs=3)
    assert [row["epoch"] for row in file.rows] == [1, 2, 3]
    file.write({"epoch": 4})
    file.close()
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
