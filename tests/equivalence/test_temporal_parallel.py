"""Parallel layouts against one trainer: memories, weights, negatives, writes and checkpoints, in processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
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
from tests.ranks import RankPool, with_shm_transport

Sizes = tuple[int, int, int]
"""Degrees of batch, epoch and memory parallelism."""

BATCH, LR = 12, 1e-3
SERIAL = (1, 1, 1)


def build_strategy(
    world: World, sizes: Sizes = SERIAL, *, lr: float = LR, queries: str = "event", **model: Any
) -> TemporalStrategy:
    """Build a strategy on events with ties in time and a short last batch."""
    graph = make_dataset("events", users=12, items=8, events=150, features=3, topics=2, ties=0.3, seed=3)
    strategy = dict(zip(("batch_parallel", "epoch_parallel", "memory_parallel"), sizes, strict=True))
    settings: dict[str, Any] = {
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
    config = resolve(settings)
    train = config.train.model_copy(update={"lr": lr})  # users cannot set 0
    built = build(
        graph, config.model_copy(update={"train": train}), context=RankContext(with_shm_transport(world))
    ).strategy
    assert isinstance(built, TemporalStrategy)
    return built


def iterations(strategy: TemporalStrategy, sweeps: int = 1) -> Iterator[tuple[int, StepRecord]]:
    """Train for some sweeps; yield the number of each iteration and its record."""
    layout, iteration = strategy.scheduler.schedule.layout, 0
    for epoch in range(sweeps * layout.epoch_parallel * layout.memory_parallel):
        for record in strategy.train_epoch(epoch):
            yield iteration, record
            iteration += 1


def tables(strategy: TemporalStrategy) -> dict[str, Tensor]:
    return {name: table.clone() for name, table in strategy.scheduler.shared.memory.tables.items()}


def weights(strategy: TemporalStrategy) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in strategy.model.named_parameters()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-10, atol=1e-12)


def assert_same_losses(actual: list[tuple[float, int]], expected: list[tuple[float, int]]) -> None:
    assert [count for _, count in actual] == [count for _, count in expected]
    assert [loss for loss, _ in actual] == pytest.approx([loss for loss, _ in expected], rel=1e-10)


# -- memories with constant weights --


def ends_of_sweeps(world: World, sizes: Sizes, sweeps: int) -> dict[int, dict[str, Tensor]]:
    """Memory tables after each complete sweep of a copy, by the pass of the first use of its batches."""
    strategy, memories = build_strategy(world, sizes, lr=0.0), {}
    schedule = strategy.scheduler.schedule
    starts_within = schedule.initial_phase(schedule.iteration_plan(world.rank, 0).memory_copy) > 0
    for iteration, _ in iterations(strategy, sweeps):
        plan = schedule.iteration_plan(world.rank, iteration)
        if plan.phase == schedule.sweep - 1 and not (starts_within and plan.sweep == 0):
            memories[(plan.sweep * sizes[2] + plan.memory_copy) * sizes[1]] = tables(strategy)
    return memories


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 3, 1), (1, 1, 2), (1, 2, 2)], ids=str)
def test_memories_of_epoch_and_memory_parallelism_equal_those_of_one_trainer(pool: RankPool, sizes: Sizes) -> None:
    """Bit for bit. Negatives decide the sizes of products, so a pass is compared with the pass of equal negatives."""
    (serial,) = pool.run(1, ends_of_sweeps, SERIAL, 7)
    assert serial[0]["mail"].any() and serial[0]["memory"].any()
    assert_close(serial[1], serial[0])  # a sweep starts with an empty memory
    for memories in pool.run(sizes[0] * sizes[1] * sizes[2], ends_of_sweeps, sizes, 2):
        assert memories
        for number, memory in memories.items():
            assert_equal(memory, serial[number])


# -- sharing a batch --


def train_shared_batches(world: World, sizes: Sizes, name: str, queries: str) -> dict[str, Any]:
    strategy, losses, grads = build_strategy(world, sizes, lr=0.0, name=name, queries=queries), [], []
    for _, record in iterations(strategy):
        losses.append((record.loss, record.count))
        grads.append({key: p.grad.clone() for key, p in strategy.model.named_parameters() if p.grad is not None})
    return {"losses": losses, "grads": grads, "tables": tables(strategy)}


@pytest.mark.parametrize(("size", "name", "queries"), [(2, "tgn", "event"), (3, "tgat", "event"), (2, "tgn", "batch")])
def test_trainers_that_share_a_batch_equal_one_trainer(pool: RankPool, size: int, name: str, queries: str) -> None:
    """Losses, counts and gradients of all steps, with dropout."""
    (serial,) = pool.run(1, train_shared_batches, SERIAL, name, queries)
    for parallel in pool.run(size, train_shared_batches, (size, 1, 1), name, queries):
        assert_same_losses(parallel["losses"], serial["losses"])
        assert_close(parallel["tables"], serial["tables"])
        for grads, serial_grads in zip(parallel["grads"], serial["grads"], strict=True):
            assert_close(grads, serial_grads)


# -- any layout, against the same schedule followed by one process --


def follow_schedule(sizes: Sizes, sweeps: int) -> dict[str, Any]:
    """Run all trainers in sequence with gradients summed by autograd and memories in plain tables."""
    strategy = build_strategy(World())
    task, model, layout = strategy.task, strategy.model, ParallelLayout(1, *sizes[1:])
    bounds = task.parts["train"].batches(BATCH)
    schedule = Schedule(layout, len(bounds) - 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    memories = [
        NodeMemory.empty(task.stream.num_nodes, model.width, torch.float64) for _ in range(layout.memory_parallel)
    ]
    for memory_copy, memory in enumerate(memories):  # one that starts within the stream has the times of last events
        phase = schedule.initial_phase(memory_copy)
        for event in range(bounds[phase] if phase < schedule.batches else 0):
            memory.tables["memory_event"][[int(task.stream.src[event]), int(task.stream.dst[event])]] = event
    rows_read: dict[int, NodeMemory] = {}
    losses = []
    model.train()
    for iteration in range(sweeps * schedule.sweep):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for rank in range(layout.workers):
            plan = schedule.iteration_plan(rank, iteration)
            if plan.starts_sweep and rank % layout.epoch_parallel == 0:  # only the first rank of the copy resets it
                memories[plan.memory_copy].reset()
            if plan.batch is None:
                continue
            if plan.is_first:
                rows_read[rank] = deepcopy(memories[plan.memory_copy])
            low, high = bounds[plan.batch], bounds[plan.batch + 1]
            batch: EventBatch = strategy._builder.batch(
                low, high, task.sample_negatives(torch.arange(low, high), sweep=plan.pass_number)
            )
            updated, update = update_memory(model, task.stream, batch, rows_read[rank].read(batch.block.nodes))
            if plan.is_first and update is not None:
                memories[plan.memory_copy].write(update)
            z = embed(model, batch, updated, None, DrawKey(0, plan.pass_number, 0))
            loss, events = task.loss(model, z, torch.arange(low, high), batch.pairs)
            total, count = total + loss, count + events
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append((float(total.detach()) / count, count))
    return {"losses": losses, "weights": weights(strategy), "tables": [memory.tables for memory in memories]}


def trained(world: World, sizes: Sizes, sweeps: int) -> dict[str, Any]:
    strategy = build_strategy(world, sizes)
    losses = [(record.loss, record.count) for _, record in iterations(strategy, sweeps)]
    memory_copy = strategy.scheduler.schedule.iteration_plan(world.rank, 0).memory_copy
    outcome = {"losses": losses, "weights": weights(strategy), "tables": tables(strategy), "copy": memory_copy}
    outcome["model"] = {name: tensor.clone() for name, tensor in strategy.state_dict()["model"].items()}
    return {**outcome, "val": strategy.validate(), "test": strategy.evaluate("test")}


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1)], ids=str)
def test_training_follows_the_schedule(pool: RankPool, sizes: Sizes) -> None:
    expected = follow_schedule(sizes, 2)
    outcomes = pool.run(sizes[0] * sizes[1] * sizes[2], trained, sizes, 2)
    alone = build_strategy(World())
    alone.load_state_dict({"model": outcomes[0]["model"]})
    for outcome in outcomes:
        assert [count for _, count in outcome["losses"]] == [count for _, count in expected["losses"]]
        assert [loss for loss, _ in outcome["losses"]] == pytest.approx(
            [loss for loss, _ in expected["losses"]], rel=1e-10
        )
        assert_close(outcome["weights"], expected["weights"])
        assert_close(outcome["tables"], expected["tables"][outcome["copy"]])
        # Evaluations are shared by all trainers and equal that of one. AP depends on the order of scores that differ by
        # rounding only, so it has a tolerance.
        for parallel, serial in ((outcome["val"], alone.validate()), (outcome["test"], alone.evaluate("test"))):
            assert parallel.pop("ap") == pytest.approx(serial.pop("ap"), abs=0.01)
            assert parallel == pytest.approx(serial, rel=1e-9)


# -- writes and negatives --


def record_writes(world: World, sizes: Sizes) -> list[dict[str, Any]]:
    """Events, negatives and written nodes of this trainer in each iteration."""
    strategy, records = build_strategy(world, sizes), []
    scheduler, memory = strategy.scheduler, strategy.scheduler.shared.memory
    write, written = memory.write, [torch.empty(0, dtype=torch.int64)]
    memory.write = lambda update: (written.append(update.ids), write(update))[1]  # type: ignore[method-assign]
    lanes = scheduler.schedule.layout.epoch_parallel
    for iteration, work in enumerate(scheduler.items(0, scheduler.schedule.sweep * 2)):
        if iteration == 0:
            scheduler.begin(0)
        plan, batch, rows = work.plan, work.batch, scheduler.read(work)
        before = len(written)
        if batch is not None and rows is not None:
            _, update = update_memory(strategy.model, strategy.task.stream, batch, rows)
            scheduler.write(work, update)
            events, negatives = list(range(batch.first, batch.end)), batch.negatives.tolist()
        else:
            scheduler.write(work, None)
            events, negatives = [], []
        sum_over_ranks(strategy._uncounted, torch.ones(1))
        ids = written[-1].tolist() if len(written) > before else []
        position = plan.memory_copy, plan.sweep, plan.batch, plan.pass_number
        records.append({"plan": position, "events": events, "negatives": negatives, "ids": ids, "lanes": lanes})
    return records


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)], ids=str)
def test_events_are_used_once_a_pass_and_nodes_are_written_once(pool: RankPool, sizes: Sizes) -> None:
    (serial,) = pool.run(1, record_writes, SERIAL)
    negatives_of_one = {
        (record["plan"][3], event): negatives
        for record in serial
        for event, negatives in zip(record["events"], record["negatives"], strict=True)
    }
    strategy = build_strategy(World())
    stream, count = strategy.task.stream, len(strategy.task.parts["train"])
    bounds = strategy.task.parts["train"].batches(BATCH)
    uses: Counter[tuple[int, int]] = Counter()
    writes: dict[tuple[int, int, int], list[int]] = {}
    for records in pool.run(sizes[0] * sizes[1] * sizes[2], record_writes, sizes):
        for record in records:
            memory_copy, sweep, batch, pass_number = record["plan"]
            for event, negatives in zip(record["events"], record["negatives"], strict=True):
                uses[pass_number, event] += 1
                assert negatives == negatives_of_one.get((pass_number, event), negatives)
                assert int(stream.dst[event]) not in negatives
            if batch is not None:
                writes.setdefault((memory_copy, sweep, batch), []).extend(record["ids"])
    assert set(uses.values()) == {1}
    complete_passes = [
        number for number in {number for number, _ in uses} if uses[number, 0] and uses[number, count - 1]
    ]
    assert complete_passes and all(uses[number, event] == 1 for number in complete_passes for event in range(count))
    for (_, _, batch), ids in writes.items():
        low, high = bounds[batch], bounds[batch + 1]
        assert sorted(ids) == torch.unique(torch.cat([stream.src[low:high], stream.dst[low:high]])).tolist()


# -- resuming --


def interrupted(world: World, sizes: Sizes, stop: int) -> dict[str, Any]:
    """Train two sweeps; again with a second strategy that resumes after ``stop`` iterations."""
    uninterrupted = build_strategy(world, sizes)
    expected = [record.loss for _, record in iterations(uninterrupted, 2)]
    first, losses, position = build_strategy(world, sizes), [], (0, 0)
    for iteration, record in iterations(first, 2):
        losses.append(record.loss)
        if iteration + 1 == stop:
            position = record.epoch, record.step + 1
            break
    state: State = {
        group: {name: t.clone() for name, t in tensors.items()} for group, tensors in first.state_dict().items()
    }
    second = build_strategy(world, sizes)
    second.load_state_dict(state)
    passes = sizes[1] * sizes[2]
    for epoch in range(position[0], 2 * passes):
        losses += [record.loss for record in second.train_epoch(epoch, position[1] if epoch == position[0] else 0)]
    ends = [weights(uninterrupted), tables(uninterrupted)], [weights(second), tables(second)]
    return {"losses": (expected, losses), "ends": ends}


@pytest.mark.parametrize("sizes", [SERIAL, (1, 2, 2), (2, 2, 1), (1, 3, 1)], ids=str)
def test_resumed_training_is_equal_bit_for_bit(pool: RankPool, sizes: Sizes) -> None:
    for stop in (4, 11):
        for runs in pool.run(sizes[0] * sizes[1] * sizes[2], interrupted, sizes, stop):
            expected, losses = runs["losses"]
            assert losses == expected
            for uninterrupted, resumed in zip(*runs["ends"], strict=True):
                assert_equal(resumed, uninterrupted)
