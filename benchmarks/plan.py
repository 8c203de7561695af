"""Predictions of ``gnnfleet plan`` against measured training: memory, bytes, rounds, seconds per epoch.

The plan is made once for every graph, model and number of workers. Then each of its settings is trained for a few
epochs and measured. Finished cells are not run again; ``--minutes`` limits a call, and the next one continues.
The table goes into docs/plan.md, between its marks.

usage: python benchmarks/plan.py [--out DIR] [--cases communities/2 …] [--minutes 5] [--epochs 4]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from ranks import run_as_rank, run_ranks
from record import run_json, write_results

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "plan.md"
BEGIN, END = "<!-- table of benchmarks/plan.py -->", "<!-- end of table -->"
WARM = 1
ROUND_STEPS = 10

# name → (generator, its parameters, model)
GRAPHS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "communities": (
        "communities",
        {"nodes": 200_000, "edges": 5_000_000, "features": 100, "classes": 47},
        {"name": "sage", "hidden": 128, "layers": 3},
    ),
    "attention": (
        "communities",
        {"nodes": 60_000, "mean_degree": 20, "features": 64, "classes": 20},
        {"name": "gat", "hidden": 64, "heads": 4, "layers": 2},
    ),
    "deep": (
        "communities",
        {"nodes": 40_000, "mean_degree": 40, "features": 64, "classes": 20},
        {"name": "gcn2", "hidden": 64, "layers": 8, "norm": "layer"},
    ),
    "events": ("events", {"users": 4_000, "items": 2_000, "events": 60_000}, {"name": "tgn", "hidden": 100}),
}
# Rounds of tma have a number of steps, so that they are comparable; pipe runs without its exactness check, temporal
# without static embeddings.
SETTINGS = {"steps": ROUND_STEPS, "exactness_check_every": 0}
EVENT_SETTINGS = {"static": "false"}
EVENT_SPLIT = "0.96/0.02/0.02"  # an evaluation scores every destination: one batch of it shows the memory
CASES = [f"{graph}/{workers}" for graph in GRAPHS for workers in (2, 4)]


def config_of(graph: str, workers: int, strategy: dict[str, Any]) -> dict[str, Any]:
    config = {"model": GRAPHS[graph][2], "strategy": strategy, "workers": workers, "train": {"eval_every": 1000}}
    return {**config, "split": EVENT_SPLIT} if graph == "events" else config


def store_of(graph: str, work: Path) -> Path:
    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.store import save_store

    name, parameters, _ = GRAPHS[graph]
    path = work / graph
    if not path.exists():
        save_store(make_dataset(name, **parameters), path)
    return path


def make_plan(graph: str, workers: int, store: Path) -> dict[str, Any]:
    """The estimates of ``gnnfleet plan``."""
    model = [f"model.{key}={value}" for key, value in GRAPHS[graph][2].items()]
    strategy_settings = EVENT_SETTINGS if graph == "events" else SETTINGS
    settings = [*model, *(f"strategy.{key}={value}" for key, value in strategy_settings.items())]
    command = ["plan", str(store), "--workers", str(workers), "--json", "--quiet"]
    command += [argument for setting in settings for argument in ("--set", setting)]
    command += ["--split", EVENT_SPLIT] if graph == "events" else []
    rows = run_json([sys.executable, "-m", "gnnfleet", *command])["fits"]
    return {
        "rows": [row for row in rows if row["workers"] > 1 or workers == 2]
    }  # a single process is the same for both numbers of workers


def measured_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The estimates whose settings are trained."""
    selected = []
    for row in rows:
        settings = row["settings"]
        if settings["name"] == "sar" and (settings["prefetch"] != 1 or settings["cache_for_backward"]):
            continue
        if settings["name"] == "tma" and settings["scheme"] in ("psgd-pa", "llcg"):
            continue
        selected.append(row)
    return selected


def label(settings: dict[str, Any]) -> str:
    hidden = ("name", "cache_for_backward", "prefetch", "exactness_check_every", "steps", "batch", "static")
    return " ".join([settings["name"], *(f"{key}={value}" for key, value in settings.items() if key not in hidden)])


def train(
    world: Any, graph: str, store: Path, placement: Path | None, settings: dict[str, Any], epochs: int
) -> dict[str, Any]:
    import torch

    from gnnfleet.comm.collectives import all_gather_rows
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.partition.chunk_layout import open_chunk_layouts
    from gnnfleet.graph.partition.partitioned_graph import open_part
    from gnnfleet.graph.store import open_store
    from gnnfleet.report.memory import peak_rss
    from gnnfleet.training.build import RankContext, build

    config = resolve(config_of(graph, world.size, settings))
    context = RankContext(world)
    if placement is not None:
        is_chunks = config.spec.placement == "chunks"
        context = (
            RankContext(world, layouts=open_chunk_layouts(placement))
            if is_chunks
            else RankContext(world, open_part(placement, world.rank))
        )
    strategy = build(open_store(store), config, context=context).strategy
    seconds, sent, rounds = [], 0, 0
    for epoch in range(WARM + epochs):
        before, started = (world.traffic.bytes_sent, world.traffic.rounds), time.perf_counter()
        for _ in strategy.train_epoch(epoch):
            pass
        seconds.append(time.perf_counter() - started)
        sent, rounds = world.traffic.bytes_sent - before[0], world.traffic.rounds - before[1]
    strategy.evaluate("val")
    figures = torch.tensor([[peak_rss(), sent, rounds]])
    all_figures = torch.cat(all_gather_rows(world, figures)).tolist()
    return {
        "seconds": sorted(seconds[WARM:])[epochs // 2],
        "memory": max(row[0] for row in all_figures),
        "bytes": sum(row[1] for row in all_figures),
        "rounds": max(row[2] for row in all_figures),
    }


def train_tma(graph: str, store: Path, settings: dict[str, Any], workers: int, epochs: int) -> dict[str, Any]:
    """Train with a coordinator and its trainers, as ``gnnfleet train`` does."""
    import gnnfleet as gf

    config = config_of(graph, workers, settings)
    train = {**config.pop("train"), "epochs": WARM + epochs}
    record = gf.train(store, config={**config, "train": train}, strategy=settings)
    summary, rounds = record.summary, WARM + epochs
    return {
        "seconds": sorted(summary.seconds_per_epoch[WARM:])[epochs // 2],
        "memory": max(summary.memory["peak_rss"]),
        "bytes": sum(summary.traffic["bytes_sent"]) / rounds,
        "rounds": max(summary.traffic["rounds"]) / rounds,
    }


def placement_for(graph: str, store: Path, workers: int, settings: dict[str, Any]) -> Path | None:
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.store import open_store
    from gnnfleet.training.partition_cache import ensure_placement

    opened = open_store(store)
    return ensure_placement(opened, opened, resolve(config_of(graph, workers, settings)))


def measure(graph: str, store: Path, row: dict[str, Any], epochs: int) -> dict[str, Any]:
    settings, workers = row["settings"], row["workers"]
    cell = {"graph": graph, "settings": settings, "epochs": epochs, "store": str(store), "workers": workers}
    if settings["name"] == "tma":
        command = [sys.executable, __file__, "--cell", json.dumps(cell)]
        return run_json(command)
    placement = placement_for(graph, store, workers, settings)
    cell["cut"] = None if placement is None else str(placement)
    return dict(run_ranks([__file__, "--cell", json.dumps(cell)], workers))


def run_cell(cell: dict[str, Any]) -> None:
    store, placement = Path(cell["store"]), cell.get("cut")
    if cell["settings"]["name"] == "tma":
        figures = train_tma(cell["graph"], store, cell["settings"], cell["workers"], cell["epochs"])
        print(json.dumps(figures))
        return
    path = None if placement is None else Path(placement)
    run_as_rank(lambda world: train(world, cell["graph"], store, path, cell["settings"], cell["epochs"]))


def read_or_make(path: Path, work: Any) -> dict[str, Any]:
    if not path.exists():
        path.write_text(json.dumps(work()))
    return dict(json.loads(path.read_text()))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All finished cells; missing ones are run while there is time."""
    started, cells = time.monotonic(), []
    for case in args.cases:
        graph, workers = case.split("/")
        is_late = time.monotonic() - started > 60 * args.minutes
        file = args.out / f"plan-{graph}-{workers}.json"
        if is_late and not file.exists():
            continue
        store = store_of(graph, args.out)
        for row in measured_rows(read_or_make(file, partial(make_plan, graph, int(workers), store))["rows"]):
            name = f"{graph}/{row['workers']}/{label(row['words'])}"
            path = args.out / f"{name.replace('/', '-').replace(' ', '-')}.json"
            if path.exists() or time.monotonic() - started < 60 * args.minutes:
                measured = read_or_make(path, partial(measure, graph, store, row, args.epochs))
                cells.append({"cell": name, "planned": row, "measured": measured})
                print(row_of(cells[-1]), flush=True)
    return cells


def row_of(cell: dict[str, Any]) -> str:
    planned, measured = cell["planned"], cell["measured"]
    graph, workers, name = cell["cell"].split("/", 2)
    ratios = [planned[key] / measured[key] for key in ("memory", "seconds")]
    sent = "none" if not measured["bytes"] else f"{planned['bytes'] / 1e6:.2f} / {measured['bytes'] / 1e6:.2f}"
    memory = f"{planned['memory'] / 2**20:.0f} / {measured['memory'] / 2**20:.0f}"
    seconds = f"{planned['seconds']:.3g} / {measured['seconds']:.3g}"
    rounds = f"{planned['rounds']:.0f} / {measured['rounds']:.0f}"
    figures = [graph, workers, name, memory, f"{ratios[0]:.2f}", seconds, f"{ratios[1]:.2f}", sent, rounds]
    return f"| {' | '.join(figures)} |"


def sort_key(cell: dict[str, Any]) -> tuple[int, int]:
    """Sort key of a cell: graph, then workers, with a single process beside two workers."""
    graph, workers, _ = cell["cell"].split("/", 2)
    return list(GRAPHS).index(graph), max(2, int(workers))


def write_table(cells: list[dict[str, Any]]) -> None:
    """Write the table into the page."""
    head = "| graph | workers | | MiB | ratio | seconds | ratio | MB sent | rounds |\n" + "|---" * 9 + "|"
    rows = "\n".join(row_of(cell) for cell in cells)
    text = PAGE.read_text() if PAGE.exists() else f"{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{head}\n{rows}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        run_cell(json.loads(args.cell))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.out = args.out or Path(folder)
        args.out.mkdir(parents=True, exist_ok=True)
        cells = run(args)
    path = write_results("plan", cells, keep=True)
    write_table(sorted(json.loads(path.read_text())["cells"], key=sort_key))
    print(path)


if __name__ == "__main__":
    main()
