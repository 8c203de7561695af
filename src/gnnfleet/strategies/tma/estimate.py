"""What a round of ``tma`` takes: weights there and back; steps on the subgraph of a trainer's own nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gnnfleet.comm.collectives import barrier, max_over_ranks
from gnnfleet.comm.world import World
from gnnfleet.graph.sampling.batches import count_batches
from gnnfleet.graph.subgraph import induced_subgraph
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.strategies.estimates import CostEstimate, PlanningContext
from gnnfleet.strategies.job import PRECISIONS, Job
from gnnfleet.strategies.step_costs import (
    BYTES_PER_EDGE,
    ProbeBlocks,
    WeightBytes,
    caches_aggregate,
    evaluation_bytes,
    feature_bytes,
    sample_probe_blocks,
    step_peak_bytes,
)
from gnnfleet.strategies.tma.averaging import FlatLayout
from gnnfleet.strategies.tma.config import PARTITIONER_OF_SCHEME, TmaConfig
from gnnfleet.strategies.tma.trainer import LocalTraining
from gnnfleet.tasks.node import NodeTask


def estimate(config: TmaConfig, outlook: PlanningContext) -> list[CostEstimate]:
    """For every scheme, or the one that is asked for."""
    names = [config.scheme] if "scheme" in config.model_fields_set else list(PARTITIONER_OF_SCHEME)
    schemes = [config.model_copy(update={"scheme": scheme}) for scheme in names]
    steps = [_step(scheme, outlook) for scheme in schemes]
    tried = _tried(schemes, outlook) if outlook.run_trials is not None and max(steps) <= LONG_STEP_SECONDS else {}
    return [
        _scheme(scheme, outlook, step, tried.get(scheme.partitioner, 0.0))
        for scheme, step in zip(schemes, steps, strict=True)
    ]


def _step(config: TmaConfig, outlook: PlanningContext) -> float:
    """Seconds of a step of a trainer, by the paces of layers."""
    pace, trainer = outlook.shared_profile, _first(config, outlook)
    if not config.full:
        return (
            pace.sampled_step_seconds(trainer.blocks.layer_loads)
            + pace.sampling_seconds * trainer.blocks.num_edges_and_rows
        )
    graph, model = trainer.job.graph, trainer.job.model
    return (
        pace.layer_seconds([(float(graph.num_nodes), float(graph.num_edges))] * model.num_layers)
        + pace.optimizer_seconds
    )


def _tried(schemes: Sequence[TmaConfig], outlook: PlanningContext) -> dict[str, float]:
    """{how nodes are cut: seconds of a step, as all trainers found together}."""
    assert outlook.run_trials is not None
    by = {scheme.partitioner: scheme for scheme in schemes}  # those that are cut alike train alike
    return {name: float(said["step"]) for name, said in zip(by, outlook.run_trials(list(by.values())), strict=True)}


def _first(config: TmaConfig, outlook: PlanningContext) -> _TrainerEstimate:
    found: _TrainerEstimate = outlook.cached(f"trainer {config.partitioner}", lambda: _trainer(config, outlook))
    return found


def _scheme(config: TmaConfig, outlook: PlanningContext, foreseen: float, tried: float) -> CostEstimate:
    job, pace, workers, trainer = outlook.job, outlook.shared_profile, outlook.workers, _first(config, outlook)
    step = tried or foreseen
    how = f" (tried; foreseen were {foreseen:.2g} s)" if tried else ""
    steps = count_batches(trainer.items, config.batch)
    # Weights go down and come up again while nobody trains; corrections are made meanwhile.
    packed = _packed(job)
    beside = (
        2 * packed / pace.bandwidth * workers + MESSAGE_SECONDS + config.correction_steps * _correction(config, outlook)
    )
    a_round = beside + (config.steps * step if config.steps else config.interval)
    made = config.steps if config.steps else max(1.0, (config.interval - beside) / step)
    learnt = WeightBytes.of(job.model).embedding_rows
    return CostEstimate(
        words={**config.model_dump(exclude_defaults=True, exclude={"scheme"}), "name": "tma", "scheme": config.scheme},
        kind="approximate",
        workers=workers,
        memory=max(trainer.memory, _coordinator_memory(outlook)),
        bytes=workers * (2 * packed + _moments(config, job)) + learnt,
        rounds=1,
        seconds=a_round,
        passes=made / steps,
        steps=int(made * workers),
        is_walk=False,
        reasons=(
            f"{trainer.kept:.0%} of the edges are inside parts",
            f"a step takes {step:.2g} s{how}, so a round has {made:.0f} of each trainer",
        ),
    )


LONG_STEP_SECONDS, TIMED_SECONDS, WARMUP_STEPS, MIN_TIMED_STEPS = 1.0, 1.5, 2, 3
"""Seconds of a step that is not tried; seconds of steps that are timed, steps before them, steps at least."""


def time_steps(alone: LocalTraining, world: World) -> dict[str, Any]:
    """Seconds of a step of the slowest trainer, while all of them make steps; 0 where nobody has anything to do."""
    walk = _forever(alone)
    barrier(world)
    began, made = time.perf_counter(), -WARMUP_STEPS
    for _ in walk:
        made += 1
        if made == 0:
            began = time.perf_counter()
        if made >= MIN_TIMED_STEPS and time.perf_counter() - began > TIMED_SECONDS:
            break
    each = (time.perf_counter() - began) / made if made > 0 else 0.0
    slowest = max_over_ranks(world, each)
    alone.strategy.close()
    return {"step": slowest}


def _forever(alone: LocalTraining) -> Iterator[Any]:
    epoch = 0
    while alone.items(epoch):
        yield from alone.strategy.train_epoch(epoch)
        epoch += 1


MESSAGE_SECONDS = 0.05
"""Seconds from the end of a round to the beginning of the next: trainers look for news that often."""


def _packed(job: Job) -> int:
    """Bytes of the weights as they travel."""
    names = [name for name, _ in job.model.named_parameters(remove_duplicate=False)]
    rows = tuple(name for name in names if _is_learnt(job, name))
    return FlatLayout.of(job.model.state_dict(), PRECISIONS[job.precision], without=rows, parameters=names).nbytes


def _moments(config: TmaConfig, job: Job) -> int:
    """Bytes of what the optimizer remembers, where that is averaged too."""
    if config.optimizer != "average":
        return 0
    numbers = [each.numel() for name, each in job.model.named_parameters() if not _is_learnt(job, name)]
    adam = job.train.optimizer != "sgd"
    each = [2 * count + 1 if adam else count * bool(job.train.momentum) for count in numbers]
    return sum(each) * PRECISIONS[job.precision].itemsize


def _is_learnt(job: Job, name: str) -> bool:
    module = job.model.get_submodule(name.rpartition(".")[0])
    return isinstance(module, NodeEmbedding)


@dataclass(frozen=True, eq=False)
class _TrainerEstimate:
    """The first of them."""

    job: Job  # its subgraph
    items: int
    blocks: ProbeBlocks
    memory: float
    kept: float  # the share of edges that all of them keep


def _trainer(config: TmaConfig, outlook: PlanningContext) -> _TrainerEstimate:
    job = outlook.job
    own = outlook.assignment(config).nodes_of(0, outlook.workers)
    graph = induced_subgraph(job.graph, own)
    task = job.task
    if isinstance(task, NodeTask):
        task = replace(task, nodes=graph.nodes[task.target])
    kept = graph.num_edges * outlook.workers / max(1, job.graph.num_edges)
    part = replace(job, graph=graph, task=task)
    # Targets of a subgraph have other numbers: of links the blocks are those of the whole graph, which are larger.
    seen = part if isinstance(task, NodeTask) else job
    items, given = seen.task.train_items(job.seed, 0), caches_aggregate(part, config.cache_inputs)
    some = items if len(items) else torch.arange(1)
    blocks = sample_probe_blocks(seen, some, config.batch, fanouts=config.fanouts, given=given, replace=config.replace)
    count = len(items) if seen is part else len(items) // outlook.workers
    tensors = step_peak_bytes(seen, blocks.views[0], given=given) + blocks.structure_bytes
    return _TrainerEstimate(part, max(1, count), blocks, _trainer_memory(part, outlook, tensors, given), kept)


def _correction(config: TmaConfig, outlook: PlanningContext) -> float:
    """Seconds of a step on the whole graph."""
    if not config.correction_steps:
        return 0.0
    job, pace = outlook.job, outlook.single_profile
    given = caches_aggregate(job, config.cache_inputs)
    items = job.task.train_items(job.seed, 0)
    blocks = sample_probe_blocks(job, items, config.batch, fanouts=config.fanouts, given=given)
    return pace.sampled_step_seconds(blocks.layer_loads) + pace.sampling_seconds * blocks.num_edges_and_rows


def _trainer_memory(part: Job, outlook: PlanningContext, tensors: float, given: bool) -> float:
    itemsize = PRECISIONS[part.precision].itemsize
    held = 2 * feature_bytes(part.graph) + given * 2 * feature_bytes(part.graph, itemsize)
    held += part.graph.num_edges * BYTES_PER_EDGE * 2
    share = part.graph.num_nodes / max(1, outlook.job.graph.num_nodes)
    return outlook.shared_profile.base_memory + held + tensors + WeightBytes.of(part.model).state(share)


def _coordinator_memory(outlook: PlanningContext) -> float:
    job = outlook.job
    held = 2 * feature_bytes(job.graph) + job.graph.num_edges * BYTES_PER_EDGE
    return (
        outlook.shared_profile.base_memory
        + held
        + evaluation_bytes(job, job.graph.num_nodes)
        + WeightBytes.of(job.model).state()
    )
