"""Profile this machine in one process: a full-batch step on a sample of the graph and a few sampled steps.

Takes seconds for any size of graph. Weights are restored, so nothing is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from gnnfleet.graph.graph import EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.graph.sampling.batches import epoch_batches
from gnnfleet.graph.sampling.loader import prepare_backward
from gnnfleet.graph.sampling.sampler import NeighborSampler
from gnnfleet.graph.views.local import LocalView
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.memory import rss
from gnnfleet.sharded.full_batch.active_row_counts import SubPartition, sub_partition
from gnnfleet.sharded.step_tracer import ones_like, resized_copy
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
    cached = should_cache_aggregate("auto", hides=job.task.masks_edges)
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
    num_rows = sum(shard.nodes(kind).count for kind in shard.node_types)
    num_edges = sum(len(shard.block(kind, "in", q).cols) for kind in shard.edge_types for q in range(shard.parts))
    share = min(1.0, MAX_SAMPLE_ROWS / max(num_rows, 1), MAX_SAMPLE_EDGES / max(num_edges, 1))
    sample = sub_partition(shard, share)
    model, dtype = resized_copy(job.model, sample.sources), job.dtype
    features = {kind: _random_features(shard, kind, count, dtype) for kind, count in sample.sources.items()}
    x = features if len(features) > 1 else next(iter(features.values()))
    seconds = []
    for has_edges in (False, True):
        view = _sample_view(shard, sample, has_edges=has_edges).with_step(key=DrawKey())
        aggregated = model.precompute(view, x) if cached else None
        step = partial(run_step_on_blocks, model, [view] * model.num_layers, x, aggregated, job.precision)
        seconds.append(_fastest(step) / model.num_layers)
    rows = sum(sample.sources.values())
    edges = sum(ends.shape[1] for ends in sample.edge_index.values())
    return seconds[0] / max(1, rows), max(0.0, seconds[1] - seconds[0]) / max(1, edges)


def _random_features(shard: Shard, kind: str, count: int, dtype: torch.dtype) -> Tensor:
    x = shard.nodes(kind).x
    return torch.randn(count, 0 if x is None else int(x.shape[1]), dtype=dtype)


def _sample_view(shard: Shard, sample: SubPartition, *, has_edges: bool) -> LocalView:
    nodes = {kind: validated_nodes(count) for kind, count in sample.sources.items()}
    edges = {}
    for name, ends in sample.edge_index.items():
        kind = EdgeType(*name)
        ends = ends if has_edges else ends[:, :0]
        weight, attr = (ones_like(shard.edge_data(kind, field), ends.shape[1]) for field in ("weight", "attr"))
        num_src, num_dst = sample.sources[kind.src], sample.sources[kind.dst]
        edges[kind] = validated_edges(ends, num_src=num_src, num_dst=num_dst, weight=weight, attr=attr)
    return LocalView.of_graph(Graph.of(nodes, edges))


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
        x, aggregated = gather_inputs(graph, views[0], job.precision, precomputed)
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
