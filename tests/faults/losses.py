"""``python -m tests.faults.losses [SEEDS]``: accuracy of tma with 1 or 2 of 4 trainers killed, paused or cut off.

Nodes of killed trainers are reassigned, or dropped in a row of their own. Paused and cut-off trainers return later.
Each run is compared with the undisturbed run of the same seed. Finished runs are kept
(benchmarks/results/tma_losses.json) and not repeated; the table goes to docs/tma.md. Cutting links needs root.
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
from tests.faults.driving import FAST_TMA, MODEL, TmaDriver, start_on_host
from tests.faults.suite import make_easy
from tests.faults.trials import TIMEOUT, wait_until
from tests.shell import set_options

TRAINERS, ROUNDS, ROUNDS_BEFORE, ROUNDS_AWAY = 4, 30, 8, 8
"""Trainers, rounds of a run, rounds before the fault, rounds until paused trainers return."""
SETTINGS = {**FAST_TMA, "strategy.interval": 1, "strategy.silence": 2, "train.epochs": ROUNDS}
DROPPED = "killed, nodes left"
EVENTS = ("killed", DROPPED, "paused", "cut off")
PORT = 29412
PAGE = Path(__file__).parents[2] / "docs" / "tma.md"
BEGIN, END = "<!-- losses -->", "<!-- /losses -->"


@dataclass(frozen=True)
class LossCase:
    """``count`` trainers are killed, paused or cut off; 0 in the undisturbed run."""

    event: str
    count: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.event}, {self.count}, {self.seed}"


@dataclass
class LossResult:
    """Metrics, rounds with missing trainers, and rounds until all trainers were back."""

    val: float
    test: float
    without: int
    back: int | None


class Run:
    """A run of four trainers; faults hit those with the highest numbers."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.run_dir / "metrics.jsonl")

    def wait(self, rounds: int, trainers: int) -> None:
        """Wait until ``rounds`` more rounds were closed by ``trainers`` trainers."""
        first = len(self.rows)
        wait_until(lambda: sum(row["trainers"] == trainers for row in self.rows[first:]) >= rounds, TIMEOUT, "rounds")

    def read_result(self, back: int | None) -> LossResult:
        rows, record = self.rows, json.loads((self.run_dir / "record.json").read_bytes())
        assert [row["epoch"] for row in rows] == list(range(1, ROUNDS + 1))
        without = sum(row["trainers"] < TRAINERS for row in rows)
        return LossResult(record["metrics"]["val"], record["metrics"]["test"], without, back)


def try_loss(store: Path, folder: Path, case: LossCase) -> LossResult:
    """Run a case; raise AssertionError if it does not reach its end."""
    with ExitStack() as stack:
        enter = _on_two_hosts if case.event == "cut off" else _on_one_host
        run, cause_fault, undo_fault, wait_for_exit = stack.enter_context(enter(store, folder, case))
        run.wait(ROUNDS_BEFORE, TRAINERS)
        back = None
        if case.count:
            cause_fault()
            run.wait(ROUNDS_AWAY, TRAINERS - case.count)
        if case.event in ("paused", "cut off"):
            first = len(run.rows)
            undo_fault()
            run.wait(1, TRAINERS)
            back = next(n for n, row in enumerate(run.rows[first:], 1) if row["trainers"] == TRAINERS)
        wait_for_exit()
        return run.read_result(back)


FaultyRun = tuple[Run, Callable[[], None], Callable[[], None], Callable[[], None]]
"""A run, and functions that cause the fault, undo it and wait for the end of the run."""


@contextmanager
def _on_one_host(store: Path, folder: Path, case: LossCase) -> Iterator[FaultyRun]:
    settings = {key.replace(".", "__"): value for key, value in SETTINGS.items()}
    if case.event == DROPPED:
        settings["strategy__on_trainer_loss"] = "drop"
    driver = TmaDriver(store, folder / "run", TRAINERS, "--seed", str(case.seed), **settings)
    run = Run(folder / "run")
    try:
        wait_until(lambda: bool(run.rows), TIMEOUT, "the first round")
        victims = [driver.process_of(str(TRAINERS - 1 - index)) for index in range(case.count)]

        def cause_fault() -> None:
            for victim in victims:
                victim.kill() if case.event in ("killed", DROPPED) else victim.suspend()

        def undo_fault() -> None:
            for victim in victims:
                victim.resume()

        def wait_for_exit() -> None:
            code, stderr = driver.wait_for_exit()
            assert code == 0, stderr

        yield run, cause_fault, undo_fault, wait_for_exit
    finally:
        driver.process.kill()
        driver.process.communicate()


@contextmanager
def _on_two_hosts(store: Path, folder: Path, case: LossCase) -> Iterator[FaultyRun]:
    """The trainers that will be cut off are on a host of their own."""
    with netns.hosts(2) as (host, other_host):
        listen = {"strategy.listen": f"{host.address}:{PORT}", "strategy.local_trainers": TRAINERS - case.count}
        options = [*set_options({**SETTINGS, **listen}), "--seed", str(case.seed), "--run-dir", str(folder / "run")]
        train = ["train", str(store), "-s", "tma", "-w", str(TRAINERS), *MODEL, *options]
        first = start_on_host(host, train, folder / "first")
        second: subprocess.Popen[str] | None = None
        try:
            wait_until(lambda: "Waiting for trainers" in (folder / "first").read_text(), TIMEOUT, "the server")
            numbers = f"{TRAINERS - case.count}-{TRAINERS - 1}"
            join = ["join", f"{host.address}:{PORT}", str(store), "--trainers", numbers]
            second = start_on_host(other_host, join, folder / "second")
            joined = second

            def wait_for_exit() -> None:
                assert first.wait(TIMEOUT) == 0, (folder / "first").read_text()
                assert joined.wait(TIMEOUT) == 0, (folder / "second").read_text()

            yield Run(folder / "run"), other_host.cut, other_host.mend, wait_for_exit
        finally:
            for process in (first, second):
                if process is not None and process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                    process.wait()


def plan(seeds: int) -> list[LossCase]:
    cases = [LossCase("none", 0, seed) for seed in range(1, seeds + 1)]
    return cases + [LossCase(e, count, s) for s in range(1, seeds + 1) for e in EVENTS for count in (1, 2)]


def table(cells: list[dict[str, Any]]) -> str:
    """One row for every event and number of trainers: means over seeds."""

    def mean(group: list[dict[str, Any]], key: str) -> float:
        return sum(cell[key] for cell in group) / len(group)

    undisturbed = {cell["seed"]: cell for cell in cells if cell["event"] == "none"}
    lines = ["| | runs | val | test | test lost, points | the most | rounds without | back in round |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for event, count in [("none", 0), *((event, count) for event in EVENTS for count in (1, 2))]:
        group = [cell for cell in cells if (cell["event"], cell["count"]) == (event, count)]
        if not group:
            continue
        losses = [100 * (undisturbed[cell["seed"]]["test"] - cell["test"]) for cell in group]
        name = "nothing happens" if event == "none" else f"{count} of {TRAINERS} {event}"
        backs = [cell["back"] for cell in group if cell["back"] is not None]
        figures = [f"{mean(group, 'val'):.4f}", f"{mean(group, 'test'):.4f}"]
        figures += ["", ""] if event == "none" else [f"{sum(losses) / len(losses):+.2f}", f"{max(losses):+.2f}"]
        figures += [f"{mean(group, 'without'):.0f}", str(max(backs)) if backs else ""]
        lines.append(f"| {name} | {len(group)} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main() -> None:
    path = RESULTS / "tma_losses.json"
    cells = {cell["cell"]: cell for cell in json.loads(path.read_text())["cells"]} if path.exists() else {}
    with tempfile.TemporaryDirectory(prefix="losses-") as scratch:
        graph = make_easy(Path(scratch))
        assert graph.store is not None
        for number, case in enumerate(plan(int(sys.argv[1]) if len(sys.argv) > 1 else 1)):
            if case.name in cells:
                continue
            folder = Path(scratch) / str(number)
            folder.mkdir()
            result = try_loss(graph.store.path, folder, case)
            cells[case.name] = {"cell": case.name, **asdict(case), **asdict(result)}
            write_results("tma_losses", list(cells.values()))
            print(case.name, result, flush=True)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(list(cells.values()))}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
