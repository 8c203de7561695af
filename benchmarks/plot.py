"""Line charts as SVG, without a library: one line per series, both axes logarithmic or both linear."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

COLORS = ("#4477aa", "#cc6644", "#559955", "#aa4499", "#888833", "#555555")
LEFT, TOP, WIDTH, HEIGHT = 70, 46, 400, 270

Series = Mapping[str, Sequence[tuple[float, float]]]


Projection = Callable[[float, float], tuple[float, float]]
"""Maps a point to its position in the drawing."""


def line_chart(path: Path, title: str, series: Series, *, x_label: str, y_label: str) -> None:
    """Write a chart with logarithmic axes; lines whose name ends in "law" are dashed."""
    points = [point for line in series.values() for point in line]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    low, high = 2 ** math.floor(math.log2(min(ys))), 2 ** math.ceil(math.log2(max(ys)))

    def project(x: float, y: float) -> tuple[float, float]:
        right = (math.log(x) - math.log(xs[0])) / max(math.log(xs[-1]) - math.log(xs[0]), 1e-9)
        above = (math.log(y) - math.log(low)) / max(math.log(high) - math.log(low), 1e-9)
        return LEFT + right * WIDTH, TOP + HEIGHT * (1 - above)

    ticks = [low * 2.0**power for power in range(round(math.log2(high / low)) + 1)]
    _write(path, _frame(title, x_label, y_label) + _grid(project, xs, ticks) + _lines(project, series))


def curve_chart(path: Path, title: str, series: Series, *, x_label: str, y_label: str) -> None:
    """Write a chart with linear axes; the x axis starts at 0."""
    points = [point for line in series.values() for point in line]
    x_max, low, high = (bound(p[axis] for p in points) for bound, axis in ((max, 0), (min, 1), (max, 1)))
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
    step = step / 2 if high - low < 3 * step else step
    low, high = step * math.floor(low / step), step * math.ceil(high / step)

    def project(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / x_max * WIDTH, TOP + HEIGHT * (1 - (y - low) / max(high - low, 1e-9))

    y_ticks = [low + step * number for number in range(round((high - low) / step) + 1)]
    x_step = 10 ** math.floor(math.log10(x_max))
    x_step = x_step / 2 if x_max < 3 * x_step else x_step
    x_ticks = [x_step * number for number in range(int(x_max / x_step) + 1)]
    _write(path, _frame(title, x_label, y_label) + _grid(project, x_ticks, y_ticks) + _lines(project, series))


def _frame(title: str, x_label: str, y_label: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 190} {TOP + HEIGHT + 60}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-weight="bold" font-size="14">{escape(title)}</text>',
        f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 44}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(18 {TOP + HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]


def _grid(project: Projection, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    out = []
    for x in xs:
        at, _ = project(x, ys[0])
        out.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{TOP + HEIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{at:.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{x:g}</text>')
    for y in ys:
        _, at = project(xs[0], y)
        out.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{y:.4g}</text>')
    return out


def _lines(project: Projection, series: Series) -> list[str]:
    out = []
    for number, (name, line) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        polyline = " ".join(f"{a:.1f},{b:.1f}" for a, b in (project(x, y) for x, y in sorted(line)))
        dash = ' stroke-dasharray="5 4"' if name.endswith("law") else ""
        out.append(f'<polyline points="{polyline}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        if not dash:
            dots = (project(x, y) for x, y in line)
            out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{color}"/>' for a, b in dots]
        at = TOP + 14 + 20 * number
        start = LEFT + WIDTH + 16
        line_to = f'<line x1="{start}" x2="{start + 24}" y1="{at}" y2="{at}"'
        out.append(f'{line_to} stroke="{color}" stroke-width="2"{dash}/>')
        out.append(f'<text x="{LEFT + WIDTH + 46}" y="{at + 4}">{escape(name)}</text>')
    return out


def _write(path: Path, out: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*out, "</svg>"]) + "\n")
