"""A partition of a graph as kernels take it: blocks of edges by the partition of their other end, and exchange plans.

A partition has all in-edges of its nodes, so it knows their degrees. Per-edge tensors of a view have the blocks
q = 0 … P − 1 one after the other. With self-loops, the local block has one for every row, in place of any in the store;
the other blocks are the same. P partitions, n local rows of a type, R of them with an edge in a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from gnnfleet.comm.halo_exchange import ExchangePlan
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.partition.shard import HaloPlan, ShardBlock, ShardNodes
from gnnfleet.graph.views.edge_list import EdgeList
from gnnfleet.graph.views.local import SELF_LOOP_IDS, fill_loops, select_or_fill
from gnnfleet.graph.views.merged_relations import StackedEdges
from gnnfleet.graph.views.view_base import LOOPS, Degrees, NodeRows, edge_factors, last_loops_of, selected_degrees
from gnnfleet.ops.csr import CSR, counting_sort


@dataclass(frozen=True, eq=False)
class EdgeBlock:
    """The edges between this partition and another. Columns are rows of the other end, in the order of arrival."""

    structure: CSR  # R rows
    rows: Tensor | None  # [R] int32: local rows; None: all
    num_rows: int  # n
    edge_ids: Tensor  # [E] int64: store edge ids; self-loops have ids of their own
    edges: slice  # position in per-edge tensors of the view; meaningless for out-edges
    weight: Tensor | None = None  # [E] the store's, for out-edges, whose owner has no other copy

    @cached_property
    def transposed(self) -> tuple[CSR, Tensor]:
        """(the edges by column, whose columns are local rows; [E] int64 the position in this block of each)."""
        # A copy of the structure is transposed, so that the structure does not cache the result as well.
        by_column, positions = CSR(self.structure.indptr, self.structure.col, self.structure.num_cols).transposed
        if self.rows is None:
            return by_column, positions
        return CSR(by_column.indptr, self.rows.index_select(0, by_column.col), self.num_rows), positions

    def select_rows(self, values: Tensor) -> Tensor:
        """[R, …] the values of this block's rows, from those of all rows."""
        return values if self.rows is None else values.index_select(0, self.rows)


@dataclass(frozen=True, eq=False)
class _LoopedBlocks:
    """In-edges with self-loops, and the origin of those in the local block."""

    blocks: tuple[EdgeBlock, ...]
    positions: Tensor  # [E'] int64: positions in the local block without loops, −1 for loops
    local_edges: slice  # the local block in per-edge tensors without loops


class BlockSource(Protocol):
    """Source of a partition's blocks: a ``Shard``, or a ``RestrictedShard``, whose destinations are its first rows."""

    @property
    def part(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def node_types(self) -> tuple[str, ...]: ...
    @property
    def edge_types(self) -> tuple[EdgeType, ...]: ...
    def nodes(self, node_type: str) -> ShardNodes: ...
    def plan(self, node_type: str, direction: str) -> HaloPlan: ...
    def block(self, edge_type: EdgeType, direction: str, q: int) -> ShardBlock: ...
    def edge_data(self, edge_type: EdgeType, name: str) -> Tensor | None: ...


class RelationBlocks:
    """Edges of one type into and out of this partition. Everything is computed on first use and cached."""

    def __init__(self, shard: BlockSource, kind: EdgeType, nodes: Mapping[str, NodeRows]) -> None:
        self.kind, self.part = kind, shard.part
        self._shard, self._nodes = shard, nodes
        self._degrees: dict[bool, Tensor] = {}  # by self_loops
        self.cache: dict[str, Any] = {}
        self.edge_list: EdgeList | None = None  # a cache of ``make_edge_list``

    @property
    def num_rows(self) -> int:
        return self._nodes[self.kind.dst].num_dst

    @property
    def num_edges(self) -> int:
        return len(self.edge_ids)

    @property
    def rows(self) -> Tensor:
        return torch.cat([edge_rows(block) for block in self.in_blocks])

    @cached_property
    def edge_ids(self) -> Tensor:
        edge_ids = self._shard.edge_data(self.kind, "edge_ids")
        assert edge_ids is not None
        return edge_ids

    @cached_property
    def weight(self) -> Tensor | None:
        return self._shard.edge_data(self.kind, "weight")

    @cached_property
    def attr(self) -> Tensor | None:
        return self._shard.edge_data(self.kind, "attr")

    @cached_property
    def in_blocks(self) -> tuple[EdgeBlock, ...]:
        """P blocks of in-edges; the local one has all rows, so that a sum can begin with it."""
        return self._edge_blocks("in", self._nodes[self.kind.dst].num_dst, len(self._nodes[self.kind.src].node_ids))

    @cached_property
    def out_blocks(self) -> tuple[EdgeBlock, ...]:
        """P blocks of out-edges: rows are sources here, columns destinations at q."""
        return self._edge_blocks("out", len(self._nodes[self.kind.src].node_ids), self._nodes[self.kind.dst].num_dst)

    def _edge_blocks(self, direction: str, num_rows: int, local_columns: int) -> tuple[EdgeBlock, ...]:
        plan = self._shard.plan(self.kind.src if direction == "in" else self.kind.dst, direction)
        start, blocks = 0, []
        for q in range(self._shard.parts):
            block = self._shard.block(self.kind, direction, q)
            if q == self.part:
                rows, structure = None, CSR(_full_indptr(block, num_rows), block.cols, local_columns)
            else:
                rows, structure = block.rows, CSR(block.indptr, block.cols, len(plan.recv[q]))
            edges = slice(start, start + len(block.cols))
            blocks.append(EdgeBlock(structure, rows, num_rows, block.edge_ids, edges, block.data.get("weight")))
            start = edges.stop
        return tuple(blocks)

    # -- self-loops --

    @cached_property
    def _loops(self) -> _LoopedBlocks:
        local = self.in_blocks[self.part]
        structure, positions = local.structure.with_self_loops
        loop_ids = SELF_LOOP_IDS + self._nodes[self.kind.dst].node_ids[structure.col.long()]
        edge_ids = torch.where(positions < 0, loop_ids, select_or_fill(local.edge_ids, positions, fill=0))
        blocks, shift = [], structure.num_edges - local.structure.num_edges
        for q, block in enumerate(self.in_blocks):
            start, stop = block.edges.start, block.edges.stop
            if q == self.part:
                blocks.append(EdgeBlock(structure, None, block.num_rows, edge_ids, slice(start, stop + shift)))
            elif q < self.part:
                blocks.append(block)
            else:
                blocks.append(replace(block, edges=slice(start + shift, stop + shift)))
        return _LoopedBlocks(tuple(blocks), positions, local.edges)

    def blocks(self, *, self_loops: bool) -> tuple[EdgeBlock, ...]:
        return self._loops.blocks if self_loops else self.in_blocks

    def out_blocks_for(self, *, self_loops: bool) -> tuple[EdgeBlock, ...]:
        return self._looped_out_blocks if self_loops else self.out_blocks

    @cached_property
    def _looped_out_blocks(self) -> tuple[EdgeBlock, ...]:
        local = self._loops.blocks[self.part]
        structure, positions = local.transposed
        weight = None
        if self.weight is not None:
            weight = select_or_fill(self.weight[self._loops.local_edges], self._loops.positions, fill=1.0)[positions]
        looped = EdgeBlock(structure, None, structure.num_rows, local.edge_ids[positions], local.edges, weight)
        return tuple(looped if q == self.part else block for q, block in enumerate(self.out_blocks))

    def append_loop_values(self, values: Tensor, *, fill: float) -> Tensor:
        """Insert ``fill`` for self-loops into per-edge values; differentiable."""
        local = self._loops.local_edges
        looped = select_or_fill(values[local], self._loops.positions, fill=fill)
        return torch.cat([values[: local.start], looped, values[local.stop :]])

    def append_mean_loop_values(self, values: Tensor) -> Tensor:
        """Insert the mean of the row's other in-edges, over all blocks, for self-loops into per-edge values."""
        looped = self.append_loop_values(values, fill=0.0)
        return fill_loops(looped, self._is_loop, self._looped_rows, self.degree(self_loops=True))

    @cached_property
    def _is_loop(self) -> Tensor:
        return self.append_loop_values(torch.zeros(self.num_edges), fill=1.0) > 0

    @cached_property
    def _looped_rows(self) -> Tensor:
        """[E'] the destination of every edge."""
        return torch.cat([edge_rows(block) for block in self._loops.blocks])

    # -- degrees --

    def degree(self, *, self_loops: bool) -> Tensor:
        """[n] int64: in-edges of every row, remote ones included."""
        if self_loops not in self._degrees:
            self._degrees[self_loops] = _degree(self.blocks(self_loops=self_loops), self.num_rows)
        return self._degrees[self_loops]

    @cached_property
    def last_loops(self) -> tuple[Tensor, Tensor]:
        """(rows with a self-loop, position of the last one of each)."""
        block = self.in_blocks[self.part]
        columns = block.structure.col if self.kind.src == self.kind.dst else torch.tensor(-1)
        rows, positions = last_loops_of(edge_rows(block), columns, block.edge_ids)
        return rows, positions + block.edges.start

    def neighbor_weight(self, *, weighted: bool) -> Tensor:
        """[n] float64: the sum of the weights of in-edges, or their number, without self-loops."""
        total = torch.zeros(self.num_rows, dtype=torch.float64)
        for q, block in enumerate(self.in_blocks):
            values = None if not weighted or self.weight is None else self.weight[block.edges]
            for rows, piece in split_block(block):
                weight = torch.ones(len(rows), dtype=torch.float64) if values is None else values[piece].double()
                if q == self.part and self.kind.src == self.kind.dst:
                    weight = torch.where(rows == block.structure.col[piece], 0.0, weight)
                total.index_add_(0, rows, weight)
        return total


class PartitionBlocks:
    """One rank's partition: rows and exchange plans by node type, edges by edge type.

    ``of`` is given for a layer that has only the first rows of another ``PartitionBlocks``, and computes ``num_dst``.
    """

    def __init__(
        self, shard: BlockSource, *, of: PartitionBlocks | None = None, num_dst: Mapping[str, int] | None = None
    ) -> None:
        self.shard = shard
        self.nodes: dict[str, NodeRows] = {}
        for kind in shard.node_types:
            ids = shard.nodes(kind).store_ids
            first_rows = slice(len(ids))
            degree = _part_degrees(self, kind) if of is None else selected_degrees(of.nodes[kind].degree, first_rows)
            self.nodes[kind] = NodeRows(ids, len(ids) if num_dst is None else num_dst[kind], degree)
        self.edges = {kind: RelationBlocks(shard, kind, self.nodes) for kind in shard.edge_types}
        self._plans: dict[tuple[str, str], ExchangePlan] = {}
        self._stacked: dict[Any, tuple[EdgeBlock, ...]] = {}
        self._merged: dict[tuple[str, bool], MergedEdges] = {}

    def exchange_plan(self, kind: str, direction: str) -> ExchangePlan:
        """Plan of an exchange: of sources of a node type (``in``), or of destinations (``out``)."""
        if (kind, direction) not in self._plans:
            plan = self.shard.plan(kind, direction)
            self._plans[kind, direction] = ExchangePlan(plan.send, tuple(map(len, plan.recv)))
        return self._plans[kind, direction]

    def stacked(self, kinds: tuple[EdgeType, ...], num_dst: Mapping[Any, int]) -> tuple[EdgeBlock, ...]:
        """In-edges of some types as one: sources stacked by edge type, destinations by the keys of ``num_dst``."""
        if (kinds, tuple(num_dst)) not in self._stacked:
            relations = [self.edges[kind] for kind in kinds]
            self._stacked[kinds, tuple(num_dst)] = _stack(relations, list(self.edges), num_dst)
        return self._stacked[kinds, tuple(num_dst)]

    def merged(self, reduce: str, *, weighted: bool) -> MergedEdges:
        if (reduce, weighted) not in self._merged:
            self._merged[reduce, weighted] = MergedEdges.of(list(self.edges.values()), reduce, weighted=weighted)
        return self._merged[reduce, weighted]


def _part_degrees(blocks: PartitionBlocks, node_type: str) -> Degrees:
    """In-degrees of local rows in the whole graph, computed once."""

    @cache
    def degree(kind: int) -> Tensor:
        fill = torch.nan if kind == LOOPS else 0.0
        total = torch.full((blocks.nodes[node_type].num_dst,), fill, dtype=torch.float64)
        for edges in (edges for name, edges in blocks.edges.items() if name.dst == node_type):
            if kind == LOOPS:
                rows, positions = edges.last_loops
                total[rows] = 1.0 if edges.weight is None else edges.weight[positions].double()
            else:
                total += edges.neighbor_weight(weighted=bool(kind))
        return total if kind else total.float()

    return degree


@dataclass(frozen=True, eq=False)
class MergedEdges:
    """In-edges of all types within one node type, in blocks by the partition of their source, with a type each.

    A sum weighted by edge type then needs one weight per edge. ``graph/views/merged_relations.py`` has the same for one
    process.
    """

    blocks: tuple[EdgeBlock, ...]
    relation: Tensor  # [E] int64: index of the edge's type
    factor: Tensor  # [E] float64: in the sum or mean over the edges of that type

    @classmethod
    def of(cls, relations: Sequence[RelationBlocks], reduce: str, *, weighted: bool) -> MergedEdges:
        edge_factor = [edge_factors(edges, reduce, weighted=weighted) for edges in relations]
        merged_blocks, types, factors, start = [], [], [], 0
        for q in range(len(relations[0].in_blocks)):
            blocks = [edges.in_blocks[q] for edges in relations]
            rows = [edge_rows(block) for block in blocks]
            sizes = torch.tensor(list(map(len, rows)))
            factor = torch.cat([values[block.edges] for values, block in zip(edge_factor, blocks, strict=True)])
            indptr, order = counting_sort(torch.cat(rows), blocks[0].num_rows)
            cols = torch.cat([block.structure.col for block in blocks])[order]
            edge_ids = torch.cat([block.edge_ids for block in blocks])[order]
            structure = CSR(indptr, cols, blocks[0].structure.num_cols)
            merged = _new_block(structure, edge_ids, start, is_local=blocks[0].rows is None)
            merged_blocks.append(merged)
            types.append(torch.repeat_interleave(torch.arange(len(relations)), sizes)[order])
            factors.append(factor[order])
            start = merged.edges.stop
        return cls(tuple(merged_blocks), torch.cat(types), torch.cat(factors))

    def weight(self, coefficient: Tensor) -> Tensor:
        """[E] the weight of each edge; differentiable in the coefficients of the types."""
        weight = coefficient[self.relation]
        return weight * self.factor.to(weight.dtype)


def _stack(
    relations: Sequence[RelationBlocks], all_kinds: Sequence[EdgeType], num_dst: Mapping[Any, int]
) -> tuple[EdgeBlock, ...]:
    stacked: list[EdgeBlock] = []
    for q in range(len(relations[0].in_blocks)):
        blocks = {edges.kind: edges.in_blocks[q] for edges in relations}
        tables = {kind: (block.structure, edge_rows(block), block.edge_ids) for kind, block in blocks.items()}
        edges = StackedEdges.of(tables, num_dst, all_kinds)
        start = stacked[-1].edges.stop if stacked else 0
        stacked.append(_new_block(edges.structure, edges.edge_ids, start, is_local=q == relations[0].part))
    return tuple(stacked)


def _new_block(structure: CSR, edge_ids: Tensor, start: int, *, is_local: bool) -> EdgeBlock:
    """A block of edges by row; rows without edges are left out unless it is the local block."""
    indptr, num_rows = structure.indptr, structure.num_rows
    rows: Tensor | None = None
    if not is_local:
        rows = indptr.diff().nonzero()[:, 0].to(torch.int32)
        structure = CSR(torch.cat([indptr[:-1][rows.long()], indptr[-1:]]), structure.col, structure.num_cols)
    return EdgeBlock(structure, rows, num_rows, edge_ids, slice(start, start + len(edge_ids)))


def _full_indptr(block: ShardBlock, rows: int) -> Tensor:
    """[rows + 1] the start of each row's edges, rows without edges included."""
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    indptr[block.rows.long() + 1] = block.indptr.diff()
    return indptr.cumsum_(0)


def edge_rows(block: EdgeBlock) -> Tensor:
    """[E] int64: the local row of each edge."""
    rows = torch.arange(block.num_rows) if block.rows is None else block.rows.long()
    return torch.repeat_interleave(rows, block.structure.indptr.diff(), output_size=block.structure.num_edges)


def split_block(block: EdgeBlock, max_edges: int = 1 << 20) -> Iterator[tuple[Tensor, slice]]:
    """([·] int64 the local row of each edge, the edges) in pieces of whole rows, about ``max_edges`` edges each."""
    indptr, low = block.structure.indptr, 0
    while low < len(indptr) - 1:
        high = int(torch.searchsorted(indptr, indptr[low] + max_edges, right=True)) - 1
        high = max(high, low + 1)
        rows = torch.arange(low, high) if block.rows is None else block.rows[low:high].long()
        start, stop = int(indptr[low]), int(indptr[high])
        yield torch.repeat_interleave(rows, indptr[low : high + 1].diff(), output_size=stop - start), slice(start, stop)
        low = high


def _degree(blocks: tuple[EdgeBlock, ...], num_rows: int) -> Tensor:
    total = torch.zeros(num_rows, dtype=torch.int64)
    for block in blocks:
        if block.rows is None:
            total += block.structure.indptr.diff()
        else:
            total.index_add_(0, block.rows, block.structure.indptr.diff())
    return total
