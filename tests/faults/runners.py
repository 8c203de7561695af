"""Runners of the trials in suite.py: each runs one trial and returns its outcome, or raises AssertionError."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from benchmarks import netns

from gnnfleet.graph.graph import Graph
from gnnfleet.report.metrics import read_metrics
from tests.faults.driving import FAST_TMA, TmaDriver, TorchrunHost, has_ended, start_on_host
from tests.faults.suite import (
    PAUSE,
    SINGLE_PROCESS,
    Case,
    Outcome,
    load,
    make_easy,
    make_events,
    make_store,
    options,
    settings_of,
)
from tests.faults.trials import TIMEOUT, ForkServer, spec_of, wait_until
from tests.graphs import assert_same_checkpoints
from tests.shell import set_options, start

SIZE = 3
EPOCHS = {"local": 300, "sar": 300, "macrobatch": 60, "pipe": 80, "temporal": 30}
ROUNDS = 40
TWO_WORKERS = "pair"
EXACT, FINISHED, FROM_LAST_ROUND = "named, then exact", "finished", "named, then on from the last closed round"
ALL_ENDED = "all gone, then exact"  # no process is left to name the lost one
Runner = Callable[["TrialContext", Case], Outcome]


class TrialContext:
    """Stores, a fork server and undisturbed runs, all below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = make_store(folder)
        self.easy = make_easy(folder)
        self.events = make_events(folder)
        self.forks = ForkServer()
        self._undisturbed: dict[str, Path] = {}

    def close(self) -> None:
        self.forks.close()

    def new_folder(self, case: Case) -> Path:
        """Make a folder for a trial, a new one each time it is run."""
        stem = case.name.replace(", ", "-").replace(" ", "_")
        number = 0
        while (self.folder / f"{stem}-{number}").exists():
            number += 1
        (self.folder / f"{stem}-{number}").mkdir()
        return self.folder / f"{stem}-{number}"

    def undisturbed(self, case: Case) -> Path:
        """Directory of the undisturbed run for a case; ``prepare`` has made it before trials run in parallel."""
        return self._undisturbed[f"{case.strategy} {undisturbed_kind(case)}"]

    def prepare(self, cases: list[Case]) -> None:
        kinds = ((case.strategy, undisturbed_kind(case)) for case in cases)
        for strategy, kind in dict.fromkeys(kinds):
            if strategy == "tma" or f"{strategy} {kind}" in self._undisturbed:
                continue
            run = self.folder / f"undisturbed-{strategy}-{kind}"
            if kind == "forks":
                spec = spec_of(self.graph(strategy), run, settings_of(strategy, SIZE))
                trial = self.forks.start(spec.as_json(), self.folder / f"ranks-undisturbed-{strategy}", size=SIZE)
                ended = trial.wait(TIMEOUT)
                assert all(code == 0 for code, _ in ended.values()), [trial.output(rank) for rank in range(SIZE)]
            else:
                process = self.command(strategy, run, workers=2 if kind == TWO_WORKERS else None)
                _, stderr = process.communicate(timeout=TIMEOUT)
                assert process.returncode == 0, stderr
            self._undisturbed[f"{strategy} {kind}"] = run

    def graph(self, strategy: str) -> Graph:
        return self.events if strategy == "temporal" else self.store

    def command(self, strategy: str, run: Path, *options: str, workers: int | None = None) -> Any:
        arguments = self.arguments(strategy, workers or (1 if strategy in SINGLE_PROCESS else 2))
        return start("train", path_of(self.graph(strategy)), *arguments, "--run-dir", run, *options)

    def arguments(self, strategy: str, workers: int) -> list[str]:
        settings = settings_of(strategy, workers)
        settings["train"]["epochs"] = EPOCHS[strategy]
        return options(settings)


def undisturbed_kind(case: Case) -> str:
    """Kind of the undisturbed run with the same result: forked ranks, a command, a command with a worker per host."""
    if case.how == "hosts" and case.strategy in SINGLE_PROCESS:
        return TWO_WORKERS
    return "forks" if case.how == "forks" else "command"


def run_fork_trial(context: TrialContext, case: Case) -> Outcome:
    """Ranks without a launcher: the others end in time and name the lost rank."""
    folder, draw = context.new_folder(case), case.draw
    spec = spec_of(context.graph(case.strategy), folder / "run", settings_of(case.strategy, SIZE))
    trial = context.forks.start(spec.as_json(), folder / "ranks", size=SIZE)
    victim, moment = 0 if case.role == "first rank" else draw.randrange(1, SIZE), draw.uniform(0, 2.0)
    context.forks.wait_until_ready(trial)
    time.sleep(moment)
    hit_time = trial.send_signal(victim, signal.SIGKILL if case.event == "kill" else signal.SIGSTOP)
    busy, ended, output = load(), trial.wait(60), ""
    for rank, (code, _) in ended.items():
        output = trial.output(rank)
        if rank == victim:
            assert code == -signal.SIGKILL, (code, output)
            continue
        assert code == 8 and f"rank {victim} (pid {trial.ranks[victim]}" in output, (code, output)
        assert "Traceback" not in output and output.count("error:") == 1, output
    seconds = max(end_time for rank, (_, end_time) in ended.items() if rank != victim) - hit_time
    again = context.forks.start(spec.as_json(), folder / "again", size=SIZE)
    assert all(code == 0 for code, _ in again.wait(TIMEOUT).values()), [again.output(rank) for rank in range(SIZE)]
    assert_same_checkpoints(folder / "run", context.undisturbed(case))
    return Outcome(EXACT, seconds, moment, last_error(trial.output(1 if victim != 1 else 0)), busy)


def run_command_trial(context: TrialContext, case: Case) -> Outcome:
    """The process that the user started, with or without workers."""
    run, draw = context.new_folder(case) / "run", case.draw
    process = context.command(case.strategy, run)
    try:
        moment = wait_for(run, EPOCHS[case.strategy], process, draw.uniform(0.02, 0.7))
        children = psutil.Process(process.pid).children(recursive=True)
        busy = load()
        if case.event == "pause":
            process.send_signal(signal.SIGSTOP)
            time.sleep(PAUSE)
            process.send_signal(signal.SIGCONT)
            _, stderr = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0, stderr
            result, seconds = FINISHED, None
        else:
            fault_time = time.monotonic()
            process.kill()
            wait_until(lambda: all(map(has_ended, children)), 60, "end of the workers")
            result, seconds = ALL_ENDED, time.monotonic() - fault_time
            process.communicate()
            process = context.command(case.strategy, run, "--resume")
            _, stderr = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0, stderr
        assert_same_checkpoints(run, context.undisturbed(case))
        return Outcome(result, seconds, moment, "", busy)
    finally:
        end(process)


def run_tma_trial(context: TrialContext, case: Case) -> Outcome:
    """A coordinator and three trainers; a resumed run is exact from the last closed round."""
    run, draw = context.new_folder(case) / "run", case.draw
    store = path_of(context.easy)
    options = ("--seed", "1", "--set", "train.checkpoint_seconds=0")
    driver = TmaDriver(store, run, 3, *options, train__epochs=ROUNDS)
    try:
        driver.wait_for_rounds(1, trainers=3)
        moment = wait_for(run, ROUNDS, driver.process, draw.uniform(0.05, 0.5))
        role = case.role if case.role != "trainer" else str(draw.randrange(3))
        victim = psutil.Process(driver.process.pid) if role == "launcher" else driver.process_of(role)
        children, closed, busy = victim.children(), len(driver.rows), load()
        fault_time = time.monotonic()
        victim.kill() if case.event == "kill" else victim.suspend()
        if case.role == "trainer" or case.event == "pause":
            if case.event == "pause":
                time.sleep(PAUSE)
                with suppress(psutil.NoSuchProcess):  # the others may be done by now and have ended it
                    victim.resume()
            code, stderr = driver.wait_for_exit()
            assert code == 0, stderr
            assert case.role != "trainer" or f"trainer {role}" in stderr, stderr
            result, seconds = FINISHED, None
        else:
            _, stderr = driver.process.communicate(timeout=60)
            wait_until(lambda: all(map(has_ended, children)), 60, "end of the coordinator and the trainers")
            result, seconds = FROM_LAST_ROUND, time.monotonic() - fault_time
            if case.role == "coordinator":
                assert driver.process.returncode == 8 and "coordinator (pid" in stderr, (
                    driver.process.returncode,
                    stderr,
                )
                assert stderr.count("error: ") == 1 and "Traceback" not in stderr, stderr
            saved_rows = driver.rows[: closed - 1]  # the last closed round may not be saved yet
            driver = TmaDriver(store, run, 3, *options, "--resume", train__epochs=ROUNDS)
            code, resumed_stderr = driver.wait_for_exit()
            assert code == 0, resumed_stderr
            assert driver.rows[: len(saved_rows)] == saved_rows, "closed rounds differ in the resumed run"
        assert [row["epoch"] for row in driver.rows] == list(range(1, ROUNDS + 1))
        return Outcome(result, seconds, moment, last_error(stderr), busy)
    finally:
        end(driver.process)


def run_host_trial(context: TrialContext, case: Case) -> Outcome:
    """torchrun on two hosts, the link cut at either end: workers on both hosts end, then both resume."""
    run, draw = context.new_folder(case) / "run", case.draw
    arguments = context.arguments(case.strategy, 2)
    del arguments[arguments.index("--workers") : arguments.index("--workers") + 2]
    store = path_of(context.graph(case.strategy))
    with netns.hosts(2) as hosts:
        torchruns = [TorchrunHost(host) for host in hosts]
        try:
            for torchrun in torchruns:
                torchrun.start(torchruns[0], run, store, *arguments, strategy=case.strategy)
            assert torchruns[0].torchrun is not None
            moment = wait_for(run, EPOCHS[case.strategy], torchruns[0].torchrun, draw.uniform(0.02, 0.5))
            workers = [torchrun.worker() for torchrun in torchruns]
            cut_host, busy = hosts[draw.randrange(2)], load()
            cut_host.cut()
            fault_time = time.monotonic()
            wait_until(lambda: all(map(has_ended, workers)), 60, "end of the workers")
            seconds = time.monotonic() - fault_time
            first_stderr, second_stderr = (torchrun.stderr_path.read_text() for torchrun in torchruns)
            assert f"rank 1 (pid {workers[1].pid}" in first_stderr, first_stderr
            assert "error: rank 1 has not reached the store" in second_stderr, second_stderr
            for torchrun in torchruns:
                torchrun.stop()
            cut_host.mend()
            for torchrun in torchruns:
                torchrun.start(torchruns[0], run, store, "--resume", *arguments, strategy=case.strategy)
            for torchrun in torchruns:
                assert torchrun.torchrun is not None
                assert torchrun.torchrun.wait(TIMEOUT) == 0, torchrun.stderr_path.read_text()
            assert_same_checkpoints(run, context.undisturbed(case))
            return Outcome(EXACT, seconds, moment, last_error(first_stderr), busy)
        finally:
            for torchrun in torchruns:
                torchrun.stop()


def run_join_trial(context: TrialContext, case: Case) -> Outcome:
    """A trainer on another host whose link is cut for a while: rounds close without it, and it returns."""
    folder, draw = context.new_folder(case), case.draw
    settings = {**FAST_TMA, "train.epochs": 60, "model.hidden": 8, "model.layers": 2}
    with netns.hosts(2) as (host, other_host):
        settings |= {"strategy.listen": f"{host.address}:29411", "strategy.local_trainers": 1}
        train = ["train", str(path_of(context.store)), "-s", "tma", "-w", "2", *set_options(settings)]
        first = start_on_host(host, [*train, "--run-dir", str(folder / "run")], folder / "first")
        second = None
        rows = lambda: read_metrics(folder / "run" / "metrics.jsonl")  # noqa: E731
        try:
            wait_until(lambda: "Waiting for trainers" in (folder / "first").read_text(), TIMEOUT, "the server")
            join = ["join", f"{host.address}:29411", str(path_of(context.store)), "--trainers", "1"]
            second = start_on_host(other_host, join, folder / "second")
            wait_until(lambda: any(row["trainers"] == 2 for row in rows()), TIMEOUT, "both trainers")
            moment = draw.uniform(0, 2)
            time.sleep(moment)
            busy = load()
            other_host.cut()
            wait_until(lambda: rows()[-1]["trainers"] == 1, TIMEOUT, "rounds without it")
            time.sleep(draw.uniform(0, 3))
            other_host.mend()
            before = len(rows())
            wait_until(
                lambda: any(row["trainers"] == 2 for row in rows()[before:]) or first.poll() is not None,
                TIMEOUT,
                "return",
            )
            assert first.wait(TIMEOUT) == 0 and second.wait(30) == 0, (folder / "first").read_text()
            assert "finished without trainer 1" in (folder / "first").read_text()
            assert [row["epoch"] for row in rows()] == list(range(1, 61))
            return Outcome(FINISHED, None, moment, "", busy)
        finally:
            end(first)
            if second is not None:
                end(second)


RUNNERS: dict[str, Runner] = {
    "forks": run_fork_trial,
    "command": run_command_trial,
    "fleet": run_tma_trial,
    "hosts": run_host_trial,
    "joined": run_join_trial,
}
MAX_PARALLEL = {"forks": 4, "command": 3, "fleet": 2, "hosts": 3, "joined": 2}
"""Parallel trials by runner: they mostly wait."""


def wait_for(run: Path, epochs: int, process: Any, share: float) -> float:
    """Wait until a share of the epochs is done and a fraction of an epoch more; return the share."""
    target = max(1, int(epochs * share))
    file = run / "metrics.jsonl"
    wait_until(lambda: len(read_metrics(file)) >= target or process.poll() is not None, TIMEOUT, "epochs")
    assert process.poll() is None, "the run finished before the fault"
    time.sleep(share % 0.05)
    return round(share, 3)


def path_of(graph: Graph) -> Path:
    assert graph.store is not None
    return graph.store.path


def last_error(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    return lines[-1] if lines else ""


def end(process: Any) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
    process.communicate()
