"""What forecasts of several strategies have in common: a scouted step, drawn blocks, what weights and features take."""

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
from gnnfleet.ops.buffers import unpooled
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.memory import peak_tensors
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.sharded.step_tracer import StepTrace, trace_step
from gnnfleet.strategies.estimates import MEMORY_SLACK, PlanningContext
from gnnfleet.strategies.input_cache import (
    MAX_CACHED_RELATIONS,
    CacheInputs,
    precompute_aggregate,
    should_cache_aggregate,
)
from gnnfleet.strategies.job import PRECISIONS, Job, autocast
from gnnfleet.strategies.sampling_options import DEFAULT_FANOUT, FanoutOption, fanouts_by_hop

BYTES_PER_EDGE = 16.0
"""Bytes that an edge takes in memory: its ends by destination, and by source for backward."""

BYTES_PER_BLOCK_EDGE = 40.0


@dataclass(frozen=True)
class WeightBytes:
    """Bytes: of the parameters that every worker has, of a sum of their gradients, of the rows learnt for nodes."""

    nbytes: int
    allreduce_bytes: int
    embedding_rows: int

    @classmethod
    def of(cls, model: Model) -> WeightBytes:
        learnt = {id(module.weight) for module in model.modules() if isinstance(module, NodeEmbedding)}
        common = [each for each in model.parameters() if id(each) not in learnt]
        nbytes = sum(each.nbytes for each in common)
        # After the gradients, a number for each parameter: how many ranks have one.
        summed = nbytes + sum(each.element_size() for each in common)
        return cls(nbytes, summed, sum(each.nbytes for each in model.parameters() if id(each) in learnt))

    def state(self, share: float = 1.0) -> float:
        """Weights, their gradients, and what Adam remembers of each twice; of learnt rows a share."""
        return 4 * (self.nbytes + share * self.embedding_rows)


def caches_aggregate(job: Job, wanted: CacheInputs) -> bool:
    """Whether the first layer's aggregate will be kept, memory apart."""
    few = len(job.graph.edges) <= MAX_CACHED_RELATIONS or wanted is True
    return few and should_cache_aggregate(wanted, hides=job.task.masks_edges) and can_precompute(job.model, job.graph)


def trace_full_batch(outlook: PlanningContext, wanted: CacheInputs, many: Sequence[bool] = ()) -> StepTrace:
    """A full-batch step, scouted on stand-ins for a part; ``many`` as of ``trace_step``."""
    job = outlook.job
    keeps = caches_aggregate(job, wanted)

    def precompute(model: Model, view: RingView, x: Any) -> Aggregate | None:
        return precompute_aggregate(wanted, model, view, x) if keeps else None

    def find() -> StepTrace:
        with autocast(job.precision):
            return trace_step(job.model, outlook.parts()[0], PRECISIONS[job.precision], precompute, many)

    found: StepTrace = outlook.cached(f"sketch {keeps} {tuple(many)}", find)
    return found


def feature_bytes(graph: Graph, itemsize: int | None = None) -> float:
    """Of all nodes; as they are stored, or in numbers of ``itemsize``."""
    tables = [nodes.x for nodes in graph.nodes.values() if nodes.x is not None]
    return float(sum(x.numel() * (itemsize or x.element_size()) for x in tables))


def evaluation_bytes(job: Job, rows: float, *, in_pieces: bool = True) -> float:
    """At the peak of an exact pass over so many rows: what a layer reads, what it makes, and one more in between."""
    most = 3.0 * rows * job.model.width * PRECISIONS[job.precision].itemsize
    return min(most, 3.0 * job.evaluation_memory) if in_pieces else most


@dataclass(frozen=True, eq=False)
class ProbeBlocks:
    """The blocks of some batches."""

    views: Sequence[Sequence[LocalView]]

    @property
    def num_edges_and_rows(self) -> float:
        """Edges drawn and rows read, on average."""
        return sum(num_drawn(views) for views in self.views) / len(self.views)

    @property
    def structure_bytes(self) -> float:
        """Bytes of the blocks of a batch: ends and ids of edges, and the same turned round for backward."""
        return self.num_edges_and_rows * BYTES_PER_BLOCK_EDGE


def sample_probe_blocks(
    job: Job, items: Tensor, size: int, *, fanouts: FanoutOption, given: bool, replace: bool = False, count: int = 2
) -> ProbeBlocks:
    """The blocks of the first ``count`` batches of ``size`` items."""
    sampler = NeighborSampler(job.graph, parse_fanouts(fanouts, job.model.num_layers), replace=replace)
    found = []
    for number, part in islice(epoch_batches(items, size, seed=job.seed, epoch=0), count):
        batch = job.task.batch(part, DrawKey(job.seed, 0, number))
        found.append(sampler.blocks(batch.seeds, batch.key, skip_last_hop=given))
    return ProbeBlocks(found)


def step_peak_bytes(job: Job, views: Sequence[LocalView], *, given: bool) -> float:
    """Bytes of tensors at the peak of a step on blocks, counted in one; the weights stay as they are."""
    x, near = gather_inputs(job.graph, job.model, views[0], job.precision, given)

    def step() -> None:
        run_step_on_blocks(job.model, views, x, near, job.precision)

    before = {name: buffer.clone() for name, buffer in job.model.named_buffers()}
    with unpooled():
        peak = peak_tensors(step)
    for name, buffer in job.model.named_buffers():
        buffer.copy_(before[name])
    job.model.zero_grad(set_to_none=True)
    inputs = float(sum(each.nbytes for each in (x.values() if isinstance(x, dict) else [x])))
    return MEMORY_SLACK * (peak + inputs * (2 if given else 1))


def loads_of(views: Sequence[LocalView]) -> list[tuple[float, float]]:
    """(rows made, edges) of every layer on its block."""
    return [
        (
            float(sum(rows.num_dst for rows in view.nodes.values())),
            float(sum(relation.structure.num_edges for relation in view.relations.values())),
        )
        for view in views
    ]


def num_drawn(views: Sequence[LocalView]) -> float:
    """Edges drawn and rows read: what making blocks takes time for."""
    read = sum(len(rows.node_ids) for rows in views[0].nodes.values())
    return read + sum(edges for _, edges in loads_of(views))


def parse_fanouts(words: FanoutOption, layers: int) -> Any:
    return fanouts_by_hop(words or (DEFAULT_FANOUT,) * layers)


def can_precompute(model: Model, graph: Graph) -> bool:
    """Whether the first layer's aggregate can be kept; asked on a graph of the same types without edges."""
    nodes = {kind: validated_nodes(2) for kind in graph.nodes}
    edges = {}
    for kind, each in graph.edges.items():
        none = torch.empty(2, 0, dtype=torch.int64)
        weight, attr = (None if values is None else values[:0] for values in (each.weight, each.attr))
        edges[kind] = validated_edges(none, num_src=2, num_dst=2, weight=weight, attr=attr)
    x = {
        kind: torch.zeros(2, 0 if table.x is None else int(table.x.shape[1]), dtype=next(model.parameters()).dtype)
        for kind, table in graph.nodes.items()
    }
    view = LocalView.of_graph(Graph.of(nodes, edges))
    return model.precompute(view, x if len(x) > 1 else next(iter(x.values()))) is not None


def gather_inputs(
    graph: Graph, model: Model, view: LocalView, precision: str, given: bool
) -> tuple[Any, Aggregate | None]:
    """What a block reads; of an aggregate rows as wide as it has, features in its place."""
    dtype, x = PRECISIONS[precision], {}
    for kind, rows in view.nodes.items():
        table = graph.nodes[kind].x
        count = len(rows.node_ids)
        x[kind] = torch.empty(count, 0, dtype=dtype) if table is None else FeatureGather(table)(rows.node_ids).to(dtype)
    near: Aggregate | None = None
    if given and len(x) == 1:
        (own,) = x.values()
        width = int(own.shape[1])
        both = buffers.empty_buffer((len(own), 2 * width), dtype)
        both[:, :width], both[:, width:] = own, own
        return both[:, width:], both[:, :width]
    if given:
        near = {kind: x[kind.src][:1].expand(len(x[kind.dst]), -1).contiguous() for kind in view.relations}
    return x if len(x) > 1 else next(iter(x.values())), near


def run_step_on_blocks(
    model: Model, views: Sequence[LocalView], x: Any, near: Aggregate | None, precision: str
) -> None:
    """A step without its loss: forward, and backward from ones."""
    model.train()
    model.zero_grad(set_to_none=True)
    with autocast(precision):
        out = model(views, x, aggregated=near)
    rows = [each for each in (out.values() if isinstance(out, Mapping) else [out]) if each.requires_grad]
    torch.autograd.backward(rows, [torch.ones_like(each) for each in rows])
