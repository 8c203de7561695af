"""A run read from its directory, as plain numbers and words, while it goes on or after; nothing of it is trusted."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from gnnfleet.errors import RunError
from gnnfleet.report.metrics import read_metrics
from gnnfleet.report.phase_timer import PHASES

Run = dict[str, Any]

RUNNING, FINISHED, STOPPED = "running", "finished", "stopped"

IMAGES = {"schedule.svg": "schedule of the last epoch", "lanes.svg": "lanes of the last epoch"}
"""Drawings that strategies leave in a run, and what they show."""


def read_run(path: Path, name: str | None = None) -> Run:
    """All that is known of a run; raises RunError where there is none."""
    about = _read(path / "config.json")
    if not isinstance(about, dict) or not isinstance(about.get("config"), dict):
        raise RunError(f"{path} is not a run: expected a config.json of one there")
    config, record, totals = about["config"], _read(path / "record.json"), _read(path / "ranks.json")
    workers, epochs = config.get("workers", 1), _group(config, "train").get("epochs", 0)
    if not isinstance(workers, int) or not isinstance(epochs, int):
        raise RunError(f"{path} is not a run: numbers of workers and epochs in its config.json are none")
    state = RUNNING if is_running(path) else FINISHED if isinstance(record, dict) else STOPPED
    rows = [row for row in read_metrics(path / "metrics.jsonl") if _is_row(row)]
    parts = _read(path / "parts.json")
    return {
        "name": name or path.resolve().name,
        "path": str(path.resolve()),
        "state": state,
        "store": Path(str(_group(about, "store").get("path", ""))).name,
        "strategy": str(_named(config.get("strategy"))),
        "model": str(_named(config.get("model"))),
        "workers": workers,
        "seed": config.get("seed"),
        "epochs": epochs,
        "config": _flat(config),
        "rows": rows,
        "ranks": [row for row in read_metrics(path / "ranks.jsonl") if _is_split(row)],
        "totals": totals if _are_totals(totals) else None,
        "parts": parts if isinstance(parts, dict) and _group(parts, "quality") else None,
        "record": record if isinstance(record, dict) and state != RUNNING else None,
        "remarks": [str(row.get("text", "")) for row in read_metrics(path / "remarks.jsonl") if isinstance(row, dict)],
        "pictures": {what: _picture(path / file) for file, what in IMAGES.items() if (path / file).is_file()},
        "has_trace": (path / "trace.json").is_file(),
    }


def is_running(path: Path) -> bool:
    """Whether a process of this machine holds the run's lock; looking does not take it."""
    try:
        inode = (path / ".lock").stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    # 1: FLOCK  ADVISORY  WRITE 4321 08:01:123456 0 EOF
    return any(
        line.split()[1] == "FLOCK" and line.split()[5].endswith(f":{inode}") for line in lines if "->" not in line
    )


def summarize(run: Run) -> dict[str, Any]:
    """The numbers by which runs are compared; None where there is none yet."""
    rows, record, totals = run["rows"], run["record"] or {}, run["totals"] or {}
    metrics = _group(record, "metrics")
    seconds = [row["seconds"] for row in rows if isinstance(row.get("seconds"), (int, float))]
    found = [row["val"] for row in rows if isinstance(row.get("val"), (int, float))]
    traffic, memory = _group(record, "traffic"), _group(record, "memory")
    sent = _numbers(traffic.get("bytes_sent")) or [sum(row) for row in totals.get("bytes", [])]
    rounds = _numbers(traffic.get("rounds")) or totals.get("rounds")
    peak = _numbers(memory.get("peak_rss")) or totals.get("peak_rss")
    return {
        "epochs": len(rows),
        "loss": rows[-1].get("train_loss") if rows else None,
        "val": _number(metrics.get("val")) if "val" in metrics else max(found, default=None),
        "test": _number(metrics.get("test")),
        "metric": str(metrics.get("name", "")),
        "baseline": _baseline(metrics),
        "best_epoch": metrics.get("best_epoch"),
        "epoch_seconds": median(seconds) if seconds else None,
        "seconds": sum(seconds) if seconds else None,
        "bytes": sum(sent) if sent else 0,
        "rounds": max(rounds, default=0) if rounds else 0,
        "peak_rss": max(peak, default=0) if peak else None,
    }


def _baseline(metrics: Mapping[str, Any]) -> float | None:
    """Of a run on events what EdgeBank, which learns nothing, comes to on test: the better of its two kinds."""
    beside = _group(_group(metrics, "beside"), "test")
    found = (_number(beside.get(name)) for name in ("edgebank", "edgebank_window"))
    return max((value for value in found if value is not None), default=None)


def worker_names(run: Run) -> list[str]:
    """What the workers of a run are called, in the order of its lists."""
    count = len((run["totals"] or {}).get("peak_rss", ())) or run["workers"]
    if run["strategy"] == "tma":
        return ["coordinator", *(f"trainer {i}" for i in range(count - 1))]
    return [f"rank {rank}" for rank in range(count)]


def mean_phase_seconds(run: Run) -> list[dict[str, float]]:
    """Seconds of an epoch by phase, of each worker, over all epochs but the first, which also warms up."""
    rows: Sequence[Mapping[str, Any]] = run["ranks"][1:] or run["ranks"]
    if not rows:
        return []
    workers = min(len(row[phase]) for row in rows for phase in PHASES)
    return [{phase: sum(row[phase][w] for row in rows) / len(rows) for phase in PHASES} for w in range(workers)]


def _read(path: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    return None


def _group(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = tree.get(key)
    return found if isinstance(found, dict) else {}


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) else None


def _numbers(values: Any) -> list[float]:
    return values if isinstance(values, list) and all(isinstance(each, (int, float)) for each in values) else []


def _named(group: Any) -> Any:
    return group.get("name", "") if isinstance(group, dict) else group


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("epoch"), int)


def _is_split(row: Any) -> bool:
    return _is_row(row) and all(
        isinstance(row.get(phase), list) and all(isinstance(x, (int, float)) for x in row[phase]) for phase in PHASES
    )


def _are_totals(found: Any) -> bool:
    """A row of bytes, a number of rounds and a peak of every worker."""
    if not isinstance(found, dict) or not isinstance(found.get("bytes"), list):
        return False
    count = len(found["bytes"])
    return all(len(_numbers(row)) == count + 1 for row in found["bytes"]) and all(
        len(_numbers(found.get(key))) == count for key in ("rounds", "peak_rss")
    )


def _picture(path: Path) -> str:
    """An image that runs no scripts, whatever is in it."""
    data = path.read_bytes() if path.stat().st_size < 8 << 20 else b""
    return "data:image/svg+xml;base64," + base64.b64encode(data).decode()
