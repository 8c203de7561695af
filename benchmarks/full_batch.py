"""One full-batch epoch, ours and torch_geometric's, side by side: seconds and peak memory, by model and allocator.

Each cell runs in a process of its own (warm-up, then the minimum of a few epochs); cells of a round are interleaved,
the best round counts. Finished cells are not run again. The graph: 200,000 nodes, 5 M edges, 100 features, 47 classes.

usage: python benchmarks/full_batch.py [OUT] [--data DIR] [--cells sage/ours/float32/thp …] [--rounds 2]
DIR holds edge_index.npy, x.npy, y.npy, train_idx.npy; without it a communities graph of the same size is generated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEPT = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:"
    "glibc.malloc.top_pad=268435456"
)
ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    "thp": {"THP_MEM_ALLOC_ENABLE": "1"},
    "kept": {"GLIBC_TUNABLES": KEPT},
}
CELLS = [
    "sage/ours/float32/thp",
    "sage/ours/bf16/thp",
    "sage/pyg_csr/float32/default",
    "sage/pyg_csr/float32/thp",
    "sage/ours/float32/kept",
    "sage/ours/bf16/kept",
    "sage/pyg_csr/float32/kept",
    "gat/ours/float32/thp",
    "gat/ours/float32/kept",
    "gat/pyg/float32/default",
]


def load(data: Path) -> Any:
    import numpy as np
    import torch

    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.graph import Graph

    if not (data / "edge_index.npy").exists():
        return make_dataset("communities", nodes=200_000, edges=5_000_000, features=100, classes=47)
    x, y = (torch.from_numpy(np.load(data / f"{name}.npy")) for name in ("x", "y"))
    train = torch.zeros(len(x), dtype=torch.bool)
    train[torch.from_numpy(np.load(data / "train_idx.npy"))] = True
    return Graph(torch.from_numpy(np.load(data / "edge_index.npy")), x=x, y=y, split={"train": train, "test": ~train})


def ours(graph: Any, model: str, precision: str) -> Any:
    """A function that runs one epoch of the local strategy."""
    import torch

    from gnnfleet.nn.config import ModelConfig
    from gnnfleet.nn.heads import NodeHead
    from gnnfleet.nn.model import build_model
    from gnnfleet.strategies.base import Job, TrainConfig
    from gnnfleet.strategies.local.config import LocalConfig
    from gnnfleet.strategies.local.strategy import LocalStrategy
    from gnnfleet.strategies.task import NodeTask

    torch.manual_seed(0)
    hidden = {"sage": 256, "gat": 128}[model]
    network = build_model(ModelConfig(name=model, hidden=hidden, layers=3, heads=4, dropout=0.0), graph)
    job = Job(
        graph=graph,
        model=network,
        task=NodeTask(next(iter(graph.nodes)), graph.only_nodes, NodeHead.of(graph.only_nodes)),
        train=TrainConfig(weight_decay=0),
        precision=precision,
    )
    strategy = LocalStrategy(LocalConfig(order="cluster"), job)
    return lambda epoch: next(iter(list(strategy.steps(epoch)))).loss


def peer(graph: Any, model: str, csr: bool) -> Any:
    """A function that runs one epoch of torch_geometric."""
    import torch
    import torch_geometric.nn.models as pyg

    torch.manual_seed(0)
    nodes, edges = graph.only_nodes, graph.only_edges
    x, y, rows = nodes.x, nodes.y, nodes.mask("train")
    if model == "sage":
        network: Any = pyg.GraphSAGE(x.shape[1], 256, 3, nodes.num_classes)
    else:
        network = pyg.GAT(x.shape[1], 128, 3, nodes.num_classes, heads=4)
    index = edges.edge_index()
    if csr:
        ones = torch.ones(edges.count)
        index = torch.sparse_csr_tensor(edges.indptr, edges.src.long(), ones, size=(nodes.count, nodes.count))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)

    def epoch(_: int) -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(x, index)[rows], y[rows])
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return epoch


def run_cell(cell: str, data: Path, epochs: int) -> dict[str, Any]:
    import warnings

    warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
    model, system, precision, allocator = cell.split("/")
    graph = load(data)
    epoch = ours(graph, model, precision) if system == "ours" else peer(graph, model, system == "pyg_csr")
    slow = system == "pyg"
    losses, seconds = [], []
    for number in range((1 if slow else 3) + (1 if slow else epochs)):
        start = time.perf_counter()
        losses.append(epoch(number))
        seconds.append(time.perf_counter() - start)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return {
        "cell": cell,
        "model": model,
        "system": system,
        "precision": precision,
        "allocator": allocator,
        "seconds": min(seconds[1 if slow else 3 :]),
        "peak_gib": int(peak.split()[1]) / 2**20,
        "losses": losses[:3],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "full_batch")
    parser.add_argument("--data", type=Path, default=Path("no data"))
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(run_cell(args.cell, args.data, args.epochs)))
        return
    from record import write_results

    args.out.mkdir(parents=True, exist_ok=True)
    best: dict[str, dict[str, Any]] = {}
    for number in range(args.rounds):
        for cell in args.cells:
            path = args.out / f"{cell.replace('/', '.')}.{number}.json"
            if not path.exists():
                environment = {**os.environ, **ALLOCATORS[cell.split("/")[3]]}
                words = [
                    sys.executable,
                    __file__,
                    "--cell",
                    cell,
                    "--data",
                    str(args.data),
                    "--epochs",
                    str(args.epochs),
                ]
                path.write_text(
                    subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
                )
            found = json.loads(path.read_text())
            if cell not in best or found["seconds"] < best[cell]["seconds"]:
                best[cell] = found
            print(
                f"{cell:36} {found['seconds']:8.2f} s {found['peak_gib']:7.2f} GiB  {found['losses'][-1]:.4f}",
                flush=True,
            )
    print(write_results("full_batch", list(best.values())))


if __name__ == "__main__":
    main()
