"""Sampled training in one process: the sampler alone, and SAGE-256 of three layers on its blocks.

Each cell runs in a process of its own; finished cells are not run again, the best round counts. Fanouts 15, 10, 5,
batches of 1,024. The graph: 200,000 nodes, 5 M edges, 100 features, 47 classes.

usage: python benchmarks/sampling.py [OUT] [--data DIR] [--cells blocks/1 train/cached …] [--rounds 2] [--steps 40]
DIR holds edge_index.npy, x.npy, y.npy, train_idx.npy; without it a communities graph of the same size is generated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FANOUTS, BATCH = (15, 10, 5), 1024
# blocks/T: the sampler on T threads. read/T: sampler, transposes and features. train: with or without the kept
# aggregate of inputs; alone: without it and without the thread in the background.
CELLS = ["blocks/1", "blocks/2", "read/1", "train/plain", "train/cached", "train/alone"]


def time_blocks(graph: Any, threads: int, *, steps: int, read: bool) -> dict[str, float]:
    import torch

    from gnnfleet.graph.batches import batches
    from gnnfleet.graph.loader import prepare_backward, read_features
    from gnnfleet.graph.sample import Sampler
    from gnnfleet.ops.draws import DrawKey

    torch.set_num_threads(threads)
    sampler, nodes = Sampler(graph, FANOUTS), graph.only_nodes
    seconds, edges = [], []
    for step, seeds in enumerate(islice(batches(nodes.mask("train").nonzero()[:, 0], BATCH, seed=0, epoch=0), steps)):
        start = time.perf_counter()
        views = sampler.blocks({"node": seeds}, DrawKey(0, 0, step))
        if read:
            prepare_backward(views)
            read_features(nodes.x, views[0].node_ids)
        seconds.append(time.perf_counter() - start)
        edges.append(sum(len(view.edge_ids) for view in views))
    median = statistics.median(seconds[3:])
    rates = {"seeds_per_second": BATCH / median, "edges_per_second": statistics.median(edges[3:]) / median}
    return {"milliseconds": 1e3 * median, **rates}


def time_steps(graph: Any, cell: str, *, steps: int) -> dict[str, float]:
    import torch

    from gnnfleet.nn.config import ModelConfig
    from gnnfleet.nn.heads import NodeHead
    from gnnfleet.nn.model import build_model
    from gnnfleet.strategies.base import Job, TrainConfig
    from gnnfleet.strategies.local.config import LocalConfig
    from gnnfleet.strategies.local.strategy import LocalStrategy
    from gnnfleet.strategies.task import NodeTask

    torch.manual_seed(0)
    network = build_model(ModelConfig(name="sage", hidden=256, layers=3, dropout=0.0), graph)
    task = NodeTask("node", graph.only_nodes, NodeHead.of(graph.only_nodes))
    job = Job(graph=graph, model=network, task=task, train=TrainConfig(weight_decay=0))
    config = LocalConfig(
        fanouts=FANOUTS, batch=BATCH, cache_inputs=cell == "train/cached", prefetch=0 if cell == "train/alone" else 2
    )
    records = list(islice(LocalStrategy(config, job).steps(0), steps))
    median = statistics.median(record.seconds for record in records[3:])
    return {"milliseconds": 1e3 * median, "seeds_per_second": BATCH / median, "loss": records[-1].loss}


def run_cell(cell: str, data: Path, steps: int) -> dict[str, Any]:
    from full_batch import load

    graph = load(data)
    kind, word = cell.split("/")
    if kind == "train":
        return {"cell": cell, **time_steps(graph, cell, steps=steps)}
    return {"cell": cell, **time_blocks(graph, int(word), steps=steps, read=kind == "read")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "sampling")
    parser.add_argument("--data", type=Path, default=Path("no data"))
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(run_cell(args.cell, args.data, args.steps)))
        return
    from record import write_results

    args.out.mkdir(parents=True, exist_ok=True)
    best: dict[str, dict[str, Any]] = {}
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}
    for number in range(args.rounds):
        for cell in args.cells:
            path = args.out / f"{cell.replace('/', '.')}.{number}.json"
            if not path.exists():
                words = [sys.executable, __file__, "--cell", cell, "--data", str(args.data), "--steps", str(args.steps)]
                done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment)
                path.write_text(done.stdout)
            found = json.loads(path.read_text())
            if cell not in best or found["milliseconds"] < best[cell]["milliseconds"]:
                best[cell] = found
            print(f"{cell:14} {found['milliseconds']:9.1f} ms {found['seeds_per_second']:10.0f} seeds/s", flush=True)
    print(write_results("sampling", list(best.values())))


if __name__ == "__main__":
    main()
