"""Base of all views: nodes and edges by type, the step and layer they belong to, dropout by store id."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.views.row_index import RowIndex
from gnnfleet.ops.draws import DrawKey, Purpose, dropout

COUNT, WEIGHTED, LOOPS = range(3)
Degrees = Callable[[int], Tensor]
"""[N_src] numbers of nodes in the whole graph.

COUNT (False): in-edges without self-loops, float32. WEIGHTED (True): the sum of their weights, float64. LOOPS: the
weight of the last self-loop, NaN for nodes without one.
"""


class EdgeTables(Protocol):
    """The edges of one type in a view: store edge ids, weights and features."""

    @property
    def num_rows(self) -> int: ...
    @property
    def rows(self) -> Tensor:
        """[E] int64: the destination row of every edge."""

    @property
    def cache(self) -> dict[str, Any]: ...
    @property
    def edge_ids(self) -> Tensor: ...
    @property
    def weight(self) -> Tensor | None: ...
    @property
    def attr(self) -> Tensor | None: ...
    @property
    def last_loops(self) -> tuple[Tensor, Tensor]: ...


EdgeStorage = TypeVar("EdgeStorage", bound=EdgeTables)


@dataclass(frozen=True, eq=False)
class NodeRows:
    """The nodes of one type in a view."""

    node_ids: Tensor  # [N_src] int64
    num_dst: int
    degree: Degrees

    @cached_property
    def row_index(self) -> RowIndex:
        return RowIndex(self.node_ids)


def stored_degrees(read: Degrees, kinds: Container[int]) -> Degrees:
    """Degrees of which ``kinds`` are stored: without weights WEIGHTED is COUNT, without LOOPS no node has one."""

    def degree(kind: int) -> Tensor:
        if kind in kinds:
            return read(kind)
        return torch.full_like(read(COUNT), torch.nan) if kind == LOOPS else read(COUNT)

    return degree


def selected_degrees(degree: Degrees, rows: Tensor | slice) -> Degrees:
    """Degrees of some rows of a view, computed once."""
    return cache(lambda kind: degree(kind)[rows])


def last_loops_of(rows: Tensor, columns: Tensor, edge_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(rows with a self-loop, position of the last one of each by edge id)."""
    loops = (rows == columns).nonzero()[:, 0]
    loops = loops[torch.argsort(edge_ids[loops], stable=True)]
    loops = loops[torch.argsort(rows[loops], stable=True)]
    of = rows[loops]
    is_last = of.diff(append=of.new_full((1,), -1)) != 0
    return of[is_last].long(), loops[is_last]


def mean_by_row(edges: EdgeTables, values: Tensor) -> Tensor:
    """[n, …] mean of values [E, …] over the in-edges of every row; 0 without any."""
    rows, shape = edges.rows, (edges.num_rows, *values.shape[1:])
    count = torch.bincount(rows, minlength=edges.num_rows).clamp(min=1).to(values.dtype)
    return values.new_zeros(shape).index_add(0, rows, values) / count.view(-1, *[1] * (values.dim() - 1))


def relative_weight(edges: EdgeTables, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[E] each weight over the mean magnitude of those into the same row; 0 where all are 0."""
    wide = weight.reshape(-1).double()
    mean = mean_by_row(edges, wide.abs())
    return (wide / torch.where(mean > 0, mean, torch.inf)[edges.rows]).to(dtype)


def edge_factors(edges: EdgeTables, reduce: str, *, weighted: bool) -> Tensor:
    """[E] float64: the factor of every edge in the sum or mean over the edges of its type."""
    weight = edges.weight if weighted else None
    if reduce != "mean":
        return torch.ones(len(edges.rows), dtype=torch.float64) if weight is None else weight.double()
    inverse = torch.bincount(edges.rows, minlength=edges.num_rows).double().reciprocal()[edges.rows]
    return inverse if weight is None else inverse * relative_weight(edges, weight, inverse.dtype)


def relation_weight(edges: EdgeTables, reduce: str, dtype: torch.dtype) -> Tensor | None:
    """[E] store weights as a sum or mean over one edge type takes them; None without weights."""
    if edges.weight is None or reduce == "sum":
        return edges.weight
    return _compute_once(edges, "relative", (edges.weight, dtype), relative_weight)


def _compute_once(edges: EdgeTables, name: str, inputs: tuple[Any, ...], compute: Callable[..., Tensor]) -> Tensor:
    """``compute(edges, *inputs)``, cached for the same tensors unless one needs a gradient."""
    known, result = edges.cache.get(name, ((), None))
    if len(known) == len(inputs) and all(map(operator.is_, known, inputs)):
        assert isinstance(result, Tensor)
        return result
    result = compute(edges, *inputs)
    if not any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        edges.cache[name] = inputs, result
    return result


def _mean_attr(edges: EdgeTables, attr: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    return mean_by_row(edges, attr.to(dtype) if weight is None else attr.to(dtype) * weight[:, None])


class ViewBase(Generic[EdgeStorage]):
    """Base of views: frozen dataclasses with these fields. ``EdgeStorage`` holds the edges of one type."""

    nodes: Mapping[str, NodeRows]
    relations: Mapping[EdgeType, EdgeStorage]
    key: DrawKey
    layer: int
    training: bool

    def with_step(self, *, key: DrawKey | None = None, layer: int | None = None, training: bool | None = None) -> Self:
        changes = {"key": key, "layer": layer, "training": training}
        return self._with(**{name: value for name, value in changes.items() if value is not None})

    def for_type(self, node_type: str) -> Self:
        return self._with(nodes={node_type: self.nodes[node_type]}, relations={})

    def _with(self, **changes: Any) -> Self:
        return cast("Self", replace(cast("Any", self), **changes))

    @property
    def node_types(self) -> tuple[str, ...]:
        return tuple(self.nodes)

    @property
    def edge_types(self) -> tuple[EdgeType, ...]:
        return tuple(self.relations)

    @property
    def _kind(self) -> str:
        if len(self.nodes) != 1:
            raise ConfigError(f"this layer works on one node type; the graph has {', '.join(self.nodes)}")
        return next(iter(self.nodes))

    @property
    def _rows(self) -> NodeRows:
        return self.nodes[self._kind]

    @property
    def _edge_type(self) -> EdgeType:
        if len(self.relations) != 1:
            count = len(self.relations)
            raise ConfigError(f"this layer works on one edge type; the graph has {count}: use rgcn or a hetero- model")
        return next(iter(self.relations))

    @property
    def _edges(self) -> EdgeStorage:
        return self.relations[self._edge_type]

    @property
    def num_src(self) -> int:
        return len(self._rows.node_ids)

    @property
    def num_dst(self) -> int:
        return self._rows.num_dst

    @property
    def node_ids(self) -> Tensor:
        return self._rows.node_ids

    @property
    def edge_ids(self) -> Tensor:
        return self._edges.edge_ids

    @property
    def weight(self) -> Tensor | None:
        return self._edges.weight

    @property
    def attr(self) -> Tensor | None:
        return self._edges.attr

    def graph_degree(self, *, weighted: bool = False) -> Tensor:
        return self._rows.degree(weighted)

    def loop_weight(self, weight: Tensor) -> Tensor:
        if weight is self.weight and not weight.requires_grad:
            return self._rows.degree(LOOPS)
        rows, positions = self._edges.last_loops
        return weight.new_full((self.num_src,), torch.nan).index_put((rows,), weight[positions])

    def attend_relations(
        self,
        value: Mapping[EdgeType, Tensor],
        *,
        src: Mapping[EdgeType, Tensor],
        dst: Mapping[Any, Tensor],
        score: str = "add",
        slope: float = 0.2,
        dropout: float = 0.0,
        mask_id: int = 0,
        **options: Any,
    ) -> dict[Any, Tensor]:
        num_dst = {key: self.nodes[key if isinstance(key, str) else key.dst].num_dst for key in dst}
        values = torch.cat(list(value.values()))
        out = self._attend_stacked(
            tuple(value),
            num_dst,
            values,
            src=values if src is value else torch.cat(list(src.values())),
            dst=torch.cat([rows[: num_dst[key]] for key, rows in dst.items()]),
            score=score,
            slope=slope,
            dropout=dropout if self.training else 0.0,
            draws=self.key.draws(Purpose.ATTENTION, self.layer, relation=mask_id),
            **options,
        )
        return dict(zip(dst, torch.split(out, list(num_dst.values())), strict=True))

    def _attend_stacked(
        self, kinds: tuple[EdgeType, ...], num_dst: Mapping[Any, int], value: Tensor, **inputs: Any
    ) -> Tensor:
        """Attention over the edges of ``kinds``: source rows are stacked by edge type, destinations by ``num_dst``."""
        raise NotImplementedError

    def relative_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return _compute_once(self._edges, "relative", (weight, dtype), relative_weight)

    def mean_attr(self, attr: Tensor, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
        return _compute_once(self._edges, "mean", (attr, weight, dtype), _mean_attr)

    def dropout(self, x: Tensor, p: float, *, mask_id: int = 0, edge_ids: Tensor | None = None) -> Tensor:
        if not self.training or not p:
            return x
        purpose = Purpose.DROPOUT if edge_ids is None else Purpose.ATTENTION
        ids = self.node_ids[: x.shape[0]] if edge_ids is None else edge_ids
        return dropout(x, p, ids=ids, draws=self.key.draws(purpose, self.layer, relation=mask_id))
