"""A stream of events: a model with node memory that predicts the next events, compared with EdgeBank.

python examples/temporal.py [directory]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import gnnfleet as gf
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.events.event_stream import EventStream


def main(folder: str | None = None) -> float:
    directory = Path(folder or tempfile.mkdtemp())
    graph = make_dataset("events", users=100, items=50, events=3000, features=8, seed=1)
    gf.save(graph, directory / "store", overwrite=True)

    record = gf.train(
        directory / "store",
        strategy={"name": "temporal", "batch": 200, "static_epochs": 2},
        model=gf.nn.TGN(hidden=32, neighbours=5),
        epochs=3,
        lr=0.003,
        seed=0,
    )
    others = record.metrics["beside"]["test"]
    print(f"test MRR {record.metrics['test']:.3f}, AP {others['ap']:.3f}; EdgeBank {others['edgebank']:.3f}")

    # Score future events: source, destination, time, features. Every call advances the memory.
    stream = EventStream.of(graph)
    assert stream.msg is not None
    user, item, now = int(stream.src[-1]), int(stream.dst[-1]) - 100, int(stream.t[-1])
    again, other = (record.score([(user, to, now + 10, *stream.msg[-1].tolist())]) for to in (item, (item + 1) % 50))
    print(f"user {user} meets item {item} again with probability {float(again[0]):.2f}", end=", ")
    print(f"then another one with {float(other[0]):.2f}")
    return float(record.metrics["test"])


if __name__ == "__main__":
    main(*sys.argv[1:])
