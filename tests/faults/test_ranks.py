"""After any fault of one rank the others end within 15 s and name it, and the resumed run has the same weights.

Seeded trials, many in parallel: they mostly wait. Ranks train with sar, each with a part, or with pipe, each with a
stage, without a launcher.
"""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gnnfleet.comm.shm_transport import MIN_BYTES
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.store import save_store
from tests.faults.trials import TIMEOUT, ForkServer, Trial, spec_of
from tests.graphs import assert_same_checkpoints, communities

SIZE = 3
DRAW = random.Random("faults")
SAR: dict[str, Any] = {
    "strategy": "sar",
    "workers": SIZE,
    "model": {"hidden": 128, "layers": 2, "dropout": 0.0},
    "auto_defaults": False,
    "partition": "random",  # most rows are exchanged: messages are large enough for shared memory
    "train": {"epochs": 40, "checkpoint_seconds": 0.2},
}
PIPE: dict[str, Any] = {
    **SAR,
    "strategy": {"name": "pipe", "graph_parallel": 1, "chunks": 6, "refresh": 3, "gradient": "stale"},
    "model": {"hidden": 32, "layers": 3},
    "train": {**SAR["train"], "epochs": 15},
}
SETTINGS = (SAR, PIPE)
Fault = tuple[int, signal.Signals, float]
"""Victim, signal, seconds after all ranks are ready."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """Each part sends about half of its rows, which is enough for shared memory."""
    nodes = 900
    assert nodes // SIZE // 2 * 128 * 4 > MIN_BYTES
    return save_store(communities(nodes), tmp_path_factory.mktemp("data") / "shop")


def send_signals(trials: list[Trial], plan: list[Fault], forks: ForkServer) -> list[float]:
    """Cause the planned fault of every trial in parallel; return their times."""

    def cause_fault(trial: Trial, fault: Fault) -> float:
        victim, signal_number, delay = fault
        forks.wait_until_ready(trial)
        time.sleep(delay)
        return trial.send_signal(victim, signal_number)

    with ThreadPoolExecutor(len(trials)) as pool:
        return list(pool.map(cause_fault, trials, plan))


def draw_faults(count: int, signal_number: signal.Signals) -> list[Fault]:
    return [(DRAW.randrange(SIZE), signal_number, DRAW.uniform(0, 2.5)) for _ in range(count)]


def start(forks: ForkServer, store: Graph, folder: Path, count: int) -> list[Trial]:
    trials = []
    for number in range(count):
        spec = spec_of(store, folder / f"run-{number}", SETTINGS[number % 2], epochs=10_000)
        trials.append(forks.start(spec.as_json(), folder / f"trial-{number}", size=SIZE))
    return trials


def check_ends(trial: Trial, victim: int, fault_time: float) -> None:
    """Check that all other ranks end in time, each with one error that names the victim."""
    for rank, (code, end_time) in trial.wait(25).items():
        if rank == victim:
            assert code == -signal.SIGKILL  # the first rank that misses a paused one kills it
            continue
        output = trial.output(rank)
        assert end_time - fault_time < 15, (rank, end_time - fault_time, output)
        assert code == 8 and f"rank {victim} (pid {trial.ranks[victim]}" in output, (code, output)
        assert "Traceback" not in output and output.count("error:") == 1


def test_others_end_and_name_a_killed_or_paused_rank(forks: ForkServer, store: Graph, tmp_path: Path) -> None:
    plan = [*draw_faults(4, signal.SIGKILL), *draw_faults(4, signal.SIGSTOP)]
    trials = start(forks, store, tmp_path, len(plan))
    fault_times = send_signals(trials, plan, forks)
    for trial, (victim, _, _), fault_time in zip(trials, plan, fault_times, strict=True):
        check_ends(trial, victim, fault_time)


def test_an_exception_is_reported_by_all_ranks_with_one_traceback(
    forks: ForkServer, store: Graph, tmp_path: Path
) -> None:
    count = 4
    trials, plan = start(forks, store, tmp_path, count), draw_faults(count, signal.SIGUSR1)
    fault_times = send_signals(trials, plan, forks)
    for trial, (victim, _, _), fault_time in zip(trials, plan, fault_times, strict=True):
        ended = trial.wait(25)
        outputs = [trial.output(rank) for rank in range(SIZE)]
        assert all(code == 1 and end_time - fault_time < 15 for code, end_time in ended.values()), (ended, outputs)
        assert all(f"unexpected Sabotage on rank {victim}: somewhere" in text for text in outputs), outputs
        assert [text.count("Traceback (most") > 0 for text in outputs] == [rank == victim for rank in range(SIZE)]


def test_slow_and_shortly_paused_ranks_live_and_without_the_store_all_end(
    forks: ForkServer, store: Graph, tmp_path: Path
) -> None:
    """One rank runs a tenth of the time for longer than the silence limit, one pauses for 6 s, one store dies."""
    slow, paused, without_store = start(forks, store, tmp_path, 3)
    for trial in (slow, paused, without_store):
        forks.wait_until_ready(trial)
    paused.send_signal(2, signal.SIGSTOP)
    os.kill(without_store.store, signal.SIGKILL)
    fault_time = time.monotonic()
    while time.monotonic() - fault_time < 13:
        slow.send_signal(1, signal.SIGSTOP)
        time.sleep(0.45)
        slow.send_signal(1, signal.SIGCONT)
        time.sleep(0.05)
        if time.monotonic() - fault_time > 6:
            paused.send_signal(2, signal.SIGCONT)
    for trial in (slow, paused):
        assert not any(pid in trial.ended for pid in trial.ranks), [trial.output(rank) for rank in range(SIZE)]
        for rank in range(SIZE):
            trial.send_signal(rank, signal.SIGTERM)
        assert {code for code, _ in trial.wait(10).values()} == {128 + signal.SIGTERM}
    for rank, (code, end_time) in without_store.wait(10).items():
        assert code == 8 and end_time - fault_time < 15 and "has not reached the store" in without_store.output(rank)


def test_killed_and_resumed_runs_end_with_the_uninterrupted_weights(
    forks: ForkServer, store: Graph, tmp_path: Path
) -> None:
    uninterrupted_specs = [
        spec_of(store, tmp_path / f"uninterrupted-{number}", settings) for number, settings in enumerate(SETTINGS)
    ]
    specs = [spec_of(store, tmp_path / f"cut-{number}", settings) for number, settings in enumerate(SETTINGS)]
    uninterrupted = [
        forks.start(spec.as_json(), tmp_path / f"trial-uninterrupted-{number}", size=SIZE)
        for number, spec in enumerate(uninterrupted_specs)
    ]
    trials = [forks.start(spec.as_json(), tmp_path / f"trial-{number}", size=SIZE) for number, spec in enumerate(specs)]
    plan = draw_faults(len(trials), signal.SIGKILL)
    fault_times = send_signals(trials, plan, forks)
    for trial, (victim, _, _), fault_time in zip(trials, plan, fault_times, strict=True):
        check_ends(trial, victim, fault_time)
    resumed = [
        forks.start(spec.as_json(), tmp_path / f"resumed-{number}", size=SIZE) for number, spec in enumerate(specs)
    ]
    for trial in (*uninterrupted, *resumed):
        assert all(code == 0 for code, _ in trial.wait(TIMEOUT).values()), [trial.output(rank) for rank in range(SIZE)]
    for spec, uninterrupted_spec in zip(specs, uninterrupted_specs, strict=True):
        assert_same_checkpoints(Path(spec.run_dir), Path(uninterrupted_spec.run_dir))
