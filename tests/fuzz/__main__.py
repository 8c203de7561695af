"""``python -m tests.fuzz [SECONDS] [FIRST]``: all subjects in turn while there is time (``make fuzz``)."""

from __future__ import annotations

import sys
import time

from tests.fuzz.subjects import SUBJECTS
from tests.fuzz.trials import problems

ROUND = 200


def main() -> None:
    seconds, first = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    begun, wrong, tried = time.monotonic(), [], 0
    while not wrong and time.monotonic() - begun < seconds:
        for name in SUBJECTS:
            found = problems(name, ROUND, first)
            wrong += found
            tried += ROUND
            print(f"{name} {first} to {first + ROUND - 1}: {len(found)} wrong", flush=True)
        first += ROUND
    for line in wrong:
        print(line)
    print(f"{tried} cases in {time.monotonic() - begun:.0f} s, {len(wrong)} wrong; the next are from {first}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
