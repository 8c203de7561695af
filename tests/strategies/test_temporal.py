"""Laws of temporal training: no query sees later events, time shifts change nothing, runs resume exactly."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.config.resolve import overlay, resolve
from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.events.event_stream import AllDestinations, EventStream, NegativeSampler
from gnnfleet.graph.graph import Graph
from gnnfleet.nn.ranking import average_precision
from gnnfleet.ops.draws import DrawKey
from gnnfleet.strategies.temporal.batch_step import embed, last_events, update_memory
from gnnfleet.strategies.temporal.memory import MemoryUpdate, NodeMemory
from gnnfleet.strategies.temporal.strategy import TemporalStrategy
from gnnfleet.tasks.event import EventTask, link_scores
from gnnfleet.training.build import build
from tests.graphs import event_stream

SETTINGS: dict[str, Any] = {
    "strategy": {"name": "temporal", "batch": 20, "static": False},
    "model": {"hidden": 8, "neighbours": 3, "time_width": 4, "dropout": 0.3},
    "train": {"lr": 0.01},
}


def events(count: int = 300) -> Graph:
    return make_dataset("events", users=20, items=10, events=count, features=3, topics=2, ties=0.3, seed=1)


def build_strategy(graph: Graph, settings: Mapping[str, Any] | None = None) -> TemporalStrategy:
    strategy = build(graph, resolve(overlay(SETTINGS, settings or {}))).strategy
    assert isinstance(strategy, TemporalStrategy)
    return strategy


def of_stream(stream: EventStream, keep: Tensor, *, shift: int = 0) -> Graph:
    """Graph of some events of a stream, with all nodes."""
    assert stream.msg is not None
    pairs = torch.stack([stream.src, stream.dst])[:, keep]
    return Graph(pairs, time=stream.t[keep] + shift, edge_attr=stream.msg[keep], num_nodes=stream.num_nodes)


def embed_and_score(strategy: TemporalStrategy, upto: int) -> tuple[Tensor, Tensor]:
    """Embeddings of both ends of events before ``upto`` and their logits, in training batches, fixed weights."""
    strategy.model.eval()
    builder, memory, task = strategy._builder, strategy.scheduler.shared.memory, strategy.task
    memory.reset()
    embeddings, logits = [], []
    bounds = task.stream.batches(20)
    for low, high in pairwise(bounds):
        batch = builder.batch(low, high, torch.empty(high - low, 0, dtype=torch.int64))
        with torch.no_grad():
            updated, update = update_memory(strategy.model, task.stream, batch, memory.read(batch.block.nodes))
            assert update is not None
            memory.write(update)
            z = embed(strategy.model, batch, updated, None, DrawKey())
            logits.append(link_scores(strategy.model, z, batch.count, batch.pairs)[0])
        embeddings.append(torch.stack([z[: high - low], z[high - low :]], 1))
        if high >= upto:
            break
    return torch.cat(embeddings)[:upto], torch.cat(logits)[:upto]


@pytest.mark.parametrize("layers", [1, 2])
def test_events_later_or_at_the_same_time_change_nothing(layers: int) -> None:
    settings = {"model": {"layers": layers, "pairs": True}, "precision": "float64"}
    stream = EventStream.of(events())
    whole = build_strategy(of_stream(stream, torch.arange(len(stream))), settings)
    for number in (75, 140):
        before = stream.t < stream.t[number]
        before[number] = True  # the event itself, without those of the same time
        truncated = build_strategy(of_stream(stream, before.nonzero()[:, 0]), settings)
        truncated.model.load_state_dict(whole.model.state_dict())
        # The unit of times in pair features is a constant of training, as weights are.
        truncated._builder = replace(truncated._builder, pair_unit=whole._builder.pair_unit)
        row = int(before[:number].sum())
        for actual, expected in zip(
            embed_and_score(truncated, row + 1), embed_and_score(whole, number + 1), strict=True
        ):
            torch.testing.assert_close(actual[row], expected[number])


@pytest.mark.parametrize("queries", ["event", "batch"])
def test_a_batch_does_not_see_itself(queries: str) -> None:
    """Nor does a share of it."""
    strategy = build_strategy(events(), {"strategy": {"queries": queries}, "model": {"layers": 2}})
    for low, high in ((100, 120), (110, 120)):
        hops = strategy._build_batch(low, high, 0, global_batch=(100, 120)).block.hops
        assert len(hops) == 2 and all(int(hop.edge[hop.neighbors >= 0].max()) < 100 for hop in hops)


def test_training_negatives_are_no_later_destinations() -> None:
    """Negatives of evaluations may be."""
    stream = EventStream.of(events())
    train, new = len(stream.split()[0]), stream.src[0]
    assert stream.msg is not None and not torch.isin(new, stream.dst[:train]).any()
    early, later = stream.dst[:train], new.expand(len(stream) - train)

    def with_destinations(dst: Tensor) -> TemporalStrategy:
        pairs = torch.stack([stream.src, dst])
        return build_strategy(Graph(pairs, time=stream.t, edge_attr=stream.msg, num_nodes=stream.num_nodes))

    task, changed = with_destinations(stream.dst).task, with_destinations(torch.cat([early, later])).task
    negatives, changed_negatives = (
        torch.cat([task.sample_negatives(torch.arange(0, train), sweep=sweep) for sweep in range(9)])
        for task in (task, changed)
    )
    assert torch.equal(negatives, changed_negatives) and torch.equal(torch.unique(negatives), torch.unique(early))
    assert bool((changed.negatives.for_evaluation(torch.arange(train), early, count=3) == new).any())
    alone = with_destinations(torch.cat([early[:1].expand(train), stream.dst[train:]]))
    with pytest.raises(ConfigError, match="1 negatives need 2 destinations, found 1"):
        list(alone.train_epoch(0))


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_shift_of_all_times_changes_nothing(precision: str) -> None:
    """A shift to unix times, which float32 resolves to two minutes only."""
    stream = EventStream.of(events())
    runs = []
    for shift in (0, 1_700_000_000):
        strategy = build_strategy(of_stream(stream, torch.arange(len(stream)), shift=shift), {"precision": precision})
        losses = [record.loss for record in strategy.train_epoch(0)]
        runs.append((losses, strategy.evaluate("test"), dict(strategy.model.state_dict())))
    (losses, test, weights), (shifted_losses, shifted_test, shifted_weights) = runs
    assert losses == shifted_losses and test == shifted_test
    assert all(torch.equal(weights[name], shifted_weights[name]) for name in weights)


def test_attention_may_read_sampled_events() -> None:
    """The sample differs between passes and is reproducible in runs and evaluations."""
    settings = {"strategy": {"events": "drawn", "static": True, "static_epochs": 1}}
    first, second, latest = (
        build_strategy(events(), settings),
        build_strategy(events(), settings),
        build_strategy(events()),
    )
    negatives = first.task.sample_negatives(torch.arange(150, 170), sweep=0)
    hops = [first._builder.batch(150, 170, negatives, sweep=sweep).block.hops[0] for sweep in (0, 0, 1)]
    assert torch.equal(hops[0].edge, hops[1].edge) and not torch.equal(hops[0].edge, hops[2].edge)
    newest = latest._builder.batch(150, 170, negatives).block.hops[0]
    exists = hops[0].neighbors >= 0
    assert torch.equal(exists, newest.neighbors >= 0)  # as many
    assert bool((hops[0].edge[exists] < newest.edge[exists]).any()) and int(hops[0].edge[exists].max()) < 150
    runs = [
        ([record.loss for record in strategy.train_epoch(0)], strategy.evaluate("test")) for strategy in (first, second)
    ]
    assert runs[0] == runs[1]


def test_the_unit_of_times_changes_nothing() -> None:
    """Frequencies are relative to the stream's times: in units of 1/1024 s the results are the same."""
    stream, runs = EventStream.of(events()), []
    for unit in (1, 1024):
        graph = of_stream(replace(stream, t=stream.t * unit), torch.arange(len(stream)))
        strategy = build_strategy(graph, {"strategy": {"static": True, "static_epochs": 1}})
        runs.append(([record.loss for record in strategy.train_epoch(0)], strategy.evaluate("test")))
    assert runs[0] == runs[1]


def test_an_outlier_time_hardly_changes_the_time_unit() -> None:
    """For example an event without a time, read as 0, among unix times."""

    def task_of(t: Tensor) -> EventTask:
        stream = event_stream(torch.zeros(len(t)), torch.ones(len(t)), t)
        return EventTask(stream, {"train": stream}, "node", NegativeSampler(stream.destinations))

    t = 1_700_000_000 + torch.randint(1, 20, (400,), generator=torch.Generator().manual_seed(0)).cumsum(0)
    task = task_of(t)
    assert task.span == pytest.approx(float(t[-1] - t[0]), rel=0.1)
    assert task.mean_gap == pytest.approx(task.span / 400)
    for index, time in ((0, 0), (-1, 2_000_000_000)):
        stray = t.clone()
        stray[index] = time
        assert task_of(stray).mean_gap == pytest.approx(task.mean_gap, rel=0.05)
        assert task_of(stray).span == pytest.approx(task.span, rel=0.05)
    assert task_of(t * 1024).mean_gap == 1024 * task.mean_gap and task_of(t * 1024).span == 1024 * task.span
    assert task_of(torch.tensor([0] + [9] * 39)).mean_gap == 9 / 40, "most have one time"
    assert task_of(torch.tensor([5, 5, 5, 5])).span == task_of(torch.tensor([7])).span == 1.0, "all have one time"


def test_time_frequencies_are_trained_only_on_request() -> None:
    for clock, moves in (("fixed", False), ("learnt", True)):
        strategy = build_strategy(events(), {"model": {"clock": clock}})
        first = {name: value.clone() for name, value in strategy.state_dict()["model"].items() if "clock" in name}
        assert set(first) == {f"{part}.clock.{name}" for part in ("cell", "layers.0") for name in ("weight", "bias")}
        list(islice(strategy.train_epoch(0), 2))  # the first batch has no earlier events
        after = strategy.state_dict()["model"]
        assert any(not torch.equal(after[name], value) for name, value in first.items()) == moves


@pytest.mark.parametrize(
    "settings", [{}, {"strategy": {"static": True, "static_epochs": 1}}, {"model": {"name": "tgat"}}]
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(settings: dict[str, Any]) -> None:
    graph = events()
    uninterrupted = build_strategy(graph, settings)
    for epoch in range(2):
        list(uninterrupted.train_epoch(epoch))
    stopped = build_strategy(graph, settings)
    list(stopped.train_epoch(0))
    list(islice(stopped.train_epoch(1), 3))
    state = {part: {name: t.clone() for name, t in tensors.items()} for part, tensors in stopped.state_dict().items()}
    resumed = build_strategy(graph, settings)
    resumed.load_state_dict(state)
    list(resumed.train_epoch(1, first=3))
    for part, tensors in uninterrupted.state_dict().items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, resumed.state_dict()[part][name]), (part, name)
    assert uninterrupted.evaluate("test") == resumed.evaluate("test")


def test_evaluation_does_not_change_training_and_is_reproducible() -> None:
    graph = events()
    watched, alone = build_strategy(graph), build_strategy(graph)
    for epoch in range(2):
        a = list(watched.train_epoch(epoch))
        first, again = watched.validate(), watched.validate()
        assert first == again
        test = watched.evaluate("test")
        assert watched.evaluate("test") == test
        assert [r.loss for r in a] == [r.loss for r in alone.train_epoch(epoch)]
    for name, tensor in watched.model.state_dict().items():
        assert torch.equal(tensor, alone.model.state_dict()[name])


def test_evaluating_test_after_val_equals_evaluating_test_alone() -> None:
    graph = events()
    both, only = build_strategy(graph), build_strategy(graph)
    val, test = both.evaluate("val"), both.evaluate("test")
    assert only.evaluate("test") == pytest.approx(test)
    assert val["mrr"] != test["mrr"]
    assert {"mrr", "ap", "edgebank", "edgebank_window"} < set(test)


def test_metrics_are_over_all_scores_of_a_split() -> None:
    """They are not means over batches."""
    strategy = build_strategy(events(), {"strategy": {"eval_batch": 10, "eval_negatives": 4}})
    part, memory = strategy.task.parts["test"], strategy._memory_after(strategy.task.parts["test"].first)
    rows = []
    for low in range(part.first, part.first + len(part), 10):
        share = low, min(low + 10, part.first + len(part))
        rows.append(strategy._evaluator._ranked(memory, None, share, share, full=True))
        strategy._evaluator._replay_batch(memory, *share)
    _, positive, negative, ranks = torch.cat(rows).t()
    metrics = strategy.evaluate("test")
    assert metrics["ap"] == pytest.approx(average_precision(positive, negative))
    assert metrics["mrr"] == pytest.approx(float((1 / ranks).mean()))
    by_batch = [average_precision(batch[:, 1], batch[:, 2]) for batch in rows]
    assert metrics["ap"] != pytest.approx(sum(by_batch) / len(by_batch), abs=1e-3)


def test_the_negative_of_ap_is_the_same_by_both_rules() -> None:
    strategy = build_strategy(events(), {"strategy": {"eval_negatives": 4}, "precision": "float64"})
    part, rule, evaluator = strategy.task.parts["test"], strategy.task.negatives, strategy._evaluator
    memory, share = strategy._memory_after(part.first), (part.first, part.first + len(part))
    few, full_rule = (evaluator._ranked(memory, None, share, share, full=full) for full in (False, True))
    torch.testing.assert_close(few[:, :3], full_rule[:, :3])
    column = rule.single_column(part.numbers, 4)[:, None]
    assert len(torch.unique(column)) == 4
    negative = rule.for_evaluation(part.numbers, part.dst, count=4).gather(1, column)
    torch.testing.assert_close(evaluator._scores(memory, None, share, share, negative)[1][:, 0], few[:, 2])


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_constant_decoder_ranks_in_the_middle(precision: str) -> None:
    strategy = build_strategy(events(), {"model": {"pairs": True}, "precision": precision})
    with torch.no_grad():
        for parameter in strategy.model.decoder.parameters():
            parameter.zero_()
    assert strategy.validate()["mrr"] == pytest.approx(1 / (1 + 9 / 2))  # all nine others
    stream, part = strategy.task.stream, strategy.task.parts["test"]
    others = AllDestinations(stream).mask(part.first, part.first + len(part)).sum(1)
    assert strategy.evaluate("test")["mrr"] == pytest.approx(float((1 / (1 + others.double() / 2)).mean()))


def test_new_destinations_have_equal_scores() -> None:
    """Without memory and events, they tie with each other."""
    stream = EventStream.of(events())
    assert stream.msg is not None
    train, dst = len(stream.split()[0]), stream.dst.clone()
    new = torch.arange(stream.num_nodes, stream.num_nodes + 13)  # each once, at the end of the stream
    dst[-13:] = new
    pairs, count = torch.stack([stream.src, dst]), stream.num_nodes + 13
    strategy = build_strategy(
        Graph(pairs, time=stream.t, edge_attr=stream.msg, num_nodes=count), {"precision": "float64"}
    )
    end = len(stream)
    memory, evaluator = strategy._memory_after(end - 13), strategy._evaluator
    assert train < end - 13
    share = end - 13, end
    positive, scores = evaluator._scores(memory, None, share, share, evaluator._all.destinations)
    is_new = torch.isin(evaluator._all.destinations, new)
    assert torch.equal(scores[:, is_new], positive[:, None].expand(-1, 13))


def test_the_memory_before_all_events_is_empty() -> None:
    """It is not confused with a cached later one."""
    strategy, fresh = build_strategy(events()), build_strategy(events())
    memory, train = strategy._memory_after(0), len(strategy.task.parts["train"])
    assert bool((memory.tables["mail_event"] == -1).all())
    strategy._replayed = 5, memory
    for name, table in strategy._memory_after(train).tables.items():
        assert torch.equal(table, fresh._memory_after(train).tables[name])


def test_static_rows_depend_on_training_events_only() -> None:
    stream = EventStream.of(events())
    train = len(stream.split()[0])
    whole = of_stream(stream, torch.arange(len(stream)))
    settings = {"strategy": {"static": True, "static_epochs": 2}}
    table = build_strategy(whole, settings)._static_rows()
    assert table is not None
    trained = torch.unique(torch.cat([stream.src[:train], stream.dst[:train]]))
    untrained = torch.ones(stream.num_nodes, dtype=torch.bool)
    untrained[trained] = False
    assert not table[untrained].any() and table[trained].any(1).all()
    assert stream.msg is not None
    new = stream.src[:1].expand(len(stream) - train)  # a node that was no destination before
    assert not torch.isin(new, stream.dst[:train]).any()
    for future in (stream.dst[train:].flip(0), new):
        other = torch.cat([stream.dst[:train], future])
        ends = torch.stack([stream.src, other])
        changed = Graph(ends, time=stream.t, edge_attr=stream.msg, num_nodes=stream.num_nodes)
        changed_table = build_strategy(changed, settings)._static_rows()
        assert changed_table is not None and torch.equal(changed_table, table)
    assert build_strategy(whole)._static_rows() is None


def test_queries_per_batch_query_each_node_once() -> None:
    strategy = build_strategy(events(), {"strategy": {"queries": "batch"}})
    batch = strategy._builder.batch(100, 120, strategy.task.sample_negatives(torch.arange(100, 120), sweep=0))
    hop = batch.block.hops[0]
    assert batch.query_index is not None and len(torch.unique(hop.query)) == len(hop.query) == len(
        batch.block.hops[-1].query
    )
    assert int(hop.edge[hop.neighbors >= 0].max()) < 100
    after = strategy._builder.batch(
        120, 140, strategy.task.sample_negatives(torch.arange(120, 140), sweep=0)
    ).block.hops[0]
    assert not torch.isin(hop.ids, after.ids).any(), "every batch has its own dropout"
    assert all(record.loss > 0 for record in strategy.train_epoch(0))


def test_the_last_event_of_a_node_counts_and_shares_of_a_batch_are_disjoint() -> None:
    stream = EventStream.of(events())
    nodes, event, other = last_events(stream, 40, 90)
    for node, number, end in zip(nodes.tolist(), event.tolist(), other.tolist(), strict=True):
        events_of_node = [n for n in range(40, 90) if node in (int(stream.src[n]), int(stream.dst[n]))]
        assert number == events_of_node[-1] and {node, end} == {int(stream.src[number]), int(stream.dst[number])}
    strategy, no_negatives = build_strategy(events()), torch.empty(25, 0, dtype=torch.int64)
    shares = [strategy._builder.batch(low, low + 25, no_negatives, global_batch=(40, 90)).targets for low in (40, 65)]
    ids = torch.cat([targets.ids for targets in shares])
    assert torch.equal(ids.sort().values, nodes), "each node is written by exactly one share"


def test_memory_stores_the_events_it_comes_from() -> None:
    memory = NodeMemory.empty(4, 2)
    ids = torch.tensor([2, 0])
    memory.write(MemoryUpdate(ids, torch.ones(2, 2), torch.ones(2, 4), torch.tensor([5, 6])))
    memory.write(MemoryUpdate(ids[:1], torch.full((1, 2), 3.0), torch.zeros(1, 4), torch.tensor([9])))
    rows = memory.read(torch.tensor([0, 1, 2]))
    assert rows.mail_event.tolist() == [6, -1, 9] and rows.memory_event.tolist() == [-1, -1, 5]
    copy = deepcopy(memory)
    memory.reset()
    assert not memory.tables["memory"].any() and bool((memory.tables["mail_event"] == -1).all())
    assert copy.tables["memory"][2].tolist() == [3.0, 3.0]
    memory.load(copy.tables)
    assert torch.equal(memory.read(ids).memory, copy.read(ids).memory)
    memory.tables["memory_event"][3] = 4  # started within the stream: no mail, but an earlier event
    memory.write(MemoryUpdate(torch.tensor([3]), torch.ones(1, 2), torch.ones(1, 4), torch.tensor([10])))
    assert memory.read(torch.tensor([3])).memory_event.tolist() == [4]


def test_new_events_are_scored_in_order_and_appended() -> None:
    stream = EventStream.of(events())
    strategy, later = build_strategy(of_stream(stream, torch.arange(260))), stream.slice(260, 300)
    in_two_calls = build_strategy(of_stream(stream, torch.arange(260)))
    in_one_call = strategy.score(later)
    scores = [in_two_calls.score(stream.slice(low, low + 20)) for low in (260, 280)]
    assert in_one_call.shape == (40,) and bool(((in_one_call > 0) & (in_one_call < 1)).all())
    torch.testing.assert_close(torch.cat(scores)[:20], in_one_call[:20])
    assert not torch.allclose(torch.cat(scores)[20:], in_one_call[20:]), "the second call knows the events of the first"
    with pytest.raises(InputError, match="must not be earlier"):
        strategy.score(stream.slice(0, 5))
    before = build_strategy(of_stream(stream, torch.arange(260))).evaluate("test")
    assert strategy.evaluate("test") == before, "later events change no earlier metric"


def test_event_classes_are_learnt() -> None:
    stream = EventStream.of(events(600))
    assert stream.msg is not None
    y = (stream.msg[:, 0] > 0).long()
    y[::7] = -1
    graph = Graph(torch.stack([stream.src, stream.dst]), time=stream.t, edge_attr=stream.msg, edge_y=y)
    strategy = build_strategy(graph, {"task": "edge", "train": {"lr": 0.01}})
    losses = [sum(r.loss * r.count for r in strategy.train_epoch(epoch)) for epoch in range(2)]
    assert losses[1] < losses[0]
    metrics = strategy.evaluate("test")
    new = EventStream.of(graph).slice(590, 600)
    assert strategy.score(replace(new, t=new.t + 10**6, y=None)).shape == (10, 2)
    assert strategy.evaluate("test") == metrics, "new events have no labels"
    assert metrics["count"] == float((strategy.task.parts["test"].y >= 0).sum()) and 0 <= metrics["accuracy"] <= 1  # type: ignore[operator]
    with pytest.raises(ConfigError, match="no labels"):
        build_strategy(events(), {"task": "edge"})


def test_bf16_losses_are_close_to_float32() -> None:
    graph = events()
    exact, rounded = build_strategy(graph), build_strategy(graph, {"precision": "bf16"})
    for a, b in zip(exact.train_epoch(0), rounded.train_epoch(0), strict=True):
        assert b.loss == pytest.approx(a.loss, rel=0.15)


def test_evaluations_use_the_ema_of_weights() -> None:
    """Training does not depend on it; a state has raw weights and EMA, its model is the EMA."""
    plain, averaged = (
        build_strategy(events(), {"strategy": {"average": 0}}),
        build_strategy(events(), {"strategy": {"average": 0.5}}),
    )
    expected: dict[str, Tensor] = {}
    for number, (record, averaged_record) in enumerate(
        zip(plain.train_epoch(0), averaged.train_epoch(0), strict=True), 1
    ):
        assert record.loss == averaged_record.loss
        decay = min(0.5, number / (number + 9))
        weights = {name: weight.detach().clone() for name, weight in plain.model.named_parameters()}
        expected = {name: decay * expected.get(name, weight) + (1 - decay) * weight for name, weight in weights.items()}
    state = {part: {name: t.clone() for name, t in tensors.items()} for part, tensors in averaged.state_dict().items()}
    for name, weight in plain.model.named_parameters():
        torch.testing.assert_close(state["model"][name], expected[name])
        assert torch.equal(state["trained"][name], weight) and torch.equal(averaged.model.get_parameter(name), weight)
    metrics = averaged.evaluate("test")
    restored = build_strategy(events(), {"strategy": {"average": 0}})
    restored.load_state_dict({"model": state["model"]})
    assert restored.evaluate("test") == metrics != plain.evaluate("test")
    assert "trained" not in plain.state_dict()
