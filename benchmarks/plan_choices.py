"""Choices of ``gnnfleet plan`` in two versions: the same graphs, the settings that are recommended, their trial times.

The plans of both versions are made in turn. Cells that are in the results are not made again. The other version is the
environment that ``python -m tests.golden.compare`` builds.

usage: python benchmarks/plan_choices.py --old build/golden/COMMIT/env/bin/python [--cases communities/2 …] [--work DIR]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from plan import CASES, EVENT_SPLIT, GRAPHS
from record import run_json, write_results

RESULTS = Path(__file__).parent / "results" / "plan_choices.json"


def make_store(python: str, graph: str, path: Path) -> Path:
    name, parameters, _ = GRAPHS[graph]
    if not path.exists():
        settings = [f"--set={key}={value}" for key, value in parameters.items()]
        run_json([python, "-m", "gnnfleet", "datasets", "make", name, "-o", str(path), *settings, "--quiet", "--json"])
    return path


def choices(python: str, graph: str, workers: int, store: Path) -> dict[str, Any]:
    """The fastest estimates for each goal: exact full batch, and any strategy."""
    settings = [f"--set=model.{key}={value}" for key, value in GRAPHS[graph][2].items()]
    command = [python, "-m", "gnnfleet", "plan", str(store), "--workers", str(workers), "--json", "--quiet", *settings]
    command += ["--split", EVENT_SPLIT] if graph == "events" else []
    rows = run_json([*command, "--goal", "any"])["fits"]  # fastest first
    best = {"any": rows[0], "exact": next((row for row in rows if row["kind"] == "exact"), rows[0])}
    return {goal: {"settings": label(row), "seconds": round(row["seconds_per_pass"], 4)} for goal, row in best.items()}


def label(row: dict[str, Any]) -> str:
    settings = row.get("settings", row.get("words"))  # 0.1.0 called them words
    values = " ".join(f"{key}={value}" for key, value in settings.items() if key not in ("name", "keep", "clock"))
    return f"{settings['name']} {values}".strip() + f", {row['workers']} workers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", required=True, help="python of the other version")
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "gnnfleet-plan-choices")
    arguments = parser.parse_args()
    cells = json.loads(RESULTS.read_text())["cells"] if RESULTS.exists() else []
    for case in arguments.cases:
        graph, workers = case.split("/")
        for version, python in (("old", arguments.old), ("new", sys.executable)):
            cell = f"{case}/{version}"
            if cell not in {row["cell"] for row in cells}:
                store = make_store(python, graph, arguments.work / version / graph)
                cells.append({"cell": cell, **choices(python, graph, int(workers), store)})
                write_results("plan_choices", cells)
            print(json.dumps(next(row for row in cells if row["cell"] == cell)), flush=True)


if __name__ == "__main__":
    main()
