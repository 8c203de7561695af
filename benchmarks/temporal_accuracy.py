"""Test MRR on real streams by TGB's rule: with and without static embeddings and features of pairs, and of EdgeBank.

All other destinations are negatives, the memory advances after every 200 events, ties get their mean rank. The weights
are those of the epoch with the best val MRR against 49 negatives. Finished seeds are not run again.

    python benchmarks/temporal_accuracy.py [OUT] [--data DIR] [--only wikipedia/memory …] [--seeds 3] [--epochs N]

DATA has ml_wikipedia.txt and CollegeMsg.txt (src dst time, no header).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = Path(__file__).parents[2] / "shared" / "data" / "temporal"
FILES = {"wikipedia": "ml_wikipedia.txt", "collegemsg": "CollegeMsg.txt"}
SIDES: dict[str, dict[str, Any]] = {
    "memory": {"strategy": {"static": False}, "model": {"pairs": False}},
    "static": {"strategy": {"static": True}, "model": {"pairs": False}},
    "no memory": {"strategy": {"static": False}, "model": {"name": "tgat", "pairs": False}},
    "static, no memory": {"strategy": {"static": True}, "model": {"name": "tgat", "pairs": False}},
    "pairs": {"strategy": {"static": False}, "model": {"pairs": True}},
    "static+pairs": {"strategy": {"static": True}, "model": {"pairs": True}},
    "pairs, no memory": {"strategy": {"static": False}, "model": {"name": "tgat", "pairs": True}},
}
EPOCHS = 8


def read(path: Path) -> Any:
    import numpy as np
    import torch

    from gnnfleet.graph.graph import Graph

    src, dst, t = torch.from_numpy(np.loadtxt(path, dtype=np.int64)).T.contiguous()
    return Graph(torch.stack([src - 1, dst - 1]), time=t - t.min())


def config_of(side: str, seed: int) -> dict[str, Any]:
    variant = SIDES[side]
    return {
        "strategy": {
            "name": "temporal",
            "batch": 200,
            "queries": "batch",
            "lr_decay": 0.0,
            **variant.get("strategy", {}),
        },
        "model": {"name": "tgn", **variant.get("model", {})},
        "seed": seed,
    }


def train(graph: Any, side: str, seed: int, epochs: int) -> dict[str, Any]:
    from gnnfleet.config.resolve import resolve
    from gnnfleet.training.build import build

    started, best = time.perf_counter(), (-1.0, -1, None)
    strategy = build(graph, resolve(config_of(side, seed))).strategy
    mrrs = []
    for epoch in range(epochs):
        for _ in strategy.train_epoch(epoch):
            pass
        mrrs.append(strategy.validate()["mrr"])
        if mrrs[-1] > best[0]:
            best = (mrrs[-1], epoch, copy.deepcopy(strategy.state_dict()))
    strategy.load_state_dict(best[2])
    return {
        "test": strategy.evaluate("test"),
        "course": mrrs,
        "epoch": best[1],
        "seconds": time.perf_counter() - started,
    }


def summary(out: Path) -> list[dict[str, Any]]:
    """Mean and standard deviation over the finished seeds of every cell."""
    cells = []
    for name in FILES:
        for side in SIDES:
            runs = [json.loads(path.read_text()) for path in sorted(out.glob(f"{name}.{side}.*.json"))]
            if not runs:
                continue
            mrrs = [run["test"]["mrr"] for run in runs]
            spread = statistics.stdev(mrrs) if len(mrrs) > 1 else 0.0
            cell = {"cell": f"{name}/{side}", "mean": statistics.mean(mrrs), "deviation": spread, "runs": runs}
            cells.append(cell)
            bank = runs[0]["test"]
            print(
                f"{cell['cell']:26} test MRR {cell['mean']:.4f} ± {spread:.4f} ({len(mrrs)} seeds), "
                f"EdgeBank {bank['edgebank']:.4f}, window {bank['edgebank_window']:.4f}"
            )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "temporal_accuracy")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--only", nargs="+", default=[f"{name}/{side}" for name in FILES for side in SIDES])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    args = parser.parse_args()
    from record import write_results

    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        for cell in args.only:
            name, side = cell.split("/")
            path = args.out / f"{name}.{side}.{seed}.json"
            if not path.exists():
                path.write_text(json.dumps(train(read(args.data / FILES[name]), side, seed, args.epochs)))
                print(path.stem, path.read_text(), flush=True)
    print(write_results("temporal_accuracy", summary(args.out)))


if __name__ == "__main__":
    main()
