"""How temporal training converges when several trainers share batches, lanes or copies of the memory.

Every cell trains on as many events; after each epoch (as many uses of events as there are in training) MRR on val is
noted with the optimizer steps and seconds so far. Ties count as the middle of their places, negatives are drawn by
event, batches of 200 do not see themselves, the state is walked through anew with the present weights.

  STREAM/SHARExLANESxCOPIES[/SCALE]/SEED    STREAM: wikipedia, college (their first --events); SCALE: linear, sqrt, none

The rate is a quarter of the default, so that four batches per step (linear) have the default; it does not fall.

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

import crew
from plot import curve_chart
from record import write_results

FILES = {"wikipedia": "ml_wikipedia.txt", "college": "CollegeMsg.txt"}
SHAPES = ("1x1x1", "2x1x1", "1x2x1", "1x1x2", "1x2x2")
NEAR = 0.95
"""Of the best MRR of one trainer: what steps are counted to."""


def words_of(cell: str, epochs: int) -> dict[str, Any]:
    _, shape, *scale, seed = cell.split("/")
    share, lanes, copies = map(int, shape.split("x"))
    return {
        "strategy": {
            "name": "temporal", "batch": 200, "static": True,
            "queries": "batch", "lr_decay": 0, "warmup": 0,
            "batch_parallel": share, "epoch_parallel": lanes, "memory_parallel": copies,
            "lr_scale": scale[0] if scale else "linear",
        },
        "model": {"name": "tgn", "pairs": False},  # with them one trainer has learnt all within an epoch
        "train": {"epochs": epochs, "lr": 2.5e-4},
        "seed": int(seed),
        "workers": share * lanes * copies,
    }  # fmt: skip


def graph_of(cell: str, data: Path, events: int) -> Any:
    import numpy as np
    import torch

    from gnnfleet.graph.graph import Graph

    table = np.loadtxt(data / FILES[cell.split("/")[0]], dtype=np.float64, max_rows=events)
    order = np.argsort(table[:, 2], kind="stable")
    ends = torch.from_numpy(table[order, :2].astype(np.int64)).T.contiguous()
    return Graph(ends, time=torch.from_numpy((table[order, 2] - table[:, 2].min()).astype(np.int64)))


def train(world: Any, cell: str, given: argparse.Namespace) -> dict[str, Any]:
    """A row of every epoch: [events, steps, seconds of training, MRR on val, loss]."""
    from gnnfleet.config.resolve import resolve
    from gnnfleet.training.build import RankContext, build

    config = resolve(words_of(cell, given.epochs))
    built = build(graph_of(cell, given.data, given.events), config, context=RankContext(world))
    strategy: Any = built.strategy
    rows, events, steps, seconds = [], 0, 0, 0.0
    for epoch in range(given.epochs):
        started, loss, count = time.perf_counter(), 0.0, 0
        for record in strategy.train_epoch(epoch):
            steps, count, loss = steps + 1, count + record.count, loss + record.loss * record.count
        events, seconds = events + count, seconds + time.perf_counter() - started
        mrr = strategy.validate()["mrr"]
        rows.append([events, steps, seconds, mrr, loss / max(count, 1)])
        if world.is_first:
            print(cell, epoch, rows[-1], file=sys.stderr, flush=True)
    found = {
        "cell": cell,
        "rows": rows,
        "test": strategy.evaluate("test"),
        "batches": strategy.scheduler.schedule.batches,
    }
    strategy.close()
    return found


def steps_to(rows: list[list[float]], target: float, column: int) -> float | None:
    """The first value of a column at which a curve reaches the target, between evaluations in proportion."""
    before = [0.0] * len(rows[0])
    for row in rows:
        if row[3] >= target:
            part = (target - before[3]) / (row[3] - before[3])
            return before[column] + part * (row[column] - before[column])
        before = row
    return None


def tell(out: Path) -> None:
    cells = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    print("| cell | steps | final val MRR | best | test MRR | steps to the mark | of one trainer | events to it | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for stream in FILES:
        here = [cell for cell in cells if cell["cell"].startswith(stream + "/")]
        for one in here:
            name, seed = one["cell"].split("/")[1:-1], one["cell"].split("/")[-1]
            alone = [c for c in here if c["cell"] == f"{stream}/1x1x1/{seed}"]
            target = NEAR * max(row[3] for row in alone[0]["rows"]) if alone else 1.0
            rows = one["rows"]
            found = steps_to(rows, target, 1)
            base = steps_to(alone[0]["rows"], target, 1) if alone else None
            events = steps_to(rows, target, 0)
            cols = [
                f"{stream} {' '.join(name)}, seed {seed}", f"{rows[-1][1]}", f"{rows[-1][3]:.3f}",
                f"{max(row[3] for row in rows):.3f}", f"{one['test']['mrr']:.3f}",
                "not reached" if found is None else f"{found:.0f} (mark {target:.3f})",
                "" if found is None or not base else f"{found / base:.2f}",
                "" if events is None else f"{events:,.0f}", f"{rows[-1][2]:.0f}",
            ]  # fmt: skip
            print("| " + " | ".join(cols) + " |")
        seeds = sorted({one["cell"].split("/")[-1] for one in here})[:1]
        lines = {
            "/".join(one["cell"].split("/")[1:-1]): [(row[1], row[3]) for row in one["rows"]]
            for one in here
            if one["cell"].split("/")[-1] in seeds
        }
        if lines:
            path = Path(__file__).parents[1] / "docs" / "img" / f"temporal-{stream}.svg"
            curve_chart(path, f"{stream}: share × lanes × copies", lines, across="optimizer steps", up="MRR on val")
    print("written to", write_results("temporal_parallel", cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--events", type=int, default=10**9)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--cells", nargs="*", default=[f"wikipedia/{shape}/0" for shape in SHAPES])
    parser.add_argument("--rank", default="")
    given = parser.parse_args()
    if given.rank:
        crew.as_rank(lambda world: train(world, given.rank, given))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    for cell in given.cells:
        path = given.out / f"{cell.replace('/', '_')}.json"
        if path.exists():
            continue
        words = [__file__, str(given.out), "--data", str(given.data), "--events", str(given.events)]
        words += ["--epochs", str(given.epochs), "--rank", cell]
        size = words_of(cell, given.epochs)["workers"]
        try:
            found = crew.run(words, size, environment={"OMP_NUM_THREADS": "1"})
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{cell}: {error}", file=sys.stderr)
            continue
        path.write_text(json.dumps(found))
    tell(given.out)


if __name__ == "__main__":
    main()
