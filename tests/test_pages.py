"""Pages that quote the program: messages are still in the source, benchmarks are all named, links lead somewhere."""

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
def texts() -> list[str]:
    """Every string of the program, with a gap for each value that is put in."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else GAP for v in node.values))
    return found


def is_said(message: str) -> bool:
    """Whether some string has the message's words in order; what a gap stands for may hold words too."""
    words = [re.escape(piece.strip()) for piece in message.split(GAP) if piece.strip(" .:;,()")]
    pattern = re.compile(".*".join(words), re.DOTALL)
    return any(pattern.search(text) for text in texts())


def quoted() -> list[str]:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    return [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("message", quoted())
def test_quoted_messages_are_still_said(message: str) -> None:
    assert is_said(message)


def test_a_message_that_nobody_says_is_noticed() -> None:
    assert not is_said("the moon is … than expected: wait")


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCS], ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_every_benchmark_is_on_the_page() -> None:
    """A page that lacks some: write its row, run benchmarks/index.py."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        assert f"{path.stem}.py" in page, path.name


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_scripts_that_pages_name_are_there(path: Path) -> None:
    for name in re.findall(
        r"\b((?:benchmarks|tests|examples)/[\w/.-]+\.(?:py|json|toml|sh|yaml|sbatch))\b", path.read_text()
    ):
        assert (ROOT / name).exists(), name


def test_files_that_the_architecture_names_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    for name in re.findall(r"`([\w/]+/[\w/]+\.(?:py|js|cpp))`", page):
        assert (ROOT / "src" / "gnnfleet" / name).exists() or (ROOT / name).exists(), name
