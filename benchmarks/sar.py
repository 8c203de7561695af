"""sar in seconds: against torch_geometric in the same run, with the number of workers, and over slow links.

Cells take turns over rounds, the best round counts; finished cells are not run again. The graph: 200,000 nodes, 5 M
edges, 100 features, 47 classes; SAGE-256 and GAT 4 × 32 of three layers, no dropout. Workers share the cores of one
machine, so more of them cannot be faster here: the table shows what spreading costs.

  sage/pyg, gat/pyg        torch_geometric in one process: SAGE on CSR, GAT on edge_index
  sage/sar/N[/words]       sar on N workers; words: rate=1gbit (each worker a host, links held to it), prefetch=0 …
  wire/W                   test accuracy after 30 epochs with rows written as W, five seeds, two workers

usage: python benchmarks/sar.py [OUT] [--data DIR] [--cells sage/sar/2 …] [--rounds 2] [--epochs 3]
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
from epochs import HIDDEN, load

HERE = Path(__file__).parent
WARM = 3
FAST = [f"{model}/{rest}" for model in ("sage", "gat") for rest in ("pyg", "sar/1", "sar/2", "sar/4")]
SLOW = ["sage/sar/8", "sage/sar/2/prefetch=0", "sage/sar/4/prefetch=0", "sage/sar/8/prefetch=0"]
LINKS = [
    f"sage/sar/{size}/rate=1gbit{more}"
    for size in (2, 4, 8)
    for more in ("", "/prefetch=0", "/wire_dtype=bf16", "/wire_dtype=int8")
]
WIRES = ["wire/exact", "wire/bf16", "wire/int8"]


def words_of(cell: str) -> tuple[str, int, dict[str, Any]]:
    """(model, workers, settings of the strategy)."""
    model, _, size, *more = cell.split("/")
    settings: dict[str, Any] = {"prefetch": 1}
    for word in more:
        key, value = word.split("=")
        settings[key] = int(value) if value.isdigit() else value
    return model, int(size), settings


def train(world: Any, model: str, settings: dict[str, Any], epochs: int, store: Path, parts: Path) -> dict[str, Any]:
    import torch

    from gnnfleet.comm.collectives import all_gather_rows
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.partition.partitioned_graph import open_part
    from gnnfleet.graph.store import open_store
    from gnnfleet.report.memory import peak_rss
    from gnnfleet.training.build import RankContext, build

    tree = {
        "model": {"name": model, "hidden": HIDDEN[model], "layers": 3, "heads": 4, "dropout": 0.0},
        "train": {"weight_decay": 0.0},
        "strategy": {"name": "sar", **settings},
    }
    context = RankContext(world, open_part(parts, world.rank))
    strategy = build(open_store(store), resolve(tree), context=context).strategy
    seconds, losses = [], []
    for epoch in range(WARM + epochs):
        sent, rounds, started = world.traffic.bytes_sent, world.traffic.rounds, time.perf_counter()
        losses += [record.loss for record in strategy.train_epoch(epoch)]
        seconds.append(time.perf_counter() - started)
    own = torch.tensor([[peak_rss(), world.traffic.bytes_sent - sent]])
    every = torch.cat(all_gather_rows(world, own)).tolist()
    return {
        "seconds": min(seconds[WARM:]),
        "median": statistics.median(seconds[WARM:]),
        "losses": losses,
        "peak_gib": [round(peak / 2**30, 2) for peak, _ in every],
        "megabytes_sent": [round(count / 1e6, 1) for _, count in every],
        "rounds": world.traffic.rounds - rounds,
    }


def run_peer(model: str, data: Path, epochs: int) -> dict[str, Any]:
    import warnings

    from epochs import peer

    warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
    epoch = peer(load(data), model, csr=model == "sage")
    warm, count = (WARM, epochs) if model == "sage" else (1, 1)  # half a minute each
    seconds = []
    for number in range(warm + count):
        started = time.perf_counter()
        epoch(number)
        seconds.append(time.perf_counter() - started)
    return {"seconds": min(seconds[warm:])}


def run_wire(wire: str) -> dict[str, Any]:
    import gnnfleet as gf
    from gnnfleet.graph.datasets import make_dataset

    words = {"nodes": 20_000, "mean_degree": 20, "features": 32, "classes": 20, "signal": 0.06, "homophily": 0.6}
    graph = make_dataset("communities", **words)
    runs = [
        gf.train(
            graph,
            strategy={"name": "sar", "wire_dtype": wire},
            workers=2,
            partition="random",
            model=gf.nn.SAGE(hidden=64, layers=3, dropout=0.2),
            epochs=30,
            seed=seed,
        ).metrics["test"]
        for seed in range(5)
    ]
    return {"accuracy": statistics.mean(runs), "deviation": statistics.stdev(runs), "runs": runs, "seconds": 0.0}


def start_cell(cell: str, args: argparse.Namespace) -> dict[str, Any]:
    if cell.endswith("/pyg") or cell.startswith("wire/"):
        words = [sys.executable, __file__, "--cell", cell, "--data", str(args.data), "--epochs", str(args.epochs)]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        return {"cell": cell, **json.loads(done.stdout.splitlines()[-1])}
    _, size, settings = words_of(cell)
    rate = settings.pop("rate", None)
    store, parts = prepare(args, size)
    words = [__file__, "--cell", cell, "--store", str(store), "--parts", str(parts), "--epochs", str(args.epochs)]
    return {"cell": cell, **crew.run(words, size, rate=rate)}


def prepare(args: argparse.Namespace, size: int) -> tuple[Path, Path]:
    """The store, and its partition by METIS into as many parts; made once."""
    from gnnfleet.graph.partition.assign import assign_nodes
    from gnnfleet.graph.partition.partitioned_graph import write_partition
    from gnnfleet.graph.store import open_store, save_store

    store, parts = args.work / "store", args.work / f"parts-{size}"
    if not store.exists():
        save_store(load(args.data), store)
    if not parts.exists():
        graph = open_store(store)
        write_partition(graph, assign_nodes(graph, size, "mincut"), parts)
    return store, parts


def show(cells: list[dict[str, Any]]) -> None:
    by = {cell["cell"]: cell for cell in cells}
    for cell in cells:
        if "accuracy" in cell:
            print(f"{cell['cell']:36} {100 * cell['accuracy']:6.2f} ± {100 * cell['deviation']:.2f}")
            continue
        peer = by.get(f"{cell['cell'].split('/')[0]}/pyg")
        ratio = f"{peer['seconds'] / cell['seconds']:5.1f}× PyG" if peer else ""
        more = "" if "rounds" not in cell else (
            f"  {max(cell['peak_gib']):.2f} GiB  {sum(cell['megabytes_sent']):.0f} MB  {cell['rounds']} rounds"
        )  # fmt: skip
        print(f"{cell['cell']:36} {cell['seconds']:7.2f} s {ratio}{more}")


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """Seconds of an epoch of SAGE against the number of workers."""
    from plot import line_chart

    names = {
        "": "one machine",
        "rate=1gbit/prefetch=0": "1 Gbit/s, prefetch 0",
        "rate=1gbit": "1 Gbit/s, prefetch 1",
        "rate=1gbit/wire_dtype=int8": "1 Gbit/s, int8",
        "rate=1gbit/wire_dtype=bf16": "1 Gbit/s, bf16",
    }
    by = {cell["cell"]: cell["seconds"] for cell in cells}
    series = {
        name: [(size, by[cell]) for size in (1, 2, 4, 8) if (cell := f"sage/sar/{size}/{more}".rstrip("/")) in by]
        for more, name in names.items()
    }
    if any(series.values()):
        shown = {name: line for name, line in series.items() if line}
        line_chart(path, "SAGE: seconds per epoch, all workers on two cores", shown, across="workers", up="seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "sar")
    parser.add_argument("--data", type=Path, default=Path("no data"))
    parser.add_argument("--cells", nargs="+", default=[*FAST, *SLOW, *LINKS, *WIRES])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell and args.store:
        model, _, settings = words_of(args.cell)
        settings.pop("rate", None)
        crew.as_rank(lambda world: train(world, model, settings, args.epochs, args.store, args.parts))
        return
    if args.cell:
        kind, word = args.cell.split("/")
        print(json.dumps(run_wire(word) if kind == "wire" else run_peer(kind, args.data, args.epochs)))
        return
    from record import best_cells, write_results

    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        args.work = Path(folder)
        for number in range(args.rounds):
            for cell in args.cells:
                once = cell in WIRES or cell == "gat/pyg"
                path = args.out / f"{cell.replace('/', '.')}.{0 if once else number}.json"
                if not path.exists():
                    path.write_text(json.dumps(start_cell(cell, args)))
                    print(cell, f"{json.loads(path.read_text())['seconds']:.2f} s", flush=True)
    best = best_cells(args.out, "seconds")
    show(best)
    draw(best, HERE.parent / "docs" / "img" / "sar_speed.svg")
    print(write_results("sar", best))


if __name__ == "__main__":
    main()
