"""``python -m tests.fuzz [SECONDS] [FIRST]``: cases of all subjects until the time is over (``make fuzz``)."""

from __future__ import annotations

import sys
import time

from tests.fuzz.subjects import SUBJECTS
from tests.fuzz.trials import problems

ROUND = 200


def main() -> None:
    seconds, first = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    started, all_problems, count = time.monotonic(), [], 0
    while not all_problems and time.monotonic() - started < seconds:
        for name in SUBJECTS:
            new_problems = problems(name, ROUND, first)
            all_problems += new_problems
            count += ROUND
            print(f"{name} {first} to {first + ROUND - 1}: {len(new_problems)} problems", flush=True)
        first += ROUND
    for problem in all_problems:
        print(problem)
    print(f"{count} cases in {time.monotonic() - started:.0f} s, {len(all_problems)} problems; next first case {first}")
    sys.exit(bool(all_problems))


if __name__ == "__main__":
    main()
