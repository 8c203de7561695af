"""Trace a training step on small sample graphs, to predict the traffic and memory of a step on a partition.

A sample graph has the partition's node and edge types, widths and degrees at a fraction of its size, and a single rank.
The tracer records the row bytes of every exchange and the bytes of live tensors at the peak, at two sizes, and
extrapolates to the rows of the partition. So it works for any model, custom ones included.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnfleet.comm.halo_exchange import OnRows, RingExchange, RowTable
from gnnfleet.comm.world import World
from gnnfleet.graph.graph import EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.partition.assign import Assignment
from gnnfleet.graph.partition.partitioned_graph import Partition, write_partition
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.graph.views.edge_list import EdgeList
from gnnfleet.nn.base import Model
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.nn.pyg.module import PygModule
from gnnfleet.ops.buffers import unpooled
from gnnfleet.report.memory import peak_tensors
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.sharded.full_batch.source_rows import SourceRows

SAMPLE_ROWS = (3000, 6000)
"""Rows of the two sample graphs, summed over node types."""

RouteKey = tuple[str, str]
"""A node type and a direction, as in ``Shard.plan``."""


@dataclass(frozen=True)
class TracedExchange:
    """One exchange of a step: bytes of a sent row and of a returned row, by route."""

    layer: int
    sent_bytes: tuple[tuple[RouteKey, int], ...]
    returned_bytes: tuple[tuple[RouteKey, int], ...]
    is_refetch: bool  # of rows that an earlier exchange has fetched
    is_cacheable: bool  # its rows are cached if ``cache_for_backward`` is set


@dataclass(frozen=True)
class StepTrace:
    """The exchanges of a step in order, and its peak: the bytes of tensors, linear in local rows and remote rows."""

    exchanges: tuple[TracedExchange, ...]
    base_bytes: float
    bytes_per_row: float
    sums: tuple[int, ...] = ()  # bytes of sums over all nodes, as in batch norm
    bytes_per_remote_row: float = 0.0  # where a module keeps remote rows

    def peak_bytes(self, rows: int, remote_rows: int = 0) -> float:
        return self.base_bytes + self.bytes_per_row * rows + self.bytes_per_remote_row * remote_rows


def trace_step(
    model: Model, shard: Shard, precision: torch.dtype, *, is_cached: bool, many: Sequence[bool] = ()
) -> StepTrace:
    """Trace a training step of ``model`` on a partition, perhaps with a cached aggregate of the first layer.

    The model stays unchanged. ``many`` has the layers that read many more rows than they compute, which may exchange
    other rows.
    """
    total = max(1, sum(shard.nodes(kind).count for kind in shard.node_types))
    (small, small_peak, ring), (large, large_peak, _) = (
        _trace_at(model, shard, rows / total, precision, is_cached, many) for rows in SAMPLE_ROWS
    )
    row_bytes = max(0.0, (large_peak - small_peak) / max(1, large - small))
    base_bytes = max(0.0, small_peak - row_bytes * small)
    remote_bytes = 0.0
    if isinstance(model, PygModule):
        share, remote_rows = SAMPLE_ROWS[0] / total, SAMPLE_ROWS[0]
        with_remote = _trace_at(model, shard, share, precision, is_cached, many, remote_rows)[1]
        remote_bytes = max(0.0, (with_remote - small_peak) / remote_rows)
    return StepTrace(tuple(ring.exchanges), base_bytes, row_bytes, tuple(ring.sums), remote_bytes)


@dataclass(frozen=True, eq=False)
class _RecordingRing(RingExchange):
    layer: int = 0
    names: Mapping[int, RouteKey] = field(default_factory=dict)
    exchanges: list[TracedExchange] = field(default_factory=list)  # shared by the rings of all layers
    sums: list[int] = field(default_factory=list)

    def run(self, tables: Sequence[RowTable], on_rows: OnRows, **options: Any) -> None:
        returns, fetched = options.get("returns", ()), options.get("fetched")
        sent = tuple((self.names[id(table.plan)], table.rows.shape[1] * table.rows.element_size()) for table in tables)
        returned = tuple((self.names[id(path.plan)], path.width * path.dtype.itemsize) for path in returns)
        is_refetch = fetched is not None and fetched.is_complete
        is_cacheable = fetched is not None and not is_refetch
        self.exchanges.append(TracedExchange(self.layer, sent, returned, is_refetch, is_cacheable))
        super().run(tables, on_rows, **options)

    def sum_over_ranks(self, t: Tensor) -> Tensor:
        self.sums.append(t.nbytes)
        out = t.view_as(t)
        if out.requires_grad:
            out.register_hook(lambda grad: self.sums.append(grad.nbytes))  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True, eq=False, kw_only=True)
class _SampleView(RingView):
    """A view of a sample graph, which has remote sources in memory only."""

    remote_rows: int

    def edge_list(self, edge_type: EdgeType | None = None) -> EdgeList:
        table = super().edge_list(edge_type)
        rows: SourceRows = table.fetch.__self__  # type: ignore[attr-defined]
        rows = replace(rows, num_fetched=rows.num_fetched + self.remote_rows)
        return replace(table, num_fetched=rows.num_fetched, fetch=rows.fetch, send_back=rows.send_back)


def _trace_at(
    model: Model,
    shard: Shard,
    share: float,
    precision: torch.dtype,
    is_cached: bool,
    many: Sequence[bool],
    remote_rows: int = 0,
) -> tuple[int, int, _RecordingRing]:
    """(rows, bytes of tensors at the peak, ring with the exchanges) of one step on a sample graph."""
    graph = _sample_graph(shard, share)
    with tempfile.TemporaryDirectory(prefix="gnnfleet-") as folder:
        one_part = Assignment(part=np.zeros(graph.num_nodes, np.int32), parts=1, method="range")
        write_partition(graph, one_part, Path(folder) / "parts")
        sample = Partition.open(Path(folder) / "parts").shard(0)
        ring = RingExchange(World())
        view = RingView.open(sample, ring)
        view = _SampleView(**{f.name: getattr(view, f.name) for f in fields(view)}, remote_rows=remote_rows)
        names = {
            id(view.blocks.exchange_plan(kind, direction)): (kind, direction)
            for kind in sample.node_types
            for direction in ("in", "out")
        }
        tables = {kind: sample.nodes(kind) for kind in sample.node_types}
        x = {k: (torch.empty(t.count, 0) if t.x is None else t.x).to(precision) for k, t in tables.items()}
        inputs: Any = x if len(x) > 1 else next(iter(x.values()))
        sample_model = resized_copy(model, {kind: nodes.count for kind, nodes in graph.nodes.items()})
        if isinstance(sample_model, PygModule):
            sample_model.propagation = sample_model.propagation.scaled(share)
        aggregated = sample_model.precompute(view, inputs) if is_cached else None
        recording_ring = _RecordingRing(ring.world, names=names)
        views = [
            replace(
                view,
                ring=replace(recording_ring, layer=layer),
                keep_fetched=True,
                has_many_sources=layer < len(many) and many[layer],
            )
            for layer in range(model.num_layers)
        ]

        def step() -> None:
            out = sample_model(views, inputs, aggregated=aggregated)
            tables = list(out.values()) if isinstance(out, dict) else [out]
            torch.stack([rows.sum() for rows in tables]).sum().backward()  # type: ignore[no-untyped-call]

        sample_model.train()
        with unpooled():
            peak = peak_tensors(step)
        return graph.num_nodes, peak, recording_ring


def _sample_graph(shard: Shard, share: float) -> Graph:
    random = torch.Generator().manual_seed(0)
    counts = {kind: max(8, round(share * shard.nodes(kind).count)) for kind in shard.node_types}
    nodes = {}
    for kind, count in counts.items():
        x = shard.nodes(kind).x
        nodes[kind] = validated_nodes(count, x=None if x is None else torch.randn(count, x.shape[1], generator=random))
    edges = {}
    for relation in shard.edge_types:
        num_edges = max(1, round(share * sum(len(shard.block(relation, "in", q).cols) for q in range(shard.parts))))
        sizes = counts[relation.src], counts[relation.dst]
        index = torch.stack([torch.randint(0, size, (num_edges,), generator=random) for size in sizes])
        weight, attr = (ones_like(shard.edge_data(relation, name), num_edges) for name in ("weight", "attr"))
        edges[relation] = validated_edges(index, num_src=sizes[0], num_dst=sizes[1], weight=weight, attr=attr)
    return Graph.of(nodes, edges)


def ones_like(values: Tensor | None, rows: int) -> Tensor | None:
    return None if values is None else torch.ones(rows, *values.shape[1:])


def resized_copy(model: Model, counts: Mapping[str, int]) -> Model:
    """A copy of the model for other numbers of nodes, with as many learnable rows."""
    resized = copy.deepcopy(model)
    for module in resized.modules():
        if isinstance(module, NodeEmbedding):
            module.ids = None
            module.weight = torch.nn.Parameter(module.weight.new_zeros(max(counts.values()), module.weight.shape[1]))
    return resized
