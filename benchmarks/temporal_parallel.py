"""Convergence of temporal training with batch, epoch and memory parallelism.

Every cell trains on the same number of events. After each epoch MRR on val is recorded with the optimizer steps and
seconds so far. Ties get their mean rank, negatives are drawn by event, batches of 200 do not contain their own events,
and the memory is replayed with the current weights.

  STREAM/BATCHxEPOCHxMEMORY[/SCALE]/SEED    STREAM: wikipedia, college (their first --events); BATCH, EPOCH, MEMORY:
                                            degrees of parallelism; SCALE: linear, sqrt, none

The learning rate is a quarter of the default, so that four batches per step (linear) have the default; it is constant.

Finished cells are not run again. usage: python benchmarks/temporal_parallel.py OUT --data DIR [--cells …] [--epochs 10]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from plot import curve_chart
from ranks import run_as_rank, run_ranks
from record import write_results

FILES = {"wikipedia": "ml_wikipedia.txt", "college": "CollegeMsg.txt"}
LAYOUTS = ("1x1x1", "2x1x1", "1x2x1", "1x1x2", "1x2x2")
TARGET = 0.95
"""Share of the best MRR of one trainer; steps are counted until it is reached."""


def config_of(cell: str, epochs: int) -> dict[str, Any]:
    _, layout, *scale, seed = cell.split("/")
    batch_parallel, epoch_parallel, memory_parallel = map(int, layout.split("x"))
    return {
        "strategy": {
            "name": "temporal", "batch": 200, "static": True,
            "queries": "batch", "lr_decay": 0, "warmup": 0,
            "batch_parallel": batch_parallel, "epoch_parallel": epoch_parallel, "memory_parallel": memory_parallel,
            "lr_scale": scale[0] if scale else "linear",
        },
        "model": {"name": "tgn", "pairs": False},  # with pairs one trainer converges within an epoch
        "train": {"epochs": epochs, "lr": 2.5e-4},
        "seed": int(seed),
        "workers": batch_parallel * epoch_parallel * memory_parallel,
    }  # fmt: skip


def graph_of(cell: str, data: Path, events: int) -> Any:
    import numpy as np
    import torch

    from gnnfleet.graph.graph import Graph

    table = np.loadtxt(data / FILES[cell.split("/")[0]], dtype=np.float64, max_rows=events)
    order = np.argsort(table[:, 2], kind="stable")
    ends = torch.from_numpy(table[order, :2].astype(np.int64)).T.contiguous()
    return Graph(ends, time=torch.from_numpy((table[order, 2] - table[:, 2].min()).astype(np.int64)))


def train(world: Any, cell: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train; one row per epoch: [events, steps, seconds of training, MRR on val, loss]."""
    from gnnfleet.config.resolve import resolve
    from gnnfleet.training.build import RankContext, build

    config = resolve(config_of(cell, args.epochs))
    built = build(graph_of(cell, args.data, args.events), config, context=RankContext(world))
    strategy: Any = built.strategy
    rows, events, steps, seconds = [], 0, 0, 0.0
    for epoch in range(args.epochs):
        started, loss, count = time.perf_counter(), 0.0, 0
        for record in strategy.train_epoch(epoch):
            steps, count, loss = steps + 1, count + record.count, loss + record.loss * record.count
        events, seconds = events + count, seconds + time.perf_counter() - started
        mrr = strategy.validate()["mrr"]
        rows.append([events, steps, seconds, mrr, loss / max(count, 1)])
        if world.is_first:
            print(cell, epoch, rows[-1], file=sys.stderr, flush=True)
    report = {
        "cell": cell,
        "rows": rows,
        "test": strategy.evaluate("test"),
        "batches": strategy.scheduler.schedule.batches,
    }
    strategy.close()
    return report


def steps_to(rows: list[list[float]], target: float, column: int) -> float | None:
    """Value of a column at which a curve reaches the target, interpolated between evaluations."""
    before = [0.0] * len(rows[0])
    for row in rows:
        if row[3] >= target:
            part = (target - before[3]) / (row[3] - before[3])
            return before[column] + part * (row[column] - before[column])
        before = row
    return None


def write_table(out: Path) -> None:
    cells = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    print(
        "| cell | steps | final val MRR | best | test MRR | steps to the target | of one trainer | events to it | s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for stream in FILES:
        of_stream = [cell for cell in cells if cell["cell"].startswith(stream + "/")]
        for cell in of_stream:
            name, seed = cell["cell"].split("/")[1:-1], cell["cell"].split("/")[-1]
            serial = [other for other in of_stream if other["cell"] == f"{stream}/1x1x1/{seed}"]
            target = TARGET * max(row[3] for row in serial[0]["rows"]) if serial else 1.0
            rows = cell["rows"]
            steps = steps_to(rows, target, 1)
            base = steps_to(serial[0]["rows"], target, 1) if serial else None
            events = steps_to(rows, target, 0)
            cols = [
                f"{stream} {' '.join(name)}, seed {seed}", f"{rows[-1][1]}", f"{rows[-1][3]:.3f}",
                f"{max(row[3] for row in rows):.3f}", f"{cell['test']['mrr']:.3f}",
                "not reached" if steps is None else f"{steps:.0f} (target {target:.3f})",
                "" if steps is None or not base else f"{steps / base:.2f}",
                "" if events is None else f"{events:,.0f}", f"{rows[-1][2]:.0f}",
            ]  # fmt: skip
            print("| " + " | ".join(cols) + " |")
        seeds = sorted({cell["cell"].split("/")[-1] for cell in of_stream})[:1]
        lines = {
            "/".join(cell["cell"].split("/")[1:-1]): [(row[1], row[3]) for row in cell["rows"]]
            for cell in of_stream
            if cell["cell"].split("/")[-1] in seeds
        }
        if lines:
            path = Path(__file__).parents[1] / "docs" / "img" / f"temporal-{stream}.svg"
            curve_chart(
                path,
                f"{stream}: batch × epoch × memory parallel",
                lines,
                x_label="optimizer steps",
                y_label="MRR on val",
            )
    print("written to", write_results("temporal_parallel", cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--events", type=int, default=10**9)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--cells", nargs="*", default=[f"wikipedia/{layout}/0" for layout in LAYOUTS])
    parser.add_argument("--rank", default="")
    args = parser.parse_args()
    if args.rank:
        run_as_rank(lambda world: train(world, args.rank, args))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    for cell in args.cells:
        path = args.out / f"{cell.replace('/', '_')}.json"
        if path.exists():
            continue
        arguments = [__file__, str(args.out), "--data", str(args.data), "--events", str(args.events)]
        arguments += ["--epochs", str(args.epochs), "--rank", cell]
        size = config_of(cell, args.epochs)["workers"]
        try:
            report = run_ranks(arguments, size, environment={"OMP_NUM_THREADS": "1"})
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{cell}: {error}", file=sys.stderr)
            continue
        path.write_text(json.dumps(report))
    write_table(args.out)


if __name__ == "__main__":
    main()
