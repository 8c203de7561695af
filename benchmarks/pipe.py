"""pipe against exact graph parallelism (sar, one-shot, overlapped): bytes, and seconds over slow links.

Cells alternate over rounds, and the best round counts; finished cells are not run again. 32 layers of width 64.

  GRAPH/MODEL/K/SIDE[/RATE]   an epoch on K workers; SIDE: pipe (K stages, 4 K chunks), ways (graph-parallel, one
                              stage, exact), sar, or plan (the choice of the planner, and its estimates of the others);
                              RATE: each worker is a host with this link, as 300mbit.
                              "alone" are the messages of an epoch in order, without the computation between them

With --epochs 0 the bytes of the first epoch are counted, and seconds are meaningless.
GRAPH: communities and rmat (generated, mean degree 128 and 110), coauthor_cs, amazon_photo, pubmed (--data).

usage: python benchmarks/pipe.py [OUT] [--data DIR] [--cells …] [--rounds 2] [--epochs 2] [--work DIR]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks import run_as_rank, run_ranks
from record import best_cells, write_results

HERE = Path(__file__).parent
DENSE = ("communities", "rmat")
SETS = ("coauthor_cs", "amazon_photo", "pubmed")
LAYERS, HIDDEN = 32, 64
BOTH, RATES = ("pipe", "sar"), ("100mbit", "300mbit", "1gbit")
PAIRS = [(graph, model) for graph in (*DENSE, *SETS) for model in ("gcn2", "res+")]
VOLUME = [f"{graph}/{model}/{k}/{side}" for graph, model in PAIRS for k in (2, 4, 8) for side in BOTH]
SLOW = [("communities", "gcn2"), ("rmat", "gcn2"), ("communities", "res+")]
LINKS = [f"{graph}/{model}/8/{side}/{rate}" for graph, model in SLOW for rate in RATES for side in BOTH]
SIDES = ("plan", "pipe", "ways", "sar")
PLANS = [f"{g}/gcn2/4/{side}{rate}" for g in (*DENSE, *SETS) for rate in ("", "/300mbit", "/100mbit") for side in SIDES]
GRIDS = {"pipe": lambda k: (1, 4 * k), "ways": lambda k: (k, k)}  # (graph_parallel, chunks) of k workers


def graph_of(name: str, data: Path) -> Any:
    import gnnfleet as gf
    from gnnfleet.graph.datasets import make_dataset

    if name == "communities":
        return make_dataset("communities", nodes=4000, mean_degree=128)
    if name == "rmat":
        return make_dataset("rmat", nodes=4096, edges=450_000, symmetric=True, features=64, classes=10, train=0.6)
    return gf.read_npz(data / f"{name}.npz")


def config_of(model: str, **strategy: Any) -> dict[str, Any]:
    norm = "layer" if model == "res+" else "none"
    return {
        "model": {"name": model, "layers": LAYERS, "hidden": HIDDEN, "dropout": 0.1, "norm": norm},
        "train": {"lr": 0.02 if model == "gcn2" else 0.003},
        "strategy": strategy,
        "split": "0.6/0.2/0.2",
    }


# -- bytes and seconds --


def train(world: Any, cell: str, epochs: int, work: Path) -> dict[str, Any]:
    import torch

    from gnnfleet.comm.collectives import all_gather_rows
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.partition.chunk_layout import open_chunk_layouts
    from gnnfleet.graph.partition.partitioned_graph import open_part
    from gnnfleet.graph.store import open_store
    from gnnfleet.report.memory import own_rss
    from gnnfleet.training.build import RankContext, build

    name, model, _, side, *_ = cell.split("/")
    log: list[str] = []
    if side == "sar":
        settings: dict[str, Any] = {"name": "sar", "group": world.size, "prefetch": 1}
        context = RankContext(world, open_part(work / name / f"parts-{world.size}", world.rank))
    else:
        graph_parallel, chunks = GRIDS[side](world.size) if side in GRIDS else (None, None)
        settings = {"name": "pipe", "exactness_check_every": 0, "warmup_history": False} | (
            {"graph_parallel": graph_parallel, "chunks": chunks} if graph_parallel else {}
        )
        context = RankContext(
            world, layouts=open_chunk_layouts(work / name / f"chunks-{world.size}-{side}"), log_user=log.append
        )
    config = {**config_of(model, **settings), "workers": world.size}
    strategy: Any = build(open_store(work / name / "store"), resolve(config), context=context).strategy
    seconds, bubbles, sent = [], [], 0
    for epoch in range(1 + epochs):
        before, started = world.traffic.bytes_sent, time.perf_counter()
        list(strategy.train_epoch(epoch))
        seconds.append(time.perf_counter() - started)
        sent = world.traffic.bytes_sent - before
        bubbles.append(strategy.epoch_metrics().get("bubble", 0.0))
    seconds = seconds[1:] or seconds  # the first epoch fills caches
    uncounted = world.uncounted()
    all_figures = torch.cat(all_gather_rows(uncounted, torch.tensor([[sent, own_rss()]]))).tolist()
    alone = messages_alone(strategy, side, 1 + epochs, uncounted) if epochs else 0.0
    strategy.close()  # the next cell starts its own threads
    report = {
        "epochs": epochs,
        "alone": alone,
        "seconds": min(seconds),
        "median": statistics.median(seconds),
        "bytes": sum(count for count, _ in all_figures),
        "own_mib": [round(rss / 2**20) for _, rss in all_figures],
        "bubble": statistics.median(bubbles[1:] or bubbles),
    }
    if side != "sar":
        report |= {"predicted_bytes": strategy.grid_estimate.bytes, "grid": str(strategy.grid), "said": log}
        report["forecast_seconds"] = strategy.grid_estimate.seconds
    return report


def messages_alone(strategy: Any, side: str, epoch: int, uncounted: Any) -> float:
    """Seconds of the messages of an epoch in order, without the computation between them; the best of three."""
    import torch

    from gnnfleet.comm.collectives import sum_over_ranks

    replay = _pipe_messages(strategy) if side == "pipe" else _sar_messages(strategy, epoch) if side == "sar" else None
    if replay is None:
        return 0.0
    seconds = []
    for _ in range(3):
        sum_over_ranks(uncounted, torch.zeros(1))  # start together
        started = time.perf_counter()
        replay()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _pipe_messages(strategy: Any) -> Callable[[], None]:
    import torch

    rank = strategy._pipeline_rank
    stage, counts = rank.stage, [chunk.rows for chunk in rank.partition.chunks]
    previous_link, next_link = stage.previous_link, stage.next_link

    def zeros(link: Any, rows: int) -> list[torch.Tensor]:
        return [torch.zeros(rows, width, dtype=dtype) for width, dtype in link.shapes]

    def replay() -> None:
        activations = previous_link and previous_link.receive_activations(counts)
        for rows in counts:
            received = activations and next(activations)
            if next_link:
                next_link.send_activations(received or zeros(next_link, rows))
        grads = next_link and next_link.receive_grads(counts[::-1])
        for rows in counts[::-1]:
            received = grads and next(grads)
            if previous_link:
                previous_link.send_grads(received or zeros(previous_link, rows))
        for link in (previous_link, next_link):
            if link:
                link.flush()

    return replay


def _sar_messages(strategy: Any, epoch: int) -> Callable[[], None]:
    import torch

    from gnnfleet.comm.halo_exchange import RingExchange

    calls: list[tuple[Any, Any, Any]] = []
    original = RingExchange.run

    def record_call(self: Any, tables: Any, use_rows: Any, *, returns: Any = (), **options: Any) -> None:
        calls.append((self, tables, returns))
        original(self, tables, use_rows, returns=returns, **options)

    RingExchange.run = record_call  # type: ignore[method-assign]
    list(strategy.train_epoch(epoch))
    RingExchange.run = original  # type: ignore[method-assign]

    def replay() -> None:
        for ring, tables, returns in calls:

            def return_zeros(q: int, rows: Any, returns: Any = returns) -> Any:
                return [torch.zeros(path.plan.recv_counts[q], path.width, dtype=path.dtype) for path in returns]

            original(
                ring, tables, return_zeros, returns=returns, on_returns=(lambda q, rows: None) if returns else None
            )

    return replay


def prepare(cell: str, args: argparse.Namespace) -> None:
    """Make the store and the partition or chunk layout of a cell, each once."""
    from gnnfleet.graph.partition.assign import assign_nodes
    from gnnfleet.graph.partition.chunk_layout import build_chunk_layout, write_chunk_layouts
    from gnnfleet.graph.partition.partitioned_graph import write_partition
    from gnnfleet.graph.store import open_store, save_store
    from gnnfleet.strategies.pipe.config import PipeConfig

    name, _, size, side, *_ = cell.split("/")
    folder, workers = args.work / name, int(size)
    if not (folder / "store").exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_store(graph_of(name, args.data), folder / "store")
    graph = open_store(folder / "store")
    parts, chunks = folder / f"parts-{size}", folder / f"chunks-{size}-{side}"
    if side == "sar" and not parts.exists():
        write_partition(graph, assign_nodes(graph, workers, "mincut"), parts)
    if side != "sar" and not chunks.exists():
        grids = [GRIDS[side](workers)] if side in GRIDS else PipeConfig().layout_candidates(workers)
        write_chunk_layouts(graph, [build_chunk_layout(graph, *grid) for grid in grids], chunks)


# -- tables --


def show(cells: list[dict[str, Any]]) -> None:
    by_name = {cell["cell"]: cell for cell in cells}
    ratios: dict[str, list[float]] = {"dense": [], "others": []}
    print("epochs: bytes and seconds of pipe and sar")
    for name, cell in by_name.items():
        parts = name.split("/")
        if len(parts) < 4 or parts[3] != "pipe":
            continue
        sar_cell = by_name.get("/".join([*parts[:3], "sar", *parts[4:]]))
        if sar_cell is None:
            continue
        ratio, speed = sar_cell["bytes"] / cell["bytes"], sar_cell["seconds"] / cell["seconds"]
        if len(parts) == 4:
            ratios["dense" if parts[0] in DENSE else "others"].append(ratio)
        alone = ""
        if cell["alone"] and sar_cell["alone"]:
            times = f"{cell['alone']:.3f} / {sar_cell['alone']:.3f} s: {sar_cell['alone'] / cell['alone']:.1f}×"
            alone = f"  messages alone {times}"
        exact = "as predicted" if cell["bytes"] == cell["predicted_bytes"] else f"predicted {cell['predicted_bytes']}"
        print(
            f"{name:36} {cell['bytes'] / 1e6:.1f} MB ({exact}), sar {sar_cell['bytes'] / 1e6:.1f}: {ratio:4.1f}× less; "
            f"{cell['seconds']:6.2f} / {sar_cell['seconds']:6.2f} s: {speed:4.2f}×  bubble {cell['bubble']:.0%}{alone}"
        )
    for kind, values in ratios.items():
        if values:
            print(f"{kind}: {statistics.geometric_mean(values):.1f}× less on average, {max(values):.1f}× at best")
    print("choice of the planner for four workers; planned / measured seconds")
    for name, cell in by_name.items():
        if "/plan" in name:
            others = [by_name.get(name.replace("/plan", f"/{side}")) for side in ("pipe", "ways")]
            texts = [f"{cell['grid']} {cell['forecast_seconds']:.2f} / {cell['seconds']:.2f}"]
            for label, sar_cell in zip(("pipeline", "graph parallel"), others, strict=True):
                planned = planned_seconds(cell["said"]).get(label)
                if planned and sar_cell:
                    texts.append(f"{label} {planned:.2f} / {sar_cell['seconds']:.2f}")
            print(f"{name:36} {', '.join(texts)}")


def planned_seconds(log: list[str]) -> dict[str, float]:
    """Seconds of grids in the messages of the planner."""
    matches = (re.search(r"(one worker|pipeline|graph parallel|hybrid).*: ([\d.]+) s,", line) for line in log)
    return {match[1]: float(match[2]) for match in matches if match}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "pipe")
    parser.add_argument("--data", type=Path, default=Path("no data"))
    parser.add_argument("--cells", nargs="*", default=[*dict.fromkeys([*VOLUME, *LINKS, *PLANS])])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=30.0, help="start no cell after this time")
    parser.add_argument("--work", type=Path, help="a directory for graphs and their partitions")
    parser.add_argument("--only-prepare", action="store_true", help="make graphs and partitions, measure nothing")
    parser.add_argument("--ranks", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks:
        run_as_rank(lambda world: train_cells(world, args))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    args.until = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        args.work = args.work or Path(folder)
        for number in range(args.rounds):
            run_round(number, args)
    if args.only_prepare:
        return
    best = best_cells(args.out, "seconds")
    show(best)
    print(write_results("pipe", best, keep=True))


def run_round(number: int, args: argparse.Namespace) -> None:
    """Run the missing cells, those with the same number of workers and the same rate in one call."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for cell in args.cells:
        if not path_of(cell, number, args.out).exists():
            _, _, size, _, *rate = cell.split("/")
            groups.setdefault((size, *rate), []).append(cell)
    for (size, *rate), cells in groups.items():
        for cell in cells:
            prepare(cell, args)
        if time.monotonic() < args.until and not args.only_prepare:
            arguments = [__file__, str(args.out), "--work", str(args.work), "--epochs", str(args.epochs)]
            arguments += [
                "--rounds",
                str(number),
                "--minutes",
                str((args.until - time.monotonic()) / 60),
                "--ranks",
                *cells,
            ]
            run_ranks(arguments, int(size), rate=rate[0] if rate else None)


def train_cells(world: Any, args: argparse.Namespace) -> int:
    """Run cells until the time is over; the first rank saves them."""
    from gnnfleet.comm.collectives import broadcast_bytes

    deadline = time.monotonic() + 60 * args.minutes
    for cell in args.ranks:
        has_time = broadcast_bytes(world, (b"1" if time.monotonic() < deadline else b"0") if world.is_first else None)
        if has_time == b"1":
            figures = train(world, cell, args.epochs, args.work)
            if world.is_first:
                save_cell(cell, args.rounds, figures, args.out)
    return len(args.ranks)


def path_of(cell: str, number: int, out: Path) -> Path:
    return out / f"{cell.replace('/', '.')}.{number}.json"


def save_cell(cell: str, number: int, figures: dict[str, Any], out: Path) -> None:
    path_of(cell, number, out).write_text(json.dumps({"cell": cell, **figures}))
    print(cell, f"{figures['seconds']:.2f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
