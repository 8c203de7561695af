"""Train from a store with one call, predict with the record, then continue the run from its directory.

python examples/train_store.py [directory]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import gnnfleet as gf
from gnnfleet.graph.datasets import make_dataset


def main(folder: str | None = None) -> float:
    directory = Path(folder or tempfile.mkdtemp())
    gf.save(make_dataset("communities", nodes=2000, mean_degree=10, seed=1), directory / "store", overwrite=True)

    model = gf.nn.SAGE(hidden=64, layers=2)
    record = gf.train(directory / "store", model=model, epochs=20, lr=0.01, seed=0, run_dir=directory / "run")
    print(f"after 20 epochs: {record.metrics}")

    record = gf.train(directory / "store", epochs=40, run_dir=directory / "run", resume=True)
    print(f"after 40 epochs: {record.metrics}")
    print("nodes 0 to 4 are of class", record.predict(range(5)))
    return float(record.metrics["test"])


if __name__ == "__main__":
    main(*sys.argv[1:])
