"""What all views are made of: nodes and edges by type, degrees, and weights of edges relative to their row."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from gnnfleet.graph.views.row_index import RowIndex

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
    return compute_once(edges, "relative", (edges.weight, dtype), relative_weight)


def compute_once(edges: EdgeTables, name: str, inputs: tuple[Any, ...], compute: Callable[..., Tensor]) -> Tensor:
    """``compute(edges, *inputs)``, cached for the same tensors unless one needs a gradient."""
    known, result = edges.cache.get(name, ((), None))
    if len(known) == len(inputs) and all(map(operator.is_, known, inputs)):
        assert isinstance(result, Tensor)
        return result
    result = compute(edges, *inputs)
    if not any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        edges.cache[name] = inputs, result
    return result


def mean_attr(edges: EdgeTables, attr: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    return mean_by_row(edges, attr.to(dtype) if weight is None else attr.to(dtype) * weight[:, None])
