"""``python -m tests.fuzz.child SUBJECT FIRST COUNT``: tries cases one after another and says what came of each.

A process of its own, since a case may crash, hang or ask for all memory: whoever reads finds the last case announced.
Memory is limited to a little more than what is in use when the first case begins.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

from gnnfleet.errors import GnnfleetError
from tests.fuzz.subjects import SUBJECTS, Subject

ROOM = 6 << 30
"""Addresses that may be asked for: pyarrow and DuckDB reserve some without using them."""
GROWTH = 300 << 20
"""Bytes that a case may come to use."""
LONGEST = 3000
"""Characters of a message."""


def main() -> None:
    name, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    subject = SUBJECTS[name]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        good = Path(scratch) / "good"
        good.mkdir()
        subject.make(good)
        expected = subject.read(good)
        limit_memory()
        for number in range(first, first + count):
            folder = Path(scratch) / "case"
            shutil.copytree(good, folder, symlinks=True)
            said = subject.hurt(folder, random.Random(f"{name} {number}"))
            say({"case": number, "did": said})
            before, problem = most_memory(), judge(subject, folder, said, expected)
            if problem is None and most_memory() - before > GROWTH:
                problem = f"took {(most_memory() - before) >> 20} MiB"
            say({"case": number, "problem": problem})
            shutil.rmtree(folder)


def judge(subject: Subject, folder: Path, said: str, expected: object) -> str | None:
    """What is wrong with how a reader took a case; None where it refused in its own words, or read what was written."""
    try:
        found = subject.read(folder)
    except GnnfleetError as error:
        text = str(error)
        if not text.strip() or len(text) > LONGEST:
            return f"a message of {len(text)} characters"
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {error}\n" + "".join(traceback.format_exception(error)[-4:])
    if subject.exact and not said.startswith("forged") and found != expected:
        return "silently accepted: what was read is not what was written"
    return None


def limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))


def most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def say(word: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
