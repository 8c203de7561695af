"""Exact full batch on two workers: the numbers of one process, what travelled, and what each worker held.

python examples/sar.py [directory]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import gnnfleet as gf
from gnnfleet.graph.datasets import make_dataset


def main(folder: str | None = None) -> float:
    place = Path(folder or tempfile.mkdtemp())
    gf.save(make_dataset("communities", nodes=4000, mean_degree=10, seed=1), place / "store", overwrite=True)

    words = {"model": gf.nn.GAT(hidden=32, layers=2, heads=4), "epochs": 15, "seed": 0, "precision": "float64"}
    alone = gf.train(place / "store", **words)
    # Each worker may hold 2 GiB: sar chooses how much it fetches at a time, and says so unless it is quiet.
    record = gf.train(place / "store", strategy="sar", workers=2, memory="2GiB", quiet=False, **words)

    for name in ("train_loss", "val", "test"):
        print(f"{name:10}  one process {alone.metrics[name]:.10f}   two workers {record.metrics[name]:.10f}")
    sent, peak = record.summary.traffic["bytes_sent"], record.summary.memory["peak_rss"]
    print("sent by each worker:", [f"{count / 2**20:.1f} MiB" for count in sent])
    print("held by each worker:", [f"{count / 2**20:.0f} MiB" for count in peak])
    print("nodes 0 to 4 are of class", record.predict(range(5)))
    return float(record.metrics["test"])


if __name__ == "__main__":
    main(*sys.argv[1:])
