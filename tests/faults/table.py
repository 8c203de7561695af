"""The table of trials in docs/reliability.md, between two marks, made from the saved outcomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- faults -->", "<!-- /faults -->"


def write_table(cells: list[dict[str, Any]]) -> None:
    if PAGE.exists():
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(cells)}\n{END}{rest.partition(END)[2]}")


def table(cells: list[dict[str, Any]]) -> str:
    """One row for every strategy, role and event."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["strategy"], cell["role"], cell["event"]), []).append(cell)
    lines = ["| strategy | who | what | trials | outcome | slowest end, s | load |", "|---|---|---|---|---|---|---|"]
    for (strategy, role, event), group in groups.items():
        succeeded = [cell for cell in group if "problem" not in cell]
        outcomes = ", ".join(sorted({cell["result"] for cell in succeeded}))
        if len(succeeded) < len(group):
            outcomes += f"; **{len(group) - len(succeeded)} wrong**"
        ends = [cell["seconds"] for cell in succeeded if cell["seconds"] is not None]
        slowest = f"{max(ends):.1f}" if ends else ""
        loads = [cell["load"] for cell in succeeded]
        span = f"{min(loads):.0f}–{max(loads):.0f}" if loads else ""
        lines.append(f"| {strategy} | {role} | {event} | {len(group)} | {outcomes} | {slowest} | {span} |")
    total, wrong = len(cells), sum("problem" in cell for cell in cells)
    return "\n".join([f"{total} trials, {wrong} wrong.", "", *lines])
