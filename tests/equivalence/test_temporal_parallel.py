"""Several trainers against one: memories, weights, negatives, writes and checkpoints, on real processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.comm.collectives import sum_over_ranks
from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.ops.draws import DrawKey
from gnnfleet.strategies.protocol import State, StepRecord
from gnnfleet.strategies.temporal.batch_step import EventBatch, embed, update_memory
from gnnfleet.strategies.temporal.memory import NodeMemory
from gnnfleet.strategies.temporal.schedule import ParallelLayout, Schedule
from gnnfleet.strategies.temporal.strategy import TemporalStrategy
from gnnfleet.training.build import RankContext, build
from tests.ranks import Crew, with_shelf

Sizes = tuple[int, int, int]
"""share, lanes, copies."""

BATCH, LR = 12, 1e-3
ONE = (1, 1, 1)


def made(world: World, sizes: Sizes = ONE, *, lr: float = LR, queries: str = "event", **model: Any) -> TemporalStrategy:
    """Times have ties and the last batch is short."""
    graph = make_dataset("events", users=12, items=8, events=150, features=3, topics=2, ties=0.3, seed=3)
    strategy = dict(zip(("batch_parallel", "epoch_parallel", "memory_parallel"), sizes, strict=True))
    words: dict[str, Any] = {
        "strategy": {
            "name": "temporal",
            "batch": BATCH,
            "static": False,
            "lr_scale": "none",
            "lr_decay": 0,
            "eval_negatives": 3,
            "queries": queries,
            **strategy,
        },
        "model": {"hidden": 8, "neighbours": 3, "time_width": 4, "dropout": 0.2, "pairs": True, **model},
        "train": {"optimizer": "sgd", "momentum": 0.0, "lr": 1.0},
        "link": {"negatives": 2},
        "precision": "float64",
        "workers": world.size,
    }
    config = resolve(words)
    train = config.train.model_copy(update={"lr": lr})  # 0 is no rate that a user may have
    found = build(graph, config.model_copy(update={"train": train}), here=RankContext(with_shelf(world))).strategy
    assert isinstance(found, TemporalStrategy)
    return found


def iterations(strategy: TemporalStrategy, sweeps: int = 1) -> Iterator[tuple[int, StepRecord]]:
    """Train for so many sweeps; the number of every iteration and its record."""
    shape, at = strategy.scheduler.schedule.layout, 0
    for epoch in range(sweeps * shape.epoch_parallel * shape.memory_parallel):
        for record in strategy.train_epoch(epoch):
            yield at, record
            at += 1


def tables(strategy: TemporalStrategy) -> dict[str, Tensor]:
    return {name: table.clone() for name, table in strategy.scheduler.shared.memory.tables.items()}


def weights(strategy: TemporalStrategy) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in strategy.model.named_parameters()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)


def assert_same_losses(found: list[tuple[float, int]], expected: list[tuple[float, int]]) -> None:
    assert [count for _, count in found] == [count for _, count in expected]
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-10)


# -- memories with weights that stay --


def ends_of_sweeps(world: World, sizes: Sizes, sweeps: int) -> dict[int, dict[str, Tensor]]:
    """What a copy remembers after each of its whole sweeps, by the pass whose negatives its batches met first."""
    strategy, found = made(world, sizes, lr=0.0), {}
    schedule = strategy.scheduler.schedule
    begins_late = schedule.begin_of(schedule.iteration_plan(world.rank, 0).memory_copy) > 0
    for at, _ in iterations(strategy, sweeps):
        turn = schedule.iteration_plan(world.rank, at)
        if turn.phase == schedule.sweep - 1 and not (begins_late and turn.sweep == 0):
            found[(turn.sweep * sizes[2] + turn.memory_copy) * sizes[1]] = tables(strategy)
    return found


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 3, 1), (1, 1, 2), (1, 2, 2)], ids=str)
def test_lanes_and_copies_remember_what_one_trainer_does(crew: Crew, sizes: Sizes) -> None:
    """To the bit: negatives decide how many rows are multiplied at a time, so passes are compared with the same."""
    (serial,) = crew.run(1, ends_of_sweeps, ONE, 7)
    assert serial[0]["mail"].any() and serial[0]["memory"].any()
    assert_close(serial[1], serial[0])  # a sweep begins with nothing
    for each in crew.run(sizes[0] * sizes[1] * sizes[2], ends_of_sweeps, sizes, 2):
        assert each
        for number, found in each.items():
            assert_equal(found, serial[number])


# -- sharing a batch --


def shared(world: World, sizes: Sizes, name: str, queries: str) -> dict[str, Any]:
    strategy, losses, grads = made(world, sizes, lr=0.0, name=name, queries=queries), [], []
    for _, record in iterations(strategy):
        losses.append((record.loss, record.count))
        grads.append({key: p.grad.clone() for key, p in strategy.model.named_parameters() if p.grad is not None})
    return {"losses": losses, "grads": grads, "tables": tables(strategy)}


@pytest.mark.parametrize(("size", "name", "queries"), [(2, "tgn", "event"), (3, "tgat", "event"), (2, "tgn", "batch")])
def test_trainers_that_share_a_batch_are_one(crew: Crew, size: int, name: str, queries: str) -> None:
    """Losses, counts and gradients of every step; dropout is on."""
    (serial,) = crew.run(1, shared, ONE, name, queries)
    for found in crew.run(size, shared, (size, 1, 1), name, queries):
        assert_same_losses(found["losses"], serial["losses"])
        assert_close(found["tables"], serial["tables"])
        for one, other in zip(found["grads"], serial["grads"], strict=True):
            assert_close(one, other)


# -- any arrangement, against the same schedule walked through by one process --


def walked(sizes: Sizes, sweeps: int) -> dict[str, Any]:
    """Every trainer's turn one after the other, gradients summed by autograd; memories in plain tables."""
    strategy = made(World())
    task, model, shape = strategy.task, strategy.model, ParallelLayout(1, *sizes[1:])
    bounds = task.parts["train"].batches(BATCH)
    schedule = Schedule(shape, len(bounds) - 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    memories = [
        NodeMemory.empty(task.stream.num_nodes, model.width, torch.float64) for _ in range(shape.memory_parallel)
    ]
    for copy, memory in enumerate(memories):  # one that begins within the stream knows when nodes were last heard of
        begin = schedule.begin_of(copy)
        for event in range(bounds[begin] if begin < schedule.batches else 0):
            memory.tables["memory_event"][[int(task.stream.src[event]), int(task.stream.dst[event])]] = event
    read: dict[int, NodeMemory] = {}
    losses = []
    model.train()
    for iteration in range(sweeps * schedule.sweep):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for rank in range(shape.workers):
            turn = schedule.iteration_plan(rank, iteration)
            if turn.starts_sweep and rank % shape.epoch_parallel == 0:  # the first lane comes first
                memories[turn.memory_copy].reset()
            if turn.batch is None:
                continue
            if turn.is_first:
                read[rank] = memories[turn.memory_copy].copy()
            low, high = bounds[turn.batch], bounds[turn.batch + 1]
            batch: EventBatch = strategy._lookout.batch(low, high, task.sample_negatives(low, high, sweep=turn.number))
            fresh, writes = update_memory(model, task.stream, batch, read[rank].read(batch.block.nodes))
            if turn.is_first and writes is not None:
                memories[turn.memory_copy].write(writes)
            z = embed(model, batch, fresh, None, DrawKey(0, turn.number, 0))
            loss, events = task.loss(model, z, low, high, batch.pairs)
            total, count = total + loss, count + events
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append((float(total.detach()) / count, count))
    return {"losses": losses, "weights": weights(strategy), "tables": [memory.tables for memory in memories]}


def trained(world: World, sizes: Sizes, sweeps: int) -> dict[str, Any]:
    strategy = made(world, sizes)
    losses = [(record.loss, record.count) for _, record in iterations(strategy, sweeps)]
    copy = strategy.scheduler.schedule.iteration_plan(world.rank, 0).memory_copy
    found = {"losses": losses, "weights": weights(strategy), "tables": tables(strategy), "copy": copy}
    found["kept"] = {name: tensor.clone() for name, tensor in strategy.state_dict()["model"].items()}
    return {**found, "val": strategy.validate(), "test": strategy.evaluate("test")}


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1)], ids=str)
def test_training_follows_the_schedule(crew: Crew, sizes: Sizes) -> None:
    expected = walked(sizes, 2)
    every = crew.run(sizes[0] * sizes[1] * sizes[2], trained, sizes, 2)
    alone = made(World())
    alone.load_state_dict({"model": every[0]["kept"]})
    for found in every:
        assert [count for _, count in found["losses"]] == [count for _, count in expected["losses"]]
        assert [loss for loss, _ in found["losses"]] == pytest.approx(
            [loss for loss, _ in expected["losses"]], rel=1e-10
        )
        assert_close(found["weights"], expected["weights"])
        assert_close(found["tables"], expected["tables"][found["copy"]])
        # Evaluations are shared by all trainers and come to what one finds. Which of two scores that differ by rounding
        # alone is higher, and so AP, is no matter of law.
        for mine, other in ((found["val"], alone.validate()), (found["test"], alone.evaluate("test"))):
            assert mine.pop("ap") == pytest.approx(other.pop("ap"), abs=0.01)
            assert mine == pytest.approx(other, rel=1e-9)


# -- who writes, what is drawn --


def noted(world: World, sizes: Sizes) -> list[dict[str, Any]]:
    """Of every iteration: the batch's events and negatives here, and the nodes written."""
    strategy, notes = made(world, sizes), []
    turns, memory = strategy.scheduler, strategy.scheduler.shared.memory
    write, written = memory.write, [torch.empty(0, dtype=torch.int64)]
    memory.write = lambda writes: (written.append(writes.ids), write(writes))[1]  # type: ignore[method-assign]
    shape = turns.schedule.layout
    for at, work in enumerate(turns.items(0, turns.schedule.sweep * 2)):
        if at == 0:
            turns.begin(0)
        turn, batch, rows = work.plan, work.batch, turns.read(work)
        before = len(written)
        if batch is not None and rows is not None:
            _, writes = update_memory(strategy.model, strategy.task.stream, batch, rows)
            turns.write(work, writes)
            events, drawn = list(range(batch.first, batch.end)), batch.negatives.tolist()
        else:
            turns.write(work, None)
            events, drawn = [], []
        sum_over_ranks(strategy._aside, torch.ones(1))
        ids = written[-1].tolist() if len(written) > before else []
        here = turn.memory_copy, turn.sweep, turn.batch, turn.number
        notes.append({"turn": here, "events": events, "negatives": drawn, "ids": ids, "lanes": shape.epoch_parallel})
    return notes


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)], ids=str)
def test_events_count_once_a_pass_and_nodes_are_written_once(crew: Crew, sizes: Sizes) -> None:
    (serial,) = crew.run(1, noted, ONE)
    draws = {}
    for note in serial:
        draws |= {
            (note["turn"][3], event): drawn for event, drawn in zip(note["events"], note["negatives"], strict=True)
        }
    strategy = made(World())
    stream, count = strategy.task.stream, len(strategy.task.parts["train"])
    bounds = strategy.task.parts["train"].batches(BATCH)
    every = crew.run(sizes[0] * sizes[1] * sizes[2], noted, sizes)
    uses: Counter[tuple[int, int]] = Counter()
    writes: dict[tuple[int, int, int], list[int]] = {}
    for notes in every:
        for note in notes:
            copy, sweep, batch, number = note["turn"]
            for event, drawn in zip(note["events"], note["negatives"], strict=True):
                uses[number, event] += 1
                if (number, event) in draws:
                    assert drawn == draws[number, event]
                assert int(stream.dst[event]) not in drawn
            if batch is not None:
                writes.setdefault((copy, sweep, batch), []).extend(note["ids"])
    assert set(uses.values()) == {1}
    whole = [number for number in {number for number, _ in uses} if uses[number, 0] and uses[number, count - 1]]
    assert whole and all(uses[number, event] == 1 for number in whole for event in range(count))
    for (_, _, batch), ids in writes.items():
        low, high = bounds[batch], bounds[batch + 1]
        assert sorted(ids) == torch.unique(torch.cat([stream.src[low:high], stream.dst[low:high]])).tolist()


# -- going on --


def interrupted(world: World, sizes: Sizes, stop: int) -> dict[str, Any]:
    """Train two sweeps; again with another strategy that takes over after ``stop`` iterations."""
    whole = made(world, sizes)
    expected = [record.loss for _, record in iterations(whole, 2)]
    first, done, place = made(world, sizes), [], (0, 0)
    for at, record in iterations(first, 2):
        done.append(record.loss)
        if at + 1 == stop:
            place = record.epoch, record.step + 1
            break
    state: State = {part: {name: t.clone() for name, t in each.items()} for part, each in first.state_dict().items()}
    second = made(world, sizes)
    second.load_state_dict(state)
    passes = sizes[1] * sizes[2]
    for epoch in range(place[0], 2 * passes):
        done += [record.loss for record in second.train_epoch(epoch, place[1] if epoch == place[0] else 0)]
    ends = [weights(whole), tables(whole)], [weights(second), tables(second)]
    return {"losses": (expected, done), "ends": ends}


@pytest.mark.parametrize("sizes", [ONE, (1, 2, 2), (2, 2, 1), (1, 3, 1)], ids=str)
def test_going_on_from_a_state_ends_in_the_same_bits(crew: Crew, sizes: Sizes) -> None:
    for stop in (4, 11):
        for found in crew.run(sizes[0] * sizes[1] * sizes[2], interrupted, sizes, stop):
            expected, done = found["losses"]
            assert done == expected
            for one, other in zip(*found["ends"], strict=True):
                assert_equal(other, one)
