"""Features twice as large as the memory limit: macrobatch on two workers, within a control group and without.

1.5 million nodes, 15 million edges, 768 float32 features (4.3 GiB); the job may use 2.05 GiB, page cache included.
Needs root for the control group (version 1 or 2) and about 10 GB of disk. Cells that are done are not run again.

usage: python benchmarks/out_of_core.py [OUT] [--work DIR] [--limit 2100] [--nodes 1500000]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SETTINGS = {
    "model.hidden": 32,
    "model.layers": 2,
    "model.dropout": 0.0,
    "strategy.fanouts": "[5,5]",
    "strategy.batch": 512,
    "strategy.buffer": "100MiB",
    "train.epochs": 2,
    "train.eval_every": 100,
}
CELLS = {
    "memory": {"strategy.features_in_memory": "true"},
    "disk": {"strategy.features_in_memory": "false"},
    "limited": {},
}


@contextmanager
def control_group(megabytes: int) -> Iterator[Path]:
    """A control group with a memory limit, removed at the end."""
    root = Path("/sys/fs/cgroup")
    is_version_1 = (root / "memory").exists()
    folder = (root / "memory" if is_version_1 else root) / f"gnnfleet-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.limit_in_bytes" if is_version_1 else "memory.max")).write_text(str(megabytes << 20))
        yield folder
    finally:
        folder.rmdir()


def train(store: Path, cell: str, limit: int, run_dir: Path) -> dict[str, Any]:
    settings = {**SETTINGS, **CELLS[cell]}
    command = [sys.executable, "-m", "gnnfleet", "train", str(store), "-s", "macrobatch", "-w", "2", "--model", "sage"]
    command += ["--json", "--run-dir", str(run_dir)]
    command += [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
    if cell != "limited":
        return _outcome(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")  # then pages count towards the limit of the group
    with control_group(limit) as folder:

        def enter() -> None:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, preexec_fn=enter)
        name = "memory.max_usage_in_bytes" if (folder / "memory.max_usage_in_bytes").exists() else "memory.peak"
        highest = int((folder / name).read_text())
        figures = {"limit": limit << 20, "highest": highest, "exit_code": done.returncode}
        return (
            {**_outcome(done.stdout), **figures} if done.returncode == 0 else figures
        )  # killed if it exceeds the limit


def _outcome(output: str) -> dict[str, Any]:
    record = json.loads(output.splitlines()[-1])
    seconds = record["seconds_per_epoch"]
    return {"seconds": min(seconds), "epochs": seconds, "loss": record["metrics"]["train_loss"],
            "test": record["metrics"]["test"], "peak_rss": record["memory"]["peak_rss"],
            "own_rss": record["memory"]["own_rss"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "out_of_core")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--limit", type=int, default=2100, help="megabytes")
    parser.add_argument("--nodes", type=int, default=1_500_000)
    args = parser.parse_args()
    import torch

    import gnnfleet as gf
    from gnnfleet.graph.datasets import make_dataset
    from record import write_results

    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        store, cells = Path(folder) / "store", []
        for cell in CELLS:
            path = args.out / f"{cell}.json"
            if not path.exists():
                if not store.exists():
                    graph = make_dataset("communities", nodes=args.nodes, mean_degree=10, features=768, classes=16)
                    split = torch.full((args.nodes,), -1, dtype=torch.int8)
                    order = torch.randperm(args.nodes, generator=torch.Generator().manual_seed(0))
                    split[order[:20_480]], split[order[20_480:40_960]] = 0, 2
                    gf.save(graph.with_nodes("node", split=split[None]), store)
                    del graph
                path.write_text(json.dumps(train(store, cell, args.limit, Path(folder) / cell)))
            cells.append({"cell": cell, **json.loads(path.read_text())})
            print(json.dumps(cells[-1]), flush=True)
    print(write_results("out_of_core", cells))


if __name__ == "__main__":
    main()
