"""Laws of training on events: nothing looks ahead, times may be shifted, a run goes on where it stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.config.resolve import overlay, resolve
from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.graph.events.negatives import AllDestinations, NegativeSampler
from gnnfleet.graph.graph import Graph
from gnnfleet.nn.ranking import average_precision
from gnnfleet.ops.draws import DrawKey
from gnnfleet.strategies.temporal.batch_step import embed, last_events, update_memory
from gnnfleet.strategies.temporal.memory import MemoryUpdate, NodeMemory
from gnnfleet.strategies.temporal.strategy import TemporalStrategy
from gnnfleet.tasks.event import EventTask, link_scores
from gnnfleet.training.build import build

WORDS: dict[str, Any] = {
    "strategy": {"name": "temporal", "batch": 20, "static": False},
    "model": {"hidden": 8, "neighbours": 3, "time_width": 4, "dropout": 0.3},
    "train": {"lr": 0.01},
}


def events(count: int = 300, **words: Any) -> Graph:
    return make_dataset("events", users=20, items=10, events=count, features=3, topics=2, ties=0.3, seed=1, **words)


def made(graph: Graph, words: Mapping[str, Any] | None = None) -> TemporalStrategy:
    strategy = build(graph, resolve(overlay(WORDS, words or {}))).strategy
    assert isinstance(strategy, TemporalStrategy)
    return strategy


def of_stream(stream: EventStream, keep: Tensor, *, shift: int = 0) -> Graph:
    """Some events of a stream as a graph of its own, with the same nodes."""
    assert stream.msg is not None
    pairs = torch.stack([stream.src, stream.dst])[:, keep]
    return Graph(pairs, time=stream.t[keep] + shift, edge_attr=stream.msg[keep], num_nodes=stream.num_nodes)


def scores(strategy: TemporalStrategy, upto: int) -> tuple[Tensor, Tensor]:
    """Embeddings of both ends of events before ``upto`` and their logits, batches as in training, weights at rest."""
    strategy.model.eval()
    lookout, memory, task = strategy._lookout, strategy.scheduler.shared.memory, strategy.task
    memory.reset()
    found, logits = [], []
    bounds = task.stream.batches(20)
    for low, high in pairwise(bounds):
        batch = lookout.batch(low, high, torch.empty(high - low, 0, dtype=torch.int64))
        with torch.no_grad():
            fresh, writes = update_memory(strategy.model, task.stream, batch, memory.read(batch.block.nodes))
            assert writes is not None
            memory.write(writes)
            z = embed(strategy.model, batch, fresh, None, DrawKey())
            logits.append(link_scores(strategy.model, z, batch.count, batch.pairs)[0])
        found.append(torch.stack([z[: high - low], z[high - low :]], 1))
        if high >= upto:
            break
    return torch.cat(found)[:upto], torch.cat(logits)[:upto]


@pytest.mark.parametrize("layers", [1, 2])
def test_what_comes_later_or_at_the_same_time_changes_nothing(layers: int) -> None:
    words = {"model": {"layers": layers, "pairs": True}, "precision": "float64"}
    stream = EventStream.of(events())
    whole = made(of_stream(stream, torch.arange(len(stream))), words)
    for number in (75, 140):
        before = stream.t < stream.t[number]
        before[number] = True  # the event itself, without those of the same time
        alone = made(of_stream(stream, before.nonzero()[:, 0]), words)
        alone.model.load_state_dict(whole.model.state_dict())
        # The unit of times between meetings is a constant of training, as weights are.
        alone._lookout = replace(alone._lookout, pair_unit=whole._lookout.pair_unit)
        mine = int(before[:number].sum())
        for found, expected in zip(scores(alone, mine + 1), scores(whole, number + 1), strict=True):
            torch.testing.assert_close(found[mine], expected[number])


@pytest.mark.parametrize("queries", ["event", "batch"])
def test_a_batch_does_not_see_itself(queries: str) -> None:
    """Nor does a share of it: training is asked what evaluations ask."""
    strategy = made(events(), {"strategy": {"queries": queries}, "model": {"layers": 2}})
    for low, high in ((100, 120), (110, 120)):
        hops = strategy._look_up(low, high, 0, whole=(100, 120)).block.hops
        assert len(hops) == 2 and all(int(hop.edge[hop.neighbors >= 0].max()) < 100 for hop in hops)


def test_training_knows_no_destination_that_comes_later() -> None:
    """Evaluations do: what is new then is among those an event is ranked with."""
    stream = EventStream.of(events())
    train, new = len(stream.split()[0]), stream.src[0]
    assert stream.msg is not None and not torch.isin(new, stream.dst[:train]).any()
    known, later = stream.dst[:train], new.expand(len(stream) - train)

    def with_destinations(dst: Tensor) -> TemporalStrategy:
        pairs = torch.stack([stream.src, dst])
        return made(Graph(pairs, time=stream.t, edge_attr=stream.msg, num_nodes=stream.num_nodes))

    one, other = with_destinations(stream.dst).task, with_destinations(torch.cat([known, later])).task
    drawn, again = (
        torch.cat([task.sample_negatives(0, train, sweep=sweep) for sweep in range(9)]) for task in (one, other)
    )
    assert torch.equal(drawn, again) and torch.equal(torch.unique(drawn), torch.unique(known))
    assert bool((other.negatives.for_evaluation(torch.arange(train), known, count=3) == new).any())
    alone = with_destinations(torch.cat([known[:1].expand(train), stream.dst[train:]]))
    with pytest.raises(ConfigError, match="1 negatives need 2 destinations, found 1"):
        list(alone.train_epoch(0))


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_shift_of_all_times_changes_nothing(precision: str) -> None:
    """To unix times, where float32 would lose two minutes."""
    stream = EventStream.of(events())
    runs = []
    for shift in (0, 1_700_000_000):
        strategy = made(of_stream(stream, torch.arange(len(stream)), shift=shift), {"precision": precision})
        losses = [record.loss for record in strategy.train_epoch(0)]
        runs.append((losses, strategy.evaluate("test"), dict(strategy.model.state_dict())))
    (losses, test, weights), (others, shifted, moved) = runs
    assert losses == others and test == shifted
    assert all(torch.equal(weights[name], moved[name]) for name in weights)


def test_attention_may_look_at_drawn_events() -> None:
    """Of all that a node has had before, others in every pass, the same in every run and evaluation."""
    words = {"strategy": {"events": "drawn", "static": True, "static_epochs": 1}}
    one, two, latest = made(events(), words), made(events(), words), made(events())
    negatives = one.task.sample_negatives(150, 170, sweep=0)
    seen = [one._lookout.batch(150, 170, negatives, sweep=sweep).block.hops[0] for sweep in (0, 0, 1)]
    assert torch.equal(seen[0].edge, seen[1].edge) and not torch.equal(seen[0].edge, seen[2].edge)
    newest = latest._lookout.batch(150, 170, negatives).block.hops[0]
    there = seen[0].neighbors >= 0
    assert torch.equal(there, newest.neighbors >= 0)  # as many
    assert bool((seen[0].edge[there] < newest.edge[there]).any()) and int(seen[0].edge[there].max()) < 150
    runs = [([record.loss for record in each.train_epoch(0)], each.evaluate("test")) for each in (one, two)]
    assert runs[0] == runs[1]


def test_the_unit_of_times_changes_nothing() -> None:
    """Frequencies go by the stream's own times: in 1024ths of a second it is the same stream."""
    stream, runs = EventStream.of(events()), []
    for unit in (1, 1024):
        graph = of_stream(replace(stream, t=stream.t * unit), torch.arange(len(stream)))
        strategy = made(graph, {"strategy": {"static": True, "static_epochs": 1}})
        runs.append(([record.loss for record in strategy.train_epoch(0)], strategy.evaluate("test")))
    assert runs[0] == runs[1]


def test_a_stray_time_decides_no_unit() -> None:
    """An event without a time, read as 0, among unix times."""

    def of(t: Tensor) -> EventTask:
        stream = EventStream.from_arrays(torch.zeros(len(t)), torch.ones(len(t)), t)
        return EventTask(stream, {"train": stream}, "node", NegativeSampler(stream.destinations))

    t = 1_700_000_000 + torch.randint(1, 20, (400,), generator=torch.Generator().manual_seed(0)).cumsum(0)
    task = of(t)
    assert task.span == pytest.approx(float(t[-1] - t[0]), rel=0.1)
    assert task.mean_gap == pytest.approx(task.span / 400)
    for place, time in ((0, 0), (-1, 2_000_000_000)):
        stray = t.clone()
        stray[place] = time
        assert of(stray).mean_gap == pytest.approx(task.mean_gap, rel=0.05)
        assert of(stray).span == pytest.approx(task.span, rel=0.05)
    assert of(t * 1024).mean_gap == 1024 * task.mean_gap and of(t * 1024).span == 1024 * task.span
    assert of(torch.tensor([0] + [9] * 39)).mean_gap == 9 / 40, "most are at once"
    assert of(torch.tensor([5, 5, 5, 5])).span == of(torch.tensor([7])).span == 1.0, "all are"


def test_training_leaves_the_clock_alone() -> None:
    """Unless it is told to move it."""
    for clock, moves in (("fixed", False), ("learnt", True)):
        strategy = made(events(), {"model": {"clock": clock}})
        first = {name: value.clone() for name, value in strategy.state_dict()["model"].items() if "clock" in name}
        assert set(first) == {f"{part}.clock.{name}" for part in ("cell", "layers.0") for name in ("weight", "bias")}
        list(islice(strategy.train_epoch(0), 2))  # the first batch has nothing to look back on
        after = strategy.state_dict()["model"]
        assert any(not torch.equal(after[name], value) for name, value in first.items()) == moves


@pytest.mark.parametrize("words", [{}, {"strategy": {"static": True, "static_epochs": 1}}, {"model": {"name": "tgat"}}])
def test_a_run_goes_on_bit_for_bit(words: dict[str, Any]) -> None:
    graph = events()
    through = made(graph, words)
    for epoch in range(2):
        list(through.train_epoch(epoch))
    stopped = made(graph, words)
    list(stopped.train_epoch(0))
    list(islice(stopped.train_epoch(1), 3))
    state = {part: {name: t.clone() for name, t in each.items()} for part, each in stopped.state_dict().items()}
    resumed = made(graph, words)
    resumed.load_state_dict(state)
    list(resumed.train_epoch(1, first=3))
    for part, tensors in through.state_dict().items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, resumed.state_dict()[part][name]), (part, name)
    assert through.evaluate("test") == resumed.evaluate("test")


def test_evaluation_leaves_training_alone_and_repeats_itself() -> None:
    graph = events()
    watched, alone = made(graph), made(graph)
    for epoch in range(2):
        a = list(watched.train_epoch(epoch))
        first, again = watched.validate(), watched.validate()
        assert first == again
        test = watched.evaluate("test")
        assert watched.evaluate("test") == test
        assert [r.loss for r in a] == [r.loss for r in alone.train_epoch(epoch)]
    for name, tensor in watched.model.state_dict().items():
        assert torch.equal(tensor, alone.model.state_dict()[name])


def test_val_then_test_goes_on_where_a_fresh_start_arrives() -> None:
    graph = events()
    both, only = made(graph), made(graph)
    val, test = both.evaluate("val"), both.evaluate("test")
    assert only.evaluate("test") == pytest.approx(test)
    assert val["mrr"] != test["mrr"]
    assert {"mrr", "ap", "edgebank", "edgebank_window"} < set(test)


def test_metrics_are_over_all_scores_of_a_split() -> None:
    """Not means over batches, which would be other numbers."""
    strategy = made(events(), {"strategy": {"eval_batch": 10, "eval_negatives": 4}})
    part, memory = strategy.task.parts["test"], strategy._after(strategy.task.parts["test"].first)
    rows = []
    for low in range(part.first, part.first + len(part), 10):
        piece = low, min(low + 10, part.first + len(part))
        rows.append(strategy._evaluator._ranked(memory, None, piece, piece, full=True))
        strategy._evaluator._replay_batch(memory, *piece)
    _, positive, negative, ranks = torch.cat(rows).t()
    found = strategy.evaluate("test")
    assert found["ap"] == pytest.approx(average_precision(positive, negative))
    assert found["mrr"] == pytest.approx(float((1 / ranks).mean()))
    by_batch = [average_precision(each[:, 1], each[:, 2]) for each in rows]
    assert found["ap"] != pytest.approx(sum(by_batch) / len(by_batch), abs=1e-3)


def test_the_one_negative_is_the_same_by_both_rules() -> None:
    strategy = made(events(), {"strategy": {"eval_negatives": 4}, "precision": "float64"})
    part, rule, evaluator = strategy.task.parts["test"], strategy.task.negatives, strategy._evaluator
    memory, piece = strategy._after(part.first), (part.first, part.first + len(part))
    few, every = (evaluator._ranked(memory, None, piece, piece, full=full) for full in (False, True))
    torch.testing.assert_close(few[:, :3], every[:, :3])
    column = rule.one_of(part.numbers, 4)[:, None]
    assert len(torch.unique(column)) == 4
    one = rule.for_evaluation(part.numbers, part.dst, count=4).gather(1, column)
    torch.testing.assert_close(evaluator._scores(memory, None, piece, piece, one)[1][:, 0], few[:, 2])


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_decoder_that_says_nothing_is_in_the_middle(precision: str) -> None:
    strategy = made(events(), {"model": {"pairs": True}, "precision": precision})
    with torch.no_grad():
        for parameter in strategy.model.decoder.parameters():
            parameter.zero_()
    assert strategy.validate()["mrr"] == pytest.approx(1 / (1 + 9 / 2))  # all nine others
    stream, part = strategy.task.stream, strategy.task.parts["test"]
    others = AllDestinations(stream).mask(part.first, part.first + len(part)).sum(1)
    assert strategy.evaluate("test")["mrr"] == pytest.approx(float((1 / (1 + others.double() / 2)).mean()))


def test_new_destinations_are_told_apart_by_nothing() -> None:
    """No memory, no event: they share the middle of their places with each other."""
    stream = EventStream.of(events())
    assert stream.msg is not None
    train, dst = len(stream.split()[0]), stream.dst.clone()
    new = torch.arange(stream.num_nodes, stream.num_nodes + 13)  # each once, at the end of the stream
    dst[-13:] = new
    pairs, count = torch.stack([stream.src, dst]), stream.num_nodes + 13
    strategy = made(Graph(pairs, time=stream.t, edge_attr=stream.msg, num_nodes=count), {"precision": "float64"})
    end = len(stream)
    memory, evaluator = strategy._after(end - 13), strategy._evaluator
    assert train < end - 13
    piece = end - 13, end
    positive, among = evaluator._scores(memory, None, piece, piece, evaluator._all.destinations)
    mine = torch.isin(evaluator._all.destinations, new)
    assert torch.equal(among[:, mine], positive[:, None].expand(-1, 13))


def test_the_state_before_all_events_is_empty() -> None:
    """And is not taken for another, once something was measured after it."""
    strategy, fresh = made(events()), made(events())
    memory, train = strategy._after(0), len(strategy.task.parts["train"])
    assert bool((memory.tables["mail_event"] == -1).all())
    strategy._known = 5, memory
    for name, table in strategy._after(train).tables.items():
        assert torch.equal(table, fresh._after(train).tables[name])


def test_batches_end_before_too_many_updates_are_lost() -> None:
    """Trained on, walked through for evaluations and gone on with as any others."""
    graph, words = events(), {"strategy": {"batch": 40, "max_lost_updates": 0.5, "eval_batch": 40}}
    strategy, plain = made(graph, words), made(graph, {"strategy": {"batch": 40, "eval_batch": 40}})
    train = strategy.task.parts["train"]
    bounds = list(strategy.scheduler.bounds)
    assert bounds == train.bounded_loss_batches(0.5, most=40) and len(bounds) > len(plain.scheduler.bounds)
    assert [record.count for record in strategy.train_epoch(0)] == [high - low for low, high in pairwise(bounds)]
    trained = strategy.scheduler.shared.memory.copy()
    at_rest = made(graph, words)
    at_rest.model.load_state_dict(strategy.model.state_dict())
    walked = at_rest._after(len(train))
    for name in ("mail_event", "memory_event"):  # of the same batches; weights differ
        assert torch.equal(walked.tables[name], trained.tables[name])
    other = plain._after(len(train))
    assert not torch.equal(walked.tables["memory_event"], other.tables["memory_event"])


def test_static_rows_come_from_training_alone() -> None:
    stream = EventStream.of(events())
    train = len(stream.split()[0])
    whole = of_stream(stream, torch.arange(len(stream)))
    words = {"strategy": {"static": True, "static_epochs": 2}}
    table = made(whole, words)._static()
    assert table is not None
    seen = torch.unique(torch.cat([stream.src[:train], stream.dst[:train]]))
    unseen = torch.ones(stream.num_nodes, dtype=torch.bool)
    unseen[seen] = False
    assert not table[unseen].any() and table[seen].any(1).all()
    assert stream.msg is not None
    new = stream.src[:1].expand(len(stream) - train)  # a node that was no destination until then
    assert not torch.isin(new, stream.dst[:train]).any()
    for future in (stream.dst[train:].flip(0), new):
        other = torch.cat([stream.dst[:train], future])
        ends = torch.stack([stream.src, other])
        changed = Graph(ends, time=stream.t, edge_attr=stream.msg, num_nodes=stream.num_nodes)
        again = made(changed, words)._static()
        assert again is not None and torch.equal(again, table)
    assert made(whole)._static() is None


def test_queries_per_batch_look_once_at_every_node() -> None:
    strategy = made(events(), {"strategy": {"queries": "batch"}})
    batch = strategy._lookout.batch(100, 120, strategy.task.sample_negatives(100, 120, sweep=0))
    hop = batch.block.hops[0]
    assert batch.places is not None and len(torch.unique(hop.query)) == len(hop.query) == batch.block.num_queries
    assert int(hop.edge[hop.neighbors >= 0].max()) < 100
    after = strategy._lookout.batch(120, 140, strategy.task.sample_negatives(120, 140, sweep=0)).block.hops[0]
    assert not torch.isin(hop.ids, after.ids).any(), "dropout is drawn anew in every batch"
    assert all(record.loss > 0 for record in strategy.train_epoch(0))


def test_the_last_event_of_a_node_counts_and_shares_agree() -> None:
    stream = EventStream.of(events())
    nodes, event, other = last_events(stream, 40, 90)
    for node, number, end in zip(nodes.tolist(), event.tolist(), other.tolist(), strict=True):
        found = [n for n in range(40, 90) if node in (int(stream.src[n]), int(stream.dst[n]))]
        assert number == found[-1] and {node, end} == {int(stream.src[number]), int(stream.dst[number])}
    strategy, nobody = made(events()), torch.empty(25, 0, dtype=torch.int64)
    shares = [strategy._lookout.batch(low, low + 25, nobody, whole=(40, 90)).targets for low in (40, 65)]
    every = torch.cat([left.ids for left in shares])
    assert torch.equal(every.sort().values, nodes), "each node is written by exactly one share"


def test_memory_keeps_which_events_it_comes_from() -> None:
    memory = NodeMemory.empty(4, 2)
    ids = torch.tensor([2, 0])
    memory.write(MemoryUpdate(ids, torch.ones(2, 2), torch.ones(2, 4), torch.tensor([5, 6])))
    memory.write(MemoryUpdate(ids[:1], torch.full((1, 2), 3.0), torch.zeros(1, 4), torch.tensor([9])))
    rows = memory.read(torch.tensor([0, 1, 2]))
    assert rows.mail_event.tolist() == [6, -1, 9] and rows.memory_event.tolist() == [-1, -1, 5]
    copy = memory.copy()
    memory.reset()
    assert not memory.tables["memory"].any() and bool((memory.tables["mail_event"] == -1).all())
    assert copy.tables["memory"][2].tolist() == [3.0, 3.0]
    memory.load_state_dict(copy.state_dict())
    assert torch.equal(memory.read(ids).memory, copy.read(ids).memory)
    memory.tables["memory_event"][3] = 4  # begun within the stream: no mail, but an event before
    memory.write(MemoryUpdate(torch.tensor([3]), torch.ones(1, 2), torch.ones(1, 4), torch.tensor([10])))
    assert memory.read(torch.tensor([3])).memory_event.tolist() == [4]


def test_new_events_are_scored_in_a_stream() -> None:
    stream = EventStream.of(events())
    known, later = made(of_stream(stream, torch.arange(260))), stream.slice(260, 300)
    one_by_one = made(of_stream(stream, torch.arange(260)))
    at_once = known.score(later)
    pieces = [one_by_one.score(stream.slice(low, low + 20)) for low in (260, 280)]
    assert at_once.shape == (40,) and bool(((at_once > 0) & (at_once < 1)).all())
    torch.testing.assert_close(torch.cat(pieces)[:20], at_once[:20])
    assert not torch.allclose(torch.cat(pieces)[20:], at_once[20:]), "the state moved on between calls"
    with pytest.raises(InputError, match="after those known"):
        known.score(stream.slice(0, 5))
    before = made(of_stream(stream, torch.arange(260))).evaluate("test")
    assert known.evaluate("test") == before, "what came later changes no metric of what was before"


def test_classes_of_events_are_learnt() -> None:
    stream = EventStream.of(events(600))
    assert stream.msg is not None
    y = (stream.msg[:, 0] > 0).long()
    y[::7] = -1
    graph = Graph(torch.stack([stream.src, stream.dst]), time=stream.t, edge_attr=stream.msg, edge_y=y)
    strategy = made(graph, {"task": "edge", "train": {"lr": 0.01}})
    losses = [sum(r.loss * r.count for r in strategy.train_epoch(epoch)) for epoch in range(2)]
    assert losses[1] < losses[0]
    found = strategy.evaluate("test")
    new = EventStream.of(graph).slice(590, 600)
    assert strategy.score(replace(new, t=new.t + 10**6, y=None)).shape == (10, 2)
    assert strategy.evaluate("test") == found, "though new events have no classes"
    assert found["count"] == float((strategy.task.parts["test"].y >= 0).sum()) and 0 <= found["accuracy"] <= 1  # type: ignore[operator]
    with pytest.raises(ConfigError, match="no labels"):
        made(events(), {"task": "edge"})


def test_bf16_stays_near() -> None:
    graph = events()
    exact, rounded = made(graph), made(graph, {"precision": "bf16"})
    for a, b in zip(exact.train_epoch(0), rounded.train_epoch(0), strict=True):
        assert b.loss == pytest.approx(a.loss, rel=0.15)


def test_evaluations_are_of_an_average_of_weights() -> None:
    """Training does not know of it; a state has both, and a model that is kept is the average."""
    plain, averaged = made(events(), {"strategy": {"average": 0}}), made(events(), {"strategy": {"average": 0.5}})
    wanted: dict[str, Tensor] = {}
    for number, (one, two) in enumerate(zip(plain.train_epoch(0), averaged.train_epoch(0), strict=True), 1):
        assert one.loss == two.loss
        keep = min(0.5, number / (number + 9))
        now = {name: weight.detach().clone() for name, weight in plain.model.named_parameters()}
        wanted = {name: keep * wanted.get(name, weight) + (1 - keep) * weight for name, weight in now.items()}
    state = {part: {name: t.clone() for name, t in each.items()} for part, each in averaged.state_dict().items()}
    for name, weight in plain.model.named_parameters():
        torch.testing.assert_close(state["model"][name], wanted[name])
        assert torch.equal(state["trained"][name], weight) and torch.equal(averaged.model.get_parameter(name), weight)
    found = averaged.evaluate("test")
    kept = made(events(), {"strategy": {"average": 0}})
    kept.load_state_dict({"model": state["model"]})
    assert kept.evaluate("test") == found != plain.evaluate("test")
    assert "trained" not in plain.state_dict()
