"""Accuracy of pipe against exact training: deep models, the techniques one by one, a case where GNNPipe fails.

  accuracy/SET/MODEL/LAYERS/V/SEED   test accuracy at the best val epoch; V: exact, pipe, or one of VARIANTS
  collapse/V                         deep gcn2 in many random chunks: exact, plain (GNNPipe as published), guarded

8 chunks, split 0.6/0.2/0.2, one thread. The table shows the gain of val in the last quarter of the epochs, a test of
convergence. Chunks stream through one process: results do not depend on the number of stages. Runs of one seed have the
same split, initial weights and draws, so their distance from exact training is shown by seed. Finished cells are not
run again, and cells of other calls stay in the results.

usage: python benchmarks/pipe_accuracy.py [OUT] --data DIR [--cells …] [--minutes 30]
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import cache
from pathlib import Path
from typing import Any

from pipe import graph_of, path_of, save_cell
from record import best_cells, write_results

HERE = Path(__file__).parent
SETS = ("amazon_photo", "pubmed", "coauthor_cs")
CHUNKS, EVERY, COLLAPSED = 8, 10, 60
LAST = 3  # evaluations at the end of a run that are compared with the exact one
SETTINGS: dict[str, dict[str, Any]] = {
    "gcn2": {"hidden": 64, "lr": 0.01, "epochs": 100, "norm": "none"},
    "res+": {"hidden": 32, "lr": 0.001, "epochs": 100, "norm": "layer"},
}
GNNPIPE = {"gradient": "double", "refresh": 23, "warmup_history": False, "exactness_check_every": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "gnnpipe": GNNPIPE,
    "gnnpipe-shuffle": {**GNNPIPE, "shuffle": False},
    "gnnpipe-history": {**GNNPIPE, "refresh": 1},
    "gnnpipe-gradient": {**GNNPIPE, "gradient": "stale"},
    "none": {"gradient": "stale", "refresh": 1, "shuffle": False, "warmup_history": False, "exactness_check_every": 0},
    "gnnpipe+warm": {**GNNPIPE, "warmup_history": True},
    "double": {"exactness_check_every": 0},
    "stale": {"gradient": "stale", "exactness_check_every": 0},
    "double-history": {"refresh": 1, "exactness_check_every": 0},
    "stale-history": {"gradient": "stale", "refresh": 1, "exactness_check_every": 0},
    "pipe-16-chunks": {"chunks": 16},
    "pipe-32-chunks": {"chunks": 32},
}
DEEP = [f"{name}/{model}/{layers}" for layers in (16, 32) for model in SETTINGS for name in SETS]
ACCURACY = [
    f"accuracy/{setting}/{variant}/{seed}" for seed in range(3) for setting in DEEP for variant in ("exact", "pipe")
]
ABLATION = [f"accuracy/amazon_photo/gcn2/16/{variant}/{seed}" for seed in range(3) for variant in VARIANTS]
COLLAPSE = [f"collapse/{variant}" for variant in ("exact", "plain", "guarded")]


def config_of(model: str, layers: int, seed: int, strategy: dict[str, Any]) -> dict[str, Any]:
    settings = SETTINGS[model]
    return {
        "model": {
            "name": model,
            "layers": layers,
            "hidden": settings["hidden"],
            "dropout": 0.1,
            "norm": settings["norm"],
        },
        "train": {"lr": settings["lr"], "weight_decay": 0.0},
        "strategy": strategy,
        "seed": seed,
        "split": "0.6/0.2/0.2",
    }


def strategy_of(graph: Any, config: dict[str, Any], log: list[str], *, method: str = "mincut") -> Any:
    from gnnfleet.config.resolve import resolve
    from gnnfleet.training.build import RankContext, build

    settings, context = config["strategy"], None
    if settings["name"] == "pipe":
        context = RankContext(layouts=[layout_of(graph, settings["chunks"], method)], log_user=log.append)
    return build(graph, resolve(config), context=context).strategy


load_graph = cache(graph_of)


@cache
def layout_of(graph: Any, chunks: int, method: str) -> Any:
    from gnnfleet.graph.partition.chunk_layout import build_chunk_layout

    return build_chunk_layout(graph, 1, chunks, method=method)


def measure(cell: str, data: Path) -> dict[str, Any]:
    _, name, model, layers, variant, seed = cell.split("/")
    graph, log = load_graph(name, data), list[str]()
    settings: dict[str, Any] = {"name": "local", "order": "store"}
    if variant != "exact":
        settings = {"name": "pipe", "graph_parallel": 1, "chunks": CHUNKS, **VARIANTS.get(variant, {})}
    strategy = strategy_of(graph, config_of(model, int(layers), int(seed), settings), log)
    curve, cosines, started = [], [], time.perf_counter()
    for epoch in range(SETTINGS[model]["epochs"]):
        (record,) = strategy.train_epoch(epoch)
        if variant != "exact" and "cosine" in (metrics := strategy.epoch_metrics()):
            cosines.append([epoch + 1, round(metrics["cosine"], 3)])
        if epoch % EVERY == EVERY - 1:
            val, test = (strategy.evaluate(split)["accuracy"] for split in ("val", "test"))
            curve.append({"epoch": epoch + 1, "loss": record.loss, "val": val, "test": test})
    best = max(curve, key=lambda row: row["val"])
    early = max(row["val"] for row in curve[: 3 * len(curve) // 4])
    return {
        "val": best["val"],
        "test": best["test"],
        "epoch": best["epoch"],
        "last": curve[-1]["test"],
        "gained": best["val"] - early,  # in the last quarter of the epochs
        "loss": curve[-1]["loss"],
        "curve": [[round(number, 4) for number in row.values()] for row in curve],
        "cosines": cosines,
        "said": log,
        "seconds": time.perf_counter() - started,
    }


def collapse(variant: str) -> dict[str, Any]:
    """A deep model in random chunks: nearly all edges are between chunks. Classes have similar sizes."""
    from gnnfleet.graph.datasets import make_dataset

    parameters = {
        "nodes": 2000,
        "mean_degree": 20,
        "features": 32,
        "classes": 10,
        "homophily": 0.8,
        "size_exponent": 10.0,
    }
    graph, log = make_dataset("communities", **parameters, signal=0.5), list[str]()
    settings: dict[str, Any] = {"name": "local", "order": "store"}
    if variant != "exact":
        settings = {"name": "pipe", "graph_parallel": 1, "chunks": 16, **(GNNPIPE if variant == "plain" else {})}
    strategy = strategy_of(graph, config_of("gcn2", 16, 0, settings), log, method="random")
    losses, tests, started = [], [], time.perf_counter()
    for epoch in range(COLLAPSED):
        losses += [record.loss for record in strategy.train_epoch(epoch)]
        if epoch % 10 == 9:
            tests.append(strategy.evaluate("test")["accuracy"])
    seconds = time.perf_counter() - started
    return {"losses": losses[9::10], "tests": tests, "test": tests[-1], "said": log, "seconds": seconds}


# -- tables --


def points_above(cell: dict[str, Any], exact: dict[str, Any]) -> tuple[float, float]:
    """Difference to another run in points of (val, test), as means of the last evaluations."""

    def mean(run: dict[str, Any], column: int) -> float:
        return 100 * statistics.mean(row[column] for row in run["curve"][-LAST:])

    val, test = 2, 3  # after epoch and loss
    return mean(cell, val) - mean(exact, val), mean(cell, test) - mean(exact, test)


def show_pairs(by_name: dict[str, dict[str, Any]], group: str) -> None:
    """Print a group of runs, each against the exact one of the same seed."""
    setting, _, variant = group.rpartition("/")
    pairs = []
    for name, cell in sorted(by_name.items()):
        exact = by_name.get(f"{setting}/exact/{name.rpartition('/')[2]}")
        if variant != "exact" and exact is not None and name.rpartition("/")[0] == group:
            pairs.append(points_above(cell, exact))
    if pairs:
        figures = [
            f"{split} {statistics.mean(points):+.2f} ({', '.join(f'{value:+.2f}' for value in points)})"
            for split, points in zip(("val", "test"), zip(*pairs, strict=True), strict=True)
        ]
        print(f"{'':52} above exact of the same seed, last {LAST} evaluations: {', '.join(figures)}")


def show(by_name: dict[str, dict[str, Any]]) -> None:
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, cell in by_name.items():
        if name.startswith("accuracy/"):
            groups.setdefault(name.rpartition("/")[0], []).append(cell)
        elif name.startswith("collapse/"):
            print(f"{name:44} test {100 * cell['test']:6.2f}  losses {[round(loss, 3) for loss in cell['losses']]}")
    for name, runs in sorted(groups.items()):
        mean = {key: 100 * statistics.mean(run[key] for run in runs) for key in ("test", "last", "gained")}
        spread = 100 * statistics.stdev(run["test"] for run in runs) if len(runs) > 1 else 0.0
        loss = statistics.mean(run["loss"] for run in runs)
        print(
            f"{name:52} {mean['test']:6.2f} ± {spread:.2f} over {len(runs)} seeds, last epoch {mean['last']:6.2f}, "
            f"loss {loss:.3f}, gained {mean['gained']:.2f}, {runs[0]['seconds']:.0f} s"
        )
        show_pairs(by_name, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "pipe_accuracy")
    parser.add_argument("--data", type=Path, default=Path("no data"))
    parser.add_argument("--cells", nargs="*", default=[*COLLAPSE, *ACCURACY, *ABLATION])
    parser.add_argument("--minutes", type=float, default=30.0, help="start no cell after this time")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    for cell in args.cells:
        if not path_of(cell, 0, args.out).exists() and time.monotonic() < deadline:
            kind, _, rest = cell.partition("/")
            save_cell(cell, 0, measure(cell, args.data) if kind == "accuracy" else collapse(rest), args.out)
    best = best_cells(args.out, "seconds")
    show({cell["cell"]: cell for cell in best})
    print(write_results("pipe_accuracy", best, keep=True))


if __name__ == "__main__":
    main()
