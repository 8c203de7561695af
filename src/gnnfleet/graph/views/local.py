"""LocalView: the verbs of a GraphView for edges in this process: the whole graph, an induced subgraph, a block.

Forward and backward are in ``ops``; here they meet the graph's ids, weights and self-loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.graph.graph import Edges, EdgeType, Graph
from gnnfleet.graph.views.merged_relations import LazyMergedRelations
from gnnfleet.graph.views.row_index import take_rows
from gnnfleet.graph.views.view import MANY_SOURCES, first_rows
from gnnfleet.graph.views.view_base import NodeRows, ViewBase
from gnnfleet.ops import aggregate as sums
from gnnfleet.ops.attend import attend
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.draws import DrawKey, Purpose
from gnnfleet.ops.message import Message
from gnnfleet.ops.propagate import propagate

# Self-loops have no store edge id; for draws they are numbered from here by the node's store id.
SELF_LOOP_IDS = 1 << 48


def _same(t: Tensor) -> Tensor:
    return t


@dataclass(frozen=True, eq=False)
class LocalEdges:
    """The edges of one type in a view; ``sampling_scale`` is there when they are a sample, drawn evenly.

    Sums over a sample are multiplied by it and so estimate, without bias, the sum over all neighbours.
    """

    structure: CSR
    edge_ids: Tensor  # [E] int64
    weight: Tensor | None = None
    attr: Tensor | None = None
    sampling_scale: Callable[[], Tensor] | None = None  # [R] float64: edges in the store per edge drawn
    is_store_order: bool = True  # whether edge ids never fall within a row
    cache: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def cut(self, structure: CSR, which: slice | Tensor, share: Callable[[], Tensor] | None = None) -> LocalEdges:
        """Some of the edges, in the same order, under another structure."""
        weight = None if self.weight is None else self.weight[which]
        attr = None if self.attr is None else self.attr[which]
        return LocalEdges(structure, self.edge_ids[which], weight, attr, share, self.is_store_order)

    @property
    def tie_ids(self) -> Tensor | None:
        """What decides between equal maxima, the store edge ids, where positions do not say the same."""
        return None if self.is_store_order else self.edge_ids

    def looped_tie_ids(self, node_ids: Tensor) -> Tensor | None:
        """The same of ``looped``: a loop is last in its row, and its id above those of all edges."""
        return None if self.is_store_order else self.looped_ids(node_ids)

    def looped_ids(self, node_ids: Tensor) -> Tensor:
        """[E'] what draws of the edges of ``looped`` go by; made once, for the nodes of the view this belongs to."""
        if "ids" not in self.cache:
            structure, edge = self.structure.with_self_loops
            loops = SELF_LOOP_IDS + node_ids[structure.col.long()]
            self.cache["ids"] = torch.where(edge < 0, loops, _pick(self.edge_ids, edge, fill=0))
        return self.cache["ids"]

    def scaled(self, total: Tensor, reduce: str) -> Tensor:
        """What sums over a sample say of the whole; ``total`` [R, F] is fresh."""
        if self.sampling_scale is None or reduce != "sum":
            return total
        return total.mul_(self._shares.to(total.dtype).view(-1, *([1] * (total.dim() - 1))))

    def scaled_weight(self, weight: Tensor | None, reduce: str) -> Tensor | None:
        """The same, edge by edge."""
        if self.sampling_scale is None or reduce != "sum":
            return weight
        each = self._shares[self.structure.row.long()]
        return each if weight is None else each.to(weight.dtype) * weight

    @cached_property
    def _shares(self) -> Tensor:
        assert self.sampling_scale is not None
        return self.sampling_scale()


@dataclass(frozen=True, eq=False)
class LocalView(ViewBase[LocalEdges]):
    """A graph, or a piece of one, in this process."""

    nodes: Mapping[str, NodeRows]
    relations: Mapping[EdgeType, LocalEdges]
    key: DrawKey = field(default_factory=DrawKey)
    layer: int = 0
    training: bool = True
    sum_over_processes: Callable[[Tensor], Tensor] = _same
    merged: LazyMergedRelations = field(default_factory=LazyMergedRelations, repr=False)

    @classmethod
    def of_graph(cls, graph: Graph) -> LocalView:
        """Every node and edge of a graph."""
        nodes = {
            kind: NodeRows(torch.arange(table.count), table.count, GraphDegrees(graph, kind))
            for kind, table in graph.nodes.items()
        }
        relations = {kind: _relation(edges, graph.nodes[kind.src].count) for kind, edges in graph.edges.items()}
        return cls(nodes, relations)

    @classmethod
    def induced(cls, graph: Graph, nodes: Mapping[str, Tensor]) -> LocalView:
        """The subgraph of some nodes (store ids, ascending) with all edges among them."""
        rows, place = {}, {}
        for kind, table in graph.nodes.items():
            ids = nodes.get(kind, torch.empty(0, dtype=torch.int64)).long()
            if len(ids) and (bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= table.count):
                raise InputError(f"nodes of a subgraph must be ascending store ids below {table.count}, each once")
            place[kind] = torch.full((table.count,), -1, dtype=torch.int64)
            place[kind][ids] = torch.arange(len(ids))
            rows[kind] = NodeRows(ids, len(ids), _SelectedDegrees(GraphDegrees(graph, kind), ids))
        relations = {
            kind: _induce(edges, place[kind.src], rows[kind.src], rows[kind.dst]) for kind, edges in graph.edges.items()
        }
        return cls(rows, relations)

    @property
    def has_many_sources(self) -> bool:
        return self.num_src > MANY_SOURCES * self.num_dst

    @property
    def edge_ids(self) -> Tensor:
        return self._edges.edge_ids

    @property
    def weight(self) -> Tensor | None:
        return self._edges.weight

    @property
    def attr(self) -> Tensor | None:
        return self._edges.attr

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
            weight = _pick(weight, edge, fill=1.0)
        ties = edges.looped_tie_ids(self.node_ids) if reduce == "max" else None
        return sums.aggregate(structure, x, reduce=reduce, weight=weight, ties=ties)

    def aggregate_with_self(self, x: Tensor, *, reduce: str = "sum") -> tuple[Tensor, Tensor]:
        edges = self._edges
        scaled = reduce == "sum" and edges.sampling_scale is not None
        if reduce == "max" or scaled or x.device.type != "cpu":
            return self.aggregate(x, reduce=reduce), first_rows(x, self.num_dst)
        return sums.aggregate_with_self(edges.structure, x, mean=reduce == "mean")

    def aggregate_relations(
        self, x: Mapping[str, Tensor], *, reduce: str = "sum", into: str | None = None
    ) -> dict[EdgeType, Tensor]:
        return {
            kind: edges.scaled(sums.aggregate(edges.structure, x[kind.src], reduce=reduce, ties=edges.tie_ids), reduce)
            for kind, edges in self.relations.items()
            if into in (None, kind.dst)
        }

    def combine_relations(self, x: Tensor, coefficient: Tensor, *, reduce: str = "sum") -> Tensor:
        assert len(self.nodes) == 1, "edge types of several node types have different rows"
        if reduce == "sum" and any(relation.sampling_scale is not None for relation in self.relations.values()):
            (kind,) = self.nodes
            each = self.aggregate_relations({kind: x}, reduce=reduce).values()
            return torch.stack([rows * coefficient[i] for i, rows in enumerate(each)]).sum(0)
        merged = self.merged.get(self.relations, [relation.structure for relation in self.relations.values()])
        return merged.combine(x, coefficient, reduce=reduce)

    def attend(
        self,
        value: Tensor,
        *,
        src: Tensor,
        dst: Tensor,
        score: str = "add",
        vector: Tensor | None = None,
        edge: Tensor | None = None,
        heads: int | None = None,
        slope: float = 0.2,
        dropout: float = 0.0,
        self_loops: bool = False,
    ) -> Tensor:
        dropout = dropout if self.training else 0.0
        structure, ids = self._edges.structure, self._edges.edge_ids if dropout else None
        if self_loops:
            structure, place = self._edges.structure.with_self_loops
            ids = self._edges.looped_ids(self.node_ids) if dropout else None
            edge = None if edge is None else _with_loops(edge, structure, place)
        return attend(
            structure,
            value,
            src=src,
            dst=first_rows(dst, self.num_dst),
            score=score,
            vector=vector,
            edge=edge,
            heads=heads,
            slope=slope,
            dropout=dropout,
            draws=self.key.draws(Purpose.ATTENTION, self.layer),
            edge_ids=ids,
        )

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
        ends = {name: first_rows(tensor, self.num_dst) for name, tensor in (dst or {}).items()}
        edges = self._edges
        out = propagate(
            edges.structure,
            message,
            src=src,
            dst=ends,
            edge=edge,
            params=params,
            reduce=reduce,
            edge_ids=edges.edge_ids,
            ties=edges.tie_ids,
        )
        return edges.scaled(out, reduce)

    def gather_rows(self, x: Tensor, store_ids: Tensor) -> Tensor:
        return take_rows(x, self._rows.row_index.rows(store_ids, below=x.shape[0]))

    def sum_over_nodes(self, t: Tensor) -> Tensor:
        return self.sum_over_processes(t)


class GraphDegrees:
    """In-degrees of a node type over all edge types into it, computed once per graph."""

    def __init__(self, graph: Graph, kind: str) -> None:
        self._graph, self._kind = graph, kind
        self._known: dict[bool, Tensor] = {}

    def __call__(self, weighted: bool) -> Tensor:
        if weighted not in self._known:
            total = torch.zeros(self._graph.nodes[self._kind].count, dtype=torch.float64)
            for kind, edges in self._graph.edges.items():
                if kind.dst == self._kind:
                    _add_degrees(total, edges, edges.weight if weighted else None, loops=kind.src != kind.dst)
            self._known[weighted] = total.float()
        return self._known[weighted]


def _add_degrees(total: Tensor, edges: Edges, weight: Tensor | None, *, loops: bool) -> None:
    """Add in-edges, or their weights, to every row of ``total``; some rows at a time, whatever the edges are."""
    starts = torch.searchsorted(edges.indptr, torch.arange(0, edges.count, _DEGREE_EDGES), right=True) - 1
    for low, high in pairwise([*torch.unique(starts).tolist(), len(total)]):
        first, end = int(edges.indptr[low]), int(edges.indptr[high])
        dst = torch.repeat_interleave(torch.arange(low, high), edges.indptr[low : high + 1].diff())
        value = torch.ones(end - first, dtype=torch.float64) if weight is None else weight[first:end].double()
        total.index_add_(0, dst, value if loops else torch.where(edges.src[first:end] == dst, 0.0, value))


_DEGREE_EDGES = 1 << 20  # edges looked at together


class _SelectedDegrees:
    """Some rows of another node's degrees."""

    def __init__(self, degrees: Callable[[bool], Tensor], rows: Tensor) -> None:
        self._degrees, self._rows = degrees, rows

    def __call__(self, weighted: bool) -> Tensor:
        return self._degrees(weighted)[self._rows]


def _relation(edges: Edges, num_src: int) -> LocalEdges:
    structure = CSR(edges.indptr, edges.src, num_src)
    return LocalEdges(structure, torch.arange(edges.count), edges.weight, edges.attr)


def _induce(edges: Edges, place: Tensor, src: NodeRows, dst: NodeRows) -> LocalEdges:
    """The edges of a type among the rows of a subgraph."""
    starts, ends = edges.indptr[dst.node_ids], edges.indptr[dst.node_ids + 1]
    degree = ends - starts
    row = torch.repeat_interleave(torch.arange(len(degree)), degree)
    first = torch.zeros(len(degree) + 1, dtype=torch.int64)
    first[1:] = degree.cumsum(0)
    edge = torch.arange(len(row)) - first[row] + starts[row]
    col = place[edges.src[edge].long()]
    keep = col >= 0
    row, col, edge = row[keep], col[keep], edge[keep]
    indptr = torch.zeros(len(degree) + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(row, minlength=len(degree)).cumsum(0)
    structure = CSR(indptr, col.to(edges.src.dtype), len(src.node_ids))
    return LocalEdges(
        structure,
        edge,
        None if edges.weight is None else edges.weight[edge],
        None if edges.attr is None else edges.attr[edge],
    )


def _pick(values: Tensor, place: Tensor, *, fill: float) -> Tensor:
    """``values[place]``, and ``fill`` where the place is −1: the last row."""
    return torch.cat([values, values.new_full((1, *values.shape[1:]), fill)])[place]


def _with_loops(edge: Tensor, structure: CSR, place: Tensor) -> Tensor:
    """Edge terms with one for every self-loop: the mean of the row's, as PyG fills them."""
    loops = place < 0
    given = _pick(edge, place, fill=0.0)
    rows = structure.row.long()
    total = edge.new_zeros(structure.num_rows, *edge.shape[1:]).index_add(0, rows, given)
    count = (structure.indptr.diff() - 1).clamp(min=1).to(edge.dtype)
    mean = total / count.view(-1, *([1] * (edge.dim() - 1)))
    return torch.where(loops.view(-1, *([1] * (edge.dim() - 1))), mean[rows], given)
