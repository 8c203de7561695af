"""Cost of macrobatch on a large graph and cluster, from constants measured on this machine and one formula.

The formula (docs/scale.md) needs, for one step of one worker: r_l rows that layer l computes, e_l edges it reads, R
rows of other parts that an exchange for M batches fetches. The sampler counts them on the graph cut into N parts. Two
constants of a core are measured: G, products in float32; A, bytes gathered and summed. A third, their share of the time
of a step, is measured with one worker. Seconds, bytes and rounds of an epoch follow, and are compared with training on
2 and 4 workers. The last lines apply the formula to a graph of a terabyte on 16 machines, with the largest possible
number of rows per batch: no node is reached twice.

usage: python benchmarks/scale_plan.py [--data DIR] [--work DIR] [--workers 1 2 4]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from macrobatch import build_strategy, prepare, train
from ranks import run_as_rank, run_ranks
from record import write_results

WIDTHS, HIDDEN, CLASSES = 100, 256, 47
FANOUTS, BATCH = (15, 10, 5), 1024


@dataclass(frozen=True)
class Step:
    """Mean work of a worker in one step."""

    rows: tuple[float, ...]  # computed by each layer, the first first
    edges: tuple[float, ...]  # read by each layer
    read: float  # rows of features
    fetched: float  # of these, rows of other parts, each once per exchange
    drawn: float  # edges drawn by other owners and received


def flops(step: Step, widths: list[int]) -> float:
    """Flops of SAGE: two weights per layer, forward, gradients of weights and, except in the first layer, of inputs."""
    total = 0.0
    for layer, rows in enumerate(step.rows):
        total += 2 * 2 * rows * widths[layer] * widths[layer + 1] * (2 if layer == 0 else 3)
    return total


def moved_bytes(step: Step, widths: list[int]) -> float:
    """Bytes of gathers and sums: features, and rows of every edge, forward and backward."""
    total = 2 * 4.0 * step.read * widths[0]
    for layer, edges in enumerate(step.edges):
        total += 4.0 * edges * widths[layer] * (1 if layer == 0 else 2)
    return total


def seconds(step: Step, widths: list[int], core: dict[str, float], cores: float) -> float:
    """Seconds of one step of one worker; products and sums are ``share`` of its time."""
    return (flops(step, widths) / core["G"] + moved_bytes(step, widths) / core["A"]) / cores / core["share"]


def fetched_bytes(step: Step, row_bytes: int) -> float:
    """Bytes that a worker receives per step: rows, ids of rows, drawn neighbours."""
    return step.fetched * (row_bytes + 8) + 4 * step.drawn


def measure_core() -> dict[str, float]:
    """Constants of one core: float32 products of a step's shapes, and sums over edges of 128 columns."""
    import torch

    from gnnfleet.ops.aggregate import aggregate
    from gnnfleet.ops.csr import CSR

    torch.set_num_threads(1)
    a, b = torch.randn(8192, 200), torch.randn(200, 256)
    nodes, degree = 200_000, 10
    edges = CSR(torch.arange(0, 20_000 * degree + 1, degree), torch.randint(nodes, (20_000 * degree,)), nodes)
    x = torch.randn(nodes, 128)
    return {
        "G": 2 * 8192 * 200 * 256 / _best(lambda: a @ b),
        "A": 20_000 * degree * 128 * 4 / _best(lambda: aggregate(edges, x, reduce="mean")),
        "share": 1.0,  # measured with one worker
    }


def _best(work: Any) -> float:
    seconds = []
    for _ in range(30):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def count(world: Any, store: Path, parts: Path) -> dict[str, Any]:
    """Mean sizes of steps on a partition, from one exchange for all batches of an epoch."""
    import torch

    from gnnfleet.comm.collectives import all_gather_rows

    strategy = build_strategy(world, {"batches_per_fetch": 1}, store, parts)
    batches = list(strategy.batches(0))
    plan = strategy.fetcher.sample(batches)
    node_type, steps = next(iter(plan.remote_ids)), len(batches)
    rows = [sum(len(sampled.ids[node_type]) for sampled in plan.sampled)]
    for layer in range(len(FANOUTS)):
        views = [sampled.views[layer] for sampled in plan.sampled]
        rows += [sum(view.num_dst for view in views), sum(len(view.edge_ids) for view in views)]
    separate = sum(len(sampled.remote_ids(node_type)) for sampled in plan.sampled)
    sizes = torch.tensor([[*rows, len(plan.remote_ids[node_type]), separate]], dtype=torch.float64) / steps
    means = torch.cat(all_gather_rows(world, sizes)).mean(0).tolist()
    return {"steps": steps, "read": means[0], "layers": means[1:-2], "wanted": means[-2], "alone": means[-1]}


def plan_of(sizes: dict[str, Any], core: dict[str, float], size: int) -> dict[str, float]:
    widths = [WIDTHS, HIDDEN, HIDDEN, CLASSES]
    layers = sizes["layers"]
    step = Step(tuple(layers[0::2]), tuple(layers[1::2]), sizes["read"], sizes["wanted"], 0.0)
    cores = (os.cpu_count() or 1) / size
    row = 4 * WIDTHS + 4
    return {
        "seconds": sizes["steps"] * seconds(step, widths, core, cores),
        "megabytes": sizes["steps"] * fetched_bytes(step, row) / 1e6,
        "rounds": 0 if size == 1 else 2 * len(FANOUTS) + 2 + 2 * sizes["steps"],
        "duplication": sizes["alone"] / max(sizes["wanted"], 1e-9),
    }


def terabyte(core: dict[str, float]) -> dict[str, float]:
    """1.6 billion nodes of 128 float32 features (0.8 TB), 32 billion edges; 16 machines of 32 cores, 25 Gbit/s."""
    nodes, edges, machines, cores, network = 1.6e9, 32e9, 16, 32, 25e9 / 8
    seeds, widths, remote_share = 1024, [128, 256, 256, 47], 0.35
    rows, drawn = [float(seeds)], []
    for fanout in FANOUTS:
        drawn.append(rows[-1] * fanout)
        rows.append(rows[-1] * (1 + fanout))
    read = rows[-1]
    step = Step(tuple(rows[-2::-1]), tuple(drawn[::-1]), read, remote_share * read, remote_share * sum(drawn))
    steps = 1.6e7 / (seeds * machines)  # one node in a hundred is labelled
    compute = seconds(step, widths, core, cores)
    network_seconds = fetched_bytes(step, 4 * 128 + 4) / network
    part = (nodes * (128 * 4 + 24) + edges * 4) / machines
    return {
        "steps": steps,
        "seconds_of_compute_per_step": compute,
        "seconds_of_network_per_step": network_seconds,
        "hours_per_epoch_overlapped": steps * max(compute, network_seconds) / 3600,
        "gigabytes_received_per_step": fetched_bytes(step, 4 * 128 + 4) / 1e9,
        "gigabytes_of_a_part": part / 1e9,
        "gigabytes_of_a_relay_of_one_batch": (step.fetched * 516 + sum(drawn) * 24) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("no data"))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        settings = {"batches_per_fetch": 20}
        work = count if args.cell == "count" else lambda world, *paths: train(world, settings, *paths)
        run_as_rank(lambda world: work(world, args.store, args.parts))
        return
    core, cells = measure_core(), []
    print(core)
    with tempfile.TemporaryDirectory() as folder:
        args.work = args.work or Path(folder)
        for size in args.workers:
            store, parts = prepare(args, "small", size)
            arguments = [__file__, "--store", str(store), "--parts", str(parts), "--cell"]
            planned = plan_of(run_ranks([*arguments, "count"], size), core, size)
            result = run_ranks([*arguments, "train"], size)
            measured = {
                "seconds": 20_000 / result["seeds_per_second"],
                "megabytes": sum(result["megabytes_fetched"]) / size,
                "rounds": result["rounds"],
            }
            if size == 1:
                core["share"] = planned["seconds"] / measured["seconds"]
            cells.append({"cell": f"workers/{size}", "planned": planned, "measured": measured})
            print(json.dumps(cells[-1]), flush=True)
    cells.append({"cell": "terabyte", "core": core, **terabyte(core)})
    print(json.dumps(cells[-1], indent=1))
    print(write_results("scale_plan", cells))


if __name__ == "__main__":
    main()
