"""A stream of events: a memory for every node, a model that says what happens next, and EdgeBank beside it.

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
    place = Path(folder or tempfile.mkdtemp())
    graph = make_dataset("events", users=100, items=50, events=3000, features=8, seed=1)
    gf.save(graph, place / "store", overwrite=True)

    record = gf.train(
        place / "store",
        strategy={"name": "temporal", "batch": 200, "static_epochs": 2},
        model=gf.nn.TGN(hidden=32, neighbours=5),
        epochs=3,
        lr=0.003,
        seed=0,
    )
    beside = record.metrics["beside"]["test"]
    print(f"test MRR {record.metrics['test']:.3f}, AP {beside['ap']:.3f}; EdgeBank {beside['edgebank']:.3f}")

    # What comes next: source, destination, time, features. The state moves on with every call.
    stream = EventStream.of(graph)
    assert stream.msg is not None
    user, item, now = int(stream.src[-1]), int(stream.dst[-1]) - 100, int(stream.t[-1])
    again, other = (record.score([(user, to, now + 10, *stream.msg[-1].tolist())]) for to in (item, (item + 1) % 50))
    print(f"user {user} meets item {item} again with probability {float(again[0]):.2f}", end=", ")
    print(f"then another one with {float(other[0]):.2f}")
    return float(record.metrics["test"])


if __name__ == "__main__":
    main(*sys.argv[1:])
