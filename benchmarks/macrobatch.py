"""macrobatch: seeds per second, bytes, rounds, duplication and hit rates, against per-batch fetch and against DGL.

Cells take turns over rounds, the best round counts; finished cells are not run again. SAGE of three layers, fanouts
15, 10, 5, batches of 1,024 over all workers, 20 batches an epoch. Workers share the cores of one machine.

  dgl                    DGL's DataLoader in one process (with --dgl); DistDGL reaches 2.8 / 3.35 of it
  local/W                one process; W: plain, cached (aggregated inputs)
  G/N/word=value/…       macrobatch on N workers. G: small (200,000 nodes, 5 M edges, 100 features; --data), large
                         (2 M nodes, 50 M edges). Words: those of the strategy; hidden=16; precision=bf16;
                         rate=1gbit (each worker a host, links held to it); small and large fetch plainly,
                         batches_per_fetch=1 is per-batch fetch. wide: 200,000 nodes, 2 M edges, 768 features
  hits/G                 hit rates of the policies on one recorded trace of two workers, and how many times less is
                         fetched than by batches by themselves; skewed: R-MAT, 2 M nodes, 50 M edges, batches of 128

usage: python benchmarks/macrobatch.py [OUT] [--data DIR] [--cells small/2/batches_per_fetch=1 …]
       [--rounds 1] [--dgl PYTHON]
About 20 minutes; cells of the large, wide and skewed graphs are run only when they are named (--cells large wide kept).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import crew
from epochs import load

HERE = Path(__file__).parent
EPOCHS, WARM = 3, 1
BATCHES = 20
METHODS = {
    "small": "mincut",
    "large": "stream",
    "skewed": "random",
    "wide": "stream",
}  # METIS takes many minutes on 50 M edges
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
    f"small/{size}/rate=1gbit/{words}{more}"
    for more in ("", "/hidden=16")
    for size in (2, 4)
    for words in (
        "batches_per_fetch=1/prefetch=0",
        "batches_per_fetch=auto",
        "batches_per_fetch=auto/cache_inputs=true",
    )
]
LARGE = [f"large/{size}/{words}" for size in (2, 4) for words in ("batches_per_fetch=1", "batches_per_fetch=auto")]
LARGE += ["large/2/cache_inputs=true"]
WIDE = [f"wide/2/rate=1gbit/hidden=16/{words}" for words in ("batches_per_fetch=1", "split=nodes", "split=columns")]
KEPT = [
    f"skewed/2/rate=1gbit/batch=128/hidden=16/batches_per_fetch=1/prefetch=0{words}" for words in ("", "/cache=32MiB")
]
HITS = ["hits/small", "hits/large", "hits/skewed"]


def words_of(cell: str) -> tuple[str, int, dict[str, Any]]:
    """(graph, workers, words)."""
    graph, size, *more = cell.split("/")
    words: dict[str, Any] = {}
    for word in more:
        key, value = word.split("=")
        words[key] = int(value) if value.isdigit() else value == "true" if value in ("true", "false") else value
    return graph, int(size), words


def tree_of(words: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in words.items() if key not in ("hidden", "precision", "rate")}
    return {
        "model": {"name": "sage", "hidden": words.get("hidden", 256), "layers": 3, "dropout": 0.0},
        "train": {"weight_decay": 0.0, "lr": 0.003},
        "strategy": {"name": "macrobatch", "fanouts": [15, 10, 5], "batch": 1024, "cache_inputs": False, **rest},
        "precision": words.get("precision", "float32"),
    }


def make(world: Any, words: dict[str, Any], store: Path, parts: Path) -> Any:
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.partition.partitioned_graph import open_part
    from gnnfleet.graph.store import open_store
    from gnnfleet.training.build import RankContext, build

    here = RankContext(world, open_part(parts, world.rank))
    return build(open_store(store), resolve(tree_of(words)), context=here).strategy


def train(world: Any, words: dict[str, Any], store: Path, parts: Path) -> dict[str, Any]:
    import torch

    from gnnfleet.comm.collectives import all_gather_rows
    from gnnfleet.report.memory import peak_rss

    strategy = make(world, words, store, parts)
    rates = []
    for epoch in range(WARM + EPOCHS):
        if epoch == WARM:
            sent, rounds = world.traffic.bytes_sent, world.traffic.rounds
        started = time.perf_counter()
        seeds = sum(record.count for record in strategy.train_epoch(epoch))
        rates.append(seeds / (time.perf_counter() - started))
    stats = strategy.stats
    own = torch.tensor([[peak_rss(), (world.traffic.bytes_sent - sent) // EPOCHS, stats.fetched_bytes]])
    every = torch.cat(all_gather_rows(world, own)).tolist()
    return {
        "seeds_per_second": max(rates[WARM:]),
        "median": statistics.median(rates[WARM:]),
        "peak_gib": [round(row[0] / 2**30, 2) for row in every],
        "megabytes_sent": [round(row[1] / 1e6, 1) for row in every],
        "megabytes_fetched": [round(row[2] / 1e6, 1) for row in every],
        "rounds": (world.traffic.rounds - rounds) // EPOCHS,
        "batches_per_fetch": strategy.fetcher.batches_per_fetch,
        "duplication": stats.rows_read / max(1, stats.rows_requested),
    }


def record_trace(world: Any, graph: str, store: Path, parts: Path) -> dict[str, Any]:
    """What the policies make of the rows that batches of a few epochs want; nothing is fetched."""
    import torch

    from gnnfleet.strategies.macrobatch.cache_policies import make_cache

    strategy = make(world, {"batches_per_fetch": 1, "batch": 128 if graph == "skewed" else 1024}, store, parts)
    fetcher = strategy.fetcher
    batches = [fetcher.sample([batch]) for epoch in range(3) for batch in strategy.batches(epoch)]
    kind = next(iter(fetcher.features.rows))
    width = fetcher.features.row_bytes(kind)
    single = [plan.remote_ids[kind] for plan in batches]
    remote = fetcher.features.owners.counts[kind] - len(fetcher.features.node_index[kind].ids)
    plain = sum(map(len, single))
    found: list[dict[str, Any]] = []
    for together in (1, 2, 4, 8):
        groups = [torch.unique(torch.cat(single[low : low + together])) for low in range(0, len(single), together)]
        most = max(map(len, groups))
        for share in (0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4):
            capacity = int(share * remote)
            line = {"together": together, "share": share, "held": round((most + capacity) / remote, 3)}
            for policy in ("static", "score", "belady"):
                cache = make_cache(policy, capacity, warmup=single[:8])
                wanted = hits = 0
                for place, ids in enumerate(groups):
                    turn = cache.step(ids, groups[place + 1 : place + 3])
                    wanted, hits = wanted + len(ids), hits + int((turn.slots >= 0).sum())
                line[policy] = round(hits / wanted, 4)
                line[f"{policy}_fall"] = round(plain / (wanted - hits), 2)
            found.append(line)
    return {"remote_rows": remote, "rows_per_batch": plain / len(single), "row_bytes": width, "lines": found,
            "seeds_per_second": 0.0}  # fmt: skip


def run_local(word: str, store: Path) -> dict[str, Any]:
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.store import open_store
    from gnnfleet.training.build import build

    tree = tree_of({"cache_inputs": word == "cached"})
    strategy = build(open_store(store), resolve({**tree, "strategy": {**tree["strategy"], "name": "local"}})).strategy
    rates = []
    for epoch in range(WARM + EPOCHS):
        started = time.perf_counter()
        seeds = sum(record.count for record in strategy.train_epoch(epoch))
        rates.append(seeds / (time.perf_counter() - started))
    return {"seeds_per_second": max(rates[WARM:]), "median": statistics.median(rates[WARM:])}


def start_cell(cell: str, args: argparse.Namespace) -> dict[str, Any]:
    if cell == "dgl":
        words = [args.dgl, str(HERE / "dgl_sampled.py"), str(args.data), "1024", "16"]
        found = _json_of(words)
        return {"cell": cell, **found, "seeds_per_second": found["training"]}
    store, _ = prepare(args, "small", 0)
    if cell.startswith("local/"):
        return {"cell": cell, **_json_of([sys.executable, __file__, "--cell", cell, "--store", str(store)])}
    if cell.startswith("hits/"):
        graph, size, rate = cell.split("/")[1], 2, None
    else:
        graph, size, words = words_of(cell)
        rate = words.get("rate")
    store, parts = prepare(args, graph, size)
    line = [__file__, "--cell", cell, "--store", str(store), "--parts", str(parts)]
    return {"cell": cell, **crew.run(line, size, rate=rate)}


def _json_of(words: list[str]) -> dict[str, Any]:
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def prepare(args: argparse.Namespace, name: str, size: int) -> tuple[Path, Path]:
    """A graph's store, and its partition by METIS into as many parts; made once."""
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
            kind = "rmat" if name == "skewed" else "communities"
            nodes, edges, width = (200_000, 2_000_000, 768) if name == "wide" else (2_000_000, 50_000_000, 100)
            graph = make_dataset(kind, nodes=nodes, edges=edges, features=width, classes=47)
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
    by = {cell["cell"]: cell for cell in cells}
    dgl = by.get("dgl")
    for cell in cells:
        if "lines" in cell:
            print(f"{cell['cell']}: {cell['remote_rows']} rows elsewhere, {cell['rows_per_batch']:.0f} read by a batch")
            for line in cell["lines"]:
                print("  ", "  ".join(f"{key} {value}" for key, value in line.items()))
            continue
        ratio = f"{cell['seeds_per_second'] / dgl['seeds_per_second'] * 3.35 / 2.8:5.1f}× DistDGL" if dgl else ""
        more = "" if "rounds" not in cell else (
            f"  {sum(cell['megabytes_sent']):7.0f} MB  {cell['rounds']:4d} rounds  M {cell['batches_per_fetch']:3d}  "
            f"dup {cell['duplication']:.2f}  {max(cell['peak_gib']):.2f} GiB"
        )  # fmt: skip
        print(f"{cell['cell']:62} {cell['seeds_per_second']:6.0f} seeds/s {ratio}{more}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "macrobatch")
    parser.add_argument("--data", type=Path, default=Path("no data"))
    parser.add_argument("--cells", nargs="+")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dgl", help="an interpreter that has DGL")
    parser.add_argument("--work", type=Path, help="where stores and partitions are kept; by default nowhere")
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
            crew.as_rank(lambda world: record_trace(world, graph, args.store, args.parts))
        else:
            words = words_of(args.cell)[2]
            crew.as_rank(lambda world: train(world, words, args.store, args.parts))
        return
    from record import best_cells, write_results

    args.out.mkdir(parents=True, exist_ok=True)
    groups = {"large": LARGE, "wide": WIDE, "kept": KEPT}
    cells = [cell for word in args.cells or () for cell in groups.get(word, [word])] or [
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
                once = cell in (*HITS, *LARGE, *WIDE, *KEPT)
                path = args.out / f"{cell.replace('/', '.')}.{0 if once else number}.json"
                if not path.exists():
                    path.write_text(json.dumps(start_cell(cell, args)))
                    print(cell, f"{json.loads(path.read_text())['seeds_per_second']:.0f} seeds/s", flush=True)
    best = best_cells(args.out, "seeds_per_second", highest=True)
    show(best)
    print(write_results("macrobatch", best, keep=True))


if __name__ == "__main__":
    main()
