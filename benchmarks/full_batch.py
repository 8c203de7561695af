"""One full-batch epoch of gnnfleet, PyG and DGL: seconds and peak memory, by model and allocator; then kernel speed
against memory bandwidth, the time of an epoch by kind of work, and growth from 5 M to 50 M edges.

Each cell runs in a process of its own (warm-up, then the minimum of a few epochs); cells of a round are interleaved,
and the best round counts. Finished cells are not run again. The graph: 200,000 nodes, 5 M edges, 100 features, 47
classes.

usage: python benchmarks/full_batch.py [OUT] [--data DIR] [--cells sage/ours/float32/thp …] [--rounds 2] [--dgl PYTHON]
DIR holds edge_index.npy, x.npy, y.npy, train_idx.npy; without it a communities graph of the same size is generated.
PYTHON is an interpreter that has DGL; its cells need DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from record import best_cells, run_json, write_results

HERE = Path(__file__).parent
KEPT_MEMORY = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:"
    "glibc.malloc.top_pad=268435456"
)
ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    "thp": {"THP_MEM_ALLOC_ENABLE": "1"},
    "kept": {"GLIBC_TUNABLES": KEPT_MEMORY},
}
# model/system/precision/allocator, run in every round; ONCE lists the others.
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

    from epochs import gnnfleet_epoch, load, pyg_epoch

    warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
    model, system, precision, _ = cell.split("/")
    graph = load(data)
    is_ours = system == "ours"
    epoch = gnnfleet_epoch(graph, model, precision) if is_ours else pyg_epoch(graph, model, csr=system == "pyg_csr")
    warmup, count = (1, 1) if system == "pyg" else (3, epochs)
    losses, seconds = [], []
    for number in range(warmup + count):
        start = time.perf_counter()
        losses.append(epoch(number))
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds[warmup:]), "losses": losses[:3]}


def run_cell(cell: str, data: Path, epochs: int) -> dict[str, Any]:
    from epochs import load

    kind, _, rest = cell.partition("/")
    if kind == "roofline":
        from roofline import roofline

        figures = roofline(load(data))
    elif kind == "where":
        from roofline import profile_epoch

        figures = profile_epoch(load(data), rest)
    elif kind == "scale":
        from scale import scale

        figures = scale(int(rest))
    else:
        figures = run_epochs(cell, data, epochs)
    from gnnfleet.report.memory import peak_rss

    return {"cell": cell, **figures, "peak_gib": peak_rss() / 2**30}


def start_cell(cell: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a cell in a process of its own."""
    allocator = cell.split("/")[3] if cell.count("/") == 3 else "thp"
    environment = {**os.environ, **ALLOCATORS[allocator]}
    if "/dgl/" in cell:
        command = [args.dgl, str(HERE / "dgl_epoch.py"), str(args.data), cell.split("/")[0], str(args.epochs)]
    else:
        command = [sys.executable, __file__, "--cell", cell, "--data", str(args.data), "--epochs", str(args.epochs)]
    return {"cell": cell, **run_json(command, environment)}


def show(cell: dict[str, Any]) -> str:
    if "losses" in cell:
        figures = f"{cell['seconds']:8.2f} s {cell['peak_gib']:7.2f} GiB  loss {cell['losses'][-1]:.4f}"
    else:
        figures = json.dumps({key: value for key, value in cell.items() if key != "cell"})
    return f"{cell['cell']:30} {figures}"


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
    args.out.mkdir(parents=True, exist_ok=True)
    cells = args.cells or [*EPOCHS, *(DGL if args.dgl else []), *ONCE]
    for number in range(args.rounds):
        for cell in cells:
            if number and cell in ONCE:
                continue
            path = args.out / f"{cell.replace('/', '.')}.{number}.json"
            if not path.exists():
                path.write_text(json.dumps(start_cell(cell, args)))
            print(show(json.loads(path.read_text())), flush=True)
    print(write_results("full_batch", best_cells(args.out, "seconds"), keep=True))


if __name__ == "__main__":
    main()
