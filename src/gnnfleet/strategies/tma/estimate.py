"""What a round of ``tma`` takes: weights there and back; steps on the subgraph of a trainer's own nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gnnfleet.graph.sampling.batches import count_batches
from gnnfleet.graph.subgraph import induced_subgraph
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.strategies.estimates import CostEstimate, MachineProfile, PlanningContext
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
from gnnfleet.tasks.node import NodeTask


def estimate(config: TmaConfig, context: PlanningContext) -> list[CostEstimate]:
    """Every scheme, or the one that is set."""
    names = [config.scheme] if "scheme" in config.model_fields_set else list(PARTITIONER_OF_SCHEME)
    return [_estimate_scheme(config.model_copy(update={"scheme": scheme}), context) for scheme in names]


def _estimate_scheme(config: TmaConfig, context: PlanningContext) -> CostEstimate:
    job, profile, workers = context.job, context.shared_profile, context.workers
    trainer: _TrainerEstimate = context.cached(f"trainer {config.partitioner}", lambda: _trainer(config, context))
    step = _step_seconds(config, trainer, profile)
    # Trainers wait while weights are sent to and from the coordinator and corrected there.
    packed = _packed(job)
    waiting = 2 * packed / profile.bandwidth * workers + MESSAGE_SECONDS
    waiting += config.correction_steps * _correction(config, context)
    steps = config.steps or max(1.0, (config.interval - waiting) / step)
    return CostEstimate(
        settings={
            **config.model_dump(exclude_defaults=True, exclude={"scheme"}),
            "name": "tma",
            "scheme": config.scheme,
        },
        kind="approximate",
        workers=workers,
        memory=max(trainer.memory, _coordinator_memory(context)),
        bytes=workers * (2 * packed + _moments(config, job)) + WeightBytes.of(job.model).embedding_rows,
        rounds=1,
        seconds=waiting + (config.steps * step if config.steps else config.interval),
        passes=steps / count_batches(trainer.items, config.batch),
        steps=int(steps * workers),
        is_synchronous=False,
        reasons=(
            f"{trainer.kept:.0%} of the edges are inside partitions",
            f"each trainer takes {steps:.0f} steps of {step:.2g} s in a round",
        ),
    )


def _step_seconds(config: TmaConfig, trainer: _TrainerEstimate, profile: MachineProfile) -> float:
    if not config.full:
        return (profile.block_seconds + profile.sampling_seconds) * max(1.0, trainer.blocks.num_edges_and_rows)
    graph = trainer.job.graph
    return profile.full_batch_seconds([(float(graph.num_nodes), float(graph.num_edges))] * trainer.job.model.num_layers)


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
    return (pace.block_seconds + pace.sampling_seconds) * blocks.num_edges_and_rows


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
