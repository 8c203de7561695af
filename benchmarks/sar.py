"""sar in seconds: against torch_geometric in the same run, by number of workers, and over slow links.

Cells alternate over rounds, and the best round counts; finished cells are not run again. The graph: 200,000 nodes, 5 M
edges, 100 features, 47 classes; SAGE-256 and GAT 4 × 32 of three layers, no dropout. Workers share the cores of one
machine, so more workers are not faster here: the table shows the cost of the distribution.

  sage/pyg, gat/pyg        torch_geometric in one process: SAGE on CSR, GAT on edge_index
  sage/sar/N[/options]     sar on N workers; options: rate=1gbit (each worker is a host with this link), prefetch=0 …
  wire/W                   test accuracy after 30 epochs with strategy.wire_dtype=W, five seeds, two workers

usage: python benchmarks/sar.py [OUT] [--data DIR] [--cells sage/sar/2 …] [--rounds 2] [--epochs 3]
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

from epochs import HIDDEN, load
from ranks import run_as_rank, run_ranks
from record import best_cells, run_json, write_results

HERE = Path(__file__).parent
WARM = 3
FAST = [f"{model}/{rest}" for model in ("sage", "gat") for rest in ("pyg", "sar/1", "sar/2", "sar/4")]
SLOW = ["sage/sar/8", "sage/sar/2/prefetch=0", "sage/sar/4/prefetch=0", "sage/sar/8/prefetch=0"]
LINKS = [
    f"sage/sar/{size}/rate=1gbit{option}"
    for size in (2, 4, 8)
    for option in ("", "/prefetch=0", "/wire_dtype=bf16", "/wire_dtype=int8")
]
WIRES = ["wire/exact", "wire/bf16", "wire/int8"]


def parse_cell(cell: str) -> tuple[str, int, dict[str, Any]]:
    """(model, workers, settings of the strategy)."""
    model, _, size, *options = cell.split("/")
    settings: dict[str, Any] = {"prefetch": 1}
    for option in options:
        key, value = option.split("=")
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

    config = {
        "model": {"name": model, "hidden": HIDDEN[model], "layers": 3, "heads": 4, "dropout": 0.0},
        "train": {"weight_decay": 0.0},
        "strategy": {"name": "sar", **settings},
    }
    strategy = build(
        open_store(store), resolve(config), context=RankContext(world, open_part(parts, world.rank))
    ).strategy
    seconds, losses = [], []
    for epoch in range(WARM + epochs):
        sent, rounds, started = world.traffic.bytes_sent, world.traffic.rounds, time.perf_counter()
        losses += [record.loss for record in strategy.train_epoch(epoch)]
        seconds.append(time.perf_counter() - started)
    figures = torch.tensor([[peak_rss(), world.traffic.bytes_sent - sent]])
    all_figures = torch.cat(all_gather_rows(world, figures)).tolist()
    return {
        "seconds": min(seconds[WARM:]),
        "median": statistics.median(seconds[WARM:]),
        "losses": losses,
        "peak_gib": [round(peak / 2**30, 2) for peak, _ in all_figures],
        "megabytes_sent": [round(count / 1e6, 1) for _, count in all_figures],
        "rounds": world.traffic.rounds - rounds,
    }


def run_pyg(model: str, data: Path, epochs: int) -> dict[str, Any]:
    import warnings

    from epochs import pyg_epoch

    warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
    epoch = pyg_epoch(load(data), model, csr=model == "sage")
    warmup, count = (WARM, epochs) if model == "sage" else (1, 1)  # an epoch of GAT takes half a minute
    seconds = []
    for number in range(warmup + count):
        started = time.perf_counter()
        epoch(number)
        seconds.append(time.perf_counter() - started)
    return {"seconds": min(seconds[warmup:])}


def run_wire(wire: str) -> dict[str, Any]:
    import gnnfleet as gf
    from gnnfleet.graph.datasets import make_dataset

    parameters = {"nodes": 20_000, "mean_degree": 20, "features": 32, "classes": 20, "signal": 0.06, "homophily": 0.6}
    graph = make_dataset("communities", **parameters)
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
        command = [sys.executable, __file__, "--cell", cell, "--data", str(args.data), "--epochs", str(args.epochs)]
        return {"cell": cell, **run_json(command)}
    _, size, settings = parse_cell(cell)
    rate = settings.pop("rate", None)
    store, parts = prepare(args, size)
    arguments = [__file__, "--cell", cell, "--store", str(store), "--parts", str(parts), "--epochs", str(args.epochs)]
    return {"cell": cell, **run_ranks(arguments, size, rate=rate)}


def prepare(args: argparse.Namespace, size: int) -> tuple[Path, Path]:
    """The store and its partition by METIS into ``size`` parts, each made once."""
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
    by_name = {cell["cell"]: cell for cell in cells}
    for cell in cells:
        if "accuracy" in cell:
            print(f"{cell['cell']:36} {100 * cell['accuracy']:6.2f} ± {100 * cell['deviation']:.2f}")
            continue
        peer = by_name.get(f"{cell['cell'].split('/')[0]}/pyg")
        ratio = f"{peer['seconds'] / cell['seconds']:5.1f}× PyG" if peer else ""
        traffic = "" if "rounds" not in cell else (
            f"  {max(cell['peak_gib']):.2f} GiB  {sum(cell['megabytes_sent']):.0f} MB  {cell['rounds']} rounds"
        )  # fmt: skip
        print(f"{cell['cell']:36} {cell['seconds']:7.2f} s {ratio}{traffic}")


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """Draw the seconds of an epoch of SAGE against the number of workers."""
    from plot import line_chart

    names = {
        "": "one machine",
        "rate=1gbit/prefetch=0": "1 Gbit/s, prefetch 0",
        "rate=1gbit": "1 Gbit/s, prefetch 1",
        "rate=1gbit/wire_dtype=int8": "1 Gbit/s, int8",
        "rate=1gbit/wire_dtype=bf16": "1 Gbit/s, bf16",
    }
    seconds_by_cell = {cell["cell"]: cell["seconds"] for cell in cells}
    series = {
        name: [
            (size, seconds_by_cell[cell])
            for size in (1, 2, 4, 8)
            if (cell := f"sage/sar/{size}/{options}".rstrip("/")) in seconds_by_cell
        ]
        for options, name in names.items()
    }
    if any(series.values()):
        shown = {name: line for name, line in series.items() if line}
        line_chart(
            path, "SAGE: seconds per epoch, all workers on two cores", shown, x_label="workers", y_label="seconds"
        )


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
        model, _, settings = parse_cell(args.cell)
        settings.pop("rate", None)
        run_as_rank(lambda world: train(world, model, settings, args.epochs, args.store, args.parts))
        return
    if args.cell:
        kind, wire = args.cell.split("/")
        print(json.dumps(run_wire(wire) if kind == "wire" else run_pyg(kind, args.data, args.epochs)))
        return
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
