"""The rehearsal behind forecasts: every layer on a piece of the graph, a few sampled steps, rows sent back and forth.

All workers measure at the same time, each on its own part, so that what they take from each other is in the figures.
Nothing is trained: the model is copied. Takes seconds, whatever the size of the graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.collectives import all_gather_rows, barrier, sum_gradients
from gnnfleet.comm.halo_exchange import ExchangePlan, RingExchange, RowTable
from gnnfleet.comm.world import World
from gnnfleet.graph.graph import EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.graph.sampling.batches import epoch_batches
from gnnfleet.graph.sampling.loader import prepare_backward
from gnnfleet.graph.sampling.sampler import NeighborSampler
from gnnfleet.graph.views.block import full_block
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.base import Aggregate, Model
from gnnfleet.ops import buffers
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.memory import rss
from gnnfleet.sharded.full_batch.active_row_counts import SubPartition, sub_partition
from gnnfleet.sharded.step_tracer import resized_copy
from gnnfleet.strategies.estimates import LayerCostModel, MachineProfile
from gnnfleet.strategies.input_cache import should_cache_aggregate
from gnnfleet.strategies.job import PRECISIONS, Job, autocast
from gnnfleet.strategies.optim import make_optimizer
from gnnfleet.strategies.sampling_options import FanoutOption
from gnnfleet.strategies.step_costs import (
    SAMPLE_EDGES,
    SAMPLE_ROWS,
    can_precompute,
    gather_inputs,
    loads_of,
    num_drawn,
    parse_fanouts,
    run_step_on_blocks,
)

_REPEATS = 3
_MESSAGE = 4 << 20  # bytes to each peer that bandwidth is measured with
_WIDTH = 256


@dataclass(frozen=True)
class SamplingProbe:
    """How sampled steps are rehearsed."""

    fanouts: FanoutOption = None
    batch: int = 1024


def profile_machine(world: World, job: Job, shard: Shard, draw: SamplingProbe) -> MachineProfile:
    """All ranks call it together, each with its own part; every one gets the mean of all."""
    resident = _resident()
    aside = world.uncounted()
    piece = sub_partition(shard, _share(shard))
    twin = resized_copy(job.model, piece.sources)
    cached = should_cache_aggregate("auto", hides=job.task.masks_edges)

    layers = _layers(twin, shard, piece, job.precision, cached, lambda: barrier(aside))
    step, sums = _optimizer(aside, twin, job)
    blocks, making = _sampled(aside, job, draw, layers, cached)
    bandwidth, latency = _network(aside)
    socket, _ = _network(replace(aside, shm=None))
    own = [step, sums, blocks, making, bandwidth, socket, latency, resident]
    own += [number for layer in layers for number in (layer.base, layer.per_row, layer.per_edge)]
    every = torch.stack(all_gather_rows(aside, torch.tensor([own], dtype=torch.float64)))[:, 0].mean(0).tolist()
    found = tuple(LayerCostModel(*every[at : at + 3]) for at in range(8, len(every), 3))
    return MachineProfile(world.size, found, *every[:8])


def _resident() -> float:
    """Bytes of a process that has learnt next to nothing: a first step reads a good deal of torch from the disk."""
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(layer.parameters(), foreach=False)
    layer(torch.ones(256, 64)).relu().sum().backward()
    optimizer.step()
    return float(rss())


def _share(shard: Shard) -> float:
    """Of the rows of a part, those that a piece may have."""
    rows = sum(shard.nodes(kind).count for kind in shard.node_types)
    edges = sum(len(shard.block(kind, "in", q).cols) for kind in shard.edge_types for q in range(shard.parts))
    return min(1.0, SAMPLE_ROWS / max(rows, 1), SAMPLE_EDGES / max(edges, 1))


def _fastest(work: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Seconds of the fastest of several times, once it has been done before."""
    work()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


# -- layers --


def _layers(
    model: Model, shard: Shard, piece: SubPartition, precision: str, cached: bool, together: Callable[[], None]
) -> list[LayerCostModel]:
    """On the piece, on the same rows without edges, and on next to nothing."""
    small = {kind: min(8, count) for kind, count in piece.rows.items()}
    if model.batch_norm:
        small = {kind: min(64, count) for kind, count in piece.rows.items()}
    bare = {kind: ends[:, :0] for kind, ends in piece.edge_index.items()}
    found = []
    for rows, ends in ((small, bare), (piece.rows, bare), (piece.rows, piece.edge_index)):
        sources = piece.sources if ends is piece.edge_index else rows
        walk = _LayerBench(model, _view(shard, SubPartition(rows, sources, ends)), shard, precision, cached)
        together()
        found.append([_fastest(partial(walk.layer, index)) for index in range(model.num_layers)])
    rows_all, few = sum(piece.rows.values()), sum(small.values())
    edges = max(1, sum(ends.shape[1] for ends in piece.edge_index.values()))
    paces = []
    for tiny, without, whole in zip(*found, strict=True):
        row = max(0.0, without - tiny) / max(1, rows_all - few)
        paces.append(LayerCostModel(max(0.0, tiny - few * row), row, max(0.0, whole - without) / edges))
    return paces


def _view(shard: Shard, piece: SubPartition) -> LocalView:
    """Destinations first; features of real width."""
    nodes = {kind: validated_nodes(count) for kind, count in piece.sources.items()}
    edges = {}
    for kind, ends in piece.edge_index.items():
        weight, attr = (_ones(shard, EdgeType(*kind), name, ends.shape[1]) for name in ("weight", "attr"))
        src, dst = piece.sources[kind[0]], piece.sources[kind[2]]
        edges[EdgeType(*kind)] = validated_edges(ends, num_src=src, num_dst=dst, weight=weight, attr=attr)
    view = LocalView.of_graph(Graph.of(nodes, edges))
    return full_block(view, {kind: (0, count) for kind, count in piece.rows.items()}).view


def _ones(shard: Shard, kind: EdgeType, name: str, count: int) -> Tensor | None:
    values = shard.edge_data(kind, name)
    return None if values is None else torch.ones(count, *values.shape[1:])


class _LayerBench:
    """Layers one by one on a view, each on random rows of the width that the layer before makes."""

    def __init__(self, model: Model, view: LocalView, shard: Shard, precision: str, cached: bool) -> None:
        self.model, self.view, self.precision = model, view.with_step(key=DrawKey()), precision
        dtype = PRECISIONS[precision]
        x: Any = {kind: _random(shard, kind, len(rows.node_ids), dtype) for kind, rows in view.nodes.items()}
        x = x if len(x) > 1 else next(iter(x.values()))
        self.near = model.precompute(self.view, x) if cached else None
        self.given: list[tuple[Any, Tensor | None]] = [(x, None)]
        model.train()
        for index in range(model.num_layers - 1):
            rows, carry = self._forward(index)
            made = None if carry is None else self._like(carry, next(iter(view.nodes)))
            self.given.append((self._every(rows), made))

    def _forward(self, index: int) -> tuple[Any, Tensor | None]:
        rows, carry = self.given[index]
        near: Aggregate | None = self.near if index == 0 else None
        with autocast(self.precision):
            return self.model.layer(index, self.view, rows, carry, aggregated=near)

    def _every(self, rows: Any) -> Any:
        """As many rows as the next layer reads, of the same widths."""
        if isinstance(rows, Mapping):
            return {kind: self._like(each, kind) for kind, each in rows.items()}
        return self._like(rows, next(iter(self.view.nodes)))

    def _like(self, rows: Tensor, kind: str) -> Tensor:
        count = len(self.view.nodes[kind].node_ids)
        return torch.randn(count, rows.shape[1]).to(rows.dtype).requires_grad_()

    def layer(self, index: int) -> None:
        """Forward and backward."""
        rows, carry = self._forward(index)
        made = [*rows.values()] if isinstance(rows, Mapping) else [rows]
        ends = [each for each in (*made, carry) if each is not None and each.requires_grad]
        torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])
        given, carried = self.given[index]
        for each in (*(given.values() if isinstance(given, Mapping) else [given]), carried):
            if each is not None:
                each.grad = None


def _random(shard: Shard, kind: str, count: int, dtype: torch.dtype) -> Tensor:
    x = shard.nodes(kind).x
    return torch.randn(count, 0 if x is None else int(x.shape[1]), dtype=dtype)


def _optimizer(world: World, model: Model, job: Job) -> tuple[float, float]:
    """Seconds of (a step, a sum of gradients over ranks)."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = make_optimizer(model, job.train)
    for each in parameters:
        each.grad = torch.zeros_like(each)
    step = _fastest(optimizer.step)
    sums = _fastest(lambda: sum_gradients(world, parameters)) if world.size > 1 else 0.0
    model.zero_grad(set_to_none=True)
    return step, sums


# -- sampled blocks --


def _sampled(
    world: World, job: Job, draw: SamplingProbe, layers: Sequence[LayerCostModel], cached: bool
) -> tuple[float, float]:
    """(how much dearer layers are on blocks, seconds for each edge and row of making them)."""
    graph, task, model = job.graph, job.task, job.model
    sampler = NeighborSampler(graph, parse_fanouts(draw.fanouts, model.num_layers))
    items = task.train_items(job.seed, 0)
    size = max(1, min(draw.batch or len(items), len(items)) // world.size)
    given = cached and can_precompute(model, graph)
    every = [(number, part) for number, part in epoch_batches(items, size, seed=job.seed, epoch=0)][
        : world.size + _REPEATS
    ]
    optimizer = make_optimizer(model, job.train)
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    barrier(world)
    making, work, foreseen, amount = [], [], [], []
    for number, part in [every[(world.rank + turn) % len(every)] for turn in range(_REPEATS + 1)]:
        started = time.perf_counter()
        batch = task.batch(part, DrawKey(job.seed, 0, number))
        views = [task.mask_edges(view, batch) for view in sampler.blocks(batch.seeds, batch.key, given=given)]
        prepare_backward(views)
        x, near = gather_inputs(graph, model, views[0], job.precision, given)
        made = time.perf_counter()
        run_step_on_blocks(model, views, x, near, job.precision)
        optimizer.step()
        work.append(time.perf_counter() - made)
        making.append(made - started)
        foreseen.append(sum(pace.seconds(*load) for pace, load in zip(layers, loads_of(views), strict=True)))
        amount.append(num_drawn(views))
    model.load_state_dict(before)
    model.zero_grad(set_to_none=True)
    times = sorted(took / max(known, 1e-9) for took, known in zip(work[1:], foreseen[1:], strict=True))
    return times[len(times) // 2], sum(making[1:]) / max(1.0, sum(amount[1:]))


# -- the network --


def _network(world: World) -> tuple[float, float]:
    """(bytes a second, seconds of a round) with all ranks sending to all others at once."""
    if world.size == 1:
        return float("inf"), 0.0
    found = []
    for count in (1, _MESSAGE // (4 * _WIDTH)):
        rows = torch.ones(count, _WIDTH)
        others = [rank != world.rank for rank in range(world.size)]
        every, none = torch.arange(count), torch.empty(0, dtype=torch.int64)
        routes = ExchangePlan(
            tuple(every if far else none for far in others), tuple(count if far else 0 for far in others)
        )
        ring = RingExchange(world, 1, 1, buffers.empty_buffer)
        found.append(_fastest(partial(_visit, ring, routes, rows), 5))
    little, much = found
    sent = (world.size - 1) * _MESSAGE
    return sent / max(much - little, 1e-9), little / world.size


def _visit(ring: RingExchange, routes: ExchangePlan, rows: Tensor) -> None:
    ring.run([RowTable(routes, rows)], lambda q, came: None, op="bandwidth")
