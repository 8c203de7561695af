"""Estimate the cost of a ``local`` epoch, full batch and sampled."""

from __future__ import annotations

from gnnfleet.graph.sampling.batches import count_batches
from gnnfleet.graph.sampling.prefetch import auto_depth
from gnnfleet.strategies.estimates import MEMORY_SLACK, CostEstimate, PlanningContext
from gnnfleet.strategies.local.config import LocalConfig
from gnnfleet.strategies.local.strategy import REORDER_MIN_NODES
from gnnfleet.strategies.sampling_options import DEFAULT_BATCH, DEFAULT_FANOUT
from gnnfleet.strategies.step_costs import (
    BYTES_PER_EDGE,
    WeightBytes,
    caches_aggregate,
    evaluation_bytes,
    feature_bytes,
    sample_probe_blocks,
    step_peak_bytes,
    trace_full_batch,
)


def estimate(config: LocalConfig, context: PlanningContext) -> list[CostEstimate]:
    """Estimate full batch and sampled training; only the latter if fanouts are set."""
    fanouts = config.fanouts or (DEFAULT_FANOUT,) * context.job.model.num_layers
    sampled = config.model_copy(update={"fanouts": fanouts})
    if config.batch is None:
        sampled = sampled.model_copy(update={"batch": DEFAULT_BATCH})
    if context.job.model.reads_whole_graph:
        return [_full_batch(config, context)]
    full_batch = [] if config.is_sampled else [_full_batch(config, context)]
    return [*full_batch, _sampled(sampled, context)]


def _full_batch(config: LocalConfig, context: PlanningContext) -> CostEstimate:
    job, profile = context.job, context.single_profile
    graph, layers = job.graph, job.model.num_layers
    ordered = config.order == "cluster" or (config.order == "auto" and graph.num_nodes > REORDER_MIN_NODES)
    loads = [(float(graph.num_nodes), float(graph.num_edges))] * layers
    reach = job.task.reachable_mask()
    if ordered and reach is not None and not job.model.batch_norm and layers > 1:
        target = job.task.target
        num_edges = sum(
            int(edges.indptr.diff()[reach].sum()) if kind.dst == target else edges.count
            for kind, edges in graph.edges.items()
        )
        loads[-1] = float(reach.sum()), float(num_edges)
    steps = count_batches(len(job.task.train_items(job.seed, 0)), config.batch_size)
    rows = sum(rows for rows, _ in loads) / layers
    itemsize = job.dtype.itemsize
    is_cached = caches_aggregate(job, config.cache_inputs)
    features = feature_bytes(graph) + feature_bytes(graph, itemsize) * (1 + 2 * is_cached)
    resident = features + graph.num_edges * 3 * BYTES_PER_EDGE
    tensors = trace_full_batch(context, config.cache_inputs).peak_bytes(int(rows))
    peak = max(MEMORY_SLACK * tensors, evaluation_bytes(job, graph.num_nodes))
    return CostEstimate(
        settings=config.settings_with(),
        kind="exact",
        workers=1,
        memory=profile.base_memory + resident + peak + WeightBytes.of(job.model).state(),
        seconds=steps * profile.full_batch_seconds(loads),
        steps=steps,
        reasons=("one process, the whole graph in every step",),
    )


def _sampled(config: LocalConfig, context: PlanningContext) -> CostEstimate:
    job, profile = context.job, context.single_profile
    is_cached = caches_aggregate(job, config.cache_inputs)
    items = job.task.train_items(job.seed, 0)
    blocks = sample_probe_blocks(
        job, items, config.batch_size, fanouts=config.fanouts, is_cached=is_cached, replace=config.replace
    )
    steps = count_batches(len(items), config.batch_size)
    work, sampling = (
        seconds * blocks.num_edges_and_rows for seconds in (profile.block_seconds, profile.sampling_seconds)
    )
    features = feature_bytes(job.graph)
    prefetch = auto_depth(int(features)) if config.prefetch == "auto" else config.prefetch
    itemsize = job.dtype.itemsize
    resident = features + is_cached * 2 * feature_bytes(job.graph, itemsize) + job.graph.num_edges * BYTES_PER_EDGE
    step = step_peak_bytes(job, blocks.views[0], is_cached=is_cached) + (1 + prefetch) * blocks.structure_bytes
    peak = max(step, evaluation_bytes(job, job.graph.num_nodes) + feature_bytes(job.graph, itemsize))
    return CostEstimate(
        settings=config.settings_with(),
        kind="sampled",
        workers=1,
        memory=profile.base_memory + resident + peak + WeightBytes.of(job.model).state(),
        seconds=steps * (max(work, sampling) if prefetch else work + sampling),
        steps=steps,
        reasons=(f"{steps} steps: sampling {sampling:.2g} s, layers {work:.2g} s each",),
    )
