"""One full-batch epoch, ours and the peers', side by side: seconds and peak memory, by model and allocator; then how
near the kernels are to memory bandwidth, where the epoch goes, and growth from 5 M to 50 M edges.

Each cell runs in a process of its own (warm-up, then the minimum of a few epochs); cells of a round are interleaved,
the best round counts. Finished cells are not run again. The graph: 200,000 nodes, 5 M edges, 100 features, 47 classes.

usage: python benchmarks/full_batch.py [OUT] [--data DIR] [--cells sage/ours/float32/thp …] [--rounds 2] [--dgl PYTHON]
DIR holds edge_index.npy, x.npy, y.npy, train_idx.npy; without it a communities graph of the same size is generated.
PYTHON is an interpreter that has DGL; its cells need DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEPT = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:"
    "glibc.malloc.top_pad=268435456"
)
ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    "thp": {"THP_MEM_ALLOC_ENABLE": "1"},
    "kept": {"GLIBC_TUNABLES": KEPT},
}
# model/system/precision/allocator, in rounds; the others once.
EPOCHS = [
    "sage/ours/float32/thp",
    "sage/pyg_csr/float32/default",
    "sage/pyg_csr/float32/thp",
    "sage/ours/float32/kept",
    "sage/pyg_csr/float32/kept",
    "sage/ours/bf16/thp",
    "gat/ours/float32/thp",
    "gat/pyg/float32/default",
    "gat/ours/float32/kept",
]
DGL = ["sage/dgl/float32/default", "gat/dgl/float32/default", "sage/dgl/float32/kept", "gat/dgl/float32/kept"]
ONCE = ["roofline", "where/sage", "where/gat", "scale/5", "scale/10", "scale/20", "scale/50"]


def run_epochs(cell: str, data: Path, epochs: int) -> dict[str, Any]:
    import warnings

    from epochs import load, ours, peer

    warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
    model, system, precision, _ = cell.split("/")
    graph = load(data)
    epoch = ours(graph, model, precision) if system == "ours" else peer(graph, model, csr=system == "pyg_csr")
    slow = system == "pyg"
    losses, seconds = [], []
    for number in range((1 if slow else 3) + (1 if slow else epochs)):
        start = time.perf_counter()
        losses.append(epoch(number))
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds[1 if slow else 3 :]), "losses": losses[:3]}


def run_cell(cell: str, data: Path, epochs: int) -> dict[str, Any]:
    from epochs import load

    kind, _, rest = cell.partition("/")
    if kind == "roofline":
        from roofline import roofline

        found = roofline(load(data))
    elif kind == "where":
        from roofline import where

        found = where(load(data), rest)
    elif kind == "scale":
        from scale import scale

        found = scale(int(rest))
    else:
        found = run_epochs(cell, data, epochs)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return {"cell": cell, **found, "peak_gib": int(peak.split()[1]) / 2**20}


def start_cell(cell: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a cell in a process of its own."""
    allocator = cell.split("/")[3] if cell.count("/") == 3 else "thp"
    environment = {**os.environ, **ALLOCATORS[allocator]}
    if "/dgl/" in cell:
        words = [args.dgl, str(HERE / "dgl_epoch.py"), str(args.data), cell.split("/")[0], str(args.epochs)]
    else:
        words = [sys.executable, __file__, "--cell", cell, "--data", str(args.data), "--epochs", str(args.epochs)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return {"cell": cell, **json.loads(done.stdout.splitlines()[-1])}


def show(found: dict[str, Any]) -> str:
    if "losses" in found:
        words = f"{found['seconds']:8.2f} s {found['peak_gib']:7.2f} GiB  loss {found['losses'][-1]:.4f}"
    else:
        words = json.dumps({key: value for key, value in found.items() if key != "cell"})
    return f"{found['cell']:30} {words}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "results" / "cells" / "full_batch")
    parser.add_argument("--data", type=Path, default=Path("no data"))
    parser.add_argument("--cells", nargs="+", default=None)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dgl", help="an interpreter that has DGL")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(run_cell(args.cell, args.data, args.epochs)))
        return
    from record import best_cells, write_results

    args.out.mkdir(parents=True, exist_ok=True)
    cells = args.cells or [*EPOCHS, *(DGL if args.dgl else []), *ONCE]
    for number in range(args.rounds):
        for cell in cells:
            if number and cell in ONCE:
                continue
            path = args.out / f"{cell.replace('/', '.')}.{number}.json"
            if not path.exists():
                path.write_text(json.dumps(start_cell(cell, args)))
            found = json.loads(path.read_text())
            print(show(found), flush=True)
    print(write_results("full_batch", best_cells(args.out, "seconds"), keep=True))


if __name__ == "__main__":
    main()
