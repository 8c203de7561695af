"""Events per second of training in one process, interleaved with torch_geometric's TGN, and time by phase.

Batch 600, memory 100, 10 neighbours, one layer.

    python benchmarks/temporal.py DATA [--events 180000] [--segments 5]

DATA has t_src.npy, t_dst.npy, t_ts.npy and t_msg.npy. ``batch`` queries every node once per batch, as the loader of
torch_geometric does; ``event``, the default, queries both nodes of every event at its own time.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnfleet.config.resolve import resolve
from gnnfleet.graph.graph import Graph
from gnnfleet.ops.draws import DrawKey
from gnnfleet.strategies.job import autocast
from gnnfleet.strategies.temporal.batch_step import embed, update_memory
from gnnfleet.training.build import build
from record import write_results

BATCH, WIDTH, NEIGHBORS = 600, 100, 10
Segment = Callable[[int, int], None]
"""Trains on the events of a range; ranges follow each other."""


def load(data: Path) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.load(data / f"t_{name}.npy")) for name in ("src", "dst", "ts", "msg")}


class PhaseClock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def build_strategy(events: dict[str, Tensor], count: int, queries: str, precision: str) -> tuple[Any, Any]:
    """(strategy, task) with all trained events in the training split."""
    graph = Graph(
        torch.stack([events["src"], events["dst"]])[:, :count],
        time=events["ts"][:count],
        edge_attr=events["msg"][:count],
    )
    config = {
        "strategy": {"name": "temporal", "batch": BATCH, "queries": queries, "static": False},
        "model": {
            "name": "tgn",
            "hidden": WIDTH,
            "neighbours": NEIGHBORS,
            "pairs": False,
            "clock": "learnt",
        },  # as torch_geometric
        "train": {"lr": 1e-4},
        "split": "0.999/0.0005/0.0005",
        "precision": precision,
    }
    built = build(graph, resolve(config))
    return built.strategy, built.task


def gnnfleet_segment(events: dict[str, Tensor], count: int, queries: str, precision: str) -> Segment:
    strategy, _ = build_strategy(events, count, queries, precision)
    steps = strategy.train_epoch(0)

    def segment(low: int, high: int) -> None:
        for _ in range(low, high, BATCH):
            next(steps, None)

    return segment


def time_phases(
    events: dict[str, Tensor], count: int, queries: str, precision: str, end: int
) -> tuple[dict[str, float], float]:
    """(milliseconds of a batch by phase, neighbours attended to per event) of the strategy's training step."""
    strategy, task = build_strategy(events, count, queries, precision)
    clock, edges, key = PhaseClock(), 0, DrawKey()
    model, memory, builder, optimizer = (
        strategy.model,
        strategy.scheduler.shared.memory,
        strategy._builder,
        strategy._optimizer,
    )
    bounds = [bound for bound in strategy.scheduler.bounds if bound <= end]
    model.train()
    for low, high in itertools.pairwise(bounds):
        with clock.phase("sampling"):
            batch = builder.batch(low, high, task.sample_negatives(torch.arange(low, high), sweep=0))
        edges += int((batch.block.hops[-1].neighbors >= 0).sum())
        with autocast(precision):
            with clock.phase("memory"):
                rows = memory.read(batch.block.nodes)
            with clock.phase("GRU"):
                updated, writes = update_memory(model, task.stream, batch, rows)
            with clock.phase("memory"):
                memory.write(writes)
            with clock.phase("attention"):
                z = embed(model, batch, updated, None, key)
            with clock.phase("decoder"):
                loss, n = task.loss(model, z, torch.arange(low, high))
        with clock.phase("backward"):
            optimizer.zero_grad(set_to_none=True)
            (loss / n).backward()
        with clock.phase("optimizer"):
            optimizer.step()
    steps = len(bounds) - 1
    return {name: 1000 * seconds / steps for name, seconds in clock.seconds.items()}, edges / bounds[-1]


def pyg_segment(events: dict[str, Tensor], count: int) -> Segment:
    """Train torch_geometric's TGN as its example does."""
    from torch_geometric.data import TemporalData
    from torch_geometric.loader import TemporalDataLoader
    from torch_geometric.nn import TGNMemory, TransformerConv
    from torch_geometric.nn.models.tgn import IdentityMessage, LastAggregator, LastNeighborLoader

    data = TemporalData(**{name: events[key] for name, key in zip(["src", "dst", "t", "msg"], events, strict=True)})
    nodes, features = int(max(data.src.max(), data.dst.max())) + 1, data.msg.shape[1]
    memory = TGNMemory(nodes, features, WIDTH, WIDTH, IdentityMessage(features, WIDTH, WIDTH), LastAggregator())
    conv = TransformerConv(WIDTH, WIDTH // 2, heads=2, dropout=0.1, edge_dim=features + WIDTH)
    src_map, dst_map, out_map = (torch.nn.Linear(WIDTH, width) for width in (WIDTH, WIDTH, 1))
    modules = torch.nn.ModuleList([memory, conv, src_map, dst_map, out_map])
    optimizer = torch.optim.Adam(modules.parameters(), lr=1e-4)
    loader, assoc = LastNeighborLoader(nodes, size=NEIGHBORS), torch.empty(nodes, dtype=torch.long)
    modules.train()
    batches = iter(TemporalDataLoader(data[:count], batch_size=BATCH, neg_sampling_ratio=1.0))
    loss_of = torch.nn.BCEWithLogitsLoss()

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        ids, edge_index, edge_ids = loader(batch.n_id)
        assoc[ids] = torch.arange(len(ids))
        z, last = memory(ids)
        time_encoding = memory.time_enc((last[edge_index[0]] - data.t[edge_ids]).float())
        z = conv(z, edge_index, torch.cat([time_encoding, data.msg[edge_ids]], 1))

        def score(src: Tensor, dst: Tensor) -> Tensor:
            return out_map((src_map(z[assoc[src]]) + dst_map(z[assoc[dst]])).relu())

        positive, negative = score(batch.src, batch.dst), score(batch.src, batch.neg_dst)
        loss = loss_of(positive, torch.ones_like(positive)) + loss_of(negative, torch.zeros_like(negative))
        memory.update_state(batch.src, batch.dst, batch.t, batch.msg)
        loader.insert(batch.src, batch.dst)
        loss.backward()
        optimizer.step()
        memory.detach()

    def segment(low: int, high: int) -> None:
        for _ in range(low, high, BATCH):
            step(next(batches))

    return segment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--events", type=int, default=180_000)
    parser.add_argument("--segments", type=int, default=5)
    args = parser.parse_args()
    events, count = load(args.data), args.events
    modes = [(queries, precision) for queries in ("batch", "event") for precision in ("float32", "bf16")]
    runs = {"torch_geometric": pyg_segment(events, count)}
    runs |= {
        f"{queries} {precision}": gnnfleet_segment(events, count, queries, precision) for queries, precision in modes
    }
    seconds_by_run = dict.fromkeys(runs, 0.0)
    size = -(-count // args.segments // BATCH) * BATCH
    for low in range(0, count, size):
        for name, segment in runs.items():
            started = time.perf_counter()
            segment(low, min(low + size, count))
            seconds_by_run[name] += time.perf_counter() - started
        print({name: round(min(low + size, count) / seconds) for name, seconds in seconds_by_run.items()}, flush=True)
    cells = []
    for name, seconds in seconds_by_run.items():
        cell: dict[str, Any] = {"cell": name, "events_per_second": count / seconds}
        cell["against_torch_geometric"] = seconds_by_run["torch_geometric"] / seconds
        if name != "torch_geometric":
            phases, edges = time_phases(events, count, *name.split(), end=min(count, 36_000))
            cell |= {"edges_per_event": edges, "milliseconds_of_a_batch": phases}
        cells.append(cell)
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in cell.items()}, flush=True)
    print("written to", write_results("temporal", cells))


if __name__ == "__main__":
    main()
