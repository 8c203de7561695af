"""A trainer that shares a memory with others is killed: they name it, and the run goes on to the same bits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.store import save_store
from gnnfleet.training.checkpoint import rank_file
from tests.faults.test_ranks import SIZE, check_ends, plan_of, side_by_side, spec_of
from tests.faults.trials import PATIENCE, Forks
from tests.graphs import assert_same_checkpoint

LANES = {"batch_parallel": 1, "epoch_parallel": SIZE, "memory_parallel": 1}
COPIES = {"batch_parallel": 1, "epoch_parallel": 1, "memory_parallel": SIZE}


def words_of(shape: dict[str, int]) -> dict[str, Any]:
    return {
        "strategy": {"name": "temporal", "batch": 40, "static": False, "eval_negatives": 4, **shape},
        "workers": SIZE,
        "model": {"hidden": 16, "neighbours": 4},
        "train": {"epochs": 14, "checkpoint_seconds": 0.2},
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    events = make_dataset("events", users=60, items=30, events=1500, features=2, topics=3, ties=0.2, seed=1)
    return save_store(events, tmp_path_factory.mktemp("data") / "visits")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


def test_killed_trainers_are_named_and_runs_go_on_to_the_same_bits(forks: Forks, store: Graph, tmp_path: Path) -> None:
    shapes = [words_of(LANES), words_of(COPIES)]
    wholes = [spec_of(store, tmp_path / f"whole-{number}", words) for number, words in enumerate(shapes)]
    specs = [spec_of(store, tmp_path / f"cut-{number}", words) for number, words in enumerate(shapes)]
    trials = [forks.start(spec.as_json(), tmp_path / f"trial-{n}", size=SIZE) for n, spec in enumerate(specs)]
    again = [forks.start(spec.as_json(), tmp_path / f"all-{n}", size=SIZE) for n, spec in enumerate(wholes)]
    plan = plan_of(len(trials), signal.SIGKILL)
    hits = side_by_side(trials, plan, forks)
    for trial, (victim, _, _), hit in zip(trials, plan, hits, strict=True):
        check_ends(trial, victim, hit)
    again += [forks.start(spec.as_json(), tmp_path / f"again-{n}", size=SIZE) for n, spec in enumerate(specs)]
    for trial in again:
        assert all(code == 0 for code, _ in trial.wait(PATIENCE).values()), [trial.said(rank) for rank in range(SIZE)]
    for cut, whole in zip(specs, wholes, strict=True):
        for name in ("last", "best"):
            one, two = (Path(run) / "checkpoints" / name for run in (cut.run_dir, whole.run_dir))
            assert_same_checkpoint(one, two)
        for rank in range(SIZE):  # memories of copies, what lanes hold
            one, two = (
                load_file(Path(run) / "checkpoints" / "last" / rank_file(rank)) for run in (cut.run_dir, whole.run_dir)
            )
            assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
        assert (Path(cut.run_dir) / "lanes.svg").read_text().startswith("<svg")
