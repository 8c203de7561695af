"""What ``gnnfleet plan`` predicts against what training takes: memory, bytes, rounds, seconds per epoch.

For every graph, model and number of workers the plan is made once; then each setting it foresees is trained for a few
epochs and measured. Finished cells are not run again; ``--minutes`` ends a call early, the next one goes on. The table
goes into docs/plan.md, between its marks.

usage: python benchmarks/plan.py [--out DIR] [--cases communities/2 …] [--minutes 5] [--epochs 4]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import crew

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "plan.md"
BEGIN, END = "<!-- table of benchmarks/plan.py -->", "<!-- end of table -->"
WARM = 1
ROUND_STEPS = 10

# name → (generator, its words, model)
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
# tma's rounds by steps, so that they can be compared; an epoch of pipe without its guard, of temporal without what is
# learnt beforehand.
WORDS = {"steps": ROUND_STEPS, "exactness_check_every": 0}
EVENT_WORDS = {"static": "false"}
EVENT_SPLIT = "0.96/0.02/0.02"  # an evaluation scores every destination: a batch of it shows its memory
CASES = [f"{graph}/{workers}" for graph in GRAPHS for workers in (2, 4)]


def tree_of(graph: str, workers: int, strategy: dict[str, Any]) -> dict[str, Any]:
    words = {"model": GRAPHS[graph][2], "strategy": strategy, "workers": workers, "train": {"eval_every": 1000}}
    return {**words, "split": EVENT_SPLIT} if graph == "events" else words


def store_of(graph: str, work: Path) -> Path:
    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.store import save_store

    name, words, _ = GRAPHS[graph]
    path = work / graph
    if not path.exists():
        save_store(make_dataset(name, **words), path)
    return path


def make(graph: str, workers: int, store: Path) -> dict[str, Any]:
    """The plan."""
    model = [f"model.{key}={value}" for key, value in GRAPHS[graph][2].items()]
    own = EVENT_WORDS if graph == "events" else WORDS
    words = [*model, *(f"strategy.{key}={value}" for key, value in own.items())]
    line = ["plan", str(store), "--workers", str(workers), "--json", "--quiet"]
    line += [text for word in words for text in ("--set", word)]
    line += ["--split", EVENT_SPLIT] if graph == "events" else []
    done = subprocess.run([sys.executable, "-m", "gnnfleet", *line], check=True, stdout=subprocess.PIPE, text=True)
    rows = json.loads(done.stdout)["fits"]
    return {"rows": [row for row in rows if row["workers"] > 1 or workers == 2]}  # one process is the same in both


def wanted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the settings that are foreseen, those that are measured."""
    found = []
    for row in rows:
        words = row["words"]
        if words["name"] == "sar" and (words["prefetch"] != 1 or words["cache_for_backward"]):
            continue
        if words["name"] == "tma" and words["scheme"] in ("psgd-pa", "llcg"):
            continue
        found.append(row)
    return found


def label(words: dict[str, Any]) -> str:
    hidden = ("name", "cache_for_backward", "prefetch", "exactness_check_every", "steps", "batch", "static")
    return " ".join([words["name"], *(f"{key}={value}" for key, value in words.items() if key not in hidden)])


def train(world: Any, graph: str, store: Path, cut: Path | None, words: dict[str, Any], epochs: int) -> dict[str, Any]:
    import torch

    from gnnfleet.comm.collectives import all_gather_rows
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.partition.chunk_layout import open_chunk_layouts
    from gnnfleet.graph.partition.partitioned_graph import open_part
    from gnnfleet.graph.store import open_store
    from gnnfleet.report.memory import peak_rss
    from gnnfleet.training.build import RankContext, build

    config = resolve(tree_of(graph, world.size, words))
    here = RankContext(world)
    if cut is not None:
        is_chunks = config.strategy.placement == "chunks"
        here = (
            RankContext(world, layouts=open_chunk_layouts(cut))
            if is_chunks
            else RankContext(world, open_part(cut, world.rank))
        )
    strategy = build(open_store(store), config, context=here).strategy
    seconds, sent, rounds = [], 0, 0
    for epoch in range(WARM + epochs):
        before, started = (world.traffic.bytes_sent, world.traffic.rounds), time.perf_counter()
        for _ in strategy.train_epoch(epoch):
            pass
        seconds.append(time.perf_counter() - started)
        sent, rounds = world.traffic.bytes_sent - before[0], world.traffic.rounds - before[1]
    strategy.evaluate("val")
    own = torch.tensor([[peak_rss(), sent, rounds]])
    every = torch.cat(all_gather_rows(world, own)).tolist()
    return {
        "seconds": sorted(seconds[WARM:])[epochs // 2],
        "memory": max(row[0] for row in every),
        "bytes": sum(row[1] for row in every),
        "rounds": max(row[2] for row in every),
    }


def train_fleet(graph: str, store: Path, words: dict[str, Any], workers: int, epochs: int) -> dict[str, Any]:
    """A coordinator and its trainers, as ``train`` starts them."""
    import gnnfleet as gf

    tree = tree_of(graph, workers, words)
    train = {**tree.pop("train"), "epochs": WARM + epochs}
    record = gf.train(store, config={**tree, "train": train}, strategy=words)
    found, rounds = record.summary, WARM + epochs
    return {
        "seconds": sorted(found.seconds_per_epoch[WARM:])[epochs // 2],
        "memory": max(found.memory["peak_rss"]),
        "bytes": sum(found.traffic["bytes_sent"]) / rounds,
        "rounds": max(found.traffic["rounds"]) / rounds,
    }


def cut_for(graph: str, store: Path, workers: int, words: dict[str, Any]) -> Path | None:
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.store import open_store
    from gnnfleet.training.partition_cache import ensure_placement

    config, opened = resolve(tree_of(graph, workers, words)), open_store(store)
    return ensure_placement(opened, opened, config) if config.strategy.uses_parts else None


def measure(graph: str, store: Path, row: dict[str, Any], epochs: int) -> dict[str, Any]:
    words, workers = row["words"], row["workers"]
    order = {"graph": graph, "words": words, "epochs": epochs, "store": str(store), "workers": workers}
    if words["name"] == "tma":
        line = [sys.executable, __file__, "--cell", json.dumps(order)]
        done = subprocess.run(line, check=True, capture_output=True, text=True)
        return dict(json.loads(done.stdout.splitlines()[-1]))
    cut = cut_for(graph, store, workers, words)
    order["cut"] = None if cut is None else str(cut)
    return dict(crew.run([__file__, "--cell", json.dumps(order)], workers))


def run_cell(order: dict[str, Any]) -> None:
    store, cut = Path(order["store"]), order.get("cut")
    if order["words"]["name"] == "tma":
        found = train_fleet(order["graph"], store, order["words"], order["workers"], order["epochs"])
        print(json.dumps(found))
        return
    path = None if cut is None else Path(cut)
    crew.as_rank(lambda world: train(world, order["graph"], store, path, order["words"], order["epochs"]))


def once(path: Path, work: Any) -> dict[str, Any]:
    if not path.exists():
        path.write_text(json.dumps(work()))
    return dict(json.loads(path.read_text()))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells that are finished, or can be within the time."""
    started, cells = time.monotonic(), []
    for case in args.cases:
        graph, workers = case.split("/")
        late = time.monotonic() - started > 60 * args.minutes
        file = args.out / f"plan-{graph}-{workers}.json"
        if late and not file.exists():
            continue
        store = store_of(graph, args.out)
        for row in wanted(once(file, partial(make, graph, int(workers), store))["rows"]):
            name = f"{graph}/{row['workers']}/{label(row['words'])}"
            at = args.out / f"{name.replace('/', '-').replace(' ', '-')}.json"
            if at.exists() or time.monotonic() - started < 60 * args.minutes:
                found = once(at, partial(measure, graph, store, row, args.epochs))
                cells.append({"cell": name, "planned": row, "measured": found})
                print(line_of(cells[-1]), flush=True)
    return cells


def line_of(cell: dict[str, Any]) -> str:
    planned, measured = cell["planned"], cell["measured"]
    graph, workers, name = cell["cell"].split("/", 2)
    ratios = [planned[key] / measured[key] for key in ("memory", "seconds")]
    sent = "none" if not measured["bytes"] else f"{planned['bytes'] / 1e6:.2f} / {measured['bytes'] / 1e6:.2f}"
    memory = f"{planned['memory'] / 2**20:.0f} / {measured['memory'] / 2**20:.0f}"
    seconds = f"{planned['seconds']:.3g} / {measured['seconds']:.3g}"
    rounds = f"{planned['rounds']:.0f} / {measured['rounds']:.0f}"
    figures = [graph, workers, name, memory, f"{ratios[0]:.2f}", seconds, f"{ratios[1]:.2f}", sent, rounds]
    return f"| {' | '.join(figures)} |"


def case_of(cell: dict[str, Any]) -> tuple[int, int]:
    """The place of a cell among those of other cases: one process comes with two workers."""
    graph, workers, _ = cell["cell"].split("/", 2)
    return list(GRAPHS).index(graph), max(2, int(workers))


def write_table(cells: list[dict[str, Any]]) -> None:
    """Into the page."""
    head = "| graph | workers | | MiB | ratio | seconds | ratio | MB sent | rounds |\n" + "|---" * 9 + "|"
    rows = "\n".join(line_of(cell) for cell in cells)
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
    from record import write_results

    with tempfile.TemporaryDirectory() as folder:
        args.out = args.out or Path(folder)
        args.out.mkdir(parents=True, exist_ok=True)
        cells = run(args)
    kept = write_results("plan", cells, keep=True)
    write_table(sorted(json.loads(kept.read_text())["cells"], key=case_of))
    print(kept)


if __name__ == "__main__":
    main()
