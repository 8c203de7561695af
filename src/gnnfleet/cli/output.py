"""Output of commands: tables for people, or one JSON object.

Results go to standard output, everything else to standard error. With ``--json``, standard output has one JSON object
and nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from gnnfleet.report.metrics import none_if_not_finite


def print_result(result: Mapping[str, Any], *, as_json: bool, human: Iterable[Any] = ()) -> None:
    """Print the result of a command: the JSON object, or ``human`` renderables."""
    if as_json:
        sys.stdout.write(json.dumps(none_if_not_finite(result), allow_nan=False) + "\n")
        sys.stdout.flush()
        return
    # Ids, class names and paths must not be read as markup.
    console = Console(width=None if sys.stdout.isatty() else 120, emoji=False, markup=False)
    for item in human:
        console.print(item)


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table whose numbers are right-aligned and grouped by thousands."""
    rich_table = Table(title=title, title_justify="left")
    cells = [[_cell(value) for value in row] for row in rows]
    for i, name in enumerate(columns):
        numeric = all(_is_number(row[i]) for row in cells)
        rich_table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        rich_table.add_row(*row)
    return rich_table


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value)


def _is_number(text: str) -> bool:
    return not text or text.replace(",", "").replace(".", "").replace("-", "").replace(" %", "").isdigit()
