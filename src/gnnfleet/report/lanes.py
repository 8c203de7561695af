"""A picture of which batch each trainer uses when: a row for each, a column for each iteration, white where idle."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Protocol

from gnnfleet.report.timeline_svg import colour

_LEFT, _RIGHT, _ROW, _GAP, _TOP, _WIDEST, _WIDTH = 190, 20, 24, 4, 60, 30, 1000


class Cell(Protocol):
    """An iteration of a trainer."""

    @property
    def batch(self) -> int | None: ...
    @property
    def use(self) -> int: ...
    @property
    def is_first(self) -> bool: ...
    @property
    def phase(self) -> int: ...


def draw_lanes(rows: Sequence[tuple[str, Sequence[Cell]]], *, title: str, batches: int, first: int = 0) -> str:
    """SVG of the iterations from ``first`` on; rows have names."""
    columns = max(len(cells) for _, cells in rows)
    wide = min(_WIDEST, _WIDTH / max(columns, 1))
    height = _TOP + len(rows) * (_ROW + _GAP) + 30
    width = _LEFT + wide * columns + _RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(width, 760):.0f} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-size="15">{escape(title)}</text>',
        '<text x="8" y="40" fill="#555">number: batch; dark: first use, memory is read and written; light: further '
        "uses with other negatives; line: memory is emptied</text>",
    ]
    for number, (name, cells) in enumerate(rows):
        top = _TOP + number * (_ROW + _GAP)
        parts.append(f'<text x="8" y="{top + 16}">{escape(name)}</text>')
        for column, cell in enumerate(cells):
            parts += _box(cell, _LEFT + wide * column, top, wide, batches)
    for column in range(0, columns, max(1, round(columns / 10))):
        at = _LEFT + wide * (column + 0.5)
        parts.append(f'<text x="{at:.1f}" y="{height - 10}" text-anchor="middle" fill="#555">{first + column}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _box(cell: Cell, left: float, top: int, wide: float, batches: int) -> list[str]:
    fill = "white" if cell.batch is None else colour(cell.batch, batches, dark=cell.is_first)
    word = "idle" if cell.batch is None else f"batch {cell.batch}, use {cell.use + 1}"
    drawn = [
        f'<rect x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{_ROW}" fill="{fill}" stroke="#ddd" '
        f'stroke-width="0.5"><title>{word}</title></rect>'
    ]
    if cell.phase == 0:
        ends = f'y1="{top - 2}" y2="{top + _ROW + 2}"'
        drawn.append(f'<line x1="{left:.2f}" x2="{left:.2f}" {ends} stroke="black" stroke-width="2"/>')
    if cell.batch is not None and wide > 14:
        ink = "white" if cell.is_first else "black"
        middle = f'x="{left + wide / 2:.1f}" y="{top + 16}"'
        drawn.append(f'<text {middle} text-anchor="middle" font-size="10" fill="{ink}">{cell.batch}</text>')
    return drawn
