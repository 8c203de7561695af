"""Allowed imports between packages. A new one is a decision: change this table and docs/architecture.md together."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import gnnfleet
from gnnfleet.comm.world import World
from gnnfleet.strategies.registry import STRATEGIES

ROOT = Path(gnnfleet.__file__).parent

# Package → packages it may import, besides itself: a folder or a module directly below gnnfleet.
_BASE = {"errors", "units"}
_FILES = {*_BASE, "io"}
_GRAPH = {*_FILES, "report", "ops"}
_TASKS = {*_GRAPH, "graph", "nn", "comm"}
_CONFIG = {*_TASKS, "tasks", "sharded", "strategies"}
_LAUNCH = {*_CONFIG, "config", "training"}
_USES = {*_LAUNCH, "launch"}
_SESSION = {*_USES, "planner", "inference", "analysis"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "io": _BASE,
    "report": _FILES,
    "comm": {*_FILES, "report"},
    "ops": {*_BASE, "_native"},
    "graph": _GRAPH,
    "nn": {*_BASE, "ops", "graph"},
    "tasks": _TASKS,
    "sharded": {*_TASKS, "tasks"},
    "strategies": {*_TASKS, "tasks", "sharded"},
    "config": _CONFIG,
    "training": {*_CONFIG, "config"},
    "launch": _LAUNCH,
    "planner": _USES,
    "inference": _USES,
    "analysis": _USES,
    "session": _SESSION,
    "cli": {*_SESSION, "session"},
    "api": {*_SESSION, "session"},
    "fleet": _SESSION,
    "__init__": {"errors", "graph", "nn", "api", "fleet"},
    "__main__": {"cli"},
}


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def is_module(name: tuple[str, ...]) -> bool:
    path = ROOT.joinpath(*name[1:])
    return name[0] == "gnnfleet" and (path.is_dir() or path.with_suffix(".py").is_file())


def imports_of(path: Path) -> set[tuple[str, ...]]:
    """The gnnfleet modules a file imports, type-checking blocks and function bodies included."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the package"
            module = tuple((node.module or "").split("."))
            imported |= {(*module, alias.name) if is_module((*module, alias.name)) else module for alias in node.names}
    return {module[1:] for module in imported if module[0] == "gnnfleet" and len(module) > 1}


def test_packages_import_only_allowed_packages() -> None:
    violations = []
    for path in sorted(ROOT.rglob("*.py")):
        package = package_of(path)
        assert package in ALLOWED, f"{path}: a package that docs/architecture.md does not show"
        forbidden = {module[0] for module in imports_of(path)} - {package} - ALLOWED[package]
        violations += [f"{path.relative_to(ROOT)} imports {other}" for other in forbidden]
    assert not violations, violations


def test_a_strategy_never_imports_another() -> None:
    for path in sorted((ROOT / "strategies").rglob("*.py")):
        folder = path.relative_to(ROOT).parts[1].removesuffix(".py")
        for module in imports_of(path):
            if module[0] == "strategies" and len(module) > 1:
                # The registry loads any of them by name.
                is_shared = folder == "registry" or not (ROOT / "strategies" / module[1]).is_dir()
                assert module[1] == folder or is_shared, (
                    f"{path} imports another strategy: move shared code to a lower package"
                )


def test_only_tma_launchers_import_a_concrete_strategy() -> None:
    """All others use its spec from the registry."""
    strategies = {path.name for path in (ROOT / "strategies").iterdir() if path.is_dir()}
    violations = []
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT)
        if name.parts[0] == "strategies" or (name.parts[0] == "launch" and name.name.startswith("tma_")):
            continue
        concrete = {m for m in imports_of(path) if m[0] == "strategies" and len(m) > 1 and m[1] in strategies}
        violations += [f"{name} imports {'.'.join(module)}" for module in concrete]
    assert not violations, violations


def test_only_the_registry_and_specs_load_a_strategy_by_name() -> None:
    loaders = {"strategies/registry.py", "strategies/spec.py"}
    for path in ROOT.rglob("*.py"):
        if "import_module" in path.read_text() and path.relative_to(ROOT).as_posix() not in loaders:
            assert "strategies" not in path.read_text(), f"{path}: strategies are loaded by strategies/registry.py"


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_spec_loads_its_own_strategy_only(name: str) -> None:
    paths = re.findall(r'lazy\("(.*?):', (ROOT / "strategies" / name / "__init__.py").read_text())
    assert paths and all(path.startswith(f"gnnfleet.strategies.{name}.") for path in paths)


def test_no_two_modules_import_each_other() -> None:
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).with_suffix("").parts
        graph[name[:-1] if name[-1] == "__init__" else name] = imports_of(path)
    for name, targets in graph.items():
        for target in targets:
            assert name not in graph.get(target, set()) or name == target, f"{name} and {target} import each other"


def test_native_core_does_not_depend_on_python() -> None:
    for path in (ROOT.parents[1] / "csrc").glob("*"):
        if not path.name.startswith("bind"):
            text = path.read_text()
            assert "nanobind" not in text and "Python.h" not in text and "torch/" not in text, path


def test_no_world_is_made_at_import() -> None:
    """A World belongs to a run: one at module or class level would share traffic and clock with every run."""
    for path in sorted((ROOT / "sharded").rglob("*.py")):
        name = ".".join(("gnnfleet", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        module = import_module(name)
        owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
        attributes = [
            (owner, key) for owner in owners for key, value in vars(owner).items() if isinstance(value, World)
        ]
        assert not attributes, attributes
