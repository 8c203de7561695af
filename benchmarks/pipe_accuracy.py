"""Accuracy of pipe against exact training: deep models, the techniques one by one, a case where GNNPipe fails.

  accuracy/SET/MODEL/LAYERS/WAY/SEED   test accuracy at the best val epoch; WAY: exact, pipe, or a variant of ABLATION
  collapse/WAY                         deep gcn2 in many random chunks: exact, plain (GNNPipe as it was), guarded

Width 32, 80 epochs, 8 chunks, split 0.6/0.2/0.2, one thread. Chunks stream through one process: what is computed does
not depend on the number of stages. Finished cells are not run again.

usage: python benchmarks/pipe_accuracy.py [OUT] --data DIR [--cells …] [--minutes 30]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pipe import graph_of, keep, path_of

HERE = Path(__file__).parent
SETS = ("amazon_photo", "pubmed", "coauthor_cs")
HIDDEN, CHUNKS, EPOCHS = 32, 8, 80
GNNPIPE = {"gradient": "double", "refresh": 23, "warm": False, "guard": 0}
ABLATION: dict[str, dict[str, Any]] = {
    "gnnpipe": GNNPIPE,
    "gnnpipe-shuffle": {**GNNPIPE, "shuffle": False},
    "gnnpipe-history": {**GNNPIPE, "refresh": 1},
    "gnnpipe-gradient": {**GNNPIPE, "gradient": "stale"},
    "none": {"gradient": "stale", "refresh": 1, "shuffle": False, "warm": False, "guard": 0},
    "gnnpipe+warm": {**GNNPIPE, "warm": True},
    "double": {"gradient": "double", "guard": 0},
    "stale": {"gradient": "stale", "guard": 0},
    "control-variate": {"gradient": "control_variate", "guard": 0},
}
DEEP = [f"{name}/{model}/{layers}" for layers in (16, 32) for model in ("gcn2", "res+") for name in SETS]
ACCURACY = [f"accuracy/{each}/{way}/{seed}" for seed in range(3) for each in DEEP for way in ("exact", "pipe")]
TRIED = [f"accuracy/amazon_photo/gcn2/16/{way}/{seed}" for seed in range(3) for way in ABLATION]
COLLAPSE = [f"collapse/{way}" for way in ("exact", "plain", "guarded")]


def words_of(model: str, layers: int, seed: int, strategy: dict[str, Any]) -> dict[str, Any]:
    norm = "layer" if model == "res+" else "none"
    return {
        "model": {"name": model, "layers": layers, "hidden": HIDDEN, "dropout": 0.3, "norm": norm},
        "train": {"lr": 0.01 if model == "gcn2" else 0.003},
        "strategy": strategy,
        "seed": seed,
        "split": "0.6/0.2/0.2",
    }


def measure(cell: str, data: Path) -> dict[str, Any]:
    import torch

    from gnnfleet.graph.chunks import lay_out
    from gnnfleet.run.build import Here, build
    from gnnfleet.run.config import resolve

    torch.set_num_threads(1)
    _, name, model, layers, way, seed = cell.split("/")
    graph = graph_of(name, data)
    knobs: dict[str, Any] = {"name": "local", "order": "store"}
    here = None
    said: list[str] = []
    if way != "exact":
        knobs = {"name": "pipe", "ways": 1, "chunks": CHUNKS, **ABLATION.get(way, {})}
        here = Here(layouts=[lay_out(graph, 1, CHUNKS)], say=said.append)
    tree = words_of(model, int(layers), int(seed), knobs)
    strategy: Any = build(graph, resolve(tree), here=here).strategy
    best, losses, started = (-1.0, 0.0, 0), [], time.perf_counter()
    for epoch in range(EPOCHS):
        losses += [record.loss for record in strategy.steps(epoch)]
        if epoch % 5 == 4:
            val = strategy.evaluate("val")["accuracy"]
            best = max(best, (val, strategy.evaluate("test")["accuracy"], epoch + 1), key=lambda each: each[0])
    last = strategy.evaluate("test")["accuracy"]
    took = time.perf_counter() - started
    return {
        "val": best[0],
        "test": best[1],
        "epoch": best[2],
        "last": last,
        "loss": losses[-1],
        "seconds": took,
        "said": said,
    }


def collapse(way: str) -> dict[str, Any]:
    """A graph whose features say little by themselves, in chunks that METIS has not looked at."""
    import torch

    from gnnfleet.graph.chunks import lay_out
    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.run.build import Here, build
    from gnnfleet.run.config import resolve

    torch.set_num_threads(1)
    words = {"nodes": 2000, "mean_degree": 20, "features": 32, "classes": 10, "signal": 0.05, "homophily": 0.8}
    graph = make_dataset("communities", **words)
    knobs: dict[str, Any] = {"name": "local", "order": "store"}
    here, said = None, []  # type: ignore[var-annotated]
    if way != "exact":
        knobs = {"name": "pipe", "ways": 1, "chunks": 32, **(GNNPIPE if way == "plain" else {})}
        here = Here(layouts=[lay_out(graph, 1, 32, method="random")], say=said.append)
    tree = words_of("gcn2", 32, 0, knobs)
    strategy: Any = build(graph, resolve(tree), here=here).strategy
    losses, tests, started = [], [], time.perf_counter()
    for epoch in range(EPOCHS):
        losses += [record.loss for record in strategy.steps(epoch)]
        if epoch % 10 == 9:
            tests.append(strategy.evaluate("test")["accuracy"])
    took = time.perf_counter() - started
    return {"losses": losses[9::10], "tests": tests, "test": tests[-1], "said": said, "seconds": took}


# -- tables --


def show(by: dict[str, dict[str, Any]]) -> None:
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, cell in by.items():
        if name.startswith("accuracy/"):
            groups.setdefault(name.rpartition("/")[0], []).append(cell)
        elif name.startswith("collapse/"):
            print(f"{name:44} test {100 * cell['test']:6.2f}  losses {[round(loss, 3) for loss in cell['losses']]}")
    for name, runs in groups.items():
        tests = [100 * run["test"] for run in runs]
        last = statistics.mean(100 * run["last"] for run in runs)
        print(f"{name:44} {statistics.mean(tests):6.2f} over {len(tests)} seeds, last epoch {last:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "pipe_accuracy")
    parser.add_argument("--data", type=Path, default=Path("no data"))
    parser.add_argument("--cells", nargs="*", default=[*COLLAPSE, *TRIED, *ACCURACY])
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no cell after so many")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        kind, _, rest = args.one.partition("/")
        print(json.dumps(measure(args.one, args.data) if kind == "accuracy" else collapse(rest)))
        return
    from record import best_cells, write_results

    args.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * args.minutes
    for cell in args.cells:
        if not path_of(cell, 0, args.out).exists() and time.monotonic() < until:
            words = [sys.executable, __file__, "--one", cell, "--data", str(args.data)]
            done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
            keep(cell, 0, json.loads(done.stdout.splitlines()[-1]), args.out)
    best = best_cells(args.out, "seconds")
    show({cell["cell"]: cell for cell in best})
    print(write_results("pipe_accuracy", best))


if __name__ == "__main__":
    main()
