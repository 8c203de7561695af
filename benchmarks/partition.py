"""Partitioners side by side: sum (lambda - 1), cut, balance, seconds and peak memory.

One JSON file per cell (graph, parts, method), each measured in a process of its own; finished cells are not run again.

usage: python benchmarks/partition.py OUT --data DIR [--graphs a b] [--parts 4 8] [--methods stream mincut]
DIR holds NAME.npz with edge_index (2, E); the graph named community_<nodes>_<edges>_<communities> is generated.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import baselines
import numpy as np
import pymetis  # noqa: F401  imported before the memory baseline is taken, as the interpreter is
from baselines import Graph, Parts

from gnnfleet.graph.partitioners.stream import stream
from gnnfleet.graph.scan import Chunk, FileScan

GRAPHS = ["pubmed", "amazon_photo", "debian_bookworm", "community_1000000_10000000_2000"]
METHODS = ["random", "ldg", "fennel", "spring", "mincut", "stream", "stream_3%"]
MINCUT_SEEDS = 5
"""The best of these counts; its time is that of all of them."""


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


def measure(parts: Parts, graph: Graph, count: int) -> dict[str, int | float]:
    """Volume, rows received by the worker that receives most, edges cut and heaviest part over mean."""
    touched = np.zeros((graph.num_nodes, count), bool)
    touched[graph.src, np.repeat(parts, np.diff(graph.indptr))] = True
    touched[np.arange(graph.num_nodes), parts] = False
    return {
        "volume": int(touched.sum()),
        "max_rows": int(touched.sum(0).max(initial=0)),
        "cut": int((parts[graph.src] != np.repeat(parts, np.diff(graph.indptr))).sum()),
        "balance": float(np.bincount(parts, minlength=count).max() * count / max(1, graph.num_nodes)),
    }


class CountedScan(FileScan):
    """Counts the edges read, over all passes."""

    edges_read = 0

    def chunks(self, limit_edges: int) -> Iterator[Chunk]:
        for chunk in super().chunks(limit_edges):
            self.edges_read += len(chunk.src)
            yield chunk


def run_cell(store: Path, name: str, parts: int, method: str) -> Cell:
    scan = CountedScan(store / f"{name}.indptr.npy", store / f"{name}.src.npy")
    imbalance = 0.03 if method == "stream_3%" else 0.05
    if method.startswith("stream"):
        found, cost = _timed(lambda: stream(scan, parts, imbalance=imbalance))
    graph = Graph(np.load(store / f"{name}.indptr.npy"), np.load(store / f"{name}.src.npy"))
    if method == "mincut":
        found, cost = _timed(lambda: _best_mincut(graph, parts))
    elif not method.startswith("stream"):
        partition: Callable[[Graph, int], Parts] = getattr(baselines, method)
        found, cost = _timed(lambda: partition(graph, parts))
    sizes = {"nodes": graph.num_nodes, "edges": len(graph.src)}
    result = cost | {"edges_read": scan.edges_read} | measure(found, graph, parts)
    return Cell(graph=name, parts=parts, method=method, **sizes, **result)  # type: ignore[arg-type]


def _best_mincut(graph: Graph, parts: int) -> Parts:
    tries = [baselines.mincut(graph, parts, seed) for seed in range(MINCUT_SEEDS)]
    return min(tries, key=lambda found: measure(found, graph, parts)["volume"])


def _timed(work: Callable[[], Parts]) -> tuple[Parts, dict[str, int | float]]:
    peak, cpu, start = _peak(), time.process_time(), time.perf_counter()
    found = work()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return found, {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak": _peak() - peak}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def prepare(data: Path, store: Path, name: str) -> None:
    """Writes NAME.indptr.npy and NAME.src.npy unless they are there."""
    if (store / f"{name}.src.npy").exists():
        return
    if name.startswith("community_"):
        nodes, edges, communities = map(int, name.split("_")[1:])
        src, dst = community_graph(nodes, edges, communities)
    else:
        with np.load(data / f"{name}.npz", allow_pickle=False) as file:
            src, dst = file["edge_index"].astype(np.int64)
            nodes = len(file["y"]) if "y" in file else int(max(src.max(), dst.max())) + 1
    order = np.lexsort((src, dst))
    indptr = np.zeros(nodes + 1, np.int64)
    np.cumsum(np.bincount(dst, minlength=nodes), out=indptr[1:])
    np.save(store / f"{name}.indptr.npy", indptr)
    np.save(store / f"{name}.src.npy", src[order].astype(np.int32))


def community_graph(
    nodes: int, edges: int, communities: int, *, seed: int = 7
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Symmetric; Pareto community sizes and degrees, four edges in five inside a community, ids shuffled."""
    rng = np.random.default_rng(seed)
    share = rng.pareto(1.5, communities) + 0.5
    community = np.sort(rng.choice(communities, size=nodes, p=share / share.sum()))
    reach = np.cumsum(np.minimum(rng.pareto(1.6, nodes) + 1.0, 500))
    tries = int(edges // 2 * 1.25)
    src = np.searchsorted(reach, rng.random(tries) * reach[-1]).clip(0, nodes - 1)
    base = np.concatenate([[0.0], reach])
    low = base[np.searchsorted(community, community[src])]
    high = base[np.searchsorted(community, community[src], side="right")]
    inside, at = rng.random(tries) < 0.8, rng.random(tries)
    dst = np.searchsorted(reach, np.where(inside, low + at * (high - low), at * reach[-1])).clip(0, nodes - 1)
    keep = src != dst
    key = np.unique(np.minimum(src, dst)[keep] * nodes + np.maximum(src, dst)[keep])
    key = rng.permutation(key)[: edges // 2]
    name = rng.permutation(nodes)
    a, b = name[key // nodes], name[key % nodes]
    return np.concatenate([a, b]), np.concatenate([b, a])


def table(cells: list[Cell]) -> str:
    """A line per cell; the ratio is to mincut's volume on the same graph and number of parts."""
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
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, default=Path("."))
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
        prepare(args.data, args.out, graph)
        for parts in args.parts:
            for method in args.methods:
                path = args.out / f"{graph}.{parts}.{method}.json"
                if not path.exists():
                    command = [sys.executable, __file__, str(args.out), "--cell", graph, str(parts), method]
                    path.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                cells.append(Cell(**json.loads(path.read_text())))
                print(table(cells[-1:]).splitlines()[-1], flush=True)
    print(table(cells))


if __name__ == "__main__":
    main()
