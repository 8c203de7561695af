"""Scouting: a step of a model on small stand-ins for a part, to know what one on the part itself will take.

A stand-in has the part's node and edge types, widths and degrees at a fraction of its size, and is alone in its world.
Every exchange that the step asks for is noted with the bytes of its rows, and the tensors that live at the peak are
counted at two sizes: what grows with the rows is extrapolated. So the figures hold for any model, the user's own too.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnfleet.comm.halo_exchange import FetchedRows, ReturnPath, RingExchange, RowTable
from gnnfleet.comm.world import World
from gnnfleet.graph.graph import Graph, validated_edges, validated_nodes
from gnnfleet.graph.partition.assign import Assignment
from gnnfleet.graph.partition.partitioned_graph import Partition, write_partition
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.nn.base import Aggregate, Model
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.ops.buffers import unpooled
from gnnfleet.report.memory import peak_tensors
from gnnfleet.sharded.full_batch.ring_view import RingView

SAMPLE_ROWS = (3000, 6000)
"""Rows of the two stand-ins, all types together."""

Precompute = Callable[[Model, RingView, Any], Aggregate | None]
"""What of the first layer is computed once, before the steps."""

RouteKey = tuple[str, str]
"""A node type and the direction its rows travel in, as in ``Shard.plan``."""


@dataclass(frozen=True)
class TracedExchange:
    """One exchange of a step: bytes of a row on every way, there and home. ``is_refetch``: of rows that came before."""

    layer: int
    sent_bytes: tuple[tuple[RouteKey, int], ...]
    returned_bytes: tuple[tuple[RouteKey, int], ...]
    is_refetch: bool
    cached_bytes: bool  # they would be kept where that is asked for


@dataclass(frozen=True)
class StepTrace:
    """What a step does: its exchanges in order, and ``base_bytes`` + ``bytes_per_row`` · rows bytes of tensors at its peak."""

    exchanges: tuple[TracedExchange, ...]
    base_bytes: float
    bytes_per_row: float
    sums: tuple[int, ...] = ()  # bytes of sums over all nodes, as batch norm's

    def peak_bytes(self, rows: int) -> float:
        return self.base_bytes + self.bytes_per_row * rows


def trace_step(
    model: Model, shard: Shard, precision: torch.dtype, precompute: Precompute, many: Sequence[bool] = ()
) -> StepTrace:
    """Sketch a training step of ``model`` on a part; the model is left as it is. ``many`` says which layers read many
    more rows than they make: these may send other rows."""
    total = max(1, sum(shard.nodes(kind).count for kind in shard.node_types))
    (small, low, notes), (large, high, _) = (
        _trace_at(model, shard, rows / total, precision, precompute, many) for rows in SAMPLE_ROWS
    )
    each = max(0.0, (high - low) / max(1, large - small))
    return StepTrace(tuple(notes.exchanges), max(0.0, low - each * small), each, tuple(notes.sums))


@dataclass
class _StepRecording:
    """What was asked for in a step."""

    exchanges: list[TracedExchange] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _RecordingRing(RingExchange):
    """A ring of one rank that writes down what it is asked for."""

    layer: int = 0
    names: Mapping[int, RouteKey] = field(default_factory=dict)
    notes: _StepRecording = field(default_factory=_StepRecording)

    def run(
        self,
        tables: Sequence[RowTable],
        on_rows: Any,
        *,
        returns: Sequence[ReturnPath] = (),
        on_returns: Any = None,
        fetched: FetchedRows | None = None,
        op: str = "rows",
    ) -> None:
        there = tuple((self.names[id(lane.plan)], lane.rows.shape[1] * lane.rows.element_size()) for lane in tables)
        back = tuple((self.names[id(one.plan)], one.width * one.dtype.itemsize) for one in returns)
        again = fetched is not None and fetched.is_complete
        self.notes.exchanges.append(TracedExchange(self.layer, there, back, again, fetched is not None and not again))
        super().run(tables, on_rows, returns=returns, on_returns=on_returns, fetched=fetched, op=op)

    def sum_over_ranks(self, t: Tensor) -> Tensor:
        self.notes.sums.append(t.nbytes)
        out = t.view_as(t)
        if out.requires_grad:
            out.register_hook(lambda grad: self.notes.sums.append(grad.nbytes))  # type: ignore[no-untyped-call]
        return out


def _trace_at(
    model: Model, shard: Shard, share: float, precision: torch.dtype, precompute: Precompute, many: Sequence[bool]
) -> tuple[int, int, _StepRecording]:
    """(rows, bytes of tensors at the peak, what was asked for) of one step on a stand-in."""
    graph = _small_shard(shard, share)
    with tempfile.TemporaryDirectory(prefix="gnnfleet-") as folder:
        nobody = Assignment(part=np.zeros(graph.num_nodes, np.int32), parts=1, method="range")
        write_partition(graph, nobody, Path(folder) / "parts")
        part = Partition.open(Path(folder) / "parts").shard(0)
        ring = RingExchange(World())
        view = RingView.open(part, ring)
        names = {
            id(view.blocks.exchange_plan(kind, direction)): (kind, direction)
            for kind in part.node_types
            for direction in ("in", "out")
        }
        x = {kind: _features(part, kind).to(precision) for kind in part.node_types}
        inputs: Any = x if len(x) > 1 else next(iter(x.values()))
        twin = resized_copy(model, {kind: nodes.count for kind, nodes in graph.nodes.items()})
        near = precompute(twin, view, inputs)
        notes = _StepRecording()
        views = [
            replace(
                view,
                ring=_RecordingRing(ring.world, layer=layer, names=names, notes=notes),
                keep_fetched=True,
                has_many_sources=layer < len(many) and many[layer],
            )
            for layer in range(model.num_layers)
        ]

        def step() -> None:
            out = twin(views, inputs, aggregated=near)
            rows = list(out.values()) if isinstance(out, dict) else [out]
            torch.stack([each.sum() for each in rows]).sum().backward()  # type: ignore[no-untyped-call]

        twin.train()
        with unpooled():
            peak = peak_tensors(step)
        return graph.num_nodes, peak, notes


def _small_shard(shard: Shard, share: float) -> Graph:
    random = torch.Generator().manual_seed(0)
    counts = {kind: max(8, round(share * shard.nodes(kind).count)) for kind in shard.node_types}
    nodes = {}
    for kind, count in counts.items():
        x = shard.nodes(kind).x
        nodes[kind] = validated_nodes(count, x=None if x is None else torch.randn(count, x.shape[1], generator=random))
    edges = {}
    for relation in shard.edge_types:
        number = max(1, round(share * sum(len(shard.block(relation, "in", q).cols) for q in range(shard.parts))))
        sizes = counts[relation.src], counts[relation.dst]
        index = torch.stack([torch.randint(0, size, (number,), generator=random) for size in sizes])
        weight, attr = (_like(shard.edge_data(relation, name), number) for name in ("weight", "attr"))
        edges[relation] = validated_edges(index, num_src=sizes[0], num_dst=sizes[1], weight=weight, attr=attr)
    return Graph.of(nodes, edges)


def _like(values: Tensor | None, number: int) -> Tensor | None:
    return None if values is None else torch.ones(number, *values.shape[1:])


def _features(part: Shard, kind: str) -> Tensor:
    nodes = part.nodes(kind)
    return torch.empty(nodes.count, 0) if nodes.x is None else nodes.x


def resized_copy(model: Model, counts: Mapping[str, int]) -> Model:
    """A copy of the model for other nodes, with as many learnable rows as there are of them."""
    twin = copy.deepcopy(model)
    most = max(counts.values())
    for module in twin.modules():
        if isinstance(module, NodeEmbedding):
            module.ids = None
            module.weight = torch.nn.Parameter(module.weight.new_zeros(most, module.weight.shape[1]))
    return twin
