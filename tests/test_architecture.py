"""Who may import whom. A new arrow is a decision: change the table here and docs/architecture.md together."""

from __future__ import annotations

import ast
from pathlib import Path

import gnnfleet

ROOT = Path(gnnfleet.__file__).parent

# Room → rooms it may import, besides itself. A room is a folder or a module directly below the package.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "report": {"errors"},
    "comm": {"errors", "report"},
    "ops": {"errors", "_native"},
    "graph": {"errors", "report", "ops"},
    "nn": {"errors", "ops", "graph"},
    "sharded": {"errors", "report", "ops", "graph", "nn", "comm"},
    "strategies": {"errors", "report", "ops", "graph", "nn", "comm", "sharded"},
    "run": {"errors", "report", "ops", "graph", "nn", "comm", "sharded", "strategies"},
    "__init__": {"errors", "report", "graph", "nn", "run"},
    "__main__": {"run"},
}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[tuple[str, ...]]:
    """The gnnfleet modules a file imports, type-checking blocks and function bodies included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrow"
            module = tuple((node.module or "").split("."))
            found |= {(*module, alias.name) if module == ("gnnfleet",) else module for alias in node.names}
    return {module[1:] for module in found if module[0] == "gnnfleet" and len(module) > 1}


def test_arrows_point_one_way() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        room = room_of(path)
        assert room in ALLOWED, f"{path}: a room that docs/architecture.md does not draw"
        foreign = {module[0] for module in imports_of(path)} - {room} - ALLOWED[room]
        wrong += [f"{path.relative_to(ROOT)} imports {other}" for other in foreign]
    assert not wrong, wrong


def test_a_strategy_never_imports_another() -> None:
    for path in sorted((ROOT / "strategies").rglob("*.py")):
        own = path.relative_to(ROOT).parts[1].removesuffix(".py")
        for module in imports_of(path):
            if module[0] == "strategies" and len(module) > 1:
                shared = not (ROOT / "strategies" / module[1]).is_dir()
                assert module[1] == own or shared, f"{path} imports another strategy: what two share moves down"


def test_no_two_modules_import_each_other() -> None:
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).with_suffix("").parts
        graph[name[:-1] if name[-1] == "__init__" else name] = imports_of(path)
    for name, targets in graph.items():
        for target in targets:
            assert name not in graph.get(target, set()) or name == target, f"{name} and {target} import each other"


def test_the_native_core_knows_no_python() -> None:
    for path in (ROOT.parents[1] / "csrc").glob("*"):
        if not path.name.startswith("bind"):
            text = path.read_text()
            assert "nanobind" not in text and "Python.h" not in text and "torch/" not in text, path
