"""``python -m tests.faults.losses [SEEDS]``: what tma loses with 1 or 2 of 4 trainers killed, paused or cut off.

Nodes of killed ones are dealt among the others; in a row of their own they are left. Each run is compared with the one
of the same seed that nothing happens to; who is paused or cut off comes back later. Runs that are done are not made
again (benchmarks/results/tma_losses.json); the table goes to docs/tma.md. Root for cuts.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import netns
from benchmarks.record import RESULTS, write_results

from gnnfleet.report.metrics import read_metrics
from tests.faults.driving import MODEL, QUICK, Fleet, within
from tests.faults.suite import make_easy
from tests.faults.trials import PATIENCE, until

TRAINERS, ROUNDS, BEFORE, AWAY = 4, 30, 8, 8
"""Trainers, rounds of a run, those before something happens, those without whoever comes back."""
KNOBS = {**QUICK, "strategy.interval": 1, "strategy.silence": 2, "train.epochs": ROUNDS}
LEFT = "killed, nodes left"
EVENTS = ("killed", LEFT, "paused", "cut off")
PORT = 29412
PAGE = Path(__file__).parents[2] / "docs" / "tma.md"
BEGIN, END = "<!-- losses -->", "<!-- /losses -->"


@dataclass(frozen=True)
class Loss:
    """``count`` of the trainers are killed, paused or cut off; none for the run they are compared with."""

    event: str
    count: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.event}, {self.count}, {self.seed}"


@dataclass
class Found:
    """What came of it: the metric, the rounds without somebody, the rounds until all were back."""

    val: float
    test: float
    without: int
    back: int | None


class Run:
    """A run of four trainers, those with the highest numbers in reach of what happens."""

    def __init__(self, run_dir: Path, fleet: Fleet | None = None) -> None:
        self.run_dir, self.fleet = run_dir, fleet

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.run_dir / "metrics.jsonl")

    def wait(self, rounds: int, trainers: int) -> int:
        """Until so many more rounds were closed by so many; how many there are then."""
        seen = len(self.rows)
        until(lambda: sum(row["trainers"] == trainers for row in self.rows[seen:]) >= rounds, PATIENCE, "rounds")
        return len(self.rows)

    def found(self, back: int | None) -> Found:
        rows, record = self.rows, json.loads((self.run_dir / "record.json").read_bytes())
        assert [row["epoch"] for row in rows] == list(range(1, ROUNDS + 1))
        without = sum(row["trainers"] < TRAINERS for row in rows)
        return Found(record["metrics"]["val"], record["metrics"]["test"], without, back)


def try_loss(store: Path, folder: Path, case: Loss) -> Found:
    """Make the run of a case; raises AssertionError where it does not go on to its end."""
    with ExitStack() as stack:
        enter = _across_hosts if case.event == "cut off" else _here
        run, happens, comes_back, ends = stack.enter_context(enter(store, folder, case))
        run.wait(BEFORE, TRAINERS)
        back = None
        if case.count:
            happens()
            run.wait(AWAY, TRAINERS - case.count)
        if case.event in ("paused", "cut off"):
            seen = len(run.rows)
            comes_back()
            run.wait(1, TRAINERS)
            back = next(n for n, row in enumerate(run.rows[seen:], 1) if row["trainers"] == TRAINERS)
        ends()
        return run.found(back)


Parts = tuple[Run, Callable[[], None], Callable[[], None], Callable[[], None]]
"""A run; what happens to it, what takes that back, what waits for its end."""


@contextmanager
def _here(store: Path, folder: Path, case: Loss) -> Iterator[Parts]:
    knobs = {key.replace(".", "__"): value for key, value in KNOBS.items()}
    if case.event == LEFT:
        knobs["strategy__on_trainer_loss"] = "drop"
    fleet = Fleet(store, folder / "run", TRAINERS, "--seed", str(case.seed), **knobs)
    run = Run(folder / "run", fleet)
    try:
        until(lambda: bool(run.rows), PATIENCE, "the first round")
        victims = [fleet.member(str(TRAINERS - 1 - place)) for place in range(case.count)]

        def happens() -> None:
            for victim in victims:
                victim.kill() if case.event in ("killed", LEFT) else victim.suspend()

        def comes_back() -> None:
            for victim in victims:
                victim.resume()

        def ends() -> None:
            code, said = fleet.ends()
            assert code == 0, said

        yield run, happens, comes_back, ends
    finally:
        fleet.process.kill()
        fleet.process.communicate()


@contextmanager
def _across_hosts(store: Path, folder: Path, case: Loss) -> Iterator[Parts]:
    """The trainers that will be cut off are on a host of their own."""
    with netns.hosts(2) as (one, two):
        knobs = {**KNOBS, "strategy.listen": f"{one.address}:{PORT}", "strategy.local_trainers": TRAINERS - case.count}
        words = [word for key, value in knobs.items() for word in ("--set", f"{key}={value}")]
        words += ["--seed", str(case.seed), "--run-dir", str(folder / "run")]
        line = ["train", str(store), "-s", "tma", "-w", str(TRAINERS), *MODEL, *words]
        first = within(one, line, folder / "first")
        second: subprocess.Popen[str] | None = None
        try:
            until(lambda: "Waiting for trainers" in (folder / "first").read_text(), PATIENCE, "the server")
            numbers = f"{TRAINERS - case.count}-{TRAINERS - 1}"
            line = ["join", f"{one.address}:{PORT}", str(store), "--trainers", numbers]
            second = within(two, line, folder / "second")
            joined = second

            def ends() -> None:
                assert first.wait(PATIENCE) == 0, (folder / "first").read_text()
                assert joined.wait(PATIENCE) == 0, (folder / "second").read_text()

            yield Run(folder / "run"), two.cut, two.mend, ends
        finally:
            for process in (first, second):
                if process is not None and process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                    process.wait()


def plan(seeds: int) -> list[Loss]:
    cases = [Loss("none", 0, seed) for seed in range(1, seeds + 1)]
    return cases + [Loss(e, count, s) for s in range(1, seeds + 1) for e in EVENTS for count in (1, 2)]


def table(cells: list[dict[str, Any]]) -> str:
    """One line for every event and number of trainers, means over seeds."""

    def mean(found: list[dict[str, Any]], key: str) -> float:
        return sum(cell[key] for cell in found) / len(found)

    whole = {cell["seed"]: cell for cell in cells if cell["event"] == "none"}
    lines = ["| | runs | val | test | test lost, points | the most | rounds without | back in round |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for event, count in [("none", 0), *((event, count) for event in EVENTS for count in (1, 2))]:
        found = [cell for cell in cells if (cell["event"], cell["count"]) == (event, count)]
        if not found:
            continue
        lost = [100 * (whole[cell["seed"]]["test"] - cell["test"]) for cell in found]
        name = "nothing happens" if event == "none" else f"{count} of {TRAINERS} {event}"
        backs = [cell["back"] for cell in found if cell["back"] is not None]
        figures = [f"{mean(found, 'val'):.4f}", f"{mean(found, 'test'):.4f}"]
        figures += ["", ""] if event == "none" else [f"{sum(lost) / len(lost):+.2f}", f"{max(lost):+.2f}"]
        figures += [f"{mean(found, 'without'):.0f}", str(max(backs)) if backs else ""]
        lines.append(f"| {name} | {len(found)} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main() -> None:
    path = RESULTS / "tma_losses.json"
    cells = {cell["cell"]: cell for cell in json.loads(path.read_text())["cells"]} if path.exists() else {}
    with tempfile.TemporaryDirectory(prefix="losses-") as scratch:
        graph = make_easy(Path(scratch))
        assert graph.store is not None
        for place, case in enumerate(plan(int(sys.argv[1]) if len(sys.argv) > 1 else 1)):
            if case.name in cells:
                continue
            folder = Path(scratch) / str(place)
            folder.mkdir()
            found = try_loss(graph.store.path, folder, case)
            cells[case.name] = {"cell": case.name, **asdict(case), **asdict(found)}
            write_results("tma_losses", list(cells.values()))
            print(case.name, found, flush=True)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(list(cells.values()))}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
