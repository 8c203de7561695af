"""Runs the trials of suite.py. Each function does one and returns its outcome; AssertionError says what went wrong."""

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
from tests.faults.driving import QUICK, Fleet, Machine, gone, within
from tests.faults.suite import (
    ALONE,
    PAUSE,
    Case,
    Outcome,
    load,
    make_easy,
    make_events,
    make_store,
    options,
    words_of,
)
from tests.faults.trials import PATIENCE, Forks, spec_of, until
from tests.graphs import assert_same_checkpoint
from tests.shell import start

SIZE = 3
EPOCHS = {"local": 300, "sar": 300, "macrobatch": 60, "pipe": 80, "temporal": 30}
ROUNDS = 40
PAIR = "pair"
EXACT, FINISHED, CLOSED = "named, then exact", "finished", "named, then on from the last closed round"
GONE = "all gone, then exact"  # nobody is left to name anybody
Runner = Callable[["Workshop", Case], Outcome]


class Workshop:
    """Stores, processes to fork from, and runs that nothing happened to; all below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = make_store(folder)
        self.easy = make_easy(folder)
        self.events = make_events(folder)
        self.forks = Forks()
        self._wholes: dict[str, Path] = {}

    def close(self) -> None:
        self.forks.close()

    def place(self, case: Case) -> Path:
        """Where the run of a trial goes, also when it is tried again."""
        stem = case.name.replace(", ", "-").replace(" ", "_")
        number = 0
        while (self.folder / f"{stem}-{number}").exists():
            number += 1
        (self.folder / f"{stem}-{number}").mkdir()
        return self.folder / f"{stem}-{number}"

    def whole(self, case: Case) -> Path:
        """The run that nothing happened to, made once; ``prepare`` makes it before trials run side by side."""
        return self._wholes[f"{case.strategy} {whole_of(case)}"]

    def prepare(self, cases: list[Case]) -> None:
        wanted = ((case.strategy, whole_of(case)) for case in cases)
        for strategy, how in dict.fromkeys(wanted):
            if strategy == "tma" or f"{strategy} {how}" in self._wholes:
                continue
            run = self.folder / f"whole-{strategy}-{how}"
            if how == "forks":
                spec = spec_of(self.graph(strategy), run, words_of(strategy, SIZE))
                trial = self.forks.start(spec.as_json(), self.folder / f"ranks-whole-{strategy}", size=SIZE)
                ended = trial.wait(PATIENCE)
                assert all(code == 0 for code, _ in ended.values()), [trial.said(rank) for rank in range(SIZE)]
            else:
                process = self.command(strategy, run, workers=2 if how == PAIR else None)
                _, said = process.communicate(timeout=PATIENCE)
                assert process.returncode == 0, said
            self._wholes[f"{strategy} {how}"] = run

    def graph(self, strategy: str) -> Graph:
        return self.events if strategy == "temporal" else self.store

    def command(self, strategy: str, run: Path, *more: str, workers: int | None = None) -> Any:
        words = self.words(strategy, workers or (1 if strategy in ALONE else 2))
        return start("train", path_of(self.graph(strategy)), *words, "--run-dir", run, *more)

    def words(self, strategy: str, workers: int) -> list[str]:
        words = words_of(strategy, workers)
        words["train"]["epochs"] = EPOCHS[strategy]
        return options(words)


def whole_of(case: Case) -> str:
    """Which uninterrupted run a trial ends like: of forked ranks, of a command, of a command with a worker per host."""
    if case.how == "hosts" and case.strategy in ALONE:
        return PAIR
    return "forks" if case.how == "forks" else "command"


def by_forks(shop: Workshop, case: Case) -> Outcome:
    """Ranks that no launcher watches over: the others end in time and name the one that was lost."""
    place, draw = shop.place(case), case.draw
    spec = spec_of(shop.graph(case.strategy), place / "run", words_of(case.strategy, SIZE))
    trial = shop.forks.start(spec.as_json(), place / "ranks", size=SIZE)
    victim, moment = 0 if case.role == "first rank" else draw.randrange(1, SIZE), draw.uniform(0, 2.0)
    shop.forks.ready(trial)
    time.sleep(moment)
    hit = trial.hit(victim, signal.SIGKILL if case.event == "kill" else signal.SIGSTOP)
    busy, ended, said = load(), trial.wait(60), ""
    for rank, (code, _) in ended.items():
        said = trial.said(rank)
        if rank == victim:
            assert code == -signal.SIGKILL, (code, said)
            continue
        assert code == 8 and f"rank {victim} (pid {trial.ranks[victim]}" in said, (code, said)
        assert "Traceback" not in said and said.count("error:") == 1, said
    seconds = max(when for rank, (_, when) in ended.items() if rank != victim) - hit
    again = shop.forks.start(spec.as_json(), place / "again", size=SIZE)
    assert all(code == 0 for code, _ in again.wait(PATIENCE).values()), [again.said(rank) for rank in range(SIZE)]
    check_same(place / "run", shop.whole(case))
    return Outcome(EXACT, seconds, moment, last_error(trial.said(1 if victim != 1 else 0)), busy)


def by_command(shop: Workshop, case: Case) -> Outcome:
    """The process that a user started, alone or with its workers."""
    run, draw = shop.place(case) / "run", case.draw
    process = shop.command(case.strategy, run)
    try:
        moment = wait_for(run, EPOCHS[case.strategy], process, draw.uniform(0.02, 0.7))
        known = psutil.Process(process.pid).children(recursive=True)
        busy = load()
        if case.event == "pause":
            process.send_signal(signal.SIGSTOP)
            time.sleep(PAUSE)
            process.send_signal(signal.SIGCONT)
            _, said = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, said
            result, seconds = FINISHED, None
        else:
            begun = time.monotonic()
            process.kill()
            until(lambda: all(map(gone, known)), 60, "end of the workers")
            result, seconds = GONE, time.monotonic() - begun
            process.communicate()
            process = shop.command(case.strategy, run, "--resume")
            _, said = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, said
        check_same(run, shop.whole(case))
        return Outcome(result, seconds, moment, "", busy)
    finally:
        end(process)


def by_fleet(shop: Workshop, case: Case) -> Outcome:
    """A coordinator and three trainers; rounds close by the clock, so going on is exact from the last closed one."""
    run, draw = shop.place(case) / "run", case.draw
    store = path_of(shop.easy)
    more = ("--seed", "1", "--set", "train.checkpoint_seconds=0")
    fleet = Fleet(store, run, 3, *more, train__epochs=ROUNDS)
    try:
        fleet.runs(1, trainers=3)
        moment = wait_for(run, ROUNDS, fleet.process, draw.uniform(0.05, 0.5))
        role = case.role if case.role != "trainer" else str(draw.randrange(3))
        victim = psutil.Process(fleet.process.pid) if role == "launcher" else fleet.member(role)
        known, closed, busy = victim.children(), len(fleet.rows), load()
        begun = time.monotonic()
        victim.kill() if case.event == "kill" else victim.suspend()
        if case.role == "trainer" or case.event == "pause":
            if case.event == "pause":
                time.sleep(PAUSE)
                with suppress(psutil.NoSuchProcess):  # the others may be done by now, and have ended it
                    victim.resume()
            code, said = fleet.ends()
            assert code == 0, said
            assert case.role != "trainer" or f"trainer {role}" in said, said
            result, seconds = FINISHED, None
        else:
            _, said = fleet.process.communicate(timeout=60)
            until(lambda: all(map(gone, known)), 60, "end of the fleet")
            result, seconds = CLOSED, time.monotonic() - begun
            if case.role == "coordinator":
                assert fleet.process.returncode == 8 and "coordinator (pid" in said, (fleet.process.returncode, said)
                assert said.count("error: ") == 1 and "Traceback" not in said, said
            kept = fleet.rows[: closed - 1]  # the round that was closed last may not have been kept yet
            fleet = Fleet(store, run, 3, *more, "--resume", train__epochs=ROUNDS)
            code, after = fleet.ends()
            assert code == 0, after
            assert fleet.rows[: len(kept)] == kept, "rounds that were closed are not those of the run that went on"
        assert [row["epoch"] for row in fleet.rows] == list(range(1, ROUNDS + 1))
        return Outcome(result, seconds, moment, last_error(said), busy)
    finally:
        end(fleet.process)


def by_hosts(shop: Workshop, case: Case) -> Outcome:
    """torchrun on two hosts, the cable taken out at either end: workers on both sides end; then both go on."""
    run, draw = shop.place(case) / "run", case.draw
    words = shop.words(case.strategy, 2)
    del words[words.index("--workers") : words.index("--workers") + 2]
    store = path_of(shop.graph(case.strategy))
    with netns.hosts(2) as found:
        machines = [Machine(host) for host in found]
        try:
            for machine in machines:
                machine.start(machines[0], run, store, *words, strategy=case.strategy)
            assert machines[0].torchrun is not None
            moment = wait_for(run, EPOCHS[case.strategy], machines[0].torchrun, draw.uniform(0.02, 0.5))
            workers = [machine.worker() for machine in machines]
            cut, busy = found[draw.randrange(2)], load()
            cut.cut()
            begun = time.monotonic()
            until(lambda: all(map(gone, workers)), 60, "end of the workers")
            seconds = time.monotonic() - begun
            near, far = (machine.said.read_text() for machine in machines)
            assert f"rank 1 (pid {workers[1].pid}" in near, near
            assert "error: rank 1 has not reached the store" in far, far
            for machine in machines:
                machine.stop()
            cut.mend()
            for machine in machines:
                machine.start(machines[0], run, store, "--resume", *words, strategy=case.strategy)
            for machine in machines:
                assert machine.torchrun is not None
                assert machine.torchrun.wait(PATIENCE) == 0, machine.said.read_text()
            check_same(run, shop.whole(case))
            return Outcome(EXACT, seconds, moment, last_error(near), busy)
        finally:
            for machine in machines:
                machine.stop()


def by_joining(shop: Workshop, case: Case) -> Outcome:
    """A trainer on another host whose cable is out for a while: rounds close without it, and it comes back."""
    place, draw = shop.place(case), case.draw
    knobs = [word for key, value in QUICK.items() for word in ("--set", f"{key}={value}")]
    with netns.hosts(2) as (one, two):
        knobs += ["--set", f"strategy.listen={one.address}:29411", "--set", "strategy.local_trainers=1"]
        shape = ["--set", "train.epochs=60", "--set", "model.hidden=8", "--set", "model.layers=2"]
        words = ["-s", "tma", "-w", "2", *knobs, *shape]
        first = within(
            one, ["train", str(path_of(shop.store)), *words, "--run-dir", str(place / "run")], place / "first"
        )
        second = None
        rows = lambda: read_metrics(place / "run" / "metrics.jsonl")  # noqa: E731
        try:
            until(lambda: "Waiting for trainers" in (place / "first").read_text(), PATIENCE, "the server")
            line = ["join", f"{one.address}:29411", str(path_of(shop.store)), "--trainers", "1"]
            second = within(two, line, place / "second")
            until(lambda: any(row["trainers"] == 2 for row in rows()), PATIENCE, "both trainers")
            moment = draw.uniform(0, 2)
            time.sleep(moment)
            busy = load()
            two.cut()
            until(lambda: rows()[-1]["trainers"] == 1, PATIENCE, "rounds without it")
            time.sleep(draw.uniform(0, 3))
            two.mend()
            seen = len(rows())
            until(lambda: any(row["trainers"] == 2 for row in rows()[seen:]) or gone_(first), PATIENCE, "return")
            assert first.wait(PATIENCE) == 0 and second.wait(30) == 0, (place / "first").read_text()
            assert "finished without trainer 1" in (place / "first").read_text()
            assert [row["epoch"] for row in rows()] == list(range(1, 61))
            return Outcome(FINISHED, None, moment, "", busy)
        finally:
            end(first)
            if second is not None:
                end(second)


RUNNERS: dict[str, Runner] = {
    "forks": by_forks,
    "command": by_command,
    "fleet": by_fleet,
    "hosts": by_hosts,
    "joined": by_joining,
}
TOGETHER = {"forks": 4, "command": 3, "fleet": 2, "hosts": 3, "joined": 2}
"""Trials side by side: they mostly wait."""


def wait_for(run: Path, epochs: int, process: Any, share: float) -> float:
    """Until a share of the epochs is done, and a moment that is no round number of them; where that was."""
    wanted = max(1, int(epochs * share))
    file = run / "metrics.jsonl"
    until(lambda: len(read_metrics(file)) >= wanted or process.poll() is not None, PATIENCE, "epochs")
    assert process.poll() is None, "the run was over before anything was done to it"
    time.sleep(share % 0.05)
    return round(share, 3)


def path_of(graph: Graph) -> Path:
    assert graph.store is not None
    return graph.store.path


def check_same(run: Path, whole: Path) -> None:
    for name in ("last", "best"):
        assert_same_checkpoint(run / "checkpoints" / name, whole / "checkpoints" / name)


def last_error(said: str) -> str:
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    return lines[-1] if lines else ""


def gone_(process: Any) -> bool:
    return process.poll() is not None


def end(process: Any) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
    process.communicate()
