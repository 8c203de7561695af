"""Test accuracy of sampled training: one process, macrobatch on two workers, the same in bf16; mean over five seeds.

Draws are the same on all sides, so results differ by rounding only. Settings are those of examples/accuracy with
fanouts of ten and batches of 512, in fewer epochs; finished seeds are not run again.

usage: python benchmarks/macrobatch_accuracy.py [OUT] [--data DIR] [--only pubmed/sage …] [--seeds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from accuracy import CONFIGS, DATA, UNDIRECTED

HERE = Path(__file__).parent
SIDES = ("local", "macrobatch", "bf16")
EPOCHS = {"pubmed/sage": 60, "amazon_photo/sage": 40, "debian_bookworm/rgcn": 20}


def train(store: Path, name: str, side: str, seed: int) -> dict[str, Any]:
    import gnnfleet as gf
    from gnnfleet.config.resolve import overlay, read_toml

    config = read_toml(CONFIGS / f"{name.replace('/', '_')}.toml")
    fanouts = [10] * config["model"]["layers"]
    strategy = {"name": "local" if side == "local" else "macrobatch", "fanouts": fanouts, "batch": 512}
    overrides = {"train": {"epochs": EPOCHS[name], "eval_every": 2}, "strategy": strategy, "seed": seed}
    overrides["precision"] = "bf16" if side == "bf16" else "float32"
    settings = overlay(config, overrides)
    record = gf.train(store, **{**settings, "workers": 1 if side == "local" else 2})
    return {"test": record.metrics["test"], "val": record.metrics["val"], "loss": record.metrics["train_loss"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "macrobatch_accuracy")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--only", nargs="+", default=list(EPOCHS))
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    import gnnfleet as gf
    from gnnfleet.graph.ingest.clean import clean_edges
    from record import write_results

    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            dataset = name.split("/")[0]
            store = Path(folder) / dataset
            graph = gf.read_npz(args.data / f"{dataset}.npz")
            if dataset in UNDIRECTED:
                graph, _ = clean_edges(graph, undirected=True, duplicates="drop")
            gf.save(graph, store)
            for seed in range(args.seeds):
                for side in SIDES:
                    path = args.out / f"{name.replace('/', '.')}.{side}.{seed}.json"
                    if not path.exists():
                        path.write_text(json.dumps(train(store, name, side, seed)))
                        print(path.stem, path.read_text(), flush=True)
    cells = []
    for name in EPOCHS:
        for side in SIDES:
            runs = [
                json.loads(path.read_text()) for path in sorted(args.out.glob(f"{name.replace('/', '.')}.{side}.*"))
            ]
            tests = [run["test"] for run in runs]
            if len(tests) > 1:
                cell = {"cell": f"{name}/{side}", "mean": statistics.mean(tests), "deviation": statistics.stdev(tests)}
                cells.append({**cell, "runs": runs})
                print(f"{cell['cell']:36} {100 * cell['mean']:.2f} ± {100 * cell['deviation']:.2f}  {len(tests)} seeds")
    print(write_results("macrobatch_accuracy", cells))


if __name__ == "__main__":
    main()
