"""Unchanged torch_geometric modules in one process, full batch: seconds per epoch and peak memory.

``module`` trains a module through gnnfleet, ``pyg`` the same module with a plain loop on edge_index, ``ours`` the model
of gnnfleet of the same widths. All convolutions of ``sage`` and ``gat`` run on gnnfleet kernels; those of ``custom``
have a message of their own and run the code of torch_geometric. Each cell runs in a process of its own, cells of a
round are interleaved, and the best epoch of all rounds counts. Finished cells are not run again.

usage: python benchmarks/pyg_modules.py [OUT] [--data DIR] [--cells sage/module …] [--rounds 2] [--epochs 2]
       [--nodes N --edges E]
DIR holds edge_index.npy, x.npy, y.npy, train_idx.npy; without it a communities graph is generated: 200,000 nodes, 5 M
edges, 100 features, 47 classes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from record import best_cells, run_json, write_results

HERE = Path(__file__).parent
CELLS = [
    "sage/ours", "sage/module", "sage/pyg", "gat/ours", "gat/module", "gat/pyg", "custom/module", "custom/pyg",
]  # fmt: skip


def sage(config: Any, graph: Any, out_channels: int) -> Any:
    return _network("sage", graph, out_channels)


def gat(config: Any, graph: Any, out_channels: int) -> Any:
    return _network("gat", graph, out_channels)


def custom(config: Any, graph: Any, out_channels: int) -> Any:
    return _network("custom", graph, out_channels)


def _network(model: str, graph: Any, out_channels: int) -> Any:
    from epochs import pyg_network

    return pyg_network(model, graph.single_nodes.x.shape[1], out_channels)


def run_cell(cell: str, args: argparse.Namespace) -> dict[str, Any]:
    from epochs import gnnfleet_epoch, load, module_epoch, pyg_epoch
    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.report.memory import peak_rss

    model, system = cell.split("/")
    size = {"nodes": args.nodes, "edges": args.edges}
    graph = make_dataset("communities", **size, features=100, classes=47) if args.nodes else load(args.data)
    if system == "ours":
        epoch = gnnfleet_epoch(graph, model, "float32")
    elif system == "module":
        epoch = module_epoch(graph, f"{__file__}:{model}")
    else:
        epoch = pyg_epoch(graph, model, csr=False)
    losses, seconds = [], []
    for number in range(1 + args.epochs):  # the first is a warm-up
        start = time.perf_counter()
        losses.append(epoch(number))
        seconds.append(time.perf_counter() - start)
    return {"cell": cell, "seconds": min(seconds[1:]), "losses": losses, "peak_gib": peak_rss() / 2**30}


def start_cell(cell: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a cell in a process of its own."""
    sizes = {"--epochs": args.epochs, "--nodes": args.nodes, "--edges": args.edges, "--data": args.data}
    options = [text for name, value in sizes.items() for text in (name, str(value))]
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}
    return run_json([sys.executable, __file__, "--cell", cell, *options], environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "pyg_modules")
    parser.add_argument("--data", type=Path, default=Path("no data"))
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=0, help="size of the generated graph; results are not recorded")
    parser.add_argument("--edges", type=int, default=0)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(run_cell(args.cell, args)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    for number in range(args.rounds):
        for cell in args.cells:
            path = args.out / f"{cell.replace('/', '.')}.{number}.json"
            if not path.exists():
                path.write_text(json.dumps(start_cell(cell, args)))
            figures = json.loads(path.read_text())
            text = f"{figures['seconds']:8.3f} s {figures['peak_gib']:7.2f} GiB  loss {figures['losses'][-1]:.4f}"
            print(f"{cell:15} {text}", flush=True)
    if not args.nodes:
        print(write_results("pyg_modules", best_cells(args.out, "seconds"), keep=True))


if __name__ == "__main__":
    main()
