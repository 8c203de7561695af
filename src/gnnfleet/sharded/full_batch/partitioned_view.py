"""The verbs of a GraphView on a partition: edges are in blocks by their other end, and blocks are processed in turn.

A ``RowExchange`` delivers the rows of the other ends block by block: from other ranks in ``RingView``, from the other
chunks of a graph-parallel replica in ``ChunkView``. Each verb has one exchange for its forward and its backward.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from gnnfleet.comm.halo_exchange import RowExchange
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.views.edge_list import EdgeList
from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.graph.views.view_base import NodeRows, relation_weight
from gnnfleet.ops.aggregate import REDUCES, accumulate_dtype
from gnnfleet.ops.attend import RowCounts, prepare
from gnnfleet.ops.attend_blocks import AttentionInputs
from gnnfleet.ops.draws import DrawKey, Purpose
from gnnfleet.ops.message import REDUCES as MESSAGE_REDUCES
from gnnfleet.ops.message import Message, autocast_dtype
from gnnfleet.sharded.full_batch.aggregate import (
    AggregationCall,
    BackwardPlan,
    RelationInput,
    aggregate_max,
    aggregate_sum,
    aggregate_sum_with_self,
)
from gnnfleet.sharded.full_batch.attention import AttentionCall, attend
from gnnfleet.sharded.full_batch.partition_blocks import PartitionBlocks, RelationBlocks
from gnnfleet.sharded.full_batch.propagate import PropagateCall, propagate
from gnnfleet.sharded.full_batch.source_rows import make_edge_list


@dataclass(frozen=True, eq=False, kw_only=True)
class PartitionedView(GraphView):
    """A partition of a graph; subclasses provide the exchange."""

    blocks: PartitionBlocks
    nodes: Mapping[str, NodeRows]
    relations: Mapping[EdgeType, RelationBlocks]
    key: DrawKey = field(default_factory=DrawKey)
    layer: int = 0
    training: bool = True
    has_many_sources: bool = False
    keep_fetched: bool = False  # cache rows that backward needs instead of fetching them again

    @abstractmethod
    def _exchange(self) -> RowExchange:
        """The exchange of one verb."""

    @property
    def _edges(self) -> RelationBlocks:
        return self.relations[self._edge_type]

    @property
    def in_degree(self) -> Tensor:
        return self._edges.degree(self_loops=False)

    def aggregate(
        self, x: Tensor, *, reduce: str = "sum", weight: Tensor | None = None, self_loops: bool = False
    ) -> Tensor:
        edges = self._edges
        _check_reduce(reduce, weight)
        call = self._aggregation(x, reduce, weight, loops=self_loops)
        if weight is not None:
            weight = edges.append_loop_values(weight.reshape(-1), fill=1.0) if self_loops else weight.reshape(-1)
        (out,) = aggregate_max(call, [_flat(x)]) if reduce == "max" else aggregate_sum(call, [_flat(x)], weight)
        return out.view(edges.num_rows, *x.shape[1:])

    def aggregate_with_self(self, x: Tensor, *, reduce: str = "sum") -> tuple[Tensor, Tensor]:
        if reduce == "max" or x.dim() != 2:
            return self.aggregate(x, reduce=reduce), first_rows(x, self.num_dst)
        _check_reduce(reduce, None)
        return aggregate_sum_with_self(self._aggregation(x, reduce, None, loops=False), x)

    def _aggregation(self, x: Tensor, reduce: str, weight: Tensor | None, *, loops: bool) -> AggregationCall:
        edges = self._edges
        self._check_rows("features", x, edges.kind.src)
        degree = edges.degree(self_loops=loops) if reduce == "mean" else None
        relation = RelationInput(edges.blocks(self_loops=loops), 0, degree)
        reverse = None
        # Owners of sources know the store's weights of their out-edges, and no others.
        if reduce != "max" and (weight is None or (weight is edges.weight and not weight.requires_grad)):
            out_plan = self.blocks.exchange_plan(edges.kind.dst, "out")
            reverse = BackwardPlan(edges.out_blocks_for(self_loops=loops), out_plan, is_weighted=weight is not None)
        plans = (self.blocks.exchange_plan(edges.kind.src, "in"),)
        return AggregationCall(self._exchange(), plans, (relation,), reverse, self.keep_fetched)

    def aggregate_relations(
        self, x: Mapping[str, Tensor], *, reduce: str = "sum", into: str | None = None, weighted: bool = False
    ) -> dict[EdgeType, Tensor]:
        _check_reduce(reduce, None)
        relations = {kind: edges for kind, edges in self.relations.items() if into in (None, kind.dst)}
        kinds = [kind for kind in self.nodes if any(edge.src == kind for edge in relations)]
        for kind in kinds:
            self._check_rows("features", x[kind], kind)
        inputs = tuple(
            RelationInput(
                edges.in_blocks,
                kinds.index(kind.src),
                edges.degree(self_loops=False) if reduce == "mean" else None,
                relation_weight(edges, reduce, accumulate_dtype(x[kind.src].dtype)) if weighted else None,
            )
            for kind, edges in relations.items()
        )
        plans = tuple(self.blocks.exchange_plan(kind, "in") for kind in kinds)
        call = AggregationCall(self._exchange(), plans, inputs)
        xs = [_flat(x[kind]) for kind in kinds]
        outs = aggregate_max(call, xs) if reduce == "max" else aggregate_sum(call, xs)
        return {kind: out.view(len(out), *x[kind.src].shape[1:]) for kind, out in zip(relations, outs, strict=True)}

    def combine_relations(
        self, x: Tensor, coefficient: Tensor, *, reduce: str = "sum", weighted: bool = False
    ) -> Tensor:
        merged = self.blocks.merged(reduce, weighted=weighted)
        plans, inputs = (self.blocks.exchange_plan(self._kind, "in"),), (RelationInput(merged.blocks, 0),)
        call = AggregationCall(self._exchange(), plans, inputs, keep_fetched=self.keep_fetched)
        (out,) = aggregate_sum(call, [x], merged.weight(coefficient))
        return out

    def attend(
        self,
        value: Tensor,
        *,
        src: Tensor,
        dst: Tensor,
        vector: Tensor | None = None,
        edge: Tensor | None = None,
        dropout: float = 0.0,
        mask_id: int = 0,
        self_loops: bool = False,
        **options: Any,
    ) -> Tensor:
        edges = self._edges
        counts = RowCounts(self.num_src, self.num_dst, edges.num_edges)
        inputs = AttentionInputs(value=value, src=src, dst=first_rows(dst, self.num_dst), edge=edge, vector=vector)
        draws = self.key.draws(Purpose.ATTENTION, self.layer, relation=mask_id)
        rate = dropout if self.training else 0.0
        spec, flat = prepare(inputs, counts, dropout=rate, draws=draws, **options)
        if self_loops and flat.edge is not None:
            flat = replace(flat, edge=edges.append_mean_loop_values(flat.edge))
        if src is value:
            flat = replace(flat, src=flat.value)
        call = AttentionCall(
            self._exchange(),
            spec,
            edges.blocks(self_loops=self_loops),
            (self.blocks.exchange_plan(edges.kind.src, "in"),),
            (self.num_src,),
            edges.out_blocks_for(self_loops=self_loops),
            self.blocks.exchange_plan(edges.kind.dst, "out"),
            keep_fetched=self.keep_fetched,
        )
        out = attend(call, flat)
        return out if value.dim() == 2 else out.view(len(out), spec.heads, spec.channels)

    def _attend_stacked(
        self, kinds: tuple[EdgeType, ...], num_dst: Mapping[Any, int], value: Tensor, **inputs: Any
    ) -> Tensor:
        blocks = self.blocks.stacked(kinds, num_dst)
        plans = tuple(self.blocks.exchange_plan(kind.src, "in") for kind in kinds)
        sizes = tuple(len(self.nodes[kind.src].node_ids) for kind in kinds)
        rows = AttentionInputs(
            value=value, src=inputs.pop("src"), dst=inputs.pop("dst"), vector=inputs.pop("vector", None)
        )
        counts = RowCounts(sum(sizes), sum(num_dst.values()), blocks[-1].edges.stop)
        spec, flat = prepare(rows, counts, **inputs)
        if rows.src is value:
            flat = replace(flat, src=flat.value)
        call = AttentionCall(self._exchange(), spec, blocks, plans, sizes, keep_fetched=self.keep_fetched)
        return attend(call, flat)

    def propagate(
        self,
        message: Message,
        *,
        src: Mapping[str, Tensor] | None = None,
        dst: Mapping[str, Tensor] | None = None,
        edge: Mapping[str, Tensor] | None = None,
        params: Sequence[Tensor] = (),
        reduce: str = "sum",
    ) -> Tensor:
        if reduce not in MESSAGE_REDUCES:
            raise ConfigError(f"cannot reduce by {reduce!r}: choose one of {', '.join(MESSAGE_REDUCES)}")
        edges = self._edges
        ends = {name: first_rows(tensor, self.num_dst) for name, tensor in (dst or {}).items()}
        groups = {"src": dict(src or {}), "dst": ends, "edge": dict(edge or {})}
        expected = {"src": self.num_src, "dst": self.num_dst, "edge": edges.num_edges}
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                if tensor.shape[0] != expected[group]:
                    raise ConfigError(f"{group}[{name!r}] has {tensor.shape[0]} rows, expected {expected[group]}")
        call = PropagateCall(
            ring=self._exchange(),
            blocks=edges.in_blocks,
            plan=self.blocks.exchange_plan(edges.kind.src, "in"),
            num_dst=self.num_dst,
            message=message,
            reduce=reduce,
            precision=autocast_dtype(),
            keep_fetched=self.keep_fetched,
            names=tuple((group, name) for group, tensors in groups.items() for name in tensors),
        )
        return propagate(call, groups, params)

    def edge_list(self, edge_type: EdgeType | None = None) -> EdgeList:
        edges = self.relations[edge_type or self._edge_type]
        source_ids, plan = self.nodes[edges.kind.src].node_ids, self.blocks.exchange_plan(edges.kind.src, "in")
        table = make_edge_list(edges, source_ids, self._exchange, plan)
        if table.is_bipartite or table.num_dst == len(source_ids):
            return table
        degree = self.nodes[edges.kind.src].degree
        return replace(table, fetched_degree=lambda kind: table.fetch(degree(kind)[:, None])[:, 0])

    def _check_rows(self, name: str, x: Tensor, kind: str) -> None:
        expected = len(self.blocks.nodes[kind].node_ids)
        if x.shape[0] != expected:
            raise ConfigError(
                f"found {x.shape[0]} rows of {name}, expected {expected}: one for each local node of type {kind}"
            )


def _check_reduce(reduce: str, weight: Tensor | None) -> None:
    if reduce not in REDUCES:
        raise ConfigError(f"cannot reduce by {reduce!r}: choose one of {', '.join(REDUCES)}")
    if reduce == "max" and weight is not None:
        raise ConfigError("max takes no edge weights: multiply the features, or use propagate")


def _flat(x: Tensor) -> Tensor:
    return x.flatten(1)
