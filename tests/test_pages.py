"""Documentation pages: quoted messages are in the source, all benchmarks are listed, links point to files."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
GAP = "…"


@cache
def source_strings() -> list[str]:
    """Every string of the source, with a gap for each formatted value."""
    strings = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                strings.append("".join(v.value if isinstance(v, ast.Constant) else GAP for v in node.values))
    return strings


def is_in_source(message: str) -> bool:
    """True if some string has the message's pieces in order; any text may stand in a gap."""
    pieces = [re.escape(piece.strip()) for piece in message.split(GAP) if piece.strip(" .:;,()")]
    pattern = re.compile(".*".join(pieces), re.DOTALL)
    return any(pattern.search(text) for text in source_strings())


def quoted_messages() -> list[str]:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    return [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("message", quoted_messages())
def test_quoted_messages_are_in_the_source(message: str) -> None:
    assert is_in_source(message)


def test_an_invented_message_is_not_in_the_source() -> None:
    assert not is_in_source("the moon is … than expected: wait")


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCS], ids=lambda path: path.name)
def test_links_point_to_files(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_every_benchmark_is_listed() -> None:
    """If this fails, add the row to docs/benchmarks.md and run benchmarks/index.py."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        assert f"{path.stem}.py" in page, path.name


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_scripts_named_on_pages_exist(path: Path) -> None:
    for name in re.findall(
        r"\b((?:benchmarks|tests|examples)/[\w/.-]+\.(?:py|json|toml|sh|yaml|sbatch))\b", path.read_text()
    ):
        assert (ROOT / name).exists(), name


def test_files_named_in_the_architecture_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    for name in re.findall(r"`([\w/]+/[\w/]+\.(?:py|js|cpp))`", page):
        assert (ROOT / "src" / "gnnfleet" / name).exists() or (ROOT / name).exists(), name
