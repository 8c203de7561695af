"""Partitioners compared: communication volume Σ(λ−1), edges cut, balance, seconds, peak memory.

One JSON file per cell (graph, parts, method), each measured in a process of its own; finished cells are not run again.

usage: python benchmarks/partition.py [OUT] [--data DIR] [--graphs a b] [--parts 4 8] [--methods stream mincut]
DIR holds NAME.npz; `communities` is generated (1 M nodes, 10 M edges). Graphs without data are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pymetis  # noqa: F401  imported before the memory baseline is measured

import baselines
from baselines import Parts
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.ingest.npz import read_npz
from gnnfleet.graph.partition.assign import node_weights
from gnnfleet.graph.partition.edge_scan import EdgeScan, EdgeSlice, PartitionRequest, measure_partition
from gnnfleet.graph.partition.metis import mincut_parts
from gnnfleet.graph.partition.streaming import stream
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.report.progress import NoProgress
from record import write_results

HERE = Path(__file__).parent
GRAPHS = ["pubmed", "amazon_photo", "debian_bookworm", "communities"]
METHODS = ["random", "ldg", "fennel", "spring", "mincut", "stream"]


@dataclass(frozen=True)
class Cell:
    """One measurement. `peak` is the rise of the resident peak while partitioning, in bytes."""

    graph: str
    parts: int
    method: str
    nodes: int
    edges: int
    volume: int
    max_rows: int
    cut: int
    balance: float
    seconds: float
    cpu_seconds: float
    peak: int
    edges_read: int


class CountedScan(EdgeScan):
    """An edge scan that counts the edges read in all passes."""

    edges_read = 0

    def slices(self, limit: int = 1 << 20) -> Iterator[EdgeSlice]:
        for edges in super().slices(limit):
            self.edges_read += len(edges.src)
            yield edges


def run_cell(store: Path, name: str, parts: int, method: str) -> Cell:
    graph = open_store(store / name)
    scan = CountedScan(graph)
    if method == "stream":
        assignment, cost = timed(lambda: stream(scan, parts, imbalance=0.03))
    elif method == "mincut":
        request = PartitionRequest(parts=parts, weights=node_weights(graph, "nodes"))
        assignment, cost = timed(lambda: mincut_parts(EdgeScan(graph), request, NoProgress())[0])
    else:
        partition: Callable[[baselines.InMemoryGraph, int], Parts] = getattr(baselines, method)
        in_memory_graph = load_in_memory(graph)
        assignment, cost = timed(lambda: partition(in_memory_graph, parts))
    quality = measure_partition(graph, assignment, parts)
    return Cell(
        graph=name,
        parts=parts,
        method=method,
        nodes=graph.num_nodes,
        edges=graph.num_edges,
        volume=quality.volume,
        max_rows=int(quality.halo_rows.sum(axis=1).max()),
        cut=quality.cut_edges,
        balance=quality.summary()["balance"]["nodes"],
        edges_read=scan.edges_read,
        **cost,  # type: ignore[arg-type]
    )


def load_in_memory(graph: Graph) -> baselines.InMemoryGraph:
    """All edges by destination, with merged edge types."""
    slices = list(EdgeScan(graph).slices())
    indptr = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(edges.indptr) for edges in slices]))])
    return baselines.InMemoryGraph(indptr, np.concatenate([edges.src for edges in slices]))


def timed(work: Callable[[], Parts]) -> tuple[Parts, dict[str, int | float]]:
    """The parts, and the cost of computing them; memory is the rise of the resident peak, which Linux can reset."""
    Path("/proc/self/clear_refs").write_text("5")
    before, cpu, start = status_bytes("VmRSS"), time.process_time(), time.perf_counter()
    parts = work()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return parts, {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak": status_bytes("VmHWM") - before}


def status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def prepare(data: Path, store: Path, name: str) -> bool:
    """Make the store of a graph unless it exists; False if there is no data for it."""
    if (store / name).exists():
        return True
    if name == "communities":
        graph = make_dataset("communities", nodes=1_000_000, edges=10_000_000, features=0)
    elif (data / f"{name}.npz").exists():
        graph = read_npz(data / f"{name}.npz")
    else:
        return False
    save_store(graph, store / name)
    return True


def table(cells: list[Cell]) -> str:
    """A row per cell; the ratio is to the volume of mincut on the same graph and number of parts."""
    best = {(c.graph, c.parts): c.volume for c in cells if c.method == "mincut"}
    head = ["graph", "parts", "method", "volume", "/ mincut", "max rows", "cut", "balance"]
    head += ["s", "CPU s", "M edges/s", "peak MiB", "B/node"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for c in cells:
        ratio = c.volume / best[c.graph, c.parts] if best.get((c.graph, c.parts)) else float("nan")
        speed = f"{c.edges_read / c.seconds / 1e6:.1f} ({c.edges / c.seconds / 1e6:.1f})" if c.edges_read else "-"
        lines.append(
            f"| {c.graph} | {c.parts} | {c.method} | {c.volume} | {ratio:.3f} | {c.max_rows} | {c.cut} "
            f"| {c.balance:.3f} | {c.seconds:.2f} | {c.cpu_seconds:.2f} | {speed} "
            f"| {c.peak / 2**20:.0f} | {c.peak / c.nodes:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "partition")
    beside = HERE.parents[1] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("GNNFLEET_DATA", beside)) / "static")
    parser.add_argument("--graphs", nargs="+", default=GRAPHS)
    parser.add_argument("--parts", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--cell", nargs=3, metavar=("GRAPH", "PARTS", "METHOD"), help="measure one cell and print it")
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(asdict(run_cell(args.out, args.cell[0], int(args.cell[1]), args.cell[2]))))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    cells = []
    for graph in args.graphs:
        if not prepare(args.data, args.out, graph):
            print(f"{graph}: no data, left out", file=sys.stderr)
            continue
        for parts in args.parts:
            for method in args.methods:
                path = args.out / f"{graph}.{parts}.{method}.json"
                if not path.exists():
                    command = [sys.executable, __file__, str(args.out), "--cell", graph, str(parts), method]
                    path.write_text(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
                cells.append(Cell(**json.loads(path.read_text())))
                print(table(cells).splitlines()[-1], flush=True)
    print(table(cells))
    print(write_results("partition", [asdict(cell) for cell in cells]))


if __name__ == "__main__":
    main()
