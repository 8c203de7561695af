"""What every command shares: where its words go, how it ends.

Everything human goes to standard error or, for the result itself, to standard output as a table; with ``--json`` the
last line of standard output is one JSON object and nothing else is printed there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gnnfleet.errors import ConfigError, StoreError
from gnnfleet.report.metrics import finite


def no_file(path: Path) -> Path:
    """Of a word that names a store: a file is data that was not imported yet."""
    if path.is_file():
        raise StoreError(f"{path} is a file, not a store: import it first (gnnfleet import --help)")
    return path


StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="The store to train on.", callback=no_file)]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, for machines.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no remarks.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a parameter; repeatable.")]


def emit(result: Mapping[str, Any], *, as_json: bool, human: Iterable[Any] = ()) -> None:
    """Print a command's result: the JSON object, or the renderables made for people."""
    if as_json:
        sys.stdout.write(json.dumps(finite(result), allow_nan=False) + "\n")
        sys.stdout.flush()
        return
    # Ids, names of classes and paths are nobody's markup.
    console = Console(width=None if sys.stdout.isatty() else 120, emoji=False, markup=False)
    for item in human:
        console.print(item)


def remark(text: str, *, quiet: bool = False) -> None:
    """A sentence for the user beside the result."""
    if not quiet:
        Console(stderr=True, highlight=False, emoji=False).print(text, markup=False, soft_wrap=True)


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table whose numbers are right-aligned and grouped by thousands."""
    made = Table(title=title, title_justify="left")
    shown = [[_cell(value) for value in row] for row in rows]
    kinds = [all(_is_number(row[i]) for row in shown) for i in range(len(columns))]
    for name, numeric in zip(columns, kinds, strict=True):
        made.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in shown:
        made.add_row(*row)
    return made


def parse_settings(settings: Sequence[str] | None) -> dict[str, str]:
    """``["nodes=100", "seed=1"]`` as a dictionary; raises ConfigError for a word without '='."""
    parsed = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, found {setting!r}")
        parsed[key] = value
    return parsed


def size_text(count: float) -> str:
    """Bytes for people."""
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
