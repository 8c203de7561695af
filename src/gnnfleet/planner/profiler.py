"""Profile this machine in one process: a full-batch step on a sample of the graph and a few sampled steps.

Takes seconds for any size of graph. Weights are restored, so nothing is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.graph.sampling.batches import epoch_batches
from gnnfleet.graph.sampling.loader import prepare_backward
from gnnfleet.graph.sampling.sampler import NeighborSampler
from gnnfleet.graph.views.local import LocalEdges, LocalView
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.memory import rss
from gnnfleet.sharded.step_tracer import resized_copy
from gnnfleet.strategies.batch_inputs import should_cache_aggregate
from gnnfleet.strategies.estimates import MachineProfile
from gnnfleet.strategies.job import Job
from gnnfleet.strategies.optim import Adam, make_optimizer
from gnnfleet.strategies.sampling_options import FanoutOption, parse_fanouts
from gnnfleet.strategies.step_costs import can_precompute, gather_inputs, num_edges_and_rows, run_step_on_blocks

MAX_SAMPLE_ROWS, MAX_SAMPLE_EDGES = 40_000, 400_000
"""Limits of the sample of a part that the full-batch step is timed on."""

REPEATS = 3
"""Timed steps after a first one that allocates."""


def profile_machine(job: Job, shard: Shard, fanouts: FanoutOption, batch: int) -> MachineProfile:
    base_memory = _base_memory()
    cached = should_cache_aggregate("auto", job.model, hides=job.task.masks_edges)
    full_batch = _profile_full_batch(job, shard, cached)
    blocks = (0.0, 0.0) if job.model.reads_whole_graph else _profile_blocks(job, fanouts, batch, cached)
    return MachineProfile(1, *full_batch, *blocks, base_memory)


def _base_memory() -> float:
    """Resident bytes of a process after a first step, which loads a good deal of torch from disk."""
    layer = torch.nn.Linear(64, 64)
    optimizer = Adam(layer.parameters(), foreach=False)
    layer(torch.ones(256, 64)).relu().sum().backward()
    optimizer.step()
    return float(rss())


def _profile_full_batch(job: Job, shard: Shard, cached: bool) -> tuple[float, float]:
    """Seconds per (row, edge) of a layer: a step on the first rows of a part without edges, then with them."""
    sample = _sample_view(job.graph, shard)
    counts = {kind: rows.num_dst for kind, rows in sample.nodes.items()}
    model = resized_copy(job.model, counts)
    features = {kind: _random_features(job, kind, count) for kind, count in counts.items()}
    x = features if len(features) > 1 else next(iter(features.values()))
    seconds = []
    for view in (replace(sample, relations={kind: _without_edges(e) for kind, e in sample.relations.items()}), sample):
        aggregated = model.precompute(view, x) if cached else None
        step = partial(run_step_on_blocks, model, [view] * model.num_layers, x, aggregated, job.precision)
        seconds.append(_fastest(step) / model.num_layers)
    edges = sum(relation.structure.num_edges for relation in sample.relations.values())
    return seconds[0] / max(1, sum(counts.values())), max(0.0, seconds[1] - seconds[0]) / max(1, edges)


def _random_features(job: Job, kind: str, count: int) -> Tensor:
    x = job.graph.nodes[kind].x
    return torch.randn(count, 0 if x is None else int(x.shape[1]), dtype=job.dtype)


def _sample_view(graph: Graph, shard: Shard) -> LocalView:
    """The first rows of a part with all their in-edges; the sources are rows without edges."""
    num_rows = sum(shard.nodes(kind).count for kind in shard.node_types)
    num_edges = graph.num_edges // shard.parts
    share = min(1.0, MAX_SAMPLE_ROWS / max(num_rows, 1), MAX_SAMPLE_EDGES / max(num_edges, 1))
    ids = {kind: shard.nodes(kind).store_ids for kind in shard.node_types}
    seeds = {kind: rows[: max(1, round(share * len(rows)))] for kind, rows in ids.items()}
    if not num_rows:
        seeds = {next(iter(ids)): torch.zeros(1, dtype=torch.int64)}
    (block,) = NeighborSampler(graph, [-1]).blocks(seeds, DrawKey())
    nodes = {
        kind: replace(rows, node_ids=torch.arange(len(rows.node_ids)), num_dst=len(rows.node_ids))
        for kind, rows in block.nodes.items()
    }
    relations = {}
    for kind, edges in block.relations.items():
        indptr, added = edges.structure.indptr, nodes[kind.dst].num_dst - edges.structure.num_rows
        structure = replace(edges.structure, indptr=torch.cat([indptr, indptr[-1:].expand(added)]))
        relations[kind] = replace(edges, structure=structure)
    return replace(block, nodes=nodes, relations=relations)


def _without_edges(edges: LocalEdges) -> LocalEdges:
    structure = edges.structure
    return edges.select(CSR(torch.zeros_like(structure.indptr), structure.col[:0], structure.num_cols), slice(0))


def _fastest(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _profile_blocks(job: Job, fanouts: FanoutOption, batch_size: int, cached: bool) -> tuple[float, float]:
    """Seconds of (forward, backward and optimizer; sampling) per row read and edge drawn, in steps on real batches."""
    graph, model, task = job.graph, job.model, job.task
    items = task.train_items(job.seed, 0)
    if not len(items):
        return 0.0, 0.0
    sampler = NeighborSampler(graph, parse_fanouts(fanouts, model.num_layers))
    precomputed = cached and can_precompute(model, graph)
    optimizer = make_optimizer(model, job.train)
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    size = min(batch_size, len(items))
    batches = list(islice(epoch_batches(items, size, seed=job.seed, epoch=0), 1 + REPEATS))
    compute_seconds, sampling_seconds, drawn = 0.0, 0.0, 0.0
    for step in range(1 + REPEATS):
        number, batch_items = batches[step % len(batches)]
        started = time.perf_counter()
        batch = task.batch(batch_items, DrawKey(job.seed, 0, number))
        views = sampler.blocks(batch.seeds, batch.key, skip_last_hop=precomputed)
        views = [task.mask_edges(view, batch) for view in views]
        prepare_backward(views)
        x, aggregated = gather_inputs(model, graph, views[0], job.precision, precomputed)
        sampled = time.perf_counter()
        run_step_on_blocks(model, views, x, aggregated, job.precision)
        optimizer.step()
        if step:  # the first one allocates
            compute_seconds += time.perf_counter() - sampled
            sampling_seconds += sampled - started
            drawn += num_edges_and_rows(views)
    model.load_state_dict(before)
    model.zero_grad(set_to_none=True)
    return compute_seconds / max(1.0, drawn), sampling_seconds / max(1.0, drawn)
