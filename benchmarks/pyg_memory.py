"""Memory and time of a training step of unchanged torch_geometric modules, by mode of propagation (model.propagate).

Three layers of width 64 on a random graph of 4,000 nodes and 100,000 edges, 8,192 edges at once, in one process and on
two ranks, one thread each. Peaks are sums of live tensors (torch's profiler), the larger of both ranks; seconds are of
the CPU, the fastest of three steps.

usage: python benchmarks/pyg_memory.py [--nodes 4000] [--degree 25]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from ranks import run_as_rank, run_ranks
from record import write_results

WIDTH, EDGES_AT_ONCE = 64, 8192
MODULES = ("GraphConv", "EdgeConv", "TransformerConv")


def make_module(name: str) -> Any:
    import torch_geometric.nn as pyg
    from torch.nn import Linear, ReLU, Sequential

    def make() -> Any:
        if name == "EdgeConv":
            return pyg.EdgeConv(Sequential(Linear(2 * WIDTH, WIDTH), ReLU(), Linear(WIDTH, WIDTH)), aggr="mean")
        if name == "GraphConv":
            return pyg.GraphConv(WIDTH, WIDTH)
        return pyg.TransformerConv(WIDTH, WIDTH // 4, heads=4)

    steps: list[Any] = []
    for _ in range(3):
        steps += [(make(), "x, edge_index -> x"), ReLU()]
    return pyg.Sequential("x, edge_index", steps)


def measure(world: Any, parts: str) -> dict[str, Any]:
    """{module/mode: [peak, seconds, bytes sent]}, the largest of all ranks."""
    import torch

    from gnnfleet.comm.collectives import all_gather_rows
    from gnnfleet.comm.halo_exchange import RingExchange
    from gnnfleet.graph.partition.partitioned_graph import open_part
    from gnnfleet.nn.pyg.memory import PROPAGATIONS, Propagation
    from gnnfleet.nn.pyg.module import PygModule
    from gnnfleet.ops.buffers import unpooled
    from gnnfleet.report.memory import peak_tensors
    from gnnfleet.sharded.full_batch.ring_view import RingView

    torch.set_num_threads(1)
    view = RingView.open(open_part(Path(parts), world.rank), RingExchange(world))
    figures = {}
    for name in MODULES:
        torch.manual_seed(0)
        model = PygModule(make_module(name))
        x = torch.randn(view.num_src, WIDTH)
        for mode in PROPAGATIONS:
            model.propagation = Propagation(mode, EDGES_AT_ONCE)
            seconds = []
            for _ in range(3):
                started, sent = time.process_time(), world.traffic.bytes_sent
                model(view, x).sum().backward()
                seconds.append(time.process_time() - started)
            sent = world.traffic.bytes_sent - sent
            with unpooled():
                peak = peak_tensors(lambda model=model, x=x: model(view, x).sum().backward())
            rows = torch.tensor([[peak, min(seconds), sent]], dtype=torch.float64)
            figures[f"{name}/{mode}"] = torch.cat(all_gather_rows(world, rows)).amax(0).tolist()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4000)
    parser.add_argument("--degree", type=int, default=25)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_as_rank(lambda world: measure(world, args.rank))
        return
    cells = []
    for size in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            path = _write_parts(Path(folder), args.nodes, args.degree, size)
            figures = run_ranks([__file__, "--rank", str(path)], size, environment={"OMP_NUM_THREADS": "1"})
        for cell, (peak, seconds, sent) in figures.items():
            cells.append(
                {"cell": f"{cell}/{size}", "peak_bytes": int(peak), "seconds": seconds, "bytes_sent": int(sent)}
            )
            print(f"{cell:25} {size} rank(s) {peak / 2**20:7.1f} MiB {seconds:6.2f} s {sent / 2**20:6.1f} MiB sent")
    print(write_results("pyg_memory", cells))


def _write_parts(folder: Path, nodes: int, degree: int, size: int) -> Path:
    import numpy as np
    import torch

    from gnnfleet.graph.graph import Graph
    from gnnfleet.graph.partition.assign import Assignment
    from gnnfleet.graph.partition.partitioned_graph import write_partition

    index = torch.randint(0, nodes, (2, nodes * degree), generator=torch.Generator().manual_seed(0))
    part = np.arange(nodes, dtype=np.int32) % size
    path = folder / "parts"
    write_partition(Graph(index, num_nodes=nodes), Assignment(part=part, parts=size, method="random"), path)
    return path


if __name__ == "__main__":
    main()
