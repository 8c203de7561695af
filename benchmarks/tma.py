"""tma: what independent trainers reach, and how soon, against PSGD-PA, LLCG and synchronous training (GGS).

Link prediction by SAGE of two layers of 64 with an MLP on the product of the ends, or by R-GCN with DistMult, three
trainers, runs of a given time. Trainers and the coordinator, which evaluates beside them, share the cores of one
machine; of GGS, which stops to be evaluated, evaluation is not counted. Time and steps are those to 99 % of the best
val metric that any scheme reaches. Cells that are done are not run again.

  ddi                  ogbl_ddi, learnt rows of 64 (hits@20)          \\  from --data
  debian               debian_temporal_lp, 256 features, R-GCN (mrr)   /
  communities          50,000 nodes, 1 M edges, 64 features (mrr)
  shop                 the generated shop, 10 M edges, R-GCN (mrr); only when it is named

usage: python benchmarks/tma.py [OUT] [--data DIR] [--only ddi …] [--schemes random …] [--seeds 1] [--seconds 90]
       [--rate 1gbit]    GGS over links held to that rate
About 25 minutes with one seed; three seeds take an hour more.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import crew

HERE = Path(__file__).parent
DATA = HERE.parent.parent / "shared" / "data" / "static"
TRAINERS, INTERVAL = 3, 3.0
SCHEMES = ("random", "super", "psgd-pa", "llcg", "ggs")
BASELINES = ("psgd-pa", "llcg", "ggs")
SETS: dict[str, dict[str, Any]] = {
    "ddi": {
        "model": {"name": "sage", "hidden": 64, "embedding": 64, "layers": 2, "dropout": 0.2},
        "link": {"decoder": "mlp", "negative_mode": "pair"},
        "strategy": {"fanouts": [10, 5], "batch": 8192},
        "train": {"lr": 0.005, "clip": 1.0, "metric": "hits@20"},
    },
    "debian": {
        "model": {"name": "rgcn", "hidden": 64, "layers": 2, "dropout": 0.2},
        "link": {"decoder": "distmult", "ranking": "sampled"},
        "strategy": {"fanouts": [5, 5], "batch": 512},
        "train": {"lr": 0.003, "clip": 1.0},
    },
    "communities": {
        "model": {"name": "sage", "hidden": 64, "layers": 2, "dropout": 0.2},
        "link": {"decoder": "mlp", "ranking": "sampled"},
        "strategy": {"fanouts": [10, 5], "batch": 2048},
        "train": {"lr": 0.003, "clip": 1.0},
        "split": "0.96/0.02/0.02",
    },
    "shop": {
        "model": {"name": "rgcn", "hidden": 32, "layers": 2, "dropout": 0.2},
        "link": {"decoder": "distmult", "ranking": "sampled"},
        "strategy": {"fanouts": [5, 3], "batch": 2048},
        "train": {"lr": 0.003, "clip": 1.0},
        "split": "0.98/0.01/0.01",
    },
}


def words_of(name: str, scheme: str, seed: int, seconds: float) -> dict[str, Any]:
    base = SETS[name]
    strategy = {"name": "tma", "scheme": scheme, "interval": INTERVAL, **base["strategy"]}
    train = {**base["train"], "epochs": math.ceil(seconds / INTERVAL)}
    return {**base, "task": "link", "strategy": strategy, "train": train, "workers": TRAINERS, "seed": seed}


def run_tma(store: Path, words: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    import gnnfleet as gf
    from gnnfleet.report.metrics import read_metrics

    record = gf.train(store, run_dir=run_dir, **words)
    rows = read_metrics(run_dir / "metrics.jsonl")
    # Of the first round only the interval counts: it waits for processes to start.
    times = [INTERVAL, *(row["round_seconds"] for row in rows[1:])]
    line, at, steps = [], 0.0, 0
    for row, took in zip(rows, times, strict=True):
        at, steps = at + took, steps + row["steps"]
        if "val" in row:
            line.append((round(at, 2), row["val"], steps))
    return {
        "line": line,
        "test": record.metrics["test"],
        "kept": rows[-1]["kept_edges"],
        "megabytes_per_round": rows[-1]["megabytes_up"],
        "megabytes_beside": rows[-1]["megabytes_beside"],
    }


def run_ggs(world: Any, name: str, seed: int, seconds: float, store: Path, parts: Path) -> dict[str, Any]:
    """As many steps as the time allows; evaluated now and then, off the clock."""
    from gnnfleet.comm.reduce import share
    from gnnfleet.graph.partition import open_part
    from gnnfleet.graph.store import open_store
    from gnnfleet.run.build import Here, build
    from gnnfleet.run.config import resolve

    words = words_of(name, "ggs", seed, seconds)
    built = build(open_store(store), resolve(words), here=Here(world, open_part(parts, world.rank)))
    strategy, metric = built.strategy, built.task.metric
    line: list[tuple[float, float, int]] = []
    at, steps, last, epoch, best, test = 0.0, 0, 0.0, 0, -1.0, 0.0
    over = False
    while not over:
        begun = time.perf_counter()
        for _ in strategy.steps(epoch):
            at, steps = at + time.perf_counter() - begun, steps + 1
            word = {"look": at - last >= INTERVAL, "over": at >= seconds}
            word = json.loads(share(world, json.dumps(word).encode() if world.is_first else None))
            if word["look"] or word["over"]:
                value = strategy.evaluate("val")[metric]
                if value > best:
                    best, test = value, strategy.evaluate("test")[metric]
                line.append((round(at, 2), value, steps))
                last = at
            if word["over"]:
                over = True
                break
            begun = time.perf_counter()
        epoch += 1
    return {"line": line, "test": test, "kept": 1.0, "megabytes": world.traffic.bytes_sent / 1e6}


def make_store(name: str, data: Path, place: Path) -> Path:
    import gnnfleet as gf
    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.ingest.clean import clean_edges

    store = place / name
    if not store.exists():
        if name == "communities":
            graph = make_dataset("communities", nodes=50_000, edges=1_000_000, features=64, seed=1)
        elif name == "shop":
            graph = make_dataset("shop", users=1_000_000, products=200_000, seed=1)
        else:
            graph = gf.read_npz(data / f"{'ogbl_ddi' if name == 'ddi' else 'debian_temporal_lp'}.npz")
            if name == "ddi":
                graph, _ = clean_edges(graph, undirected=True, duplicates="drop")
        gf.save(graph, store)
    return store


def cut(name: str, store: Path, place: Path) -> Path:
    """Parts for GGS, of the edges that are trained on."""
    from gnnfleet.graph.partition import write_partition
    from gnnfleet.graph.partitioners import assign
    from gnnfleet.graph.store import open_store
    from gnnfleet.run.config import resolve
    from gnnfleet.run.parts import trained_graph

    parts = place / f"{name}-parts"
    if not parts.exists():
        graph = trained_graph(open_store(store), resolve(words_of(name, "ggs", 0, 1)))
        write_partition(graph, assign(graph, TRAINERS, "mincut"), parts)
    return parts


def reached(cells: list[dict[str, Any]], goal: float) -> tuple[float, float] | None:
    """Median over seeds of (seconds, steps) until a val metric; None where one does not get there."""
    found = []
    for cell in cells:
        hit = next(((at, steps) for at, value, steps in cell["line"] if value >= goal), None)
        if hit is None:
            return None
        found.append(hit)
    return statistics.median(at for at, _ in found), statistics.median(steps for _, steps in found)


def show(cells: list[dict[str, Any]], out: Path) -> list[dict[str, Any]]:
    table = []
    for name in SETS:
        by = {
            scheme: [c for c in cells if (c["set"], c["scheme"]) == (name, scheme)] for scheme in [*SCHEMES, "ggs-slow"]
        }
        by = {scheme: found for scheme, found in by.items() if found}
        if not by:
            continue
        final = {
            scheme: statistics.mean(max(v for _, v, _ in c["line"]) for c in found) for scheme, found in by.items()
        }
        goal = 0.99 * max(final.values())
        times = {scheme: reached(found, goal) for scheme, found in by.items()}
        rivals = [hit[0] for scheme, hit in times.items() if scheme in BASELINES and hit is not None]
        for scheme, found in by.items():
            tests = [cell["test"] for cell in found]
            hit = times[scheme]
            line = {
                "set": name, "scheme": scheme, "seeds": len(found), "val": round(final[scheme], 4),
                "test": round(statistics.mean(tests), 4), "kept": round(found[0]["kept"], 3),
                "seconds": None if hit is None else round(hit[0], 1), "steps": None if hit is None else round(hit[1]),
                "times_fastest_baseline": round(min(rivals) / hit[0], 2) if rivals and hit is not None else None,
            }  # fmt: skip
            table.append(line)
            print("  ".join(f"{key} {value}" for key, value in line.items()))
        plot(name, by, out / f"{name}.svg")
    return table


def plot(name: str, by: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Val metric over time, the first seed of each scheme; only where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for scheme, found in by.items():
        line = found[0]["line"]
        axes.plot([at for at, _, _ in line], [value for _, value, _ in line], label=scheme)
    axes.set(xlabel="seconds of training", ylabel="val", title=name)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "tma")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--only", nargs="+", default=[name for name in SETS if name != "shop"], choices=list(SETS))
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--rate", help="of the links between the workers of GGS, as 1gbit; needs root")
    parser.add_argument("--work", type=Path, help="where stores are kept; by default nowhere")
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        name, seed, store, parts = args.cell
        crew.as_rank(lambda world: run_ggs(world, name, int(seed), args.seconds, Path(store), Path(parts)))
        return
    from record import write_results

    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        place = args.work or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        for seed in range(args.seeds):
            for name in args.only:
                for scheme in args.schemes:
                    slow = scheme == "ggs" and args.rate is not None
                    path = args.out / f"{name}.{scheme}{'-slow' if slow else ''}.{seed}.json"
                    if path.exists():
                        continue
                    store = make_store(name, args.data, place)
                    words = words_of(name, scheme, seed, args.seconds)
                    try:
                        if scheme == "ggs":
                            line = [__file__, "--seconds", str(args.seconds), "--cell", name, str(seed)]
                            line += [str(store), str(cut(name, store, place))]
                            found = crew.run(line, TRAINERS, rate=args.rate)
                        else:
                            found = run_tma(store, words, Path(tempfile.mkdtemp(dir=folder)) / "run")
                    except (RuntimeError, subprocess.SubprocessError) as error:
                        print(path.stem, "failed:", error, file=sys.stderr, flush=True)
                        continue
                    cell = {"set": name, "scheme": f"{scheme}{'-slow' if slow else ''}", "seed": seed, **found}
                    path.write_text(json.dumps(cell))
                    best = max(value for _, value, _ in cell["line"])
                    print(path.stem, f"val {best:.4f} test {cell['test']:.4f} {cell['line'][-1][2]} steps", flush=True)
    cells = [json.loads(path.read_text()) for path in sorted(args.out.glob("*.json"))]
    table = show(cells, args.out)
    print(write_results("tma", [{"cell": f"{line['set']}/{line['scheme']}", **line} for line in table]))


if __name__ == "__main__":
    main()
