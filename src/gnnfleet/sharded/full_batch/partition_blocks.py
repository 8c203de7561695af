"""A rank's part of a graph as kernels take it: edges cut by the part of their far end, and the routes of rows.

In-edges of a part are all in-edges of its nodes, so it knows their degrees. Per-edge tensors of a view have the blocks
q = 0 … P − 1 one after the other. With self-loops the block from the part to itself has one for every row, in place of
any the store has; the other blocks are the same. P parts, n rows of a type here, R of them with an edge in a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from gnnfleet.comm.halo_exchange import ExchangePlan
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.partition.shard import HaloPlan, ShardBlock, ShardNodes
from gnnfleet.graph.views.local import SELF_LOOP_IDS
from gnnfleet.graph.views.view_base import NodeRows
from gnnfleet.ops.csr import CSR


@dataclass(frozen=True, eq=False)
class EdgeBlock:
    """The edges between this part and another: rows of this part, columns at the other end as they arrive."""

    structure: CSR  # R rows
    rows: Tensor | None  # [R] int32: rows of this part; None: all
    num_rows: int  # n
    edge_ids: Tensor  # [E] int64: store edge ids, for self-loops what stands in for them
    edges: slice  # where these edges are in per-edge tensors of the view; of out-edges without meaning
    weight: Tensor | None = None  # [E] the store's, for out-edges: their owner has no other way to know it

    @cached_property
    def transposed(self) -> tuple[CSR, Tensor]:
        """(the edges by column, whose columns are rows of this part; [E] int64 the position here of each)."""
        # From a copy of the structure, which keeps nothing.
        turned, positions = CSR(self.structure.indptr, self.structure.col, self.structure.num_cols).transposed
        if self.rows is None:
            return turned, positions
        return CSR(turned.indptr, self.rows.index_select(0, turned.col), self.num_rows), positions

    def select_rows(self, values: Tensor) -> Tensor:
        """[R, …] the values of the rows of this block, from those of all rows."""
        return values if self.rows is None else values.index_select(0, self.rows)


@dataclass(frozen=True, eq=False)
class _LoopedBlocks:
    """In-edges with self-loops, and where those of the part's own block come from."""

    blocks: tuple[EdgeBlock, ...]
    place: Tensor  # [E'] int64: positions in the part's own block, −1 for loops
    own: slice  # the own block among the edges of the store


class BlockSource(Protocol):
    """What a part is read from: a ``Shard``, or a ``RestrictedShard``, whose destinations are the first of its rows."""

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
    """Edges of one type into and out of this part. Everything is made when first asked for and kept."""

    def __init__(self, shard: BlockSource, kind: EdgeType, nodes: Mapping[str, NodeRows]) -> None:
        self.kind, self.part = kind, shard.part
        self._shard, self._nodes = shard, nodes

    @property
    def num_rows(self) -> int:
        return self._nodes[self.kind.dst].num_dst

    @property
    def num_edges(self) -> int:
        return len(self.edge_ids)

    @cached_property
    def edge_ids(self) -> Tensor:
        found = self._shard.edge_data(self.kind, "edge_ids")
        assert found is not None
        return found

    @cached_property
    def weight(self) -> Tensor | None:
        return self._shard.edge_data(self.kind, "weight")

    @cached_property
    def attr(self) -> Tensor | None:
        return self._shard.edge_data(self.kind, "attr")

    @cached_property
    def in_blocks(self) -> tuple[EdgeBlock, ...]:
        """P blocks of in-edges; the part's own has all rows, so that a sum can begin with it."""
        return self._cuts("in", self._nodes[self.kind.dst].num_dst, len(self._nodes[self.kind.src].node_ids))

    @cached_property
    def out_blocks(self) -> tuple[EdgeBlock, ...]:
        """P blocks of out-edges: rows are sources here, columns destinations at q."""
        return self._cuts("out", len(self._nodes[self.kind.src].node_ids), self._nodes[self.kind.dst].num_dst)

    def _cuts(self, direction: str, rows: int, own_columns: int) -> tuple[EdgeBlock, ...]:
        plan = self._shard.plan(self.kind.src if direction == "in" else self.kind.dst, direction)
        start, found = 0, []
        for q in range(self._shard.parts):
            block = self._shard.block(self.kind, direction, q)
            own = q == self.part
            columns = own_columns if own else len(plan.recv[q])
            indptr = _full_indptr(block, rows) if own else block.indptr
            edges = slice(start, start + len(block.cols))
            found.append(
                EdgeBlock(
                    CSR(indptr, block.cols, columns),
                    None if own else block.rows,
                    rows,
                    block.edge_ids,
                    edges,
                    block.data.get("weight"),
                )
            )
            start = edges.stop
        return tuple(found)

    # -- self-loops --

    @cached_property
    def _loops(self) -> _LoopedBlocks:
        own = self.in_blocks[self.part]
        structure, place = own.structure.with_self_loops
        ids = self._nodes[self.kind.dst].node_ids
        edge_ids = torch.where(
            place < 0, SELF_LOOP_IDS + ids[structure.col.long()], select_or_fill(own.edge_ids, place, fill=0)
        )
        found, shift = [], structure.num_edges - own.structure.num_edges
        for q, cut in enumerate(self.in_blocks):
            low, high = cut.edges.start, cut.edges.stop
            if q == self.part:
                found.append(EdgeBlock(structure, None, cut.num_rows, edge_ids, slice(low, high + shift)))
            elif q < self.part:
                found.append(cut)
            else:
                moved = slice(low + shift, high + shift)
                found.append(EdgeBlock(cut.structure, cut.rows, cut.num_rows, cut.edge_ids, moved))
        return _LoopedBlocks(tuple(found), place, own.edges)

    def blocks(self, *, self_loops: bool) -> tuple[EdgeBlock, ...]:
        """The blocks of in-edges."""
        return self._loops.blocks if self_loops else self.in_blocks

    def out_blocks_for(self, *, self_loops: bool) -> tuple[EdgeBlock, ...]:
        """The blocks of out-edges."""
        return self._looped_outward if self_loops else self.out_blocks

    @cached_property
    def _looped_outward(self) -> tuple[EdgeBlock, ...]:
        own = self._loops.blocks[self.part]
        turned, positions = own.transposed
        weight = None
        if self.weight is not None:
            weight = select_or_fill(self.weight[self._loops.own], self._loops.place, fill=1.0)[positions]
        looped = EdgeBlock(turned, None, turned.num_rows, own.edge_ids[positions], own.edges, weight)
        return tuple(looped if q == self.part else cut for q, cut in enumerate(self.out_blocks))

    def append_loop_values(self, values: Tensor, *, fill: float) -> Tensor:
        """Per-edge values with ``fill`` for self-loops; differentiable."""
        own = self._loops.own
        return torch.cat(
            [values[: own.start], select_or_fill(values[own], self._loops.place, fill=fill), values[own.stop :]]
        )

    def append_mean_loop_values(self, values: Tensor) -> Tensor:
        """Per-edge values where a self-loop has the mean of the other in-edges of its row, those of all blocks."""
        spread = (-1, *([1] * (values.dim() - 1)))
        given = self.append_loop_values(values, fill=0.0)
        rows = self._looped_rows
        total = values.new_zeros(self.num_rows, *values.shape[1:]).index_add(0, rows, given)
        count = (self.degree(self_loops=True) - 1).clamp(min=1).to(values.dtype)
        return torch.where(self._is_loop.view(spread), (total / count.view(spread))[rows], given)

    @cached_property
    def _is_loop(self) -> Tensor:
        return self.append_loop_values(torch.zeros(self.num_edges), fill=1.0) > 0

    @cached_property
    def _looped_rows(self) -> Tensor:
        """[E'] the destination of every edge."""
        return torch.cat([edge_rows(cut) for cut in self._loops.blocks])

    # -- degrees --

    def degree(self, *, self_loops: bool) -> Tensor:
        """[n] int64: in-edges of every row, those from other parts too."""
        return self._looped_degree if self_loops else self._degree

    @cached_property
    def _degree(self) -> Tensor:
        return _degree(self.in_blocks, self.num_rows)

    @cached_property
    def _looped_degree(self) -> Tensor:
        return _degree(self._loops.blocks, self.num_rows)

    def inverse_degree(self, dtype: torch.dtype, *, self_loops: bool) -> Tensor:
        """[n] one over the number of in-edges; 1 for rows without."""
        return self.degree(self_loops=self_loops).clamp(min=1).to(dtype).reciprocal()

    def neighbor_weight(self, *, weighted: bool) -> Tensor:
        """[n] float64: the sum of the weights of in-edges, or their number, without self-loops."""
        total = torch.zeros(self.num_rows, dtype=torch.float64)
        for q, cut in enumerate(self.in_blocks):
            values = None if not weighted or self.weight is None else self.weight[cut.edges]
            for rows, piece in split_block(cut):
                value = torch.ones(len(rows), dtype=torch.float64) if values is None else values[piece].double()
                if q == self.part and self.kind.src == self.kind.dst:
                    value = torch.where(rows == cut.structure.col[piece], 0.0, value)
                total.index_add_(0, rows, value)
        return total


class PartitionBlocks:
    """One rank's part of a graph: rows and routes by node type, edges by edge type.

    ``of`` is the part that this one has the first rows of, as a layer that need not compute all of them: ``num_dst``.
    """

    def __init__(
        self, shard: BlockSource, *, of: PartitionBlocks | None = None, num_dst: Mapping[str, int] | None = None
    ) -> None:
        self.shard = shard
        self.nodes: dict[str, NodeRows] = {}
        for kind in shard.node_types:
            ids = shard.nodes(kind).store_ids
            degree = _PartDegrees(self, kind) if of is None else _PrefixDegrees(of.nodes[kind], len(ids))
            self.nodes[kind] = NodeRows(ids, len(ids) if num_dst is None else num_dst[kind], degree)
        self.edges = {kind: RelationBlocks(shard, kind, self.nodes) for kind in shard.edge_types}
        self._routes: dict[tuple[str, str], ExchangePlan] = {}

    def exchange_plan(self, kind: str, direction: str) -> ExchangePlan:
        """``in``: sources of a node type come from where they live; ``out``: destinations do."""
        if (kind, direction) not in self._routes:
            self._routes[kind, direction] = _exchange_plan(self.shard.plan(kind, direction))
        return self._routes[kind, direction]


class _PartDegrees:
    """In-degrees of the part's rows in the whole graph."""

    def __init__(self, part: PartitionBlocks, kind: str) -> None:
        self._part, self._kind = part, kind
        self._known: dict[bool, Tensor] = {}

    def __call__(self, weighted: bool) -> Tensor:
        if weighted not in self._known:
            total = torch.zeros(self._part.nodes[self._kind].num_dst, dtype=torch.float64)
            for kind, edges in self._part.edges.items():
                if kind.dst == self._kind:
                    total += edges.neighbor_weight(weighted=weighted)
            self._known[weighted] = total.float()
        return self._known[weighted]


class _PrefixDegrees:
    """Those of the first rows of another part."""

    def __init__(self, rows: NodeRows, count: int) -> None:
        self._rows, self._count = rows, count

    def __call__(self, weighted: bool) -> Tensor:
        return self._rows.degree(weighted)[: self._count]


def select_or_fill(values: Tensor, place: Tensor, *, fill: float) -> Tensor:
    """``values[place]``, and ``fill`` where the place is −1: the last row."""
    return torch.cat([values, values.new_full((1, *values.shape[1:]), fill)])[place]


def _exchange_plan(plan: HaloPlan) -> ExchangePlan:
    return ExchangePlan(plan.send, tuple(len(rows) for rows in plan.recv))


def _full_indptr(block: ShardBlock, rows: int) -> Tensor:
    """[rows + 1] where the edges of each row start, those without edges included."""
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    indptr[block.rows.long() + 1] = block.indptr.diff()
    return indptr.cumsum_(0)


def edge_rows(cut: EdgeBlock) -> Tensor:
    """[E] int64: the row of this part that each edge belongs to."""
    rows = torch.arange(cut.num_rows) if cut.rows is None else cut.rows.long()
    return torch.repeat_interleave(rows, cut.structure.indptr.diff(), output_size=cut.structure.num_edges)


def split_block(cut: EdgeBlock, most: int = 1 << 20) -> Iterator[tuple[Tensor, slice]]:
    """([·] int64 the rows of this part, which edges) of a block, not many more than ``most`` edges at a time."""
    indptr, low = cut.structure.indptr, 0
    while low < len(indptr) - 1:
        high = int(torch.searchsorted(indptr, indptr[low] + most, right=True)) - 1
        high = max(high, low + 1)
        rows = torch.arange(low, high) if cut.rows is None else cut.rows[low:high].long()
        start, stop = int(indptr[low]), int(indptr[high])
        yield torch.repeat_interleave(rows, indptr[low : high + 1].diff(), output_size=stop - start), slice(start, stop)
        low = high


def _degree(cuts: tuple[EdgeBlock, ...], num_rows: int) -> Tensor:
    total = torch.zeros(num_rows, dtype=torch.int64)
    for cut in cuts:
        if cut.rows is None:
            total += cut.structure.indptr.diff()
        else:
            total.index_add_(0, cut.rows, cut.structure.indptr.diff())
    return total
