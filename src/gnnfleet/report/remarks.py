"""Notes for the user on standard error, beside the result on standard output."""

from __future__ import annotations

from rich.console import Console


def print_note(text: str, *, quiet: bool = False) -> None:
    if not quiet:
        Console(stderr=True, highlight=False, emoji=False).print(text, markup=False, soft_wrap=True)
