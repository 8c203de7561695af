"""pipe against exact graph parallelism (sar, one-shot, overlapped): bytes, seconds over slow links, accuracy.

Cells take turns over rounds, the best round counts; finished cells are not run again. 32 layers of width 64.

  GRAPH/MODEL/K/SIDE[/RATE]       an epoch on K workers; SIDE: pipe (one way, K stages, 4 K chunks), sar, or plan (what
                                  the planner chooses); RATE: each worker a host whose link is held to it, as 300mbit
  accuracy/SET/MODEL/LAYERS/WAY/SEED   test accuracy at the best val epoch; WAY: exact, pipe, or a variant of ABLATION
  collapse/WAY                    deep gcn2 in many random chunks: exact, plain (GNNPipe as it was), guarded

GRAPH: communities and rmat (generated, mean degree 128 and 110), coauthor_cs, amazon_photo, pubmed (--data). Accuracy
cells stream chunks through one process: what is computed does not depend on the number of stages.

usage: python benchmarks/pipe.py [OUT] [--data DIR] [--cells …] [--rounds 2] [--epochs 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import crew

HERE = Path(__file__).parent
DENSE = ("communities", "rmat")
SETS = ("coauthor_cs", "amazon_photo", "pubmed")
LAYERS, HIDDEN, CHUNKS = 32, 64, 16
GNNPIPE = {"gradient": "double", "refresh": 23, "warm": False, "guard": 0}
ABLATION: dict[str, dict[str, Any]] = {
    "gnnpipe": GNNPIPE,
    "gnnpipe-shuffle": {**GNNPIPE, "shuffle": False},
    "gnnpipe-history": {**GNNPIPE, "refresh": 1},
    "gnnpipe-gradient": {**GNNPIPE, "gradient": "stale"},
    "none": {"gradient": "stale", "refresh": 1, "shuffle": False, "warm": False, "guard": 0},
    "control-variate": {"gradient": "control_variate", "guard": 0},
    "double": {"gradient": "double", "guard": 0},
    "stale": {"gradient": "stale", "guard": 0},
}
BOTH, RATES = ("pipe", "sar"), ("100mbit", "300mbit", "1gbit")
PAIRS = [(graph, model) for graph in (*DENSE, *SETS) for model in ("gcn2", "res+")]
VOLUME = [f"{graph}/{model}/{k}/{side}" for graph, model in PAIRS for k in (2, 4, 8) for side in BOTH]
LINKS = [f"{graph}/gcn2/{k}/{side}/{rate}" for graph in DENSE for k in (4, 8) for rate in RATES for side in BOTH]
PLANS = [f"{graph}/gcn2/4/plan" for graph in (*DENSE, *SETS)]
DEEP = [f"{name}/{model}/{layers}" for name in SETS for model in ("gcn2", "res+") for layers in (16, 32)]
ACCURACY = [f"accuracy/{each}/{way}/{seed}" for each in DEEP for seed in range(3) for way in ("exact", "pipe")]
TRIED = [f"accuracy/amazon_photo/gcn2/16/{way}/{seed}" for seed in range(3) for way in ABLATION]
COLLAPSE = [f"collapse/{way}" for way in ("exact", "plain", "guarded")]


def graph_of(name: str, data: Path) -> Any:
    import gnnfleet as gf
    from gnnfleet.graph.datasets import make_dataset

    if name == "communities":
        return make_dataset("communities", nodes=4000, mean_degree=128)
    if name == "rmat":
        return make_dataset("rmat", nodes=4096, edges=450_000, symmetric=True, features=64, classes=10, train=0.6)
    return gf.read_npz(data / f"{name}.npz")


def words_of(model: str, layers: int, *, seed: int = 0, **strategy: Any) -> dict[str, Any]:
    norm = "layer" if model == "res+" else "none"
    return {
        "model": {"name": model, "layers": layers, "hidden": HIDDEN, "dropout": 0.5, "norm": norm},
        "train": {"lr": 0.003 if model == "gcn2" else 0.001},
        "strategy": strategy,
        "seed": seed,
        "split": "0.6/0.2/0.2",
    }


# -- bytes and seconds --


def train(world: Any, cell: str, epochs: int, work: Path) -> dict[str, Any]:
    from dataclasses import replace

    import torch

    from gnnfleet.comm.reduce import gather_rows
    from gnnfleet.graph.chunks import open_layouts
    from gnnfleet.graph.partition import open_part
    from gnnfleet.graph.store import open_store
    from gnnfleet.report.memory import own_rss
    from gnnfleet.report.traffic import Traffic
    from gnnfleet.run.build import Here, build
    from gnnfleet.run.config import resolve

    name, model, _, side, *_ = cell.split("/")
    said: list[str] = []
    if side == "sar":
        knobs: dict[str, Any] = {"name": "sar", "group": world.size, "prefetch": 1}
        here = Here(world, open_part(work / name / f"parts-{world.size}", world.rank))
    else:
        knobs = {"name": "pipe", "guard": 0} | ({"ways": 1, "chunks": 4 * world.size} if side == "pipe" else {})
        here = Here(world, layouts=open_layouts(work / name / f"chunks-{world.size}-{side}"), say=said.append)
    tree = {**words_of(model, LAYERS, **knobs), "workers": world.size}
    tree["split"] = "0.6/0.2/0.2"
    strategy: Any = build(open_store(work / name / "store"), resolve(tree), here=here).strategy
    list(strategy.steps(0))
    seconds, bubbles, sent = [], [], 0
    for epoch in range(1, 1 + epochs):
        before, started = world.traffic.bytes_sent, time.perf_counter()
        list(strategy.steps(epoch))
        seconds.append(time.perf_counter() - started)
        sent = world.traffic.bytes_sent - before
        bubbles.append(strategy.counts().get("bubble", 0.0))
    aside = replace(world, traffic=Traffic())
    every = torch.cat(gather_rows(aside, torch.tensor([[sent, own_rss()]]))).tolist()
    found = {
        "seconds": min(seconds),
        "median": statistics.median(seconds),
        "bytes": sum(each for each, _ in every),
        "own_mib": [round(rss / 2**20) for _, rss in every],
        "bubble": statistics.median(bubbles),
    }
    if side != "sar":
        found |= {"predicted_bytes": strategy.forecast.bytes, "grid": str(strategy.grid), "said": said}
        found["forecast_seconds"] = strategy.forecast.seconds
    return found


def prepare(cell: str, args: argparse.Namespace) -> None:
    """The store and what a cell needs of its cuts; made once."""
    from gnnfleet.graph.chunks import lay_out, write_layouts
    from gnnfleet.graph.partition import write_partition
    from gnnfleet.graph.partitioners import assign
    from gnnfleet.graph.store import open_store, save_store
    from gnnfleet.strategies.pipe.config import PipeConfig

    name, _, size, side, *_ = cell.split("/")
    folder, workers = args.work / name, int(size)
    if not (folder / "store").exists():
        folder.mkdir(exist_ok=True)
        save_store(graph_of(name, args.data), folder / "store")
    graph = open_store(folder / "store")
    parts, chunks = folder / f"parts-{size}", folder / f"chunks-{size}-{side}"
    if side == "sar" and not parts.exists():
        write_partition(graph, assign(graph, workers, "mincut"), parts)
    if side != "sar" and not chunks.exists():
        wanted = [(1, 4 * workers)] if side == "pipe" else PipeConfig().candidates(workers)
        write_layouts(graph, [lay_out(graph, *each) for each in wanted], chunks)


# -- accuracy --


def measure(cell: str, data: Path) -> dict[str, Any]:
    import torch

    from gnnfleet.graph.chunks import lay_out
    from gnnfleet.run.build import Here, build
    from gnnfleet.run.config import resolve

    torch.set_num_threads(1)
    _, name, model, layers, way, seed = cell.split("/")
    graph, epochs = graph_of(name, data), 100
    knobs: dict[str, Any] = {"name": "local", "order": "store"}
    here = None
    said: list[str] = []
    if way != "exact":
        knobs = {"name": "pipe", "ways": 1, "chunks": CHUNKS, **ABLATION.get(way, {})}
        here = Here(layouts=[lay_out(graph, 1, CHUNKS)], say=said.append)
    tree = words_of(model, int(layers), seed=int(seed), **knobs)
    tree["split"] = 0 if name == "pubmed" else "0.6/0.2/0.2"
    strategy: Any = build(graph, resolve(tree), here=here).strategy
    best, losses, started = (-1.0, 0.0, 0), [], time.perf_counter()
    for epoch in range(epochs):
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
        more = {**GNNPIPE, "refresh": 1, "gradient": "stale"} if way == "plain" else {"refresh": 1, "gradient": "stale"}
        knobs = {"name": "pipe", "ways": 1, "chunks": 32, **more}
        here = Here(layouts=[lay_out(graph, 1, 32, method="random")], say=said.append)
    tree = words_of("gcn2", 32, **knobs)
    tree["train"] = {"lr": 0.01}
    tree["model"]["dropout"] = 0.1
    strategy: Any = build(graph, resolve(tree), here=here).strategy
    losses = [record.loss for epoch in range(80) for record in strategy.steps(epoch)]
    return {"losses": losses[9::10], "test": strategy.evaluate("test")["accuracy"], "said": said, "seconds": 0.0}


# -- tables --


def show(cells: list[dict[str, Any]]) -> None:
    by = {cell["cell"]: cell for cell in cells}
    ratios: dict[str, list[float]] = {"dense": [], "others": []}
    print("epochs: bytes and seconds of pipe and sar")
    for name, cell in by.items():
        words = name.split("/")
        if len(words) < 4 or words[3] != "pipe" or words[0] in ("accuracy", "collapse"):
            continue
        other = by.get("/".join([*words[:3], "sar", *words[4:]]))
        if other is None:
            continue
        ratio, speed = other["bytes"] / cell["bytes"], other["seconds"] / cell["seconds"]
        if len(words) == 4:
            ratios["dense" if words[0] in DENSE else "others"].append(ratio)
        links = ""
        free = [by.get("/".join([*words[:3], side])) for side in ("pipe", "sar")]
        if len(words) > 4 and all(free):
            added = [each["seconds"] - base["seconds"] for each, base in zip((cell, other), free, strict=True) if base]
            links = f"  link adds {added[0]:.2f} / {added[1]:.2f} s"
        exact = "as predicted" if cell["bytes"] == cell["predicted_bytes"] else f"predicted {cell['predicted_bytes']}"
        print(
            f"{name:36} {cell['bytes'] / 1e6:7.1f} MB ({exact}), sar {other['bytes'] / 1e6:7.1f}: {ratio:5.1f}× less; "
            f"{cell['seconds']:6.2f} / {other['seconds']:6.2f} s: {speed:4.2f}×  bubble {cell['bubble']:.0%}{links}"
        )
    for kind, each in ratios.items():
        if each:
            print(f"{kind}: {statistics.geometric_mean(each):.1f}× less on average, {max(each):.1f}× at best")
    for name, cell in by.items():
        if name.endswith("/plan"):
            print(f"{name:36} {cell['grid']}, {cell['forecast_seconds']:.2f} s planned, {cell['seconds']:.2f} s")
    show_accuracy(by)


def show_accuracy(by: dict[str, dict[str, Any]]) -> None:
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
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "pipe")
    parser.add_argument("--data", type=Path, default=Path("no data"))
    parser.add_argument("--cells", nargs="+", default=[*VOLUME, *LINKS, *PLANS, *COLLAPSE, *TRIED, *ACCURACY])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no cell after so many")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        kind = args.cell.split("/")[0]
        if kind in ("accuracy", "collapse"):
            print(
                json.dumps(measure(args.cell, args.data) if kind == "accuracy" else collapse(args.cell.split("/")[1]))
            )
        else:
            crew.as_rank(lambda world: train(world, args.cell, args.epochs, args.work))
        return
    from record import best_cells, write_results

    args.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        args.work = args.work or Path(folder)
        for number in range(args.rounds):
            for cell in args.cells:
                once = cell.startswith(("accuracy", "collapse"))
                path = args.out / f"{cell.replace('/', '.')}.{0 if once else number}.json"
                if path.exists() or time.monotonic() - begun > 60 * args.minutes:
                    continue
                path.write_text(json.dumps({"cell": cell, **start_cell(cell, args, once=once)}))
                print(cell, f"{json.loads(path.read_text())['seconds']:.2f} s", flush=True)
    best = best_cells(args.out, "seconds")
    show(best)
    print(write_results("pipe", best))


def start_cell(cell: str, args: argparse.Namespace, *, once: bool) -> dict[str, Any]:
    if once:
        words = [sys.executable, __file__, "--cell", cell, "--data", str(args.data)]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    prepare(cell, args)
    words = [__file__, "--cell", cell, "--work", str(args.work), "--epochs", str(args.epochs)]
    _, _, size, _, *rate = cell.split("/")
    answer: dict[str, Any] = crew.run(words, int(size), rate=rate[0] if rate else None)
    return answer


if __name__ == "__main__":
    main()
