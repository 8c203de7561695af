"""Schedules equal those of torch.optim.lr_scheduler; a resumed run has the rates of an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import gnnfleet as gf
from gnnfleet.config.resolve import check_resumable, resolve
from gnnfleet.errors import ConfigError, GnnfleetError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.report.metrics import read_metrics
from gnnfleet.tasks.learning_rate import learning_rate
from gnnfleet.tasks.train_options import TrainConfig
from tests.equivalence.spread import plain_graph
from tests.graphs import assert_same_checkpoints

EPOCHS, STEPS = 12, 5
TOTAL = EPOCHS * STEPS
WARM = 2 * STEPS

SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "cosine": ({"min_lr": 0.01}, lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL, eta_min=0.01)),
    "linear": ({"min_lr": 0.02}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, TOTAL)),
    "step": ({"step_size": 4, "gamma": 0.3}, lambda o: lr_scheduler.StepLR(o, 4 * STEPS, 0.3)),
    "one_cycle": ({}, lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=TOTAL, cycle_momentum=False)),
    "constant": (
        {"warmup": 2},
        lambda o: lr_scheduler.LinearLR(o, 1 / (WARM + 1), 1.0, WARM),
    ),
    "cosine after warm-up": (
        {"warmup": 2, "schedule": "cosine"},
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 1 / (WARM + 1), 1.0, WARM), lr_scheduler.CosineAnnealingLR(o, TOTAL - WARM)],
            [WARM],
        ),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rates_equal_torchs(name: str) -> None:
    options, make = SCHEDULES[name]
    train = TrainConfig(**{"epochs": EPOCHS, "lr": 0.2, "schedule": name.split()[0], **options})
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.2)
    peer = make(optimizer)
    for step in range(TOTAL):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate(train, step, steps_per_epoch=STEPS) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        optimizer.step()
        peer.step()


def test_plateau_reduces_as_torch_does_and_resumes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": gf.nn.SAGE(hidden=8, layers=2), "seed": 3, "lr": 0.3, "quiet": True}
    settings |= {"schedule": "plateau", "step_size": 1, "gamma": 0.5, "min_lr": 0.02, "checkpoint_seconds": 0}
    graph = plain_graph()
    gf.train(graph, **settings, epochs=14, run_dir=tmp_path / "whole")
    gf.train(graph, **settings, epochs=6, run_dir=tmp_path / "part")
    gf.train(graph, **settings, epochs=14, run_dir=tmp_path / "part", resume=True)
    assert_same_checkpoints(tmp_path / "whole", tmp_path / "part")
    rows, resumed = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "part"))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    peer = lr_scheduler.ReduceLROnPlateau(optimizer, "max", 0.5, 1, threshold=0, min_lr=0.02)
    best = (-1.0, 0.0)
    for row, other in zip(rows, resumed, strict=True):
        assert row["lr"] == other["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
        score = (row["val"], -row["val_loss"])  # ties of the metric go to the lower loss
        peer.step(float(score > best))
        peer.best = 0.5  # only an improvement on the best epoch exceeds it
        best = max(best, score)
    assert rows[-1]["lr"] < 0.3, "the rate was reduced"


@pytest.mark.parametrize(
    ("strategy", "workers"), [("local", 1), ({"name": "macrobatch", "fanouts": [3, 2], "batch": 7}, 1)]
)
def test_a_resumed_run_with_a_schedule_has_the_same_bits(tmp_path: Path, strategy: Any, workers: int) -> None:
    """The first run ends where a longer one would be killed."""
    settings: dict[str, Any] = {"model": gf.nn.SAGE(hidden=8, layers=2), "seed": 3, "lr": 0.05, "quiet": True}
    settings |= {"schedule": "step", "step_size": 2, "gamma": 0.5, "warmup": 1.5, "checkpoint_seconds": 0, "clip": 0.5}
    settings |= {"strategy": strategy, "workers": workers}
    graph = plain_graph()
    gf.train(graph, **settings, epochs=6, run_dir=tmp_path / "whole")
    gf.train(graph, **settings, epochs=3, run_dir=tmp_path / "part")
    gf.train(graph, **settings, epochs=6, run_dir=tmp_path / "part", resume=True)
    assert_same_checkpoints(tmp_path / "whole", tmp_path / "part")
    rates = [row["lr"] for row in read_metrics(tmp_path / "whole" / "metrics.jsonl")]
    assert rates == [row["lr"] for row in read_metrics(tmp_path / "part" / "metrics.jsonl")]
    assert len(set(rates)) > 2


def test_a_schedule_replaces_the_decay_of_temporal(tmp_path: Path) -> None:
    graph = make_dataset("events", users=12, items=8, events=90, features=3, topics=2, seed=3)
    strategy = {"name": "temporal", "batch": 7, "static": False}
    train: dict[str, Any] = {"epochs": 3, "lr": 0.01, "schedule": "linear", "run_dir": tmp_path / "run"}
    record = gf.train(graph, model=gf.nn.TGN(hidden=8), strategy=strategy, quiet=True, **train)
    trained: Any = record._built.strategy
    steps = trained.steps_per_epoch
    assert record.summary.steps == 3 * steps > 3
    rates = [row["lr"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert rates == pytest.approx([0.01 * (1 - (epoch * steps - 1) / (3 * steps)) for epoch in (1, 2, 3)])
    assert trained._optimizer.param_groups[0]["lr"] == pytest.approx(rates[-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "one_cycle", "warmup": 1}, "leave out warmup"),
        ({"schedule": "plateau", "split": "0.8/0/0.2"}, "needs val nodes"),
        ({"schedule": "plateau", "strategy": "tma", "workers": 2}, "trainers do not know the val metric"),
    ],
)
def test_schedules_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GnnfleetError, match=message):
        gf.train(plain_graph(), quiet=True, **options)


def test_epochs_of_a_schedule_stay_on_resume() -> None:
    config = resolve({"train": {"schedule": "cosine", "epochs": 5}})
    with pytest.raises(ConfigError, match=r"train\.epochs=5"):
        check_resumable(config, resolve({"train": {"schedule": "cosine", "epochs": 9}}))
    check_resumable(resolve({"train": {"epochs": 5}}), resolve({"train": {"epochs": 9}}))
