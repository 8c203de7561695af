"""A deep model in two pipeline stages: bytes sent, idle time of the stages, and accuracy.

python examples/pipe.py [directory]
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
    gf.save(make_dataset("communities", nodes=1000, mean_degree=20, seed=1), directory / "store", overwrite=True)

    # Two stages and eight chunks; without graph_parallel the planner chooses from measured layers and links.
    record = gf.train(
        directory / "store",
        strategy={"name": "pipe", "graph_parallel": 1, "chunks": 8},
        workers=2,
        model=gf.nn.GCN2(hidden=32, layers=8, dropout=0.1),
        epochs=20,
        lr=0.01,
        run_dir=directory / "run",
        seed=0,
    )
    for row in read_metrics(directory / "run" / "metrics.jsonl")[::6]:
        print(f"epoch {row['epoch']}: loss {row['train_loss']:.3f}, val {row['val']:.4f}, idle {row['bubble']:.0%}")
    sent = sum(record.summary.traffic["bytes_sent"]) / 1e6
    print(f"test {record.metrics['test']:.4f}; {sent:.1f} MB sent; schedule: {directory / 'run' / 'schedule.svg'}")
    return float(record.metrics["test"])


if __name__ == "__main__":
    main(*sys.argv[1:])
