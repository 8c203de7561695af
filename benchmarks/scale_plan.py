"""What macrobatch takes on a graph and a cluster that are not here, from constants measured here and one formula.

The formula (docs/scale.md) needs, for one step of one worker: r_l rows that layer l computes, e_l edges it reads, R
rows of other parts that a relay of M batches fetches. They are drawn, not guessed: the sampler runs on the graph cut
into N parts. Two constants of a core are measured apart: G, products in float32; A, bytes gathered and summed; a third,
the share of a step's time that these two are, with one worker. Then seconds, bytes and rounds of an epoch follow, and
are compared with training on 2 and 4 workers. The last lines put
a graph of a terabyte on 16 machines into the same formula, with rows per batch as large as they can be: no node reached
twice.

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

import crew
from macrobatch import make, prepare, train

WIDTHS, HIDDEN, CLASSES = 100, 256, 47
FANOUTS, BATCH = (15, 10, 5), 1024


@dataclass(frozen=True)
class Step:
    """What a worker does in one step, on average."""

    rows: tuple[float, ...]  # computed by each layer, the first first
    edges: tuple[float, ...]  # read by each layer
    read: float  # rows of features
    fetched: float  # of these, rows of other parts, after sharing them among the batches of a relay
    drawn: float  # edges that owners draw for others and send, per step


def flops(step: Step, widths: list[int]) -> float:
    """Products of SAGE: two weights per layer, forward, gradients of weights, and of inputs but in the first layer."""
    total = 0.0
    for place, rows in enumerate(step.rows):
        total += 2 * 2 * rows * widths[place] * widths[place + 1] * (2 if place == 0 else 3)
    return total


def moved(step: Step, widths: list[int]) -> float:
    """Bytes that gathers and sums read or write: features, and rows of every edge, forward and backward."""
    total = 2 * 4.0 * step.read * widths[0]
    for place, edges in enumerate(step.edges):
        total += 4.0 * edges * widths[place] * (1 if place == 0 else 2)
    return total


def seconds(step: Step, widths: list[int], core: dict[str, float], cores: float) -> float:
    """Of one step of one worker that has so many cores; products and sums are ``share`` of its time."""
    return (flops(step, widths) / core["G"] + moved(step, widths) / core["A"]) / cores / core["share"]


def fetched_bytes(step: Step, row_bytes: int) -> float:
    """What a worker receives per step: rows, ids of rows, drawn neighbours."""
    return step.fetched * (row_bytes + 8) + 4 * step.drawn


def measure_core() -> dict[str, float]:
    """Constants of one core: float32 products of the shapes at hand, and sums over edges of 128 columns."""
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
        "share": 1.0,  # found with one worker
    }


def _best(work: Any) -> float:
    found = []
    for _ in range(30):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def count(world: Any, store: Path, parts: Path) -> dict[str, Any]:
    """The sizes of steps on this cut, the largest over ranks, from one relay of an epoch's batches."""
    import torch

    from gnnfleet.comm.collectives import all_gather_rows

    strategy = make(world, {"batches_per_fetch": 1}, store, parts)
    batches = list(strategy.batches(0))
    plan = strategy.fetcher.sample(batches)
    kind, steps = next(iter(plan.remote_ids)), len(batches)
    rows = [sum(len(one.ids[kind]) for one in plan.sampled)]
    for layer in range(len(FANOUTS)):
        views = [one.views[layer] for one in plan.sampled]
        rows += [sum(view.num_dst for view in views), sum(len(view.edge_ids) for view in views)]
    alone = sum(len(one.remote_ids(kind)) for one in plan.sampled)
    own = torch.tensor([[*rows, len(plan.remote_ids[kind]), alone]], dtype=torch.float64) / steps
    most = torch.cat(all_gather_rows(world, own)).mean(0).tolist()
    return {"steps": steps, "read": most[0], "layers": most[1:-2], "wanted": most[-2], "alone": most[-1]}


def plan_of(found: dict[str, Any], core: dict[str, float], size: int) -> dict[str, float]:
    widths = [WIDTHS, HIDDEN, HIDDEN, CLASSES]
    layers = found["layers"]
    step = Step(tuple(layers[0::2]), tuple(layers[1::2]), found["read"], found["wanted"], 0.0)
    cores = (os.cpu_count() or 1) / size
    row = 4 * WIDTHS + 4
    return {
        "seconds": found["steps"] * seconds(step, widths, core, cores),
        "megabytes": found["steps"] * fetched_bytes(step, row) / 1e6,
        "rounds": 0 if size == 1 else 2 * len(FANOUTS) + 2 + 2 * found["steps"],
        "duplication": found["alone"] / max(found["wanted"], 1e-9),
    }


def terabyte(core: dict[str, float]) -> dict[str, float]:
    """1.6 billion nodes of 128 float32 features (0.8 TB), 32 billion edges; 16 machines of 32 cores, 25 Gbit/s."""
    nodes, edges, machines, cores, network = 1.6e9, 32e9, 16, 32, 25e9 / 8
    seeds, widths, elsewhere = 1024, [128, 256, 256, 47], 0.35
    rows, drawn = [float(seeds)], []
    for fanout in FANOUTS:
        drawn.append(rows[-1] * fanout)
        rows.append(rows[-1] * (1 + fanout))
    read = rows[-1]
    step = Step(tuple(rows[-2::-1]), tuple(drawn[::-1]), read, elsewhere * read, elsewhere * sum(drawn))
    steps = 1.6e7 / (seeds * machines)  # one node in a hundred is labelled
    compute = seconds(step, widths, core, cores)
    travel = fetched_bytes(step, 4 * 128 + 4) / network
    part = (nodes * (128 * 4 + 24) + edges * 4) / machines
    return {
        "steps": steps,
        "seconds_of_compute_per_step": compute,
        "seconds_of_network_per_step": travel,
        "hours_per_epoch_overlapped": steps * max(compute, travel) / 3600,
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
        words = {"batches_per_fetch": 20}
        work = count if args.cell == "count" else lambda world, *where: train(world, words, *where)
        crew.as_rank(lambda world: work(world, args.store, args.parts))
        return
    from record import write_results

    core, cells = measure_core(), []
    print(core)
    with tempfile.TemporaryDirectory() as folder:
        args.work = args.work or Path(folder)
        for size in args.workers:
            store, parts = prepare(args, "small", size)
            line = [__file__, "--store", str(store), "--parts", str(parts), "--cell"]
            planned = plan_of(crew.run([*line, "count"], size), core, size)
            run = crew.run([*line, "train"], size)
            measured = {
                "seconds": 20_000 / run["seeds_per_second"],
                "megabytes": sum(run["megabytes_fetched"]) / size,
                "rounds": run["rounds"],
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
