"""Reads a run directory during or after training into plain values; its content is not trusted."""

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

IMAGES = {"schedule.svg": "schedule of the last epoch", "lanes.svg": "batches of trainers in the last epoch"}
"""Drawings that strategies write into a run directory, and their titles."""


def read_run(path: Path, name: str | None = None) -> Run:
    """Read a run; raises RunError if the directory is not one."""
    saved = _read(path / "config.json")
    if not isinstance(saved, dict) or not isinstance(saved.get("config"), dict):
        raise RunError(f"{path} is not a run: expected a run directory with a config.json")
    config, record, totals = saved["config"], _read(path / "record.json"), _read(path / "ranks.json")
    workers, epochs = config.get("workers", 1), _group(config, "train").get("epochs", 0)
    if not isinstance(workers, int) or not isinstance(epochs, int):
        raise RunError(f"{path} is not a run: workers and epochs in its config.json must be integers")
    state = RUNNING if is_running(path) else FINISHED if isinstance(record, dict) else STOPPED
    rows = [row for row in read_metrics(path / "metrics.jsonl") if _is_row(row)]
    parts = _read(path / "parts.json")
    return {
        "name": name or path.resolve().name,
        "path": str(path.resolve()),
        "state": state,
        "store": Path(str(_group(saved, "store").get("path", ""))).name,
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
        "pictures": {title: _picture(path / file) for file, title in IMAGES.items() if (path / file).is_file()},
        "has_trace": (path / "trace.json").is_file(),
    }


def is_running(path: Path) -> bool:
    """True if a process of this machine holds the run's lock; does not take the lock."""
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
    """The numbers by which runs are compared; None if not measured yet."""
    rows, record, totals = run["rows"], run["record"] or {}, run["totals"] or {}
    metrics = _group(record, "metrics")
    seconds = [row["seconds"] for row in rows if isinstance(row.get("seconds"), (int, float))]
    vals = [row["val"] for row in rows if isinstance(row.get("val"), (int, float))]
    traffic, memory = _group(record, "traffic"), _group(record, "memory")
    sent = _numbers(traffic.get("bytes_sent")) or [sum(row) for row in totals.get("bytes", [])]
    rounds = _numbers(traffic.get("rounds")) or totals.get("rounds")
    peak = _numbers(memory.get("peak_rss")) or totals.get("peak_rss")
    return {
        "epochs": len(rows),
        "loss": rows[-1].get("train_loss") if rows else None,
        "val": _number(metrics.get("val")) if "val" in metrics else max(vals, default=None),
        "test": _number(metrics.get("test")),
        "metric": str(metrics.get("name", "")),
        "baseline": _baseline(metrics),
        "classes": _classes(_group(metrics, "per_class")),
        "best_epoch": metrics.get("best_epoch"),
        "epoch_seconds": median(seconds) if seconds else None,
        "seconds": sum(seconds) if seconds else None,
        "bytes": sum(sent) if sent else 0,
        "rounds": max(rounds, default=0) if rounds else 0,
        "peak_rss": max(peak, default=0) if peak else None,
    }


def _baseline(metrics: Mapping[str, Any]) -> float | None:
    """Test metric of EdgeBank, a baseline without parameters for runs on events: the better of its two variants."""
    beside = _group(_group(metrics, "beside"), "test")
    values = (_number(beside.get(name)) for name in ("edgebank", "edgebank_window"))
    return max((value for value in values if value is not None), default=None)


def _classes(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Measures per class and the confusion matrix of the test split; None unless all are numbers of one length."""
    names = ("precision", "recall", "f1", "support")
    columns = {name: _numbers(report.get(name)) for name in names}
    classes, matrix = report.get("classes"), report.get("confusion") or []
    if not isinstance(classes, list) or not isinstance(matrix, list) or not classes:
        return None
    lengths = {len(column) for column in columns.values()} | {len(_numbers(row)) for row in matrix}
    if lengths != {len(classes)} or len(matrix) not in (0, len(classes)):
        return None
    return {"classes": [str(name) for name in classes], **columns, "confusion": matrix}


def worker_names(run: Run) -> list[str]:
    """Names of the workers of a run, in the order of its lists."""
    count = len((run["totals"] or {}).get("peak_rss", ())) or run["workers"]
    if run["strategy"] == "tma":
        return ["coordinator", *(f"trainer {i}" for i in range(count - 1))]
    return [f"rank {rank}" for rank in range(count)]


def mean_phase_seconds(run: Run) -> list[dict[str, float]]:
    """Mean seconds per epoch by phase, for each worker, without the first epoch, which warms up."""
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
    group = tree.get(key)
    return group if isinstance(group, dict) else {}


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) else None


def _numbers(values: Any) -> list[float]:
    return values if isinstance(values, list) and all(isinstance(value, (int, float)) for value in values) else []


def _named(group: Any) -> Any:
    return group.get("name", "") if isinstance(group, dict) else group


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("epoch"), int)


def _is_split(row: Any) -> bool:
    return _is_row(row) and all(
        isinstance(row.get(phase), list) and all(isinstance(x, (int, float)) for x in row[phase]) for phase in PHASES
    )


def _are_totals(totals: Any) -> bool:
    """True for a row of bytes, a number of rounds and a memory peak per worker."""
    if not isinstance(totals, dict) or not isinstance(totals.get("bytes"), list):
        return False
    count = len(totals["bytes"])
    return all(len(_numbers(row)) == count + 1 for row in totals["bytes"]) and all(
        len(_numbers(totals.get(key))) == count for key in ("rounds", "peak_rss")
    )


def _picture(path: Path) -> str:
    """A data URL of an image, in which browsers run no scripts."""
    data = path.read_bytes() if path.stat().st_size < 8 << 20 else b""
    return "data:image/svg+xml;base64," + base64.b64encode(data).decode()
