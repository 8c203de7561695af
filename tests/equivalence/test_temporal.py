"""Temporal training against a plain loop with dictionaries, scans of all past events and single queries."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.config.resolve import resolve
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.nn.temporal.attention import EventBlock, Hop
from gnnfleet.nn.temporal.decoders import EventDecoder
from gnnfleet.nn.temporal.model import TemporalModel
from gnnfleet.ops.draws import DrawKey
from gnnfleet.strategies.temporal import evaluation
from gnnfleet.strategies.temporal.strategy import TemporalStrategy
from gnnfleet.training.build import build

EVENTS, BATCH, NEIGHBOURS, EVAL_BATCH = 48, 8, 3, 3


def build_strategy(**model: object) -> TemporalStrategy:
    graph = make_dataset("events", users=12, items=8, events=EVENTS, features=3, topics=2, ties=0.3, seed=3)
    settings = {
        "strategy": {
            "name": "temporal",
            "batch": BATCH,
            "static": False,
            "lr_decay": 0,
            "eval_batch": EVAL_BATCH,
            "average": 0,
        },
        "model": {"hidden": 8, "neighbours": NEIGHBOURS, "time_width": 4, "dropout": 0.0, **model},
        "train": {"optimizer": "sgd", "momentum": 0.0, "lr": 0.05},
        "link": {"negatives": 2},
        "precision": "float64",
    }
    strategy = build(graph, resolve(settings)).strategy
    assert isinstance(strategy, TemporalStrategy)
    return strategy


@dataclass
class Plain:
    """Node memory as dictionaries by node."""

    strategy: TemporalStrategy
    memory: dict[int, Tensor] = field(default_factory=dict)
    mail: dict[int, Tensor] = field(default_factory=dict)
    mail_event: dict[int, int] = field(default_factory=dict)
    memory_event: dict[int, int] = field(default_factory=dict)
    begin: int = 0  # of the batch; only events before it are visible

    def __post_init__(self) -> None:
        self.model: TemporalModel = self.strategy.model
        self.task = self.strategy.task
        self.stream = self.task.stream

    def updated_memory(self, node: int) -> Tensor:
        """Memory of a node after its mail."""
        zeros = torch.zeros(1, self.model.width, dtype=torch.float64)
        if node not in self.mail:
            return zeros[0]
        event, previous = self.mail_event[node], self.memory_event.get(node)
        time_delta = int(self.stream.t[event] - self.stream.t[0 if previous is None else previous])
        assert self.stream.msg is not None
        edge = self.stream.msg[event].double()[None]
        old = self.memory[node][None] if node in self.memory else zeros
        return self.model.update(self.mail[node][None], edge, torch.tensor([time_delta]).double(), old)[0]

    def past(self, node: int, time: int) -> list[int]:
        """Latest events before the batch and before a time, latest first."""
        columns = [column[: self.begin].tolist() for column in (self.stream.src, self.stream.dst, self.stream.t)]
        events = [number for number, (u, v, t) in enumerate(zip(*columns, strict=True)) if node in (u, v) and t < time]
        return events[::-1][:NEIGHBOURS]

    def embed(self, node: int, time: int, layers: int) -> Tensor:
        if layers == 0 or not self.model.has_attention:
            return (
                self.updated_memory(node)
                if self.model.has_memory
                else torch.zeros(self.model.width, dtype=torch.float64)
            )
        rows, neighbors, edge, time_delta = [self.embed(node, time, layers - 1)], [], [], []
        for event in self.past(node, time):
            u, v, t = (int(column[event]) for column in (self.stream.src, self.stream.dst, self.stream.t))
            neighbors.append(len(rows))
            rows.append(self.embed(v if u == node else u, t, layers - 1))
            edge.append(event)
            time_delta.append(float(time - t))
        hop = Hop(
            torch.tensor([0]),
            torch.tensor([neighbors], dtype=torch.int64).view(1, -1),
            torch.tensor([edge], dtype=torch.int64).view(1, -1),
            torch.tensor([time_delta], dtype=torch.float64).view(1, -1),
            torch.tensor([0]),
        )
        assert self.stream.msg is not None
        block = EventBlock(torch.arange(len(rows)), (hop,), self.stream.msg.double())
        out: Tensor = self.model.layers[layers - 1](hop, torch.stack(rows), block.features, DrawKey())
        return out[0]

    def score(self, u: int, v: int, time: int) -> Tensor:
        decoder, layers = self.model.decoder, len(self.model.layers)
        assert isinstance(decoder, EventDecoder)
        ends = decoder.src(self.embed(u, time, layers)) + decoder.dst(self.embed(v, time, layers))
        logit: Tensor = decoder.out(torch.relu(ends))[0]
        if decoder.pair is not None and decoder.pair_out is not None:
            logit = logit + decoder.pair_out(torch.relu(decoder.pair(self.pair(u, v, time))))[0]
        return logit

    def loss(self, low: int, high: int, epoch: int) -> Tensor:
        self.begin, total = low, torch.zeros((), dtype=torch.float64)
        negatives = self.task.sample_negatives(torch.arange(low, high), sweep=epoch)
        for number in range(low, high):
            u, v, t = (int(column[number]) for column in (self.stream.src, self.stream.dst, self.stream.t))
            for node, truth in [(v, 1.0), *((int(other), 0.0) for other in negatives[number - low])]:
                logit = self.score(u, node, t)
                total = total + functional.binary_cross_entropy_with_logits(logit, torch.tensor(truth).double())
        return total / (high - low)

    def rank(self, number: int, *, full: bool) -> float:
        """Rank among all destinations; the full rule leaves out those the source meets at the same time."""
        src, dst, t = (column.tolist() for column in (self.stream.src, self.stream.dst, self.stream.t))
        u, time = src[number], t[number]
        excluded = {dst[e] for e in range(len(dst)) if full and (src[e], t[e]) == (u, time)} | {dst[number]}
        score = float(self.score(u, dst[number], time))
        others = [node for node in self.stream.destinations.tolist() if node not in excluded]
        leads = [float(self.score(u, node, time)) - score for node in others]
        return 1 + sum(lead > 1e-9 for lead in leads) + sum(abs(lead) <= 1e-9 for lead in leads) / 2

    def mrr(self, split: str) -> dict[bool, float]:
        """MRR by the full rule and without it; batches of events are scored, then replayed."""
        part = self.task.parts[split]
        first, end = part.first, part.first + len(part)
        reciprocal: dict[bool, list[float]] = {True: [], False: []}
        for low in range(first, end, EVAL_BATCH):
            self.begin, high = low, min(low + EVAL_BATCH, end)
            for full, ranks in reciprocal.items():
                ranks += [1 / self.rank(number, full=full) for number in range(low, high)]
            self.replay(low, high)
        return {full: sum(ranks) / len(ranks) for full, ranks in reciprocal.items()}

    def pair(self, u: int, v: int, time: int) -> Tensor:
        """Features of a pair of nodes from events before the batch."""
        src, dst, t = (column.tolist() for column in (self.stream.src, self.stream.dst, self.stream.t))
        count = len(self.task.parts["train"])
        cut = count // 20
        unit = (t[count - 1 - cut] - t[cut]) / (count - 1 - 2 * cut)
        events = [e for e in range(self.begin) if t[e] < time]
        of_source, of_destination = ([e for e in events if node in (src[e], dst[e])] for node in (u, v))
        met = [e for e in of_source if {src[e], dst[e]} == {u, v}]
        gap = len([e for e in of_source if e >= met[-1]]) if met else 0
        features = [
            bool(met),
            math.log1p(len(met)) / 3,
            math.log1p((time - t[met[-1]]) / unit if met else 0) / 10,
            len(met) / max(len(of_source), 1),
            math.log1p(gap) / 4,
            gap == 1,
            math.exp(-gap / 3) if met else 0,
            bool(met) and src[met[-1]] == u,
            bool(of_destination),
            math.log1p(len(of_destination)) / 5,
            math.log1p((time - t[of_destination[-1]]) / unit if of_destination else 0) / 10,
            math.log1p(len(events) - of_destination[-1] if of_destination else 0) / 10,
        ]
        return torch.tensor(features, dtype=torch.float64)

    def replay(self, low: int, high: int) -> None:
        """Advance past a batch; the last event of each node counts."""
        last = {}
        for number in range(low, high):
            u, v = int(self.stream.src[number]), int(self.stream.dst[number])
            last[u], last[v] = (number, v), (number, u)
        memories = {node: self.updated_memory(node).detach() for node in last}
        for node, (number, other) in last.items():
            if node in self.mail_event:
                self.memory_event[node] = self.mail_event[node]
            self.memory[node] = memories[node]
            self.mail[node] = torch.cat([memories[node], memories[other]])
            self.mail_event[node] = number


@pytest.mark.parametrize(
    ("name", "layers", "pairs"),
    [("tgn", 1, False), ("tgn", 2, False), ("tgn-id", 1, False), ("tgn-id", 1, True), ("tgat", 1, False)],
)
def test_training_equals_a_plain_loop(name: str, layers: int, pairs: bool) -> None:
    strategy, reference = (build_strategy(name=name, layers=layers, pairs=pairs) for _ in range(2))
    tolerance = 1e-6 if pairs else 1e-10  # features of pairs are float32
    optimizer = torch.optim.SGD(reference.model.parameters(), lr=0.05)
    plain = Plain(reference)
    records = list(strategy.train_epoch(0))
    bounds = reference.task.parts["train"].batches(BATCH)
    assert len(records) == len(bounds) - 1 > 3
    for record, (low, high) in zip(records, pairwise(bounds), strict=True):
        loss = plain.loss(low, high, 0)
        if reference.model.has_memory:
            plain.replay(low, high)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert record.loss == pytest.approx(float(loss.detach()), rel=tolerance)
        assert record.count == high - low
    for (key, parameter), expected in zip(strategy.model.named_parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(
            parameter, expected, rtol=1e-7, atol=max(1e-8, tolerance), msg=lambda text, key=key: f"{key}: {text}"
        )
    if name == "tgat":
        return
    state = strategy.scheduler.shared.memory.tables
    for node in range(reference.task.stream.num_nodes):
        assert int(state["mail_event"][node]) == plain.mail_event.get(node, -1)
        assert int(state["memory_event"][node]) == plain.memory_event.get(node, -1)
        if node in plain.mail:
            torch.testing.assert_close(state["memory"][node], plain.memory[node], rtol=1e-7, atol=max(1e-9, tolerance))
            torch.testing.assert_close(state["mail"][node], plain.mail[node], rtol=1e-7, atol=max(1e-9, tolerance))
        else:
            assert not state["memory"][node].any() and not state["mail"][node].any()


@pytest.mark.parametrize(
    ("name", "layers", "queries_at_once"), [("tgn", 1, 1 << 15), ("tgn", 2, 20), ("tgn-id", 1, 20)]
)
def test_evaluation_equals_a_plain_loop(
    name: str, layers: int, queries_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of queries at a time."""
    monkeypatch.setattr(evaluation, "QUERIES_AT_ONCE", queries_at_once)
    strategy = build_strategy(name=name, layers=layers, pairs=False)
    list(strategy.train_epoch(0))
    few, val, test = strategy.validate(), strategy.evaluate("val"), strategy.evaluate("test")
    plain = Plain(strategy)
    assert min(len(plain.task.parts[split]) for split in ("val", "test")) > EVAL_BATCH
    with torch.no_grad():
        for low, high in pairwise(strategy.scheduler.bounds):
            plain.replay(low, high)
        expected, last = plain.mrr("val"), plain.mrr("test")
    # There are fewer destinations than sampled negatives, so all others are negatives.
    assert few["mrr"] == pytest.approx(expected[False]) and val["mrr"] == pytest.approx(expected[True])
    assert test["mrr"] == pytest.approx(last[True])
