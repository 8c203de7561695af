"""Shared parts of cost estimates: a traced step, sampled blocks, bytes of weights and features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gnnfleet.graph.graph import Graph, validated_edges, validated_nodes
from gnnfleet.graph.sampling.batches import epoch_batches
from gnnfleet.graph.sampling.loader import FeatureGather
from gnnfleet.graph.sampling.sampler import NeighborSampler
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.base import Aggregate, Model
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.ops import buffers
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.memory import peak_tensors
from gnnfleet.sharded.step_tracer import StepTrace, trace_step
from gnnfleet.strategies.batch_inputs import CacheInputs, should_cache_aggregate
from gnnfleet.strategies.estimates import MEMORY_SLACK, PlanningContext
from gnnfleet.strategies.job import PRECISIONS, Job, autocast
from gnnfleet.strategies.sampling_options import FanoutOption, parse_fanouts

BYTES_PER_EDGE = 16.0
"""Bytes of an edge in memory: its ends by destination, and by source for backward."""

BYTES_PER_BLOCK_EDGE = 40.0
"""Bytes of an edge or a row of a block: ends and ids, and the transposed copy for backward."""


@dataclass(frozen=True)
class WeightBytes:
    replicated: int  # that every worker has
    allreduce: int  # sent in a sum of their gradients
    embedding_rows: int

    @classmethod
    def of(cls, model: Model) -> WeightBytes:
        tables = {id(module.weight) for module in model.modules() if isinstance(module, NodeEmbedding)}
        replicated = [parameter for parameter in model.parameters() if id(parameter) not in tables]
        nbytes = sum(parameter.nbytes for parameter in replicated)
        # The sum counts, for each parameter, the ranks that have a gradient.
        counts = sum(parameter.element_size() for parameter in replicated)
        return cls(nbytes, nbytes + counts, sum(parameter.nbytes for parameter in model.parameters()) - nbytes)

    def state(self, share: float = 1.0) -> float:
        """Weights, gradients and two moments of Adam; ``share`` of the embedding rows."""
        return 4 * (self.replicated + share * self.embedding_rows)


def caches_aggregate(job: Job, option: CacheInputs) -> bool:
    """True if training will cache the first layer's aggregate, if memory allows."""
    is_allowed = should_cache_aggregate(option, job.model, hides=job.task.masks_edges, relations=len(job.graph.edges))
    return is_allowed and can_precompute(job.model, job.graph)


def trace_full_batch(context: PlanningContext, option: CacheInputs, has_many_sources: Sequence[bool] = ()) -> StepTrace:
    """Trace a full-batch step on a miniature of a partition; ``has_many_sources`` has an entry per layer, or none."""
    job = context.job
    is_cached = caches_aggregate(job, option)

    def trace() -> StepTrace:
        with autocast(job.precision):
            shard = context.parts()[0]
            return trace_step(job.model, shard, job.dtype, is_cached=is_cached, many=has_many_sources)

    step: StepTrace = context.cached(f"step trace {is_cached} {tuple(has_many_sources)}", trace)
    return step


def feature_bytes(graph: Graph, itemsize: int | None = None) -> float:
    """Bytes of the features of all nodes, as stored or with ``itemsize`` bytes per number."""
    tables = [nodes.x for nodes in graph.nodes.values() if nodes.x is not None]
    return float(sum(x.numel() * (itemsize or x.element_size()) for x in tables))


def evaluation_bytes(job: Job, rows: float, *, layerwise: bool = True) -> float:
    """Peak of an exact pass over ``rows`` rows: input and output of a layer, and a tensor between them."""
    peak = 3.0 * rows * job.model.width * job.dtype.itemsize
    return min(peak, 3.0 * job.evaluation_memory) if layerwise else peak


@dataclass(frozen=True, eq=False)
class ProbeBlocks:
    views: Sequence[Sequence[LocalView]]

    @property
    def num_edges_and_rows(self) -> float:
        """Edges sampled and rows read per batch, on average."""
        return sum(num_edges_and_rows(views) for views in self.views) / len(self.views)

    @property
    def structure_bytes(self) -> float:
        """Bytes of the blocks of a batch."""
        return self.num_edges_and_rows * BYTES_PER_BLOCK_EDGE


def sample_probe_blocks(
    job: Job, items: Tensor, size: int, *, fanouts: FanoutOption, is_cached: bool, replace: bool = False
) -> ProbeBlocks:
    """Sample the blocks of the first two batches of ``size`` items."""
    sampler = NeighborSampler(job.graph, parse_fanouts(fanouts, job.model.num_layers), replace=replace)
    views = []
    for number, batch_items in islice(epoch_batches(items, size, seed=job.seed, epoch=0), 2):
        batch = job.task.batch(batch_items, DrawKey(job.seed, 0, number))
        views.append(sampler.blocks(batch.seeds, batch.key, skip_last_hop=is_cached))
    return ProbeBlocks(views)


def step_peak_bytes(job: Job, views: Sequence[LocalView], *, is_cached: bool) -> float:
    """Measure the peak bytes of tensors in a step on blocks. The model stays unchanged."""
    x, aggregated = gather_inputs(job.model, job.graph, views[0], job.precision, is_cached)
    before = {name: buffer.clone() for name, buffer in job.model.named_buffers()}
    with buffers.unpooled():
        peak = peak_tensors(lambda: run_step_on_blocks(job.model, views, x, aggregated, job.precision))
    for name, buffer in job.model.named_buffers():
        buffer.copy_(before[name])
    job.model.zero_grad(set_to_none=True)
    inputs = float(sum(rows.nbytes for rows in (x.values() if isinstance(x, dict) else [x])))
    return MEMORY_SLACK * (peak + inputs * (2 if is_cached else 1))


def num_edges_and_rows(views: Sequence[LocalView]) -> float:
    """Edges sampled and rows read for the blocks of a batch; sampling time is proportional to it."""
    edges = sum(relation.structure.num_edges for view in views for relation in view.relations.values())
    return float(edges + sum(len(rows.node_ids) for rows in views[0].nodes.values()))


def can_precompute(model: Model, graph: Graph) -> bool:
    """True if the first layer's aggregate can be cached."""
    return _trial_aggregate(model, graph) is not None


def _trial_aggregate(model: Model, graph: Graph) -> Aggregate | None:
    """The first layer's aggregate on a graph of the same types, with two nodes each and no edges."""
    nodes = {kind: validated_nodes(2) for kind in graph.nodes}
    edges = {}
    for kind, table in graph.edges.items():
        ends = torch.empty(2, 0, dtype=torch.int64)
        weight, attr = (None if values is None else values[:0] for values in (table.weight, table.attr))
        edges[kind] = validated_edges(ends, num_src=2, num_dst=2, weight=weight, attr=attr)
    x = {
        kind: torch.zeros(2, 0 if table.x is None else int(table.x.shape[1]), dtype=next(model.parameters()).dtype)
        for kind, table in graph.nodes.items()
    }
    view = LocalView.of_graph(Graph.of(nodes, edges))
    return model.precompute(view, x if len(x) > 1 else next(iter(x.values())))


def gather_inputs(
    model: Model, graph: Graph, view: LocalView, precision: str, is_cached: bool
) -> tuple[Any, Aggregate | None]:
    """(features, aggregate) that a block reads; other rows of the same widths stand in for the aggregate."""
    dtype, x = PRECISIONS[precision], {}
    for kind, rows in view.nodes.items():
        table = graph.nodes[kind].x
        count = len(rows.node_ids)
        x[kind] = torch.empty(count, 0, dtype=dtype) if table is None else FeatureGather(table)(rows.node_ids).to(dtype)
    aggregated: Aggregate | None = None
    trial = _trial_aggregate(model, graph) if is_cached else None
    if isinstance(trial, Tensor):
        (features,) = x.values()
        width = int(features.shape[1])
        both = buffers.empty_buffer((len(features), 2 * width), dtype)
        both[:, :width], both[:, width:] = features, features
        return both[:, width:], both[:, :width]
    if trial is not None:
        aggregated = {kind: rows[:1].expand(len(x[kind.dst]), -1).contiguous() for kind, rows in trial.items()}
    return x if len(x) > 1 else next(iter(x.values())), aggregated


def run_step_on_blocks(
    model: Model, views: Sequence[LocalView], x: Any, aggregated: Aggregate | None, precision: str
) -> None:
    """Run a step without its loss: forward, and backward from gradients of ones."""
    model.train()
    model.zero_grad(set_to_none=True)
    with autocast(precision):
        out = model(views, x, aggregated=aggregated)
    outputs = [rows for rows in (out.values() if isinstance(out, Mapping) else [out]) if rows.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(rows) for rows in outputs])
