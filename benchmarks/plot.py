"""Line charts as SVG, drawn without any library: one line per series, both axes logarithmic or neither."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

COLORS = ("#4477aa", "#cc6644", "#559955", "#aa4499", "#888833", "#555555")
LEFT, TOP, WIDTH, HEIGHT = 70, 46, 400, 270

Series = Mapping[str, Sequence[tuple[float, float]]]


Place = Callable[[float, float], tuple[float, float]]
"""From a point to where it is drawn."""


def line_chart(path: Path, title: str, series: Series, *, across: str, up: str) -> None:
    """Write a chart with logarithmic axes; lines whose name ends in "law" are dashed."""
    points = [point for line in series.values() for point in line]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    low, high = 2 ** math.floor(math.log2(min(ys))), 2 ** math.ceil(math.log2(max(ys)))

    def place(x: float, y: float) -> tuple[float, float]:
        right = (math.log(x) - math.log(xs[0])) / max(math.log(xs[-1]) - math.log(xs[0]), 1e-9)
        above = (math.log(y) - math.log(low)) / max(math.log(high) - math.log(low), 1e-9)
        return LEFT + right * WIDTH, TOP + HEIGHT * (1 - above)

    ticks = [low * 2.0**power for power in range(round(math.log2(high / low)) + 1)]
    _write(path, _frame(title, across, up) + _grid(place, xs, ticks) + _lines(place, series))


def curve_chart(path: Path, title: str, series: Series, *, across: str, up: str) -> None:
    """Write a chart with even axes, the one across from 0."""
    points = [point for line in series.values() for point in line]
    wide, low, high = (f(p[at] for p in points) for f, at in ((max, 0), (min, 1), (max, 1)))
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
    step = step / 2 if high - low < 3 * step else step
    low, high = step * math.floor(low / step), step * math.ceil(high / step)

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / wide * WIDTH, TOP + HEIGHT * (1 - (y - low) / max(high - low, 1e-9))

    ups = [low + step * number for number in range(round((high - low) / step) + 1)]
    nice = 10 ** math.floor(math.log10(wide))
    nice = nice / 2 if wide < 3 * nice else nice
    acrosses = [nice * number for number in range(int(wide / nice) + 1)]
    _write(path, _frame(title, across, up) + _grid(place, acrosses, ups) + _lines(place, series))


def _frame(title: str, across: str, up: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 190} {TOP + HEIGHT + 60}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-weight="bold" font-size="14">{escape(title)}</text>',
        f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 44}" text-anchor="middle">{escape(across)}</text>',
        f'<text transform="translate(18 {TOP + HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(up)}</text>',
    ]


def _grid(place: Place, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    out = []
    for x in xs:
        at, _ = place(x, ys[0])
        out.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{TOP + HEIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{at:.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{x:g}</text>')
    for y in ys:
        _, at = place(xs[0], y)
        out.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{y:.4g}</text>')
    return out


def _lines(place: Place, series: Series) -> list[str]:
    out = []
    for number, (name, line) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        way = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(x, y) for x, y in sorted(line)))
        dash = ' stroke-dasharray="5 4"' if name.endswith("law") else ""
        out.append(f'<polyline points="{way}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        if not dash:
            dots = (place(x, y) for x, y in line)
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
