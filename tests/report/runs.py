"""Run directories as training writes them, for tests of their readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gnnfleet.io.bundle import manifest_digest


def write_run(path: Path, *, strategy: str = "sar", workers: int = 2, epochs: int = 4, **more: Any) -> Path:
    """Write a finished run. ``more`` replaces or adds files by name without ending; None leaves one out."""
    rows = [
        {
            "epoch": e,
            "step": 2 * e,
            "train_loss": 2.0 / e,
            "seconds": 0.5,
            "val": 1 - 0.5 / e,
            **({"trainers": workers - (e == 2), "steps": 8, "round_seconds": 0.4} if strategy == "tma" else {}),
        }
        for e in range(1, epochs + 1)
    ]
    count = workers + (strategy == "tma")
    split = [
        {"epoch": e, "compute": [0.3] * count, "exchange": [0.1] * count, "wait": [0.1] * count}
        for e in range(1, epochs + 1)
    ]
    pairs = [[0 if p == q else 1000 * (p + 1) + q for q in range(count)] + [64] for p in range(count)]
    sent = [sum(row) for row in pairs]
    balance = {"nodes": 1.0, "edges": 1.1, "train": 1.0}
    files: dict[str, Any] = {
        "config": {
            "config": {
                "strategy": {"name": strategy},
                "model": {"name": "sage"},
                "workers": workers,
                "seed": 3,
                "train": {"epochs": epochs},
            },
            "store": {"path": "/data/shop"},
        },
        "metrics": rows,
        "ranks": split,
        "totals": {"epoch": epochs, "bytes": pairs, "rounds": [7] * count, "peak_rss": [300 << 20] * count},
        "parts": {
            "method": "mincut",
            "quality": {"parts": workers, "kept_share": 0.9, "volume": 1234, "replication": 1.2, "balance": balance},
        },
        "record": {
            "metrics": {"val": 0.875, "test": 0.86, "name": "accuracy", "best_epoch": epochs},
            "traffic": {"bytes_sent": sent, "rounds": [7] * count},
            "memory": {"peak_rss": [300 << 20] * count},
        },
        **more,
    }
    names = {"config": "config.json", "metrics": "metrics.jsonl", "ranks": "ranks.jsonl", "totals": "ranks.json"}
    names |= {"parts": "parts.json", "record": "record.json", "remarks": "remarks.jsonl"}
    if files["config"] is not None:
        files["config"]["digest"] = manifest_digest(files["config"])
    path.mkdir(parents=True)
    for key, content in files.items():
        if content is not None:
            lines = [json.dumps(row) + "\n" for row in content] if isinstance(content, list) else [json.dumps(content)]
            (path / names[key]).write_text("".join(lines))
    return path
