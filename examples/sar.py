"""Exact full-batch training on two workers: the results of one process, bytes sent, and memory of each worker.

python examples/sar.py [directory]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import gnnfleet as gf
from gnnfleet.graph.datasets import make_dataset


def main(folder: str | None = None) -> float:
    directory = Path(folder or tempfile.mkdtemp())
    gf.save(make_dataset("communities", nodes=4000, mean_degree=10, seed=1), directory / "store", overwrite=True)

    options = {"model": gf.nn.GAT(hidden=32, layers=2, heads=4), "epochs": 15, "seed": 0, "precision": "float64"}
    single = gf.train(directory / "store", **options)
    # With 2 GiB per worker, sar chooses the rows it fetches at a time, and logs its choice unless it is quiet.
    record = gf.train(directory / "store", strategy="sar", workers=2, memory="2GiB", quiet=False, **options)

    for name in ("train_loss", "val", "test"):
        print(f"{name:10}  one process {single.metrics[name]:.10f}   two workers {record.metrics[name]:.10f}")
    sent, peak = record.summary.traffic["bytes_sent"], record.summary.memory["peak_rss"]
    print("sent by each worker:", [f"{count / 2**20:.1f} MiB" for count in sent])
    print("peak memory of each worker:", [f"{count / 2**20:.0f} MiB" for count in peak])
    print("nodes 0 to 4 are of class", record.predict(range(5)))
    return float(record.metrics["test"])


if __name__ == "__main__":
    main(*sys.argv[1:])
