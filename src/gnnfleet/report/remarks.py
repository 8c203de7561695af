"""Remarks: sentences for the user beside a result, on standard error."""

from __future__ import annotations

from rich.console import Console


def print_note(text: str, *, quiet: bool = False) -> None:
    """A sentence for the user beside the result."""
    if not quiet:
        Console(stderr=True, highlight=False, emoji=False).print(text, markup=False, soft_wrap=True)
