"""Language of the source: identifiers that say nothing, docstrings that open with a clause, names used twice, length.

python -m tests.test_language     # prints the counts
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gnnfleet"

EMPTY_NAMES = ("found", "each", "words")
CLAUSE = re.compile(r"(What|Whether|Who|Whoever|Where|How)\b")
MAX_EMPTY_NAMES, MAX_CLAUSES, MAX_FUNCTION_LINES = 100, 20, 70
COMMANDS = SOURCE / "cli"
"""Signatures of commands are as long as their options are many."""


@cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path, tree in modules().items():
        for node in ast.walk(tree):
            yield path, node


def empty_names() -> Counter[str]:
    return Counter(node.id for _, node in nodes() if isinstance(node, ast.Name) and node.id in EMPTY_NAMES)


def clause_docstrings() -> list[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    docstrings = [(path, ast.get_docstring(node) or "") for path, node in nodes() if isinstance(node, kinds)]
    return [f"{path.relative_to(SOURCE)}: {text.splitlines()[0]}" for path, text in docstrings if CLAUSE.match(text)]


def ambiguous_types() -> dict[str, list[str]]:
    """Public classes whose name is defined in more than one module."""
    places: dict[str, set[str]] = defaultdict(set)
    for path, node in nodes():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            places[node.name].add(str(path.relative_to(SOURCE)))
    return {name: sorted(paths) for name, paths in places.items() if len(paths) > 1}


def long_functions() -> list[str]:
    functions = [(path, node) for path, node in nodes() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        f"{path.relative_to(SOURCE)}: {node.name}, {_body_lines(path, node)} lines"
        for path, node in functions
        if _body_lines(path, node) > MAX_FUNCTION_LINES
    ]


def _body_lines(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    start = node.body[0].lineno if path.is_relative_to(COMMANDS) else node.lineno
    return (node.end_lineno or start) - start + 1


def test_few_identifiers_say_nothing() -> None:
    assert empty_names().total() < MAX_EMPTY_NAMES, empty_names()


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert len(clause_docstrings()) < MAX_CLAUSES, clause_docstrings()


def test_public_type_names_are_unique() -> None:
    assert not ambiguous_types()


def test_functions_are_short() -> None:
    assert not long_functions()


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 140


if __name__ == "__main__":
    print(f"identifiers {dict(empty_names())}")
    print(f"docstrings that open with a clause {len(clause_docstrings())}")
    print(f"public type names in several modules {len(ambiguous_types())}")
    print(f"functions above {MAX_FUNCTION_LINES} lines {len(long_functions())}")
    print(f"source lines {sum(path.read_text().count(chr(10)) for path in modules())}")
