"""Runs all tests in two processes: those that mostly wait for other processes, and those that compute.

    python -m tests [PYTEST OPTION …]

The output of the first comes after that of the second. The exit code is 0 if both pass.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WAITING = ("faults", "fuzz", "inference", "launch", "session")


def main(options: list[str]) -> int:
    folder = ROOT / "tests"
    waiting = [*(str(folder / name) for name in WAITING), *map(str, sorted(folder.glob("test_*.py")))]
    computing = [
        str(path) for path in sorted(folder.iterdir()) if (path / "__init__.py").exists() and path.name not in WAITING
    ]
    command = [sys.executable, "-m", "pytest", *options]
    with tempfile.TemporaryFile() as output:
        first = subprocess.Popen([*command, "-p", "no:cacheprovider", *waiting], cwd=ROOT, stdout=output, stderr=output)
        try:
            second = subprocess.run([*command, *computing], cwd=ROOT, check=False)
            first.wait()
        finally:
            first.kill()  # does nothing if it has ended
            output.seek(0)
            sys.stdout.flush()
            sys.stdout.buffer.write(output.read())
            sys.stdout.flush()
    return first.returncode or second.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
