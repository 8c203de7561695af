"""Sampled mini-batches on two workers, each with a part of the graph: the results of one process, and the bytes sent.

python examples/macrobatch.py [directory]
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

    model = gf.nn.SAGE(hidden=32, layers=2)
    sampled = {"fanouts": [10, 5], "batch": 256, "cache_inputs": False}
    runs = {
        "one process": ("local", 1, {}),
        "two workers, M = 4": ("macrobatch", 2, {"batches_per_fetch": 4}),
    }
    for name, (strategy, workers, options) in runs.items():
        settings = {"name": strategy, **sampled, **options}
        record = gf.train(directory / "store", strategy=settings, workers=workers, model=model, epochs=5, seed=0)
        sent, rounds = sum(record.summary.traffic["bytes_sent"]), max(record.summary.traffic["rounds"])
        loss, test = record.metrics["train_loss"], record.metrics["test"]
        print(f"{name:24} loss {loss:.5f}  test {test:.4f}  {sent / 2**20:5.1f} MiB sent in {rounds} rounds")
    print("nodes 0 to 4 are of class", record.predict(range(5)))
    return float(record.metrics["test"])


if __name__ == "__main__":
    main(*sys.argv[1:])
