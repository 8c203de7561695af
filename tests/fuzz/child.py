"""``python -m tests.fuzz.child SUBJECT FIRST COUNT``: runs cases one after another and reports the outcome of each.

A case may crash, hang or allocate all memory, so cases run in this separate process. Each case is announced before it
runs. Memory is limited to slightly more than is in use when the first case begins.
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

MAX_RESERVED = 6 << 30
"""Bytes of address space: pyarrow and DuckDB reserve some without using them."""
MAX_GROWTH = 300 << 20
"""Bytes of memory that a case may use."""
MAX_MESSAGE = 3000
"""Characters of a message."""


def main() -> None:
    name, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    subject = SUBJECTS[name]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        undamaged = Path(scratch) / "good"
        undamaged.mkdir()
        subject.make(undamaged)
        expected = subject.read(undamaged)
        limit_memory()
        for number in range(first, first + count):
            folder = Path(scratch) / "case"
            shutil.copytree(undamaged, folder, symlinks=True)
            damage = subject.damage(folder, random.Random(f"{name} {number}"))
            send({"case": number, "damage": damage})
            before, problem = peak_memory(), find_problem(subject, folder, damage, expected)
            if problem is None and peak_memory() - before > MAX_GROWTH:
                problem = f"took {(peak_memory() - before) >> 20} MiB"
            send({"case": number, "problem": problem})
            shutil.rmtree(folder)


def find_problem(subject: Subject, folder: Path, damage: str, expected: object) -> str | None:
    """Read a damaged case. None if the reader refused it with its own error or read the original content."""
    try:
        content = subject.read(folder)
    except GnnfleetError as error:
        text = str(error)
        if not text.strip() or len(text) > MAX_MESSAGE:
            return f"a message of {len(text)} characters"
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {error}\n" + "".join(traceback.format_exception(error)[-4:])
    if subject.exact and not damage.startswith("forged") and content != expected:
        return "silently accepted: the content read differs from the content written"
    return None


def limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_RESERVED, used + MAX_RESERVED))


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def send(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
