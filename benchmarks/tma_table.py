"""Summary of the cells of benchmarks/tma.py: a table over seeds, and charts of val over time."""

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
    """One row for every set and scheme: means over seeds."""
    return [line for name in SETS for line in _rows_of_set(name, [cell for cell in cells if cell["set"] == name])]


def best_of(cell: Cell) -> float:
    return max(value for _, value, _ in cell["line"])


def _rows_of_set(name: str, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    cells_by_scheme = _by_scheme(cells)
    if not cells_by_scheme:
        return []
    final = {scheme: statistics.mean(map(best_of, runs)) for scheme, runs in cells_by_scheme.items()}
    candidates = {scheme: value for scheme, value in final.items() if scheme not in LONGER}
    goal = 0.99 * max(candidates.values())
    baselines = [value for scheme, value in candidates.items() if scheme in BASELINES]
    baseline_goal = 0.99 * max(baselines, default=goal)
    reached_goal = {scheme: time_to_goal(runs, goal) for scheme, runs in cells_by_scheme.items()}
    reached_baseline = {scheme: time_to_goal(runs, baseline_goal) for scheme, runs in cells_by_scheme.items()}
    lines = []
    for scheme, runs in cells_by_scheme.items():
        hit, hit_baseline = reached_goal[scheme], reached_baseline[scheme]
        lines.append(
            {
                "set": name,
                "scheme": scheme,
                "seeds": len(runs),
                "val": _mean([best_of(cell) for cell in runs]),
                "val_range": _range([best_of(cell) for cell in runs]),
                "test": _mean([cell["test"] for cell in runs]),
                "kept": round(runs[0]["kept"], 3),
                "steps_made": round(statistics.mean(cell["line"][-1][2] for cell in runs)),
                "seconds": None if hit is None else round(hit[0], 1),
                "steps": None if hit is None else round(hit[1]),
                "times_fastest_baseline": _times(hit, reached_goal, BASELINES),
                "times_ggs_1gbit": _times(hit, reached_goal, tuple(RATES)),
                "seconds_to_best_baseline": None if hit_baseline is None else round(hit_baseline[0], 1),
                "times_to_best_baseline": _times(hit_baseline, reached_baseline, BASELINES),
            }
        )
    return lines


def _by_scheme(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    groups = {scheme: [cell for cell in cells if cell["scheme"] == scheme] for scheme in SCHEMES}
    return {scheme: group for scheme, group in groups.items() if group}


def time_to_goal(cells: Sequence[Cell], goal: float) -> tuple[float, float] | None:
    """(seconds, steps) until the best val so far, as mean over seeds, reaches the goal; None if it never does."""
    for at in sorted({at for cell in cells for at, _, _ in cell["line"]}):
        best, steps = zip(*(_until(cell, at) for cell in cells), strict=True)
        if statistics.mean(best) >= goal:
            return at, statistics.mean(steps)
    return None


def _until(cell: Cell, end: float) -> tuple[float, float]:
    """(best val, steps) up to a time."""
    values = [(value, steps) for at, value, steps in cell["line"] if at <= end]
    return max((value for value, _ in values), default=0.0), max((steps for _, steps in values), default=0)


Times = Mapping[str, tuple[float, float] | None]


def _times(hit: tuple[float, float] | None, times: Times, others: Sequence[str]) -> float | None:
    """Time of the fastest of the others, as a multiple."""
    seconds = [other[0] for scheme, other in times.items() if scheme in others and other is not None]
    return None if hit is None or not seconds else round(min(seconds) / hit[0], 2)


def _mean(values: Sequence[float]) -> float:
    return round(statistics.mean(values), 4)


def _range(values: Sequence[float]) -> list[float]:
    return [round(min(values), 4), round(max(values), 4)]


ASSIGNMENTS = {"random": "random", "super": "super", "psgd-pa": "mincut", "llcg": "mincut"}
"""Scheme of the diagnosis that has the same assignment of nodes."""


def markdown(table: Sequence[Mapping[str, Any]], diagnoses: Sequence[Mapping[str, Any]]) -> str:
    """The table in Markdown, with the diagnosis of each scheme."""
    by_set_and_scheme = {(row["set"], row["scheme"]): row for row in diagnoses}
    titles = ["", "scheme", "seeds", "edges kept", "features apart", "loss ±", "cosine", "aim", "steps", "val", "test"]
    titles += ["s to 99 %", "steps to it", "times fastest baseline", "times ggs 1 Gbit/s", "s to baselines' best"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in table:
        diagnosis = by_set_and_scheme.get((row["set"], ASSIGNMENTS.get(row["scheme"], "")))
        low, high = row["val_range"]
        cells = [row["set"], row["scheme"], row["seeds"], f"{row['kept']:.0%}", *_diagnosis_cells(diagnosis)]
        cells += [row["steps_made"], f"{row['val']:.4f} ({low:.3f}–{high:.3f})", f"{row['test']:.4f}"]
        cells += [row[key] for key in ("seconds", "steps", "times_fastest_baseline", "times_ggs_1gbit")]
        cells.append(row["seconds_to_best_baseline"])
        lines.append(f"| {' | '.join('–' if cell is None else str(cell) for cell in cells)} |")
    return "\n".join(lines)


def _diagnosis_cells(row: Mapping[str, Any] | None) -> list[str]:
    """Divergence of features; discrepancy of losses, cosine of gradients and of aims after some steps."""
    if row is None:
        return [""] * 4
    trained = row["trained"]
    values = [row["features"], trained["discrepancy"], trained["cosine"], trained["aim"]]
    return ["" if value is None else f"{value:.3f}" for value in values]


def plot(cells: Sequence[Cell], folder: Path) -> None:
    """Draw a chart for every set: mean val over seconds."""
    for name in SETS:
        by_scheme = _by_scheme([cell for cell in cells if cell["set"] == name])
        means = {scheme: _mean_line(runs) for scheme, runs in by_scheme.items()}
        if lines := {scheme: line for scheme, line in means.items() if line}:
            curve_chart(folder / f"tma_{name}.svg", name, lines, x_label="seconds of training", y_label="val")


def _mean_line(cells: Sequence[Cell]) -> list[tuple[float, float]]:
    """Mean over seeds at the times of the first one, once all have a value."""

    def value_at(cell: Cell, when: float) -> float | None:
        values = [value for time, value, _ in cell["line"] if time <= when]
        return values[-1] if values else None

    points = [(time, [value_at(cell, time) for cell in cells]) for time, _, _ in cells[0]["line"]]
    return [(time, statistics.mean(v for v in each if v is not None)) for time, each in points if None not in each]
