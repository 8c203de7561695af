"""macrobatch: seeds per second, bytes, rounds, duplication and hit rates, against fetching per batch and against DGL.

Cells alternate over rounds, and the best round counts; finished cells are not run again. SAGE of three layers, fanouts
15, 10, 5, batches of 1,024 over all workers, 20 batches an epoch. Workers share the cores of one machine.

  dgl                    DGL's DataLoader in one process (with --dgl); DistDGL reaches 2.8 / 3.35 of it
  local/W                one process; W: plain, cached (aggregated inputs)
  G/N/option=value/…     macrobatch on N workers. G: small (200,000 nodes, 5 M edges, 100 features; --data), large
                         (2 M nodes, 50 M edges), wide (200,000 nodes, 2 M edges, 768 features). Options: those of the
                         strategy; hidden=16; precision=bf16; rate=1gbit (each worker is a host with this link);
                         batches_per_fetch=1 fetches per batch
  hits/G                 hit rates of the policies on one recorded trace of two workers, and the reduction of fetched
                         rows against single batches; skewed: R-MAT, 2 M nodes, 50 M edges, batches of 128

usage: python benchmarks/macrobatch.py [OUT] [--data DIR] [--cells small/2/batches_per_fetch=1 …]
       [--rounds 1] [--dgl PYTHON]
About 20 minutes; cells of the large, wide and skewed graphs run only if they are named (--cells large wide kept).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from epochs import load
from ranks import run_as_rank, run_ranks
from record import best_cells, run_json, write_results

HERE = Path(__file__).parent
EPOCHS, WARM = 3, 1
BATCHES = 20
METHODS = {
    "small": "mincut",
    "large": "stream",
    "skewed": "random",
    "wide": "stream",  # METIS takes many minutes on 50 M edges
}
LOCAL = ["local/plain", "local/cached"]
SMALL = [
    "small/2/batches_per_fetch=1",
    "small/2",
    "small/2/cache_inputs=true",
    "small/2/cache_inputs=true/precision=bf16",
    "small/4/batches_per_fetch=1",
    "small/4",
    "small/4/cache_inputs=true",
]
SLOW = [
    f"small/{size}/rate=1gbit/{options}{hidden}"
    for hidden in ("", "/hidden=16")
    for size in (2, 4)
    for options in (
        "batches_per_fetch=1/prefetch=0",
        "batches_per_fetch=auto",
        "batches_per_fetch=auto/cache_inputs=true",
    )
]
LARGE = [f"large/{size}/{options}" for size in (2, 4) for options in ("batches_per_fetch=1", "batches_per_fetch=auto")]
LARGE += ["large/2/cache_inputs=true"]
WIDE = [f"wide/2/rate=1gbit/hidden=16/{options}" for options in ("batches_per_fetch=1", "split=nodes", "split=columns")]
CACHED = [
    f"skewed/2/rate=1gbit/batch=128/hidden=16/batches_per_fetch=1/prefetch=0{cache}" for cache in ("", "/cache=32MiB")
]
HITS = ["hits/small", "hits/large", "hits/skewed"]


def parse_cell(cell: str) -> tuple[str, int, dict[str, Any]]:
    """(graph, workers, options)."""
    graph, size, *pairs = cell.split("/")
    options: dict[str, Any] = {}
    for pair in pairs:
        key, value = pair.split("=")
        options[key] = int(value) if value.isdigit() else value == "true" if value in ("true", "false") else value
    return graph, int(size), options


def config_of(options: dict[str, Any]) -> dict[str, Any]:
    strategy = {key: value for key, value in options.items() if key not in ("hidden", "precision", "rate")}
    return {
        "model": {"name": "sage", "hidden": options.get("hidden", 256), "layers": 3, "dropout": 0.0},
        "train": {"weight_decay": 0.0, "lr": 0.003},
        "strategy": {"name": "macrobatch", "fanouts": [15, 10, 5], "batch": 1024, "cache_inputs": False, **strategy},
        "precision": options.get("precision", "float32"),
    }


def build_strategy(world: Any, options: dict[str, Any], store: Path, parts: Path) -> Any:
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.partition.partitioned_graph import open_part
    from gnnfleet.graph.store import open_store
    from gnnfleet.training.build import RankContext, build

    context = RankContext(world, open_part(parts, world.rank))
    return build(open_store(store), resolve(config_of(options)), context=context).strategy


def train(world: Any, options: dict[str, Any], store: Path, parts: Path) -> dict[str, Any]:
    import torch

    from gnnfleet.comm.collectives import all_gather_rows
    from gnnfleet.report.memory import peak_rss

    strategy = build_strategy(world, options, store, parts)
    rates = []
    for epoch in range(WARM + EPOCHS):
        if epoch == WARM:
            sent, rounds = world.traffic.bytes_sent, world.traffic.rounds
        started = time.perf_counter()
        seeds = sum(record.count for record in strategy.train_epoch(epoch))
        rates.append(seeds / (time.perf_counter() - started))
    stats = strategy.stats
    figures = torch.tensor([[peak_rss(), (world.traffic.bytes_sent - sent) // EPOCHS, stats.fetched_bytes]])
    all_figures = torch.cat(all_gather_rows(world, figures)).tolist()
    return {
        "seeds_per_second": max(rates[WARM:]),
        "median": statistics.median(rates[WARM:]),
        "peak_gib": [round(row[0] / 2**30, 2) for row in all_figures],
        "megabytes_sent": [round(row[1] / 1e6, 1) for row in all_figures],
        "megabytes_fetched": [round(row[2] / 1e6, 1) for row in all_figures],
        "rounds": (world.traffic.rounds - rounds) // EPOCHS,
        "batches_per_fetch": strategy.fetcher.batches_per_fetch,
        "duplication": stats.rows_read / max(1, stats.rows_requested),
    }


def record_trace(world: Any, graph: str, store: Path, parts: Path) -> dict[str, Any]:
    """Simulate the cache policies on the rows that batches of three epochs request; nothing is fetched."""
    import torch

    from gnnfleet.strategies.macrobatch.cache_policies import make_cache

    strategy = build_strategy(
        world, {"batches_per_fetch": 1, "batch": 128 if graph == "skewed" else 1024}, store, parts
    )
    fetcher = strategy.fetcher
    batches = [fetcher.sample([batch]) for epoch in range(3) for batch in strategy.batches(epoch)]
    node_type = next(iter(fetcher.features.rows))
    width = fetcher.features.row_bytes(node_type)
    single = [plan.remote_ids[node_type] for plan in batches]
    remote = fetcher.features.owners.counts[node_type] - len(fetcher.features.node_index[node_type].ids)
    uncached = sum(map(len, single))
    lines: list[dict[str, Any]] = []
    for group_size in (1, 2, 4, 8):
        groups = [torch.unique(torch.cat(single[low : low + group_size])) for low in range(0, len(single), group_size)]
        largest = max(map(len, groups))
        for share in (0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4):
            capacity = int(share * remote)
            figures = {"together": group_size, "share": share, "held": round((largest + capacity) / remote, 3)}
            for policy in ("score", "belady"):
                cache = make_cache(policy, capacity, warmup=single[:8])
                requested = hits = 0
                for index, ids in enumerate(groups):
                    decision = cache.step(ids, groups[index + 1 : index + 3])
                    requested, hits = requested + len(ids), hits + int((decision.slots >= 0).sum())
                figures[policy] = round(hits / requested, 4)
                figures[f"{policy}_fall"] = round(uncached / (requested - hits), 2)
            lines.append(figures)
    return {"remote_rows": remote, "rows_per_batch": uncached / len(single), "row_bytes": width, "lines": lines,
            "seeds_per_second": 0.0}  # fmt: skip


def run_local(variant: str, store: Path) -> dict[str, Any]:
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.store import open_store
    from gnnfleet.training.build import build

    config = config_of({"cache_inputs": variant == "cached"})
    strategy = build(
        open_store(store), resolve({**config, "strategy": {**config["strategy"], "name": "local"}})
    ).strategy
    rates = []
    for epoch in range(WARM + EPOCHS):
        started = time.perf_counter()
        seeds = sum(record.count for record in strategy.train_epoch(epoch))
        rates.append(seeds / (time.perf_counter() - started))
    return {"seeds_per_second": max(rates[WARM:]), "median": statistics.median(rates[WARM:])}


def start_cell(cell: str, args: argparse.Namespace) -> dict[str, Any]:
    if cell == "dgl":
        rates = run_json([args.dgl, str(HERE / "dgl_sampled.py"), str(args.data), "1024", "16"])
        return {"cell": cell, **rates, "seeds_per_second": rates["training"]}
    store, _ = prepare(args, "small", 0)
    if cell.startswith("local/"):
        return {"cell": cell, **run_json([sys.executable, __file__, "--cell", cell, "--store", str(store)])}
    if cell.startswith("hits/"):
        graph, size, rate = cell.split("/")[1], 2, None
    else:
        graph, size, options = parse_cell(cell)
        rate = options.get("rate")
    store, parts = prepare(args, graph, size)
    arguments = [__file__, "--cell", cell, "--store", str(store), "--parts", str(parts)]
    return {"cell": cell, **run_ranks(arguments, size, rate=rate)}


def prepare(args: argparse.Namespace, name: str, size: int) -> tuple[Path, Path]:
    """The store of a graph and its partition into ``size`` parts, each made once."""
    import torch

    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.partition.assign import assign_nodes
    from gnnfleet.graph.partition.partitioned_graph import write_partition
    from gnnfleet.graph.store import open_store, save_store

    store, parts = args.work / name, args.work / f"{name}-{size}"
    if not store.exists():
        if name == "small":
            graph = load(args.data)
        else:
            generator = "rmat" if name == "skewed" else "communities"
            nodes, edges, width = (200_000, 2_000_000, 768) if name == "wide" else (2_000_000, 50_000_000, 100)
            graph = make_dataset(generator, nodes=nodes, edges=edges, features=width, classes=47)
            split = torch.full((nodes,), -1, dtype=torch.int8)
            count = BATCHES * (128 if name == "skewed" else 1024)
            split[torch.randperm(nodes, generator=torch.Generator().manual_seed(0))[:count]] = 0
            graph = graph.with_nodes("node", split=split[None])
        save_store(graph, store)
    if size and not parts.exists():
        graph = open_store(store)
        write_partition(graph, assign_nodes(graph, size, METHODS[name]), parts)
    return store, parts


def show(cells: list[dict[str, Any]]) -> None:
    by_name = {cell["cell"]: cell for cell in cells}
    dgl = by_name.get("dgl")
    for cell in cells:
        if "lines" in cell:
            print(f"{cell['cell']}: {cell['remote_rows']} remote rows, {cell['rows_per_batch']:.0f} read by a batch")
            for line in cell["lines"]:
                print("  ", "  ".join(f"{key} {value}" for key, value in line.items()))
            continue
        ratio = f"{cell['seeds_per_second'] / dgl['seeds_per_second'] * 3.35 / 2.8:5.1f}× DistDGL" if dgl else ""
        traffic = "" if "rounds" not in cell else (
            f"  {sum(cell['megabytes_sent']):7.0f} MB  {cell['rounds']:4d} rounds  M {cell['batches_per_fetch']:3d}  "
            f"dup {cell['duplication']:.2f}  {max(cell['peak_gib']):.2f} GiB"
        )  # fmt: skip
        print(f"{cell['cell']:62} {cell['seeds_per_second']:6.0f} seeds/s {ratio}{traffic}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "macrobatch")
    parser.add_argument("--data", type=Path, default=Path("no data"))
    parser.add_argument("--cells", nargs="+")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dgl", help="an interpreter that has DGL")
    parser.add_argument("--work", type=Path, help="directory for stores and partitions; by default a temporary one")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell and args.cell.startswith("local/"):
        print(json.dumps(run_local(args.cell.split("/")[1], args.store)))
        return
    if args.cell:
        if args.cell.startswith("hits/"):
            graph = args.cell.split("/")[1]
            run_as_rank(lambda world: record_trace(world, graph, args.store, args.parts))
        else:
            options = parse_cell(args.cell)[2]
            run_as_rank(lambda world: train(world, options, args.store, args.parts))
        return
        args.out.mkdir(parents=True, exist_ok=True)
    groups = {"large": LARGE, "wide": WIDE, "kept": CACHED}
    cells = [cell for name in args.cells or () for cell in groups.get(name, [name])] or [
        *(["dgl"] if args.dgl else []),
        *LOCAL,
        *SMALL,
        *SLOW,
        "hits/small",
        "hits/skewed",
    ]
    with tempfile.TemporaryDirectory() as folder:
        args.work = args.work or Path(folder)
        args.work.mkdir(parents=True, exist_ok=True)
        for number in range(args.rounds):
            for cell in cells:
                once = cell in (*HITS, *LARGE, *WIDE, *CACHED)
                path = args.out / f"{cell.replace('/', '.')}.{0 if once else number}.json"
                if not path.exists():
                    path.write_text(json.dumps(start_cell(cell, args)))
                    print(cell, f"{json.loads(path.read_text())['seeds_per_second']:.0f} seeds/s", flush=True)
    best = best_cells(args.out, "seeds_per_second", highest=True)
    show(best)
    print(write_results("macrobatch", best, keep=True))


if __name__ == "__main__":
    main()
