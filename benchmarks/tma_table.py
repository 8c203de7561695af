"""What the cells of benchmarks/tma.py come to: the table over seeds, and val over time as SVG."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plot import curve_chart
from tma_sets import BASELINES, LONGER, RATES, SCHEMES, SETS

Cell = Mapping[str, Any]
"""``line`` has (seconds, val, steps) in the order of time."""


def table_of(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One line for every set and scheme, means over seeds."""
    return [line for name in SETS for line in _set(name, [cell for cell in cells if cell["set"] == name])]


def best_of(cell: Cell) -> float:
    return max(value for _, value, _ in cell["line"])


def _set(name: str, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    by = _by_scheme(cells)
    if not by:
        return []
    final = {scheme: statistics.mean(map(best_of, found)) for scheme, found in by.items()}
    marks = {scheme: value for scheme, value in final.items() if scheme not in LONGER}
    goal = 0.99 * max(marks.values())
    own = [value for scheme, value in marks.items() if scheme in BASELINES]
    near = 0.99 * max(own, default=goal)
    times = {scheme: reached(found, goal) for scheme, found in by.items()}
    nears = {scheme: reached(found, near) for scheme, found in by.items()}
    lines = []
    for scheme, found in by.items():
        hit, close = times[scheme], nears[scheme]
        lines.append(
            {
                "set": name,
                "scheme": scheme,
                "seeds": len(found),
                "val": _mean([best_of(cell) for cell in found]),
                "val_range": _range([best_of(cell) for cell in found]),
                "test": _mean([cell["test"] for cell in found]),
                "kept": round(found[0]["kept"], 3),
                "steps_made": round(statistics.mean(cell["line"][-1][2] for cell in found)),
                "seconds": None if hit is None else round(hit[0], 1),
                "steps": None if hit is None else round(hit[1]),
                "times_fastest_baseline": _times(hit, times, BASELINES),
                "times_ggs_1gbit": _times(hit, times, tuple(RATES)),
                "seconds_to_best_baseline": None if close is None else round(close[0], 1),
                "times_to_best_baseline": _times(close, nears, BASELINES),
            }
        )
    return lines


def _by_scheme(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    by = {scheme: [cell for cell in cells if cell["scheme"] == scheme] for scheme in SCHEMES}
    return {scheme: found for scheme, found in by.items() if found}


def reached(cells: Sequence[Cell], goal: float) -> tuple[float, float] | None:
    """(seconds, steps) until the best val so far, its mean over seeds, is there; None where it never is."""
    for at in sorted({at for cell in cells for at, _, _ in cell["line"]}):
        best, steps = zip(*(_until(cell, at) for cell in cells), strict=True)
        if statistics.mean(best) >= goal:
            return at, statistics.mean(steps)
    return None


def _until(cell: Cell, end: float) -> tuple[float, float]:
    """(best val, steps made) up to a time."""
    seen = [(value, steps) for at, value, steps in cell["line"] if at <= end]
    return max((value for value, _ in seen), default=0.0), max((steps for _, steps in seen), default=0)


Times = Mapping[str, tuple[float, float] | None]


def _times(own: tuple[float, float] | None, times: Times, rivals: Sequence[str]) -> float | None:
    """How many times as long the fastest of the rivals takes."""
    found = [hit[0] for scheme, hit in times.items() if scheme in rivals and hit is not None]
    return None if own is None or not found else round(min(found) / own[0], 2)


def _mean(values: Sequence[float]) -> float:
    return round(statistics.mean(values), 4)


def _range(values: Sequence[float]) -> list[float]:
    return [round(min(values), 4), round(max(values), 4)]


DEALS = {"random": "random", "super": "super", "psgd-pa": "mincut", "llcg": "mincut"}
"""How nodes are dealt in a scheme, for its diagnosis."""


def markdown(table: Sequence[Mapping[str, Any]], alike: Sequence[Mapping[str, Any]]) -> str:
    """The table for people, with what is known of the parts of a scheme beside it."""
    known = {(row["set"], row["scheme"]): row for row in alike}
    titles = ["", "scheme", "seeds", "edges kept", "features apart", "loss ±", "cosine", "aim", "steps", "val", "test"]
    titles += ["s to 99 %", "steps to it", "times fastest baseline", "times ggs 1 Gbit/s", "s to baselines' best"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for line in table:
        parts = known.get((line["set"], DEALS.get(line["scheme"], "")))
        low, high = line["val_range"]
        cells = [line["set"], line["scheme"], line["seeds"], f"{line['kept']:.0%}", *_alike(parts)]
        cells += [line["steps_made"], f"{line['val']:.4f} ({low:.3f}–{high:.3f})", f"{line['test']:.4f}"]
        cells += [line[key] for key in ("seconds", "steps", "times_fastest_baseline", "times_ggs_1gbit")]
        cells.append(line["seconds_to_best_baseline"])
        lines.append(f"| {' | '.join('–' if cell is None else str(cell) for cell in cells)} |")
    return "\n".join(lines)


def _alike(row: Mapping[str, Any] | None) -> list[str]:
    """Divergence of features; discrepancy of loss, cosine of gradients and aim after some steps."""
    if row is None:
        return [""] * 4
    trained = row["trained"]
    values = [row["features"], trained["discrepancy"], trained["cosine"], trained["aim"]]
    return ["" if value is None else f"{value:.3f}" for value in values]


def plot(cells: Sequence[Cell], folder: Path) -> None:
    """A chart for every set: val over seconds, the mean over seeds."""
    for name in SETS:
        by = _by_scheme([cell for cell in cells if cell["set"] == name])
        drawn = {scheme: _mean_line(found) for scheme, found in by.items()}
        if lines := {scheme: line for scheme, line in drawn.items() if line}:
            curve_chart(folder / f"tma_{name}.svg", name, lines, across="seconds of training", up="val")


def _mean_line(cells: Sequence[Cell]) -> list[tuple[float, float]]:
    """The mean over seeds at the times of the first one, where all have begun."""

    def at(cell: Cell, when: float) -> float | None:
        known = [value for time, value, _ in cell["line"] if time <= when]
        return known[-1] if known else None

    points = [(time, [at(cell, time) for cell in cells]) for time, _, _ in cells[0]["line"]]
    return [(time, statistics.mean(v for v in each if v is not None)) for time, each in points if None not in each]
