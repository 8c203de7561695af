"""Runs without a flag on many graphs, beside published figures and the best settings of ``gnnfleet tune``.

A cell is a data set, a side and a seed. ``defaults`` trains as ``gnnfleet train STORE`` does, ``plain`` trains 100
epochs with auto_defaults=false, ``tuned`` searches for --tune minutes and takes the best run by validation. Seeds
select the split of sets with ten of them. Every cell runs in a process of its own with one thread. Seconds are those of
a process. Finished cells are not run again: remove results/cells/defaults to measure anew.

usage: python benchmarks/defaults.py [--data DIR] [--only cora pubmed …] [--sides defaults plain tuned] [--seeds 1]
       [--tune 30] [--minutes 30]
DIR holds cora.npz and the others (layout: docs/formats.md); default ../shared/data/static or $GNNFLEET_DATA/static.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from accuracy import DATA, UNDIRECTED
from record import run_json, write_results

CELLS = Path(__file__).parent / "results" / "cells" / "defaults"
SETS: dict[str, tuple[str | None, str, float | None, str]] = {  # split, metric, published figure, its source
    "cora": (None, "accuracy", 81.5, "GCN"),
    "citeseer": (None, "accuracy", 70.3, "GCN"),
    "pubmed": (None, "accuracy", 79.0, "GCN, GAT"),
    "amazon_photo": ("0.6/0.2/0.2", "accuracy", 96.8, "SAGE, Luo et al., one split"),
    "amazon_photo:20": ("20-per-class", "accuracy", 91.2, "GCN, Shchur et al."),
    "coauthor_cs:20": ("20-per-class", "accuracy", 91.1, "GCN, Shchur et al."),
    "squirrel_filtered": (None, "accuracy", 39.5, "GCN, Platonov et al."),
    "minesweeper": (None, "roc_auc", 93.51, "SAGE, Platonov et al."),
    "attr_flickr": ("0.6/0.2/0.2", "accuracy", None, ""),
    "twitch": ("0.6/0.2/0.2", "accuracy", None, ""),
    "blogcatalog_multilabel": ("0.5/0.1/0.4", "micro_f1", 41.0, "DeepWalk"),
    "debian_bookworm": (None, "accuracy", 78.5, "SAGE, not converged"),
    "hetero_acm": (None, "micro_f1", 88.1, "HeCo"),
    "hetero_dblp": (None, "micro_f1", 92.0, "HeCo"),
    "communities": ("0.1/0.1/0.8", "accuracy", None, ""),  # generated
}
SIDES = ("defaults", "plain", "tuned")


def load(name: str, data: Path) -> Any:
    import gnnfleet as gf
    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.ingest.clean import clean_edges

    base = name.partition(":")[0]
    if base == "communities":
        return make_dataset("communities", nodes=10_000, edges=100_000)
    graph = gf.read_npz(data / f"{base}.npz")
    return clean_edges(graph, undirected=True, duplicates="drop")[0] if base in UNDIRECTED else graph


def run_cell(cell: str, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    import gnnfleet as gf
    from gnnfleet.config.resolve import flatten, read_toml
    from gnnfleet.session.tune import tune

    torch.set_num_threads(1)
    name, side, seed = cell.rsplit("/", 2)
    split, metric, *_ = SETS[name]
    graph = load(name, args.data)
    splits = graph.nodes[graph.labelled_type].split
    several = split is None and splits is not None and len(splits) > 1
    own: dict[str, Any] = {"seed": int(seed), "split": int(seed) % len(splits) if several else split or 0}
    own["train"] = {"metric": metric}
    started, spent = time.perf_counter(), time.process_time()
    if side == "tuned":
        with tempfile.TemporaryDirectory() as folder:
            best = tune(graph, own, Path(folder) / "search", budget=60 * args.tune).best
            record = gf.train(graph, config=read_toml(best), quiet=True)
    elif side == "plain":
        record = gf.train(graph, config=own, epochs=100, auto_defaults=False, quiet=True)
    else:
        record = gf.train(graph, config=own, quiet=True)
    settings = flatten(record.config.model_dump(mode="json"))
    chosen = {key: settings[key] for key in settings if key.startswith(("model.", "train."))}
    figures = {key: record.metrics[key] for key in ("val", "test", "best_epoch")}
    seconds = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - spent}
    return {"cell": cell, "metric": metric, **figures, "epochs": record.summary.epochs, **seconds, "settings": chosen}


def show(cells: list[dict[str, Any]]) -> None:
    """Print the table: mean test figures by set and side, and how far defaults are below the better of both others."""
    by_key: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        name, side, _ = cell["cell"].rsplit("/", 2)
        by_key.setdefault((name, side), []).append(100 * cell["test"])
    print(f"{'set':24} {'metric':10}" + "".join(f"{side:>12}" for side in (*SIDES, "published", "gap")))
    for name, (_, metric, published, _) in SETS.items():
        means = [statistics.mean(by_key[name, side]) if (name, side) in by_key else None for side in SIDES]
        known = [value for value in (means[2], published) if value is not None]
        gap = None if means[0] is None or not known else max(known) - means[0]
        print(
            f"{name:24} {metric:10}"
            + "".join("           -" if v is None else f"{v:12.2f}" for v in (*means, published, gap))
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--only", nargs="+", default=list(SETS))
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--tune", type=float, default=30.0, help="minutes of a search")
    parser.add_argument("--minutes", type=float, default=30.0, help="start no further cell after this time")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(run_cell(args.cell, args)))
        return
    CELLS.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    names = [f"{name}/{side}/{seed}" for side in args.sides for seed in range(args.seeds) for name in args.only]
    for cell in names:
        path = CELLS / f"{cell.replace('/', '.')}.json"
        if not path.exists() and time.monotonic() < deadline:
            options = ["--data", str(args.data), "--tune", str(args.tune)]
            path.write_text(json.dumps(run_json([sys.executable, __file__, "--cell", cell, *options])))
            done = json.loads(path.read_text())
            print(f"{cell:36} val {done['val']:.4f} test {done['test']:.4f} {done['cpu_seconds']:.0f} s", flush=True)
    cells = [json.loads(path.read_text()) for path in sorted(CELLS.glob("*.json"))]
    show(cells)
    print(write_results("defaults", cells, keep=True))


if __name__ == "__main__":
    main()
