"""SVG timelines: the pipeline schedule of an epoch, and the batches of temporal trainers."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_LEFT, _RIGHT, _ROW, _GAP, _WIDTH, _TOP = 130, 40, 26, 6, 1000, 56


@dataclass(frozen=True)
class ChunkSpan:
    """The time that a rank computed a chunk."""

    stage: int
    partition: int
    slot: int
    chunk: int
    is_backward: bool
    begin: float  # seconds
    end: float
    busy: float  # seconds of CPU time


def draw_schedule(slots: Sequence[ChunkSpan], stages: int, partitions: int) -> str:
    """SVG of one epoch: stages from top to bottom, seconds from left to right; backward is darker."""
    first, last = min(slot.begin for slot in slots), max(slot.end for slot in slots)
    scale = _WIDTH / max(last - first, 1e-9)
    chunks = 1 + max(slot.chunk for slot in slots)
    height = _TOP + stages * partitions * (_ROW + _GAP) + 34
    busy = sum(slot.end - slot.begin for slot in slots) / max((last - first) * stages * partitions, 1e-9)
    grid = f"{stages} stages" + (f" × {partitions} partitions" if partitions > 1 else "")
    title = f"{grid}, {last - first:.3f} s; workers busy {busy:.0%} of the time"
    legend = "light: forward; dark: backward; colour: chunk; white: idle"
    parts = _head(_LEFT + _WIDTH + _RIGHT, height, title, legend)
    for stage in range(stages):
        for partition in range(partitions):
            top = _TOP + (stage * partitions + partition) * (_ROW + _GAP)
            name = f"stage {stage + 1}" + (f", partition {partition + 1}" if partitions > 1 else "")
            parts.append(f'<text x="8" y="{top + 17}">{name}</text>')
            parts.append(f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_ROW}" fill="none" stroke="#ddd"/>')
    for slot in slots:
        top = _TOP + (slot.stage * partitions + slot.partition) * (_ROW + _GAP)
        left, wide = _LEFT + (slot.begin - first) * scale, max((slot.end - slot.begin) * scale, 0.5)
        direction = "backward" if slot.is_backward else "forward"
        tooltip = f"chunk {slot.chunk + 1}, {direction}, {slot.busy * 1e3:.1f} ms of CPU time"
        parts.append(
            f'<rect x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{_ROW}" '
            f'fill="{colour(slot.chunk, chunks, dark=slot.is_backward)}" stroke="white" stroke-width="0.5">'
            f"<title>{tooltip}</title></rect>"
        )
        if wide > 18:
            parts.append(
                f'<text x="{left + wide / 2:.1f}" y="{top + 17}" text-anchor="middle" font-size="10" '
                f'fill="{"white" if slot.is_backward else "black"}">{slot.chunk + 1}</text>'
            )
    bottom = height - 12
    for tick in range(6):
        at = _LEFT + tick * _WIDTH / 5
        parts.append(f'<text x="{at:.0f}" y="{bottom}" text-anchor="middle">{(last - first) * tick / 5:.3f} s</text>')
    return "\n".join([*parts, "</svg>\n"])


def _head(width: float, height: int, title: str, legend: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-size="15">{escape(title)}</text>',
        f'<text x="8" y="40" fill="#555">{legend}</text>',
    ]


def colour(number: int, count: int, *, dark: bool) -> str:
    """One of ``count`` hues in SVG notation."""
    red, green, blue = colorsys.hls_to_rgb(number / max(count, 1), 0.38 if dark else 0.72, 0.6)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


_LANE_LEFT, _LANE_RIGHT, _LANE_ROW, _LANE_GAP, _LANE_TOP, _LANE_WIDEST, _LANE_WIDTH = 190, 20, 24, 4, 60, 30, 1000


def draw_batch_lanes(rows: Sequence[tuple[str, Sequence[Any]]], *, title: str, batches: int, first: int = 0) -> str:
    """SVG of the iterations from ``first`` on, one named row per trainer; cells have batch, use, is_first and phase."""
    columns = max(len(cells) for _, cells in rows)
    wide = min(_LANE_WIDEST, _LANE_WIDTH / max(columns, 1))
    height = _LANE_TOP + len(rows) * (_LANE_ROW + _LANE_GAP) + 30
    width = _LANE_LEFT + wide * columns + _LANE_RIGHT
    legend = "number: batch; dark: first use, reads and writes the memory; light: later uses with other negatives; "
    parts = _head(max(width, 760), height, title, legend + "line: memory is reset")
    for number, (name, cells) in enumerate(rows):
        top = _LANE_TOP + number * (_LANE_ROW + _LANE_GAP)
        parts.append(f'<text x="8" y="{top + 16}">{escape(name)}</text>')
        for column, cell in enumerate(cells):
            parts += _lane_box(cell, _LANE_LEFT + wide * column, top, wide, batches)
    for column in range(0, columns, max(1, round(columns / 10))):
        at = _LANE_LEFT + wide * (column + 0.5)
        parts.append(f'<text x="{at:.1f}" y="{height - 10}" text-anchor="middle" fill="#555">{first + column}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _lane_box(cell: Any, left: float, top: int, wide: float, batches: int) -> list[str]:
    fill = "white" if cell.batch is None else colour(cell.batch, batches, dark=cell.is_first)
    tooltip = "idle" if cell.batch is None else f"batch {cell.batch}, use {cell.use + 1}"
    elements = [
        f'<rect x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{_LANE_ROW}" fill="{fill}" stroke="#ddd" '
        f'stroke-width="0.5"><title>{tooltip}</title></rect>'
    ]
    if cell.phase == 0:
        ends = f'y1="{top - 2}" y2="{top + _LANE_ROW + 2}"'
        elements.append(f'<line x1="{left:.2f}" x2="{left:.2f}" {ends} stroke="black" stroke-width="2"/>')
    if cell.batch is not None and wide > 14:
        ink = "white" if cell.is_first else "black"
        middle = f'x="{left + wide / 2:.1f}" y="{top + 16}"'
        elements.append(f'<text {middle} text-anchor="middle" font-size="10" fill="{ink}">{cell.batch}</text>')
    return elements
