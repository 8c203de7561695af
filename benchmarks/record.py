"""Results in benchmarks/results/NAME.json, with the machine, versions and commit they were measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(), "memory_gib": round(memory, 1)}


def write_results(name: str, cells: list[dict[str, Any]], *, keep: bool = False) -> Path:
    """Write one file per benchmark. With ``keep``, former cells that are not among these stay, each with the commit and
    machine it was measured on."""
    command = ["git", "-C", str(RESULTS.parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    packages = {package: version(package) for package in ("torch", "numpy", "duckdb", "pyarrow", "pymetis")}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    if keep and path.exists():
        before = json.loads(path.read_text())
        origin, measured = {key: before[key] for key in ("commit", "machine")}, {cell["cell"] for cell in cells}
        cells = [*cells, *({**origin, **cell} for cell in before["cells"] if cell["cell"] not in measured)]
    body = {"commit": commit, "machine": machine(), "python": platform.python_version(), "packages": packages}
    head = json.dumps(body, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(cell)}" for cell in cells)  # one line for each cell
    path.write_text(f'{head},\n "cells": [\n{lines}\n ]\n}}\n')
    return path


def best_cells(out: Path, key: str, *, highest: bool = False) -> list[dict[str, Any]]:
    """The best round of every finished cell in ``out``, from all calls."""
    best: dict[str, dict[str, Any]] = {}
    for path in sorted(out.glob("*.json")):
        cell = json.loads(path.read_text())
        former = best.get(cell["cell"])
        if former is None or (cell.get(key, 0) > former.get(key, 0) if highest else cell[key] < former[key]):
            best[cell["cell"]] = cell
    return list(best.values())


def run_json(command: list[str], env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a command; return the JSON object in the last line of its output."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
