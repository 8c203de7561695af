"""Two independent trainers and a coordinator that averages their weights: edges seen, bytes sent, and accuracy.

python examples/tma.py [directory]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import gnnfleet as gf
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.report.metrics import read_metrics


def main(folder: str | None = None) -> float:
    directory = Path(folder or tempfile.mkdtemp())
    gf.save(make_dataset("communities", nodes=4000, mean_degree=10, seed=1), directory / "store", overwrite=True)

    # Rounds of ten steps give the same results in every run; interval=1 would average every second.
    settings = {"name": "tma", "scheme": "super", "steps": 10, "fanouts": [10, 5], "batch": 64}
    record = gf.train(
        directory / "store",
        strategy=settings,
        workers=2,
        model=gf.nn.SAGE(hidden=32, layers=2),
        epochs=8,
        run_dir=directory / "run",
        seed=0,
    )
    for row in read_metrics(directory / "run" / "metrics.jsonl")[::3]:
        print(
            f"round {row['epoch']}: {row['trainers']} trainers, {row['kept_edges']:.0%} of the edges seen, "
            f"{row['megabytes_up']:.2f} MB up, val {row['val']:.4f}"
        )
    print(f"test {record.metrics['test']:.4f}; nodes 0 to 4 are of class", record.predict(range(5)))
    return float(record.metrics["test"])


if __name__ == "__main__":
    main(*sys.argv[1:])
