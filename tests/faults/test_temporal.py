"""A killed trainer that shares a node memory: the others name it, and the resumed run is equal bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.store import save_store
from gnnfleet.training.checkpoint import rank_file
from tests.faults.test_ranks import SIZE, check_ends, draw_faults, send_signals
from tests.faults.trials import TIMEOUT, ForkServer, spec_of
from tests.graphs import assert_same_checkpoints

EPOCH_PARALLEL = {"batch_parallel": 1, "epoch_parallel": SIZE, "memory_parallel": 1}
MEMORY_PARALLEL = {"batch_parallel": 1, "epoch_parallel": 1, "memory_parallel": SIZE}


def settings_of(layout: dict[str, int]) -> dict[str, Any]:
    return {
        "strategy": {"name": "temporal", "batch": 40, "static": False, "eval_negatives": 4, **layout},
        "workers": SIZE,
        "model": {"hidden": 16, "neighbours": 4},
        "train": {"epochs": 14, "checkpoint_seconds": 0.2},
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    events = make_dataset("events", users=60, items=30, events=1500, features=2, topics=3, ties=0.2, seed=1)
    return save_store(events, tmp_path_factory.mktemp("data") / "visits")


def test_killed_trainers_are_named_and_resumed_runs_are_equal_bit_for_bit(
    forks: ForkServer, store: Graph, tmp_path: Path
) -> None:
    layouts = [settings_of(EPOCH_PARALLEL), settings_of(MEMORY_PARALLEL)]
    uninterrupted_specs = [
        spec_of(store, tmp_path / f"uninterrupted-{number}", settings) for number, settings in enumerate(layouts)
    ]
    specs = [spec_of(store, tmp_path / f"cut-{number}", settings) for number, settings in enumerate(layouts)]
    trials = [forks.start(spec.as_json(), tmp_path / f"trial-{n}", size=SIZE) for n, spec in enumerate(specs)]
    trials_to_finish = [
        forks.start(spec.as_json(), tmp_path / f"all-{n}", size=SIZE) for n, spec in enumerate(uninterrupted_specs)
    ]
    plan = draw_faults(len(trials), signal.SIGKILL)
    fault_times = send_signals(trials, plan, forks)
    for trial, (victim, _, _), fault_time in zip(trials, plan, fault_times, strict=True):
        check_ends(trial, victim, fault_time)
    trials_to_finish += [
        forks.start(spec.as_json(), tmp_path / f"again-{n}", size=SIZE) for n, spec in enumerate(specs)
    ]
    for trial in trials_to_finish:
        assert all(code == 0 for code, _ in trial.wait(TIMEOUT).values()), [trial.output(rank) for rank in range(SIZE)]
    for spec, uninterrupted_spec in zip(specs, uninterrupted_specs, strict=True):
        runs = (Path(spec.run_dir), Path(uninterrupted_spec.run_dir))
        assert_same_checkpoints(*runs)
        for rank in range(SIZE):  # copies of the memory, cached reads of epoch parallelism
            state, expected = (load_file(run / "checkpoints" / "last" / rank_file(rank)) for run in runs)
            assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in state)
        assert (runs[0] / "lanes.svg").read_text().startswith("<svg")
