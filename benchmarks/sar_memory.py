"""Memory of a worker against the number of workers, on a dense power-law graph partitioned at random: the worst case.

sar fetches one block at a time; oneshot is the same with group = N; classical fetches all rows at once, keeps them
until backward and has unfused attention. A figure is the peak sum of live tensors in a step (torch's profiler), the
largest of all workers, without features, weights and edges. The law: (c + r) / N of a layer's full matrix of rows,
c the tensors of one process in that unit, r = min(1 + prefetch, N − 1) blocks of remote rows. Rows being sent come on
top. Finished cells are not run again.

The cells limit/MODE/N train on a larger graph with a limit of memory for every process (RLIMIT_DATA): some train, some
fail.

usage: python benchmarks/sar_memory.py [OUT] [--cells sage/sar/8 …] [--nodes 60000] [--degree 60] [--limit 1200]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from ranks import run_as_rank, run_ranks
from record import write_results

HERE = Path(__file__).parent
WIDTH = 128
SIZES = (1, 2, 4, 8)
CELLS = [
    f"{model}/{mode}/{size}" for model in ("sage", "gat") for size in SIZES for mode in ("sar", "oneshot", "classical")
]
CELLS += ["limit/local/1", "limit/oneshot/8", "limit/sar/8"]


def make_store(folder: Path, nodes: int, degree: int, size: int) -> tuple[Path, Path]:
    import numpy as np

    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.partition.assign import Assignment
    from gnnfleet.graph.partition.partitioned_graph import write_partition
    from gnnfleet.graph.store import open_store, save_store

    store, parts = folder / "store", folder / "parts"
    parameters = {"nodes": nodes, "mean_degree": degree, "features": WIDTH, "classes": 16, "homophily": 0.1}
    save_store(make_dataset("communities", **parameters), store)
    part = np.random.default_rng(0).permutation(np.arange(nodes, dtype=np.int32) % size)
    write_partition(open_store(store), Assignment(part=part, parts=size, method="random"), parts)
    return store, parts


def measure(world: Any, model: str, mode: str, store: Path, parts: Path) -> dict[str, Any]:
    import torch

    from classical import ClassicalView
    from gnnfleet.comm.collectives import all_gather_rows
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.partition.partitioned_graph import open_part
    from gnnfleet.graph.store import open_store
    from gnnfleet.ops.buffers import unpooled
    from gnnfleet.report.memory import peak_tensors
    from gnnfleet.training.build import RankContext, build

    group = 1 if mode == "sar" else world.size
    config = {
        "model": {"name": model, "hidden": WIDTH, "layers": 3, "heads": 4, "dropout": 0.0},
        "strategy": {"name": "sar", "group": group, "prefetch": 1, "restrict_rows": False, "cache_inputs": False},
    }
    shard = open_part(parts, world.rank)
    strategy: Any = build(open_store(store), resolve(config), context=RankContext(world, shard)).strategy
    if mode == "classical":
        strategy.__dict__["_views"] = [ClassicalView.from_ring_view(view) for view in strategy._views]
    losses = [record.loss for record in strategy.train_epoch(0)]
    with unpooled():
        peak = peak_tensors(lambda: losses.extend(record.loss for record in strategy.train_epoch(1)))
    received = _watch_received_rows()
    losses += [record.loss for record in strategy.train_epoch(2)]
    plan = strategy._view.blocks.exchange_plan("node", "in")
    figures = torch.tensor(
        [[peak, max(plan.recv_counts), sum(plan.recv_counts), max(map(len, plan.send_rows)), received["peak"]]]
    )
    rows = torch.cat(all_gather_rows(world, figures)).amax(0).tolist()
    names = ("peak_tensors", "largest_block", "remote_rows", "largest_given", "resident_bytes")
    return {"losses": losses, **dict(zip(names, rows, strict=True))}


def _watch_received_rows() -> dict[str, int]:
    """From now on, count the bytes of received rows in memory, and their peak."""
    import weakref

    from gnnfleet.comm import halo_exchange

    ring_pass: Any = halo_exchange._RingPass
    allocate, counts = ring_pass._recv_buffer, {"live": 0, "peak": 0}

    def release(nbytes: int) -> None:
        counts["live"] -= nbytes

    def counting_allocate(self: Any, source: int, nbytes: int) -> Any:
        buffer = allocate(self, source, nbytes)
        counts["live"] += buffer.nbytes
        counts["peak"] = max(counts["peak"], counts["live"])
        weakref.finalize(buffer.untyped_storage(), release, buffer.nbytes)
        return buffer

    ring_pass._recv_buffer = counting_allocate
    return counts


def train_with_limit(world: Any, mode: str, store: Path, parts: Path, mebibytes: int) -> dict[str, Any]:
    """Train two steps of SAGE in a process with a limit of anonymous memory."""
    import resource

    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.partition.partitioned_graph import open_part
    from gnnfleet.graph.store import open_store
    from gnnfleet.training.build import RankContext, build

    resource.setrlimit(resource.RLIMIT_DATA, (mebibytes << 20, mebibytes << 20))
    strategy: dict[str, Any] = (
        {"name": "local", "order": "store"} if mode == "local" else {"name": "sar", "restrict_rows": False}
    )
    if mode == "oneshot":
        strategy |= {"group": world.size}
    config = {"model": {"name": "sage", "hidden": WIDTH, "layers": 3, "dropout": 0.0}, "strategy": strategy}
    context = None if mode == "local" else RankContext(world, open_part(parts, world.rank))
    built = build(open_store(store), resolve(config), context=context).strategy
    return {"losses": [record.loss for epoch in range(2) for record in built.train_epoch(epoch)]}


def run_limit(cell: str, args: argparse.Namespace) -> dict[str, Any]:
    _, mode, size = cell.split("/")
    with tempfile.TemporaryDirectory() as folder:
        store, parts = make_store(Path(folder), 10 * args.nodes, args.degree // 4, int(size))
        arguments = [__file__, "--rank", f"limit/{mode}", "--store", str(store), "--parts", str(parts)]
        try:
            sockets = {"GNNFLEET_SHARED_MEMORY": "0"}  # shared memory would not count as memory of a process
            outcome = run_ranks([*arguments, "--limit", str(args.limit)], int(size), environment=sockets)
        except RuntimeError as error:
            outcome = {"failed": str(error)}
    return {"cell": cell, "mebibytes": args.limit, "workers": int(size), "trained": "losses" in outcome, **outcome}


def run_cell(cell: str, args: argparse.Namespace) -> dict[str, Any]:
    if cell.startswith("limit/"):
        return run_limit(cell, args)
    model, mode, size = cell.split("/")
    with tempfile.TemporaryDirectory() as folder:
        store, parts = make_store(Path(folder), args.nodes, args.degree, int(size))
        arguments = [__file__, "--rank", f"{model}/{mode}", "--store", str(store), "--parts", str(parts)]
        figures = run_ranks(
            arguments, int(size), environment={"GNNFLEET_SHARED_MEMORY": "0"}
        )  # so that the profiler records the buffers
    return {"cell": cell, "nodes": args.nodes, "workers": int(size), **figures}


def add_law(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the prediction of the law to measured cells, in units of a layer's full matrix of rows."""
    by_name = {cell["cell"]: cell for cell in cells}
    for cell in cells:
        if "peak_tensors" not in cell:
            continue
        model, mode, size = cell["cell"].split("/")
        single, count = by_name.get(f"{model}/sar/1"), int(size)
        if single is None:
            continue
        unit = cell["nodes"] * WIDTH * 4
        cell["units"] = cell["peak_tensors"] * count / unit
        c = single["peak_tensors"] / unit
        remote = min(2, count - 1) if mode == "sar" else count - 1
        block = cell["largest_block"] * count / cell["nodes"]  # as a share of the nodes of a part
        sent_block = cell["largest_given"] * count / cell["nodes"]
        cell["law"], cell["with_sends"] = c + remote * block, c + remote * (block + sent_block)
        cell["of_law"] = cell["units"] / cell["law"]
        if "resident_bytes" in cell:  # the widest rows are GAT's in backward, which have 3 numbers a head besides
            row = (WIDTH + (3 * 4 if model == "gat" else 0)) * 4
            cell["resident_rows"] = cell["resident_bytes"] / row
            cell["resident_bound"] = min(2, count - 1) * cell["largest_block"]
        sar_cell = by_name.get(f"{model}/sar/{size}")
        if sar_cell is not None:
            cell["to_sar"] = cell["peak_tensors"] / sar_cell["peak_tensors"]
    return cells


def show(cells: list[dict[str, Any]]) -> None:
    print(f"{'cell':20} {'MiB':>8} {'units':>7} {'law':>7} {'measured/law':>13} {'to sar':>7}")
    for cell in cells:
        if "trained" in cell:
            print(f"{cell['cell']:20} {'trains' if cell['trained'] else 'fails'} within {cell['mebibytes']} MiB")
            continue
        figures = [f"{cell.get(name, float('nan')):{width}.2f}" for name, width in
                 (("units", 7), ("law", 7), ("of_law", 13), ("to_sar", 7))]  # fmt: skip
        print(f"{cell['cell']:20} {cell['peak_tensors'] / 2**20:8.0f} {' '.join(figures)}")


def draw(cells: list[dict[str, Any]], folder: Path) -> None:
    """Draw a chart for each model: memory of a worker against the number of workers."""
    from plot import line_chart

    for model in ("sage", "gat"):
        series: dict[str, list[tuple[float, float]]] = {}
        for cell in cells:
            kind, mode, size = cell["cell"].split("/")
            if kind == model and "law" in cell:
                series.setdefault(mode, []).append((float(size), cell["peak_tensors"] / 2**20))
                if mode == "sar":
                    law = cell["law"] * cell["nodes"] * WIDTH * 4 / float(size) / 2**20
                    series.setdefault("sar, by the law", []).append((float(size), law))
        if series:
            title = f"{model}: tensors of a worker in a step"
            line_chart(folder / f"sar_memory_{model}.svg", title, series, x_label="workers", y_label="MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "sar_memory")
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--nodes", type=int, default=60_000)
    parser.add_argument("--degree", type=int, default=60)
    parser.add_argument("--limit", type=int, default=1200, help="MiB of memory of its own for a process of limit/…")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        model, mode = args.rank.split("/")
        if model == "limit":
            run_as_rank(lambda world: train_with_limit(world, mode, args.store, args.parts, args.limit))
        else:
            run_as_rank(lambda world: measure(world, model, mode, args.store, args.parts))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    cells = []
    for cell in args.cells:
        path = args.out / f"{cell.replace('/', '.')}.json"
        if not path.exists():
            path.write_text(json.dumps(run_cell(cell, args)))
        cells.append(json.loads(path.read_text()))
        print(cell, flush=True)
    show(add_law(cells))
    draw(cells, HERE.parent / "docs" / "img")
    print(write_results("sar_memory", cells))


if __name__ == "__main__":
    main()
