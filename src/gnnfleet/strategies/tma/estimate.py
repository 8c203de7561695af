"""Estimate the cost of a ``tma`` round: weights to and from trainers, and steps on their subgraphs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gnnfleet.graph.sampling.batches import count_batches
from gnnfleet.graph.subgraph import induced_subgraph
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.strategies.estimates import CostEstimate, MachineProfile, PlanningContext
from gnnfleet.strategies.job import Job
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

MESSAGE_SECONDS = 0.05
"""Seconds from the end of a round to the start of the next: the interval at which trainers poll."""


def estimate(config: TmaConfig, context: PlanningContext) -> list[CostEstimate]:
    """Estimate every scheme, or the one that is set."""
    schemes = [config.scheme] if "scheme" in config.model_fields_set else list(PARTITIONER_OF_SCHEME)
    return [_estimate_scheme(config.model_copy(update={"scheme": scheme}), context) for scheme in schemes]


def _estimate_scheme(config: TmaConfig, context: PlanningContext) -> CostEstimate:
    job, profile, workers = context.job, context.shared_profile, context.workers
    trainer: _TrainerEstimate = context.cached(f"trainer {config.partitioner}", lambda: _trainer(config, context))
    step = _step_seconds(config, trainer, profile)
    # Trainers wait while weights are sent to and from the coordinator and corrected there.
    weight_bytes = _weight_bytes(job)
    waiting = 2 * weight_bytes / profile.bandwidth * workers + MESSAGE_SECONDS
    waiting += config.correction_steps * _correction_seconds(config, context)
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
        bytes=workers * 2 * weight_bytes + WeightBytes.of(job.model).embedding_rows,
        rounds=1,
        seconds=waiting + (config.steps * step if config.steps else config.interval),
        passes=steps / count_batches(trainer.items, config.batch),
        steps=int(steps * workers),
        is_synchronous=False,
        reasons=(
            f"{trainer.inner_edges:.0%} of the edges are inside partitions",
            f"each trainer takes {steps:.0f} steps of {step:.2g} s in a round",
        ),
    )


def _step_seconds(config: TmaConfig, trainer: _TrainerEstimate, profile: MachineProfile) -> float:
    if not config.full:
        return (profile.block_seconds + profile.sampling_seconds) * max(1.0, trainer.blocks.num_edges_and_rows)
    graph = trainer.job.graph
    return profile.full_batch_seconds([(float(graph.num_nodes), float(graph.num_edges))] * trainer.job.model.num_layers)


def _weight_bytes(job: Job) -> int:
    """Bytes of the weights in a message."""
    modules = job.model.named_modules(remove_duplicate=False)
    embeddings = [f"{name}.weight" for name, module in modules if isinstance(module, NodeEmbedding)]
    return FlatLayout.of_model(job.model, job.dtype, without=embeddings).nbytes


@dataclass(frozen=True, eq=False)
class _TrainerEstimate:
    """The first trainer."""

    job: Job  # on its subgraph
    items: int
    blocks: ProbeBlocks
    memory: float
    inner_edges: float  # share of all edges that are inside partitions


def _trainer(config: TmaConfig, context: PlanningContext) -> _TrainerEstimate:
    job, task = context.job, context.job.task
    graph = induced_subgraph(job.graph, context.assignment(config).nodes_of(0, context.workers))
    if isinstance(task, NodeTask):
        task = replace(task, nodes=graph.nodes[task.target])
    local_job = replace(job, graph=graph, task=task)
    # Store ids of links differ in a subgraph: their blocks are estimated by those of the whole graph, which are larger.
    probed = local_job if isinstance(task, NodeTask) else job
    is_cached = caches_aggregate(local_job, config.cache_inputs)
    items = probed.task.train_items(job.seed, 0)
    blocks = sample_probe_blocks(
        probed,
        items if len(items) else torch.arange(1),
        config.batch,
        fanouts=config.fanouts,
        is_cached=is_cached,
        replace=config.replace,
    )
    count = len(items) if probed is local_job else len(items) // context.workers
    tensors = step_peak_bytes(probed, blocks.views[0], is_cached=is_cached) + blocks.structure_bytes
    memory = _trainer_memory(local_job, context, tensors, is_cached)
    inner_edges = graph.num_edges * context.workers / max(1, job.graph.num_edges)
    return _TrainerEstimate(local_job, max(1, count), blocks, memory, inner_edges)


def _correction_seconds(config: TmaConfig, context: PlanningContext) -> float:
    """Seconds of a step on the whole graph."""
    if not config.correction_steps:
        return 0.0
    job, profile = context.job, context.single_profile
    is_cached = caches_aggregate(job, config.cache_inputs)
    items = job.task.train_items(job.seed, 0)
    blocks = sample_probe_blocks(job, items, config.batch, fanouts=config.fanouts, is_cached=is_cached)
    return (profile.block_seconds + profile.sampling_seconds) * blocks.num_edges_and_rows


def _trainer_memory(local_job: Job, context: PlanningContext, tensors: float, is_cached: bool) -> float:
    graph = local_job.graph
    features = 2 * feature_bytes(graph) + is_cached * 2 * feature_bytes(graph, local_job.dtype.itemsize)
    resident = context.shared_profile.base_memory + features + graph.num_edges * BYTES_PER_EDGE * 2
    share = graph.num_nodes / max(1, context.job.graph.num_nodes)
    return resident + tensors + WeightBytes.of(local_job.model).state(share)


def _coordinator_memory(context: PlanningContext) -> float:
    job = context.job
    resident = context.shared_profile.base_memory + 2 * feature_bytes(job.graph) + job.graph.num_edges * BYTES_PER_EDGE
    return resident + evaluation_bytes(job, job.graph.num_nodes) + WeightBytes.of(job.model).state()
