"""Notes for the user, beside the result on standard output: log records of the module that writes them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar

from rich.console import Console

rewrite: ContextVar[Callable[[str], str]] = ContextVar("rewrite", default=lambda text: text)
"""Adapts notes to the syntax of the user: that of the command line, or of Python."""


class _NoteHandler(logging.Handler):
    """Prints notes to standard error, unless the program has configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_note", False) and not logging.getLogger().handlers:
            console = Console(stderr=True, highlight=False, emoji=False, force_jupyter=False)
            console.print(record.getMessage(), markup=False, soft_wrap=True)


def print_note(text: str, *, quiet: bool = False) -> None:
    """Log a note for the user. It is printed to standard error if the program has no handler of its own."""
    if quiet:
        return
    logger = logging.getLogger("gnnfleet")
    if not logger.hasHandlers():
        logger.addHandler(_NoteHandler())
        logger.setLevel(logger.level or logging.INFO)
    package = str(sys._getframe(1).f_globals.get("__package__"))  # of a module run with -m, too
    child = logging.getLogger(package if package.startswith("gnnfleet") else "gnnfleet")
    child.info("%s", rewrite.get()(text), extra={"is_note": True})
