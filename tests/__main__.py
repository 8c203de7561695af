"""``python -m tests``: the whole suite, as ``make test`` runs it. Tests of faults, which wait for most of their time,
run beside all others; what they say comes last, and either's failure is a failure.

``python -m pytest`` runs the same tests one after the other, and takes longer.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

FAULTS = "tests/faults"


def main() -> int:
    line = [sys.executable, "-m", "pytest"]
    with tempfile.TemporaryFile("w+") as said:
        beside = subprocess.Popen([*line, FAULTS], stdout=said, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            others = subprocess.run([*line, f"--ignore={FAULTS}"], check=False).returncode
            code = beside.wait(timeout=1800)
        finally:
            beside.kill()
            beside.wait()
        said.seek(0)
        sys.stdout.write(said.read())
    return others or code


if __name__ == "__main__":
    assert Path(FAULTS).is_dir(), "run it in the checkout"
    sys.exit(main())
