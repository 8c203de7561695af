"""What an epoch of ``local`` takes: full batch, and on sampled blocks."""

from __future__ import annotations

from gnnfleet.graph.sampling.batches import count_batches
from gnnfleet.graph.sampling.prefetch import wise_depth
from gnnfleet.strategies.estimates import SLACK, Forecast, Outlook
from gnnfleet.strategies.job import PRECISIONS
from gnnfleet.strategies.local.config import LocalConfig
from gnnfleet.strategies.local.strategy import ORDER_NODES
from gnnfleet.strategies.sampling_options import FANOUT, SAMPLED_BATCH
from gnnfleet.strategies.step_costs import (
    EDGE,
    Weights,
    draw_blocks,
    evaluation_bytes,
    feature_bytes,
    keeps_aggregate,
    sketch_of,
    step_tensors,
)


def foresee(config: LocalConfig, outlook: Outlook) -> list[Forecast]:
    """Both ways; only the sampled one where fanouts are given."""
    fanouts = config.fanouts or (FANOUT,) * outlook.job.model.num_layers
    sampled = config.model_copy(update={"fanouts": fanouts})
    if config.batch is None:
        sampled = sampled.model_copy(update={"batch": SAMPLED_BATCH})
    found = [] if config.samples else [_full(config, outlook)]
    return [*found, _sampled(sampled, outlook)]


def _full(config: LocalConfig, outlook: Outlook) -> Forecast:
    job, pace = outlook.job, outlook.alone
    graph, layers = job.graph, job.model.num_layers
    ordered = config.order == "cluster" or (config.order == "auto" and graph.num_nodes > ORDER_NODES)
    loads = [(float(graph.num_nodes), float(graph.num_edges))] * layers
    reach = job.task.reach()
    if ordered and reach is not None and not job.model.batch_norm and layers > 1:
        target = job.task.target
        edges = sum(
            int(each.indptr.diff()[reach].sum()) if kind.dst == target else each.count
            for kind, each in graph.edges.items()
        )
        loads[-1] = float(reach.sum()), float(edges)
    steps = count_batches(len(job.task.trained(job.seed, 0)), config.batch_size)
    rows = sum(rows for rows, _ in loads) / layers
    itemsize = PRECISIONS[job.precision].itemsize
    keeps = keeps_aggregate(job, config.cache_inputs)
    held = feature_bytes(graph) + feature_bytes(graph, itemsize) * (1 + 2 * keeps) + graph.num_edges * 3 * EDGE
    tensors = sketch_of(outlook, config.cache_inputs).tensors(int(rows))
    most = max(SLACK * tensors, evaluation_bytes(job, graph.num_nodes))
    return Forecast(
        words={**config.model_dump(exclude_defaults=True), "name": "local"},
        kind="exact",
        workers=1,
        memory=pace.resident + held + most + Weights.of(job.model).state(),
        seconds=steps * (pace.walk(loads) + pace.step),
        steps=steps,
        reasons=("one process, the whole graph in every step",),
    )


def _sampled(config: LocalConfig, outlook: Outlook) -> Forecast:
    job, pace = outlook.job, outlook.alone
    given = keeps_aggregate(job, config.cache_inputs)
    items = job.task.trained(job.seed, 0)
    blocks = draw_blocks(job, items, config.batch_size, fanouts=config.fanouts, given=given, replace=config.replace)
    steps = count_batches(len(items), config.batch_size)
    work, making = pace.sampled(blocks.loads), pace.draw * blocks.amount
    features = feature_bytes(job.graph)
    ahead = wise_depth(int(features)) if config.prefetch == "auto" else config.prefetch
    itemsize = PRECISIONS[job.precision].itemsize
    held = features + given * 2 * feature_bytes(job.graph, itemsize) + job.graph.num_edges * EDGE
    step = step_tensors(job, blocks.views[0], given=given) + (1 + ahead) * blocks.structure
    most = max(step, evaluation_bytes(job, job.graph.num_nodes) + feature_bytes(job.graph, itemsize))
    return Forecast(
        words={**config.model_dump(exclude_defaults=True), "name": "local"},
        kind="sampled",
        workers=1,
        memory=pace.resident + held + most + Weights.of(job.model).state(),
        seconds=steps * (max(work, making) if ahead else work + making),
        steps=steps,
        reasons=(f"{steps} steps: blocks {making:.2g} s, layers {work:.2g} s each",),
    )
