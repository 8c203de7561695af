"""``python -m tests.faults [REPEATS [MINUTES]]``: run missing trials and write the table of docs/reliability.md.

No trial starts after MINUTES; the next call continues. Each outcome is saved to benchmarks/results/faults.json at once.
A trial that failed or was late is run again, alone. ``make faults`` calls this; trials with hosts need root.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, write_results

from tests.faults.runners import MAX_PARALLEL, RUNNERS, TrialContext
from tests.faults.suite import EXIT_LIMIT, Case, Outcome, plan
from tests.faults.table import write_table

ATTEMPTS = 3
"""For a trial whose run finished before the fault, or that was late on a busy machine."""


class OutcomeFile:
    """Outcomes by name of the trial, written to disk after each."""

    def __init__(self) -> None:
        path = RESULTS / "faults.json"
        cells = json.loads(path.read_text())["cells"] if path.exists() else []
        self.cells: dict[str, dict[str, Any]] = {cell["name"]: cell for cell in cells}
        self._lock = threading.Lock()

    def is_done(self, case: Case) -> bool:
        cell = self.cells.get(case.name)
        return cell is not None and "problem" not in cell and (cell["seconds"] or 0) < EXIT_LIMIT

    def save(self, case: Case, outcome: Outcome | str) -> None:
        record = {"problem": outcome} if isinstance(outcome, str) else asdict(outcome)
        with self._lock:
            self.cells[case.name] = {"name": case.name, **asdict(case), **record}
            write_results("faults", list(self.cells.values()))
        failed = isinstance(outcome, str)
        summary = outcome if failed else f"{outcome.result}, {outcome.seconds or 0:.1f} s, load {outcome.load}"
        print(f"{case.name}: {summary}", flush=True)


def attempt(context: TrialContext, outcomes: OutcomeFile, case: Case) -> None:
    try:
        outcomes.save(case, RUNNERS[case.how](context, case))
    except Exception as error:
        outcomes.save(case, f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"[:4000])


def main() -> None:
    arguments = [float(argument) for argument in sys.argv[1:]]
    repeats, minutes = arguments[0] if arguments else 6, arguments[1] if len(arguments) > 1 else 60
    started, outcomes, cases = time.monotonic(), OutcomeFile(), plan(int(repeats))

    def attempt_in_time(case: Case) -> None:
        if time.monotonic() - started < minutes * 60:
            attempt(context, outcomes, case)

    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        context = TrialContext(Path(folder))
        try:
            for runner, workers in MAX_PARALLEL.items():
                pending = [case for case in cases if case.how == runner and not outcomes.is_done(case)]
                if time.monotonic() - started < minutes * 60:
                    context.prepare(pending)
                with ThreadPoolExecutor(max_workers=workers) as pool:
                    list(pool.map(attempt_in_time, pending))
                for _ in range(ATTEMPTS - 1):
                    for case in [case for case in pending if not outcomes.is_done(case)]:
                        attempt_in_time(case)
        finally:
            context.close()
    failed = [case.name for case in cases if not outcomes.is_done(case)]
    write_table([outcomes.cells[case.name] for case in cases if case.name in outcomes.cells])
    print(
        f"{len(cases)} trials, {len(failed)} failed or not run, {time.monotonic() - started:.0f} s: {', '.join(failed)}"
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
