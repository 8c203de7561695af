"""``python -m tests.faults [REPEATS [MINUTES]]``: trials that are not done yet, and the table of docs/reliability.md.

None is begun after so many minutes; the next call goes on. Outcomes are kept one by one in
benchmarks/results/faults.json. A trial that failed or was late is tried again, alone. ``make faults``; root tries hosts
too.
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

from tests.faults.runners import RUNNERS, TOGETHER, Workshop
from tests.faults.suite import LIMIT, Case, Outcome, plan
from tests.faults.table import write_table

ATTEMPTS = 3
"""Of a trial whose run was over before anything was done to it, or that was late on a busy machine."""


class Kept:
    """Outcomes by name, on disk after each."""

    def __init__(self) -> None:
        path = RESULTS / "faults.json"
        cells = json.loads(path.read_text())["cells"] if path.exists() else []
        self.cells: dict[str, dict[str, Any]] = {cell["name"]: cell for cell in cells}
        self._lock = threading.Lock()

    def is_done(self, case: Case) -> bool:
        cell = self.cells.get(case.name)
        return cell is not None and "problem" not in cell and (cell["seconds"] or 0) < LIMIT

    def keep(self, case: Case, found: Outcome | str) -> None:
        told = {"problem": found} if isinstance(found, str) else asdict(found)
        with self._lock:
            self.cells[case.name] = {"name": case.name, **asdict(case), **told}
            write_results("faults", list(self.cells.values()))
        words = found if isinstance(found, str) else f"{found.result}, {found.seconds or 0:.1f} s, load {found.load}"
        print(f"{case.name}: {words}", flush=True)


def attempt(shop: Workshop, kept: Kept, case: Case) -> None:
    try:
        kept.keep(case, RUNNERS[case.how](shop, case))
    except Exception as error:
        kept.keep(case, f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"[:4000])


def main() -> None:
    words = [float(word) for word in sys.argv[1:]]
    repeats, minutes = words[0] if words else 6, words[1] if len(words) > 1 else 60
    begun, kept, cases = time.monotonic(), Kept(), plan(int(repeats))

    def attempt_in_time(case: Case) -> None:
        if time.monotonic() - begun < minutes * 60:
            attempt(shop, kept, case)

    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        shop = Workshop(Path(folder))
        try:
            for how, together in TOGETHER.items():
                waiting = [case for case in cases if case.how == how and not kept.is_done(case)]
                if time.monotonic() - begun < minutes * 60:
                    shop.prepare(waiting)
                with ThreadPoolExecutor(max_workers=together) as pool:
                    list(pool.map(attempt_in_time, waiting))
                for _ in range(ATTEMPTS - 1):
                    for case in [case for case in waiting if not kept.is_done(case)]:
                        attempt_in_time(case)
        finally:
            shop.close()
    wrong = [case.name for case in cases if not kept.is_done(case)]
    write_table([kept.cells[case.name] for case in cases if case.name in kept.cells])
    print(f"{len(cases)} trials, {len(wrong)} wrong or not tried, {time.monotonic() - begun:.0f} s: {', '.join(wrong)}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
