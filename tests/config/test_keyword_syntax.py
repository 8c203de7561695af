"""Messages of gf.train name keyword arguments; notes go through logging."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gnnfleet
from gnnfleet.config.keyword_syntax import as_keywords, keyword_syntax
from gnnfleet.errors import ConfigError
from gnnfleet.report.remarks import print_note
from gnnfleet.training.run_dir import RunDirectory

ROOT = Path(gnnfleet.__file__).parent
# Parts of the package that only the command line reaches.
COMMANDS = ("cli/", "graph/ingest/", "graph/datasets/", "analysis/compare", "session/torchrun")
COMMANDS += ("launch/confirmed_model", "report/http", "comm/world", "config/keyword_syntax")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pass --split 0.6/0.2/0.2 or --split 20-per-class", 'pass split="0.6/0.2/0.2" or split="20-per-class"'),
        ("choose another --split, as 0.6", "choose another split, as 0.6"),
        ("use --workers 1, or --strategy sar|tma", 'use workers=1, or strategy="sar"|"tma"'),
        ("use --set strategy.memory_budget=SIZE or", "use memory_budget=SIZE or"),
        ("use --set evaluation_memory=SIZE or", "use evaluation_memory=SIZE or"),
        ("as --set 'strategy.fanouts=[15,10]'", "as fanouts=[15, 10]"),
        ("--memory is the budget", "memory is the budget"),
        ("set model.embedding=64 to", 'set model={"embedding": 64} to'),
        ("set link.exclude=disjoint:0.3 to", 'set **{"link.exclude": "disjoint:0.3"} to'),
        ("train.patience needs: set train.patience=0.", "patience needs: set patience=0."),
        ("did you mean model.hidden?", 'did you mean model={"hidden": …}?'),
        ("strategy.fanouts=[15,10,5] has 3", "fanouts=[15, 10, 5] has 3"),
        ("with --run-dir /tmp/a/b.c --resume", 'with run_dir="/tmp/a/b.c" resume=True'),
        ("--max-restarts 2; use --resume.", "max_restarts=2; use resume=True."),
        ("/tmp/train.py, line 3: model.py", "/tmp/train.py, line 3: model.py"),
        ("gnnfleet predict --events FILE, or --task link", "gnnfleet predict --events FILE, or --task link"),
    ],
)
def test_flags_and_settings_become_keywords(text: str, expected: str) -> None:
    assert as_keywords(text) == expected


def test_no_message_that_a_python_program_can_reach_keeps_a_flag() -> None:
    kept = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.relative_to(ROOT).as_posix().startswith(COMMANDS):
            continue
        for text in _messages(ast.parse(path.read_text())):
            if "--" not in text:
                continue
            rewritten = re.sub(r"gnnfleet [a-z]+ [^.;:)]*", "", as_keywords(text))
            if re.search(r"--[a-z]|(?<!gnnfleet )--", rewritten):
                kept.append((path.name, rewritten))
    assert not kept


def _messages(tree: ast.AST) -> Iterator[str]:
    """All texts but docstrings, with 7 in place of values."""
    parts = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(value.value) if isinstance(value, ast.Constant) else "7" for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def test_errors_and_notes_are_rewritten_inside_only(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, "gnnfleet")
    with pytest.raises(ConfigError, match=r"^use workers=1$"), keyword_syntax():
        print_note("see --workers 2")
        print_note("hidden", quiet=True)
        raise ConfigError("use --workers 1")
    print_note("see --workers 2")
    assert [record.getMessage() for record in caplog.records] == ["see workers=2", "see --workers 2"]
    assert {record.name for record in caplog.records} == {"gnnfleet"}
    RunDirectory(tmp_path).log("from a package", quiet=False)
    assert caplog.records[-1].name == "gnnfleet.training"


def test_notes_are_printed_unless_the_program_configures_logging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, root = logging.getLogger("gnnfleet"), logging.getLogger()
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    handlers = root.handlers
    monkeypatch.setattr(root, "handlers", [])
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    print_note("printed")
    logging.getLogger("gnnfleet.graph").info("a detail")
    monkeypatch.setattr(root, "handlers", handlers)
    print_note("logged only")
    assert capsys.readouterr().err == "printed\n"
