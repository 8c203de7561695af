"""The public API: every name resolves, and heavy modules load only when needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import gnnfleet
import gnnfleet.nn


def test_public_names_resolve_to_the_objects_type_checkers_see() -> None:
    source = ast.parse(Path(gnnfleet.__file__).read_text())
    original_names = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for name in gnnfleet.__all__:
        assert getattr(gnnfleet, name).__name__ == original_names[name]


def test_all_names_of_nn_are_exported() -> None:
    names: dict[str, object] = {}
    exec("from gnnfleet.nn import *", names)
    source = ast.parse(Path(str(gnnfleet.nn.__file__)).read_text())
    imports = [node for node in ast.walk(source) if isinstance(node, ast.ImportFrom)]
    public = {alias.asname or alias.name for node in imports for alias in node.names}
    assert (
        public - {"annotations", "Any", "TYPE_CHECKING", "import_module"}
        == {*gnnfleet.nn.__all__}
        == {*names} - {"__builtins__"}
    )


def test_help_does_not_load_torch() -> None:
    script = "import sys, gnnfleet.cli.main; sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
