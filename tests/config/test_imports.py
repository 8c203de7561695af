"""Settings, specs and help texts are available without loading torch, which takes seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gnnfleet.strategies.registry import STRATEGIES

CLI = "from gnnfleet.cli.main import main\nsys.argv[1:] = {arguments}\ntry: main()\nexcept SystemExit: pass"


@pytest.mark.parametrize(
    "code",
    [
        "import gnnfleet",
        "import gnnfleet.config.resolve",
        "from gnnfleet.config.resolve import resolve\nresolve({'strategy': {'name': 'tma'}, 'workers': 2})",
        *(f"from gnnfleet.strategies.{name} import SPEC\nassert SPEC.name == {name!r}" for name in STRATEGIES),
        CLI.format(arguments=["--help"]),
        CLI.format(arguments=["--version"]),
        CLI.format(arguments=["train", "--help"]),
        CLI.format(arguments=["join", "--help"]),
    ],
)
def test_torch_is_not_loaded(code: str) -> None:
    script = f"import sys\n{code}\nassert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
