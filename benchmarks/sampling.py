"""Sampled training in one process: the sampler alone, and SAGE-256 of three layers on its blocks; DGL for comparison.

Each cell runs in a process of its own; finished cells are not run again, the best round counts. Fanouts 15, 10, 5,
batches of 1,024. The graph: 200,000 nodes, 5 M edges, 100 features, 47 classes.

usage: python benchmarks/sampling.py [OUT] [--data DIR] [--cells blocks/1 train/cached …] [--rounds 2] [--steps 40]
                                     [--dgl PYTHON]
DIR holds edge_index.npy, x.npy, y.npy, train_idx.npy; without it a communities graph of the same size is generated.
PYTHON is an interpreter that has DGL; its cell needs DIR. memory/M: memory of sampled training on a store of M million
edges, features mapped from disk. few/M: the same with small fanouts, for which the rows of a batch do not depend on M.
scale/M: seeds and sampled edges per second on a graph of M million edges. accuracy/V: test accuracy after five epochs,
mean of three seeds, in percent; V as in train/V.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from record import best_cells, run_json, write_results

HERE = Path(__file__).parent
FANOUTS, BATCH = (15, 10, 5), 1024
FEW, FEW_BATCH = (10, 5), 512
# blocks/T: the sampler on T threads. read/T: sampler, transposes and features. train: with or without the cached
# aggregate of inputs; ahead: without it, batches are prefetched by a background thread.
CELLS = ["train/plain", "train/cached", "train/bf16", "train/ahead", "blocks/1", "blocks/2", "read/1"]
ONCE = ["memory/5", "memory/50", "few/5", "few/50", "scale/50", "accuracy/plain", "accuracy/cached", "accuracy/bf16"]
EPOCHS, SEEDS = 5, 3
WARM = 3


def time_blocks(graph: Any, threads: int, *, steps: int, read: bool) -> dict[str, float]:
    import torch

    from gnnfleet.graph.sampling.batches import epoch_batches
    from gnnfleet.graph.sampling.loader import FeatureGather, prepare_backward
    from gnnfleet.graph.sampling.sampler import NeighborSampler
    from gnnfleet.ops.draws import DrawKey

    torch.set_num_threads(threads)
    sampler, nodes = NeighborSampler(graph, FANOUTS), graph.single_nodes
    features = FeatureGather(nodes.x)
    seconds, edges = [], []
    for step, seeds in islice(epoch_batches(nodes.mask("train").nonzero()[:, 0], BATCH, seed=0, epoch=0), steps):
        start = time.perf_counter()
        views = sampler.blocks({"node": seeds}, DrawKey(0, 0, step))
        if read:
            prepare_backward(views)
            features(views[0].node_ids)
        seconds.append(time.perf_counter() - start)
        edges.append(sum(len(view.edge_ids) for view in views))
    median = statistics.median(seconds[3:])
    rates = {"seeds_per_second": BATCH / median, "edges_per_second": statistics.median(edges[3:]) / median}
    return {"milliseconds": 1e3 * median, **rates}


def time_steps(graph: Any, cell: str, *, steps: int, few: bool = False) -> dict[str, float]:
    from gnnfleet.config.resolve import resolve
    from gnnfleet.training.build import build

    batch, fanouts = (FEW_BATCH, FEW) if few else (BATCH, FANOUTS)
    strategy = {
        "fanouts": list(fanouts),
        "batch": batch,
        "cache_inputs": cell in ("train/cached", "train/bf16"),
        "prefetch": 2 if cell == "train/ahead" else "auto",
    }
    config = {
        "model": {"name": "sage", "hidden": 256, "layers": len(fanouts), "dropout": 0.0},
        "train": {"weight_decay": 0.0},
        "strategy": strategy,
        "precision": "bf16" if cell == "train/bf16" else "float32",
    }
    built_strategy = build(graph, resolve(config)).strategy
    records = list(islice(chain.from_iterable(map(built_strategy.train_epoch, count())), WARM + steps))[WARM:]
    rate = sum(record.count for record in records) / sum(record.seconds for record in records)
    return {"milliseconds": 1e3 * batch / rate, "seeds_per_second": rate, "loss": records[-1].loss}


def measure_accuracy(graph: Any, variant: str) -> dict[str, Any]:
    import gnnfleet as gf

    runs = [
        gf.train(
            graph,
            model=gf.nn.SAGE(hidden=256, layers=3, dropout=0.0),
            strategy={"name": "local", "fanouts": FANOUTS, "batch": BATCH, "cache_inputs": variant != "plain"},
            precision="bf16" if variant == "bf16" else "float32",
            split="0.1/0.1/0.8",
            epochs=EPOCHS,
            lr=0.003,
            weight_decay=0.0,
            seed=seed,
        ).metrics["test"]
        for seed in range(SEEDS)
    ]
    return {"accuracy": 100 * statistics.mean(runs), "runs": runs}


def on_store(million_edges: int, cell: str, *, steps: int) -> dict[str, float]:
    """Run a cell on a generated store of that many edges, in a new process."""
    import tempfile

    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.store import save_store

    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        sizes = {"nodes": 40_000 * million_edges, "edges": 1_000_000 * million_edges}
        save_store(make_dataset("communities", features=100, classes=47, **sizes), store)
        return run_json([sys.executable, __file__, "--cell", f"{cell}:{store}", "--steps", str(steps)])


def train_store(store: str, *, steps: int, few: bool) -> dict[str, float]:
    """Memory of training that reads features from disk: anonymous (RssAnon) and mapped pages (RssFile)."""
    from gnnfleet.graph.store import open_store

    figures = time_steps(open_store(store), "train/plain", steps=steps, few=few)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {**figures, **{name: int(status[name].split()[0]) / 2**20 for name in ("VmHWM", "RssAnon", "RssFile")}}


def run_cell(cell: str, data: Path, steps: int) -> dict[str, Any]:
    from epochs import load

    if ":" in cell:
        kind, store = cell.split(":", 1)
        if kind != "scale":
            return train_store(store, steps=steps, few=kind == "few")
        from gnnfleet.graph.store import open_store

        graph = open_store(store)
        blocks = time_blocks(graph, 2, steps=steps, read=False)
        return {"edges_per_second": blocks["edges_per_second"], **time_steps(graph, "train/plain", steps=steps)}
    kind, parameter = cell.split("/", 1)
    if kind in ("memory", "few", "scale"):
        return {**on_store(int(parameter), kind, steps=steps), "cell": cell}
    graph = load(data)
    if kind == "accuracy":
        return {"cell": cell, **measure_accuracy(graph, parameter)}
    if kind == "train":
        return {"cell": cell, **time_steps(graph, cell, steps=steps)}
    return {"cell": cell, **time_blocks(graph, int(parameter), steps=steps, read=kind == "read")}


def start_cell(cell: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a cell in a process of its own."""
    command = [sys.executable, __file__, "--cell", cell, "--data", str(args.data), "--steps", str(args.steps)]
    if cell == "dgl":
        command = [args.dgl, str(HERE / "dgl_sampled.py"), str(args.data), str(BATCH), str(min(args.steps, 16))]
    environment = {**os.environ, **({} if cell == "dgl" else {"THP_MEM_ALLOC_ENABLE": "1"})}
    figures = run_json(command, environment)
    return {"cell": cell, **figures, **({"seeds_per_second": figures["training"]} if cell == "dgl" else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "sampling")
    parser.add_argument("--data", type=Path, default=Path("no data"))
    parser.add_argument("--cells", nargs="+")
    parser.add_argument("--dgl", help="an interpreter that has DGL")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(run_cell(args.cell, args.data, args.steps)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    for number in range(args.rounds):
        for cell in args.cells or [*(["dgl"] if args.dgl else []), *CELLS, *ONCE]:
            if number and cell in ONCE:
                continue
            path = args.out / f"{cell.replace('/', '.')}.{number}.json"
            if not path.exists():
                path.write_text(json.dumps(start_cell(cell, args)))
            print(path.read_text(), flush=True)
    print(write_results("sampling", best_cells(args.out, "seeds_per_second", highest=True), keep=True))


if __name__ == "__main__":
    main()
