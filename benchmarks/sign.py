"""Model sign beside GraphSAGE: accuracy, seconds per epoch and bytes on 1, 2 and 4 workers.

A cell is a data set, a model and a number of workers (1: strategy local; more: sar, full batch). Both models have 256
hidden units, layer norm and the same rate; hops of sign are computed before the first epoch and counted apart. Bytes
are those of all workers: per epoch as the slope between a run of all epochs and one of half of them, so that hops and
evaluations at the end cancel. A finished cell is not run again.

usage: python benchmarks/sign.py [--data DIR] [--epochs 100] [--only SET/MODEL …] [--out DIR] [--table]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import best_cells, run_json, write_results

HERE = Path(__file__).parent
DATA = Path(os.environ.get("GNNFLEET_DATA", HERE.parents[1] / "shared" / "data")) / "static"
PAGE = HERE.parent / "docs" / "models.md"
BEGIN, END = "<!-- table of benchmarks/sign.py -->\n", "<!-- end of table -->"
SETS = {  # split, model beside sign, further options of import
    "pubmed": ("0", "sage", []),
    "amazon_photo": ("0.6/0.2/0.2", "sage", []),
    "debian_bookworm": ("0", "hetero-sage", ["--undirected"]),  # three edge types
}
WORKERS = (1, 2, 4)
TRAIN = ["model.norm=layer", "model.layers=2", "train.lr=0.003", "train.weight_decay=0.0005"]


def gnnfleet(*arguments: str) -> dict[str, Any]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return run_json([sys.executable, "-m", "gnnfleet", *arguments, "--json"], env=env)


def run_cell(store: Path, name: str, model: str, workers: int, epochs: int, scratch: Path) -> dict[str, Any]:
    half, record = (train(store, name, model, workers, count, scratch) for count in (epochs // 2, epochs))
    bytes_sent = sum(record["traffic"]["bytes_sent"]) - sum(half["traffic"]["bytes_sent"])
    return {
        "set": name,
        "model": model,
        "workers": workers,
        "epochs": epochs,
        "val": record["metrics"]["val"],
        "test": record["metrics"]["test"],
        "seconds": round(statistics.median(record["seconds_per_epoch"]), 4),
        "megabytes_per_epoch": round(bytes_sent / (epochs - epochs // 2) / 1e6, 3),
        "load": round(os.getloadavg()[0], 1),
    }


def train(store: Path, name: str, model: str, workers: int, epochs: int, scratch: Path) -> dict[str, Any]:
    settings = [*TRAIN, f"train.epochs={epochs}", f"train.eval_every={max(1, epochs // 4)}", "train.patience=0"]
    strategy = "local" if workers == 1 else "sar"
    options = [part for setting in settings for part in ("--set", setting)]
    run_dir = scratch / f"{name}-{model}-{workers}-{epochs}"
    options += ["--run-dir", str(run_dir), "--split", SETS[name][0], "--workers", str(workers), "--strategy", strategy]
    return gnnfleet("train", str(store), "--model", model, *options)


def table(cells: list[dict[str, Any]]) -> str:
    titles = ["set", "model", "epochs", "test", "s per epoch on 1 / 2 / 4", "MB per epoch on 2 / 4"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name in SETS:
        for model in (SETS[name][1], "sign"):
            by_workers = {c["workers"]: c for c in cells if (c["set"], c["model"]) == (name, model)}
            if len(by_workers) == len(WORKERS):
                seconds = " / ".join(f"{by_workers[count]['seconds']:.3g}" for count in WORKERS)
                sent = " / ".join(f"{by_workers[count]['megabytes_per_epoch']:.3g}" for count in WORKERS[1:])
                one = by_workers[1]
                lines.append(f"| {name} | `{model}` | {one['epochs']} | {one['test']:.3f} | {seconds} | {sent} |")
    return "\n".join(lines)


def write_page(cells: list[dict[str, Any]]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(cells) + "\n" + END + rest.partition(END)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--only", nargs="*", help="run these sets and models only, as pubmed/sign")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "gnnfleet-sign")
    parser.add_argument("--table", action="store_true", help="write results and page from finished cells only")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, (_, peer, import_options) in SETS.items():
        store = options.out / name
        if not options.table and not store.exists():
            gnnfleet("import", str(options.data / f"{name}.npz"), "-o", str(store), *import_options)
        for model in (peer, "sign"):
            for workers in WORKERS:
                label = f"{name}/{model}/{workers}"
                path = options.out / f"{label.replace('/', '.')}.json"
                is_chosen = not options.only or f"{name}/{model}" in options.only
                if options.table or path.exists() or not is_chosen:
                    continue
                with tempfile.TemporaryDirectory() as scratch:
                    cell = run_cell(store, name, model, workers, options.epochs, Path(scratch))
                path.write_text(json.dumps({"cell": label, **cell}))
                print(path.read_text(), flush=True)
    cells = best_cells(options.out, "seconds")
    write_results("sign", cells)
    write_page(cells)


if __name__ == "__main__":
    main()
