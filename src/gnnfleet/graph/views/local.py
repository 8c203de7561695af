"""LocalView: a GraphView of edges in this process: the whole graph or a block.

``ops`` has the forward and backward passes. The view adds ids, weights and self-loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gnnfleet.graph.graph import Edges, EdgeType, Graph
from gnnfleet.graph.views.edge_list import EdgeList
from gnnfleet.graph.views.merged_relations import LazyMergedRelations, MergedRelations, StackedEdges
from gnnfleet.graph.views.row_index import take_rows
from gnnfleet.graph.views.view import MANY_SOURCES, GraphView, first_rows
from gnnfleet.graph.views.view_base import LOOPS, Degrees, NodeRows, last_loops_of, relation_weight
from gnnfleet.ops import aggregate as sums
from gnnfleet.ops.attend import attend
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.draws import DrawKey, Purpose
from gnnfleet.ops.message import Message
from gnnfleet.ops.propagate import propagate

# Self-loops have no store edge id. Their id for draws is this plus the store id of the node.
SELF_LOOP_IDS = 1 << 48
_EDGES_PER_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class LocalEdges:
    """The edges of one type in a view.

    If they are a uniform sample, sums over them are multiplied by ``sampling_scale``, which makes them unbiased
    estimates of the sum over all neighbours.
    """

    structure: CSR
    edge_ids: Tensor  # [E] int64
    weight: Tensor | None = None
    attr: Tensor | None = None
    sampling_scale: Callable[[], Tensor] | None = None  # → [R] float64: edges in the store per sampled edge
    is_store_order: bool = True  # edge ids never decrease within a row
    cache: dict[str, Any] = field(default_factory=dict, repr=False)

    def select(
        self, structure: CSR, selection: slice | Tensor, sampling_scale: Callable[[], Tensor] | None = None
    ) -> LocalEdges:
        """Select edges without reordering them; ``structure`` is theirs."""
        weight, attr = (None if data is None else data[selection] for data in (self.weight, self.attr))
        return LocalEdges(structure, self.edge_ids[selection], weight, attr, sampling_scale, self.is_store_order)

    @property
    def num_rows(self) -> int:
        return self.structure.num_rows

    @property
    def rows(self) -> Tensor:
        return self.structure.row.long()

    @property
    def tie_ids(self) -> Tensor | None:
        """[E] ids whose lowest wins among equal maxima; None if positions have the same order."""
        return None if self.is_store_order else self.edge_ids

    def looped_ids(self, node_ids: Tensor) -> Tensor:
        """[E'] edge ids with self-loops, for draws. Cached: ``node_ids`` are always those of the view."""
        if "ids" not in self.cache:
            structure, edge = self.structure.with_self_loops
            loop_ids = SELF_LOOP_IDS + node_ids[structure.col.long()]
            self.cache["ids"] = torch.where(edge < 0, loop_ids, select_or_fill(self.edge_ids, edge, fill=0))
        ids: Tensor = self.cache["ids"]
        return ids

    @cached_property
    def last_loops(self) -> tuple[Tensor, Tensor]:
        """(rows with a self-loop, position of the last one of each)."""
        return last_loops_of(self.structure.row, self.structure.col, self.edge_ids)

    def scaled(self, total: Tensor, reduce: str) -> Tensor:
        """Scale sums over a sample, [R, F], in place where autograd allows it."""
        if self.sampling_scale is None or reduce != "sum":
            return total
        scale = self._scale.to(total.dtype).view(-1, *([1] * (total.dim() - 1)))
        return total * scale if total._is_view() else total.mul_(scale)

    def scaled_weight(self, weight: Tensor | None, reduce: str) -> Tensor | None:
        """[E] weights with which the sum over a sample is scaled."""
        if self.sampling_scale is None or reduce != "sum":
            return weight
        scale = self._scale[self.structure.row.long()]
        return scale if weight is None else scale.to(weight.dtype) * weight

    @cached_property
    def _scale(self) -> Tensor:
        assert self.sampling_scale is not None
        return self.sampling_scale()


@dataclass(frozen=True, eq=False)
class LocalView(GraphView):
    """A graph or a block in this process."""

    nodes: Mapping[str, NodeRows]
    relations: Mapping[EdgeType, LocalEdges]
    key: DrawKey = field(default_factory=DrawKey)
    layer: int = 0
    training: bool = True
    merged: LazyMergedRelations = field(default_factory=LazyMergedRelations, repr=False)

    @classmethod
    def of_graph(cls, graph: Graph) -> LocalView:
        nodes = {
            node_type: NodeRows(torch.arange(table.count), table.count, graph_degrees(graph, node_type))
            for node_type, table in graph.nodes.items()
        }
        relations = {}
        for edge_type, edges in graph.edges.items():
            structure = CSR(edges.indptr, edges.src, graph.nodes[edge_type.src].count)
            relations[edge_type] = LocalEdges(structure, torch.arange(edges.count), edges.weight, edges.attr)
        return cls(nodes, relations)

    @property
    def has_many_sources(self) -> bool:
        return self.num_src > MANY_SOURCES * self.num_dst

    @property
    def _edges(self) -> LocalEdges:
        return self.relations[self._edge_type]

    @property
    def in_degree(self) -> Tensor:
        return self._edges.structure.indptr.diff()

    def aggregate(
        self, x: Tensor, *, reduce: str = "sum", weight: Tensor | None = None, self_loops: bool = False
    ) -> Tensor:
        edges = self._edges
        if not self_loops:
            out = sums.aggregate(edges.structure, x, reduce=reduce, weight=weight, ties=edges.tie_ids)
            return edges.scaled(out, reduce)
        structure, edge = edges.structure.with_self_loops
        weight = edges.scaled_weight(weight, reduce)
        if weight is not None:
            weight = select_or_fill(weight, edge, fill=1.0)
        # In store order no ids are needed: self-loops are last in their rows and have the highest ids.
        ties = edges.looped_ids(self.node_ids) if reduce == "max" and not edges.is_store_order else None
        return sums.aggregate(structure, x, reduce=reduce, weight=weight, ties=ties)

    def aggregate_with_self(self, x: Tensor, *, reduce: str = "sum") -> tuple[Tensor, Tensor]:
        edges = self._edges
        is_scaled = reduce == "sum" and edges.sampling_scale is not None
        if reduce == "max" or is_scaled or x.device.type != "cpu":
            return self.aggregate(x, reduce=reduce), first_rows(x, self.num_dst)
        return sums.aggregate_with_self(edges.structure, x, mean=reduce == "mean")

    def aggregate_relations(
        self, x: Mapping[str, Tensor], *, reduce: str = "sum", into: str | None = None, weighted: bool = False
    ) -> dict[EdgeType, Tensor]:
        outs = {}
        for edge_type, edges in self.relations.items():
            if into in (None, edge_type.dst):
                rows = x[edge_type.src]
                weight = relation_weight(edges, reduce, sums.accumulate_dtype(rows.dtype)) if weighted else None
                out = sums.aggregate(edges.structure, rows, reduce=reduce, weight=weight, ties=edges.tie_ids)
                outs[edge_type] = edges.scaled(out, reduce)
        return outs

    def combine_relations(
        self, x: Tensor, coefficient: Tensor, *, reduce: str = "sum", weighted: bool = False
    ) -> Tensor:
        assert len(self.nodes) == 1, "edge types of several node types have different rows"
        if reduce == "sum" and any(relation.sampling_scale is not None for relation in self.relations.values()):
            (node_type,) = self.nodes
            sums_by_type = self.aggregate_relations({node_type: x}, reduce=reduce, weighted=weighted).values()
            return torch.stack([total * coefficient[i] for i, total in enumerate(sums_by_type)]).sum(0)
        relations, key = list(self.relations.values()), (reduce, weighted)
        make = partial(MergedRelations.of, relations, reduce, weighted=weighted)
        merged: MergedRelations = self.merged.get(self.relations, key, make)
        return merged.combine(x, coefficient)

    def attend(
        self,
        value: Tensor,
        *,
        src: Tensor,
        dst: Tensor,
        score: str = "add",
        edge: Tensor | None = None,
        dropout: float = 0.0,
        mask_id: int = 0,
        self_loops: bool = False,
        **options: Any,
    ) -> Tensor:
        dropout = dropout if self.training else 0.0
        structure, ids = self._edges.structure, self._edges.edge_ids if dropout else None
        if self_loops:
            structure, position = self._edges.structure.with_self_loops
            ids = self._edges.looped_ids(self.node_ids) if dropout else None
            edge = None if edge is None else _add_loop_terms(edge, structure, position)
        return attend(
            structure,
            value,
            src=src,
            dst=first_rows(dst, self.num_dst),
            score=score,
            edge=edge,
            dropout=dropout,
            draws=self.key.draws(Purpose.ATTENTION, self.layer, relation=mask_id),
            edge_ids=ids,
            **options,
        )

    def _attend_stacked(
        self, kinds: tuple[EdgeType, ...], num_dst: Mapping[Any, int], value: Tensor, **inputs: Any
    ) -> Tensor:
        def stack() -> StackedEdges:
            relations = {kind: self.relations[kind] for kind in kinds}
            edges = {kind: (table.structure, table.structure.row, table.edge_ids) for kind, table in relations.items()}
            return StackedEdges.of(edges, num_dst, self.edge_types)

        edges: StackedEdges = self.merged.get(self.relations, (kinds, tuple(num_dst)), stack)
        return attend(edges.structure, value, edge_ids=edges.edge_ids if inputs["dropout"] else None, **inputs)

    def propagate(
        self, message: Message, *, dst: Mapping[str, Tensor] | None = None, reduce: str = "sum", **inputs: Any
    ) -> Tensor:
        dst = {name: first_rows(tensor, self.num_dst) for name, tensor in (dst or {}).items()}
        edges = self._edges
        inputs |= {"dst": dst, "reduce": reduce, "edge_ids": edges.edge_ids, "ties": edges.tie_ids}
        return edges.scaled(propagate(edges.structure, message, **inputs), reduce)

    def edge_list(self, edge_type: EdgeType | None = None) -> EdgeList:
        edge_type = edge_type or self._edge_type
        edges, sources = self.relations[edge_type], self.nodes[edge_type.src]
        ids, num_dst = sources.node_ids, self.nodes[edge_type.dst].num_dst
        if "index" not in edges.cache:
            edges.cache["index"] = torch.stack([edges.structure.col.long(), edges.structure.row.long()])
        index, data = edges.cache["index"], (edges.weight, edges.attr)
        table = EdgeList(index, edges.edge_ids, ids, num_dst, len(ids), *data, edge_type)
        if table.is_bipartite or (num_dst == len(ids) and edges.sampling_scale is None):
            return table
        return replace(table, fetched_degree=sources.degree, sampling_scale=edges.sampling_scale)

    def gather_rows(self, x: Tensor, store_ids: Tensor) -> Tensor:
        return take_rows(x, self._rows.row_index.rows(store_ids, below=x.shape[0]))

    def sum_over_nodes(self, t: Tensor) -> Tensor:
        return t


def graph_degrees(graph: Graph, node_type: str) -> Degrees:
    """In-degrees of a node type over all edge types into it, computed once per graph."""

    @cache
    def degrees(kind: int) -> Tensor:
        fill = torch.nan if kind == LOOPS else 0.0
        total = torch.full((graph.nodes[node_type].count,), fill, dtype=torch.float64)
        for edge_type, edges in graph.edges.items():
            if edge_type.dst == node_type:
                _add_degrees(total, edges, kind, has_loops=edge_type.src == node_type)
        return total if kind else total.float()

    return degrees


def _add_degrees(total: Tensor, edges: Edges, kind: int, *, has_loops: bool) -> None:
    """Add the in-edges of every row, or their weights, in blocks of rows and without self-loops; or set LOOPS."""
    weight = edges.weight if kind else None
    starts = torch.searchsorted(edges.indptr, torch.arange(0, edges.count, _EDGES_PER_BLOCK), right=True) - 1
    for low, high in pairwise([*torch.unique(starts).tolist(), len(total)]):
        first, end = int(edges.indptr[low]), int(edges.indptr[high])
        dst = torch.repeat_interleave(torch.arange(low, high), edges.indptr[low : high + 1].diff())
        value = torch.ones(end - first, dtype=torch.float64) if weight is None else weight[first:end].double()
        if kind == LOOPS:
            rows, positions = last_loops_of(dst, edges.src[first:end] if has_loops else dst - 1, dst)
            total[rows] = value[positions]
        else:
            total.index_add_(0, dst, torch.where(edges.src[first:end] == dst, 0.0, value) if has_loops else value)


def select_or_fill(values: Tensor, position: Tensor, *, fill: float) -> Tensor:
    """``values[position]``, and ``fill`` for position −1, which is an additional last row."""
    return torch.cat([values, values.new_full((1, *values.shape[1:]), fill)])[position]


def _add_loop_terms(edge: Tensor, structure: CSR, position: Tensor) -> Tensor:
    """[E', …] edge terms with self-loops; the term of a self-loop is the mean over its row, as in PyG."""
    terms = select_or_fill(edge, position, fill=0.0)
    return fill_loops(terms, position < 0, structure.row.long(), structure.indptr.diff())


def fill_loops(terms: Tensor, is_loop: Tensor, rows: Tensor, degree: Tensor) -> Tensor:
    """Set the terms [E', …] of self-loops, which are 0, to the mean of the others in the row."""
    column = (-1, *[1] * (terms.dim() - 1))
    total = terms.new_zeros(len(degree), *terms.shape[1:]).index_add(0, rows, terms)
    count = (degree - 1).clamp(min=1).to(terms.dtype)
    return torch.where(is_loop.view(column), (total / count.view(column))[rows], terms)
