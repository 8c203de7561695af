"""Several edge types as one edge list.

Aggregating hundreds of relations within one node type one by one needs an output for each. Merged, a relation is a
coefficient of its edges. Attention over relations stacks the rows of their ends instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.views.view_base import EdgeTables, edge_factors
from gnnfleet.ops import csr
from gnnfleet.ops.aggregate import aggregate
from gnnfleet.ops.csr import CSR


class _RelationEdges(EdgeTables, Protocol):
    @property
    def structure(self) -> CSR: ...


@dataclass(frozen=True, eq=False)
class MergedRelations:
    """The edges of all types by destination."""

    structure: CSR
    relation: Tensor  # [E] int64: the index of the edge type
    factor: Tensor  # [E] float64: in the sum or mean over the edges of that type

    @classmethod
    def of(cls, relations: Sequence[_RelationEdges], reduce: str, *, weighted: bool) -> MergedRelations:
        structures = [edges.structure for edges in relations]
        rows = torch.cat([edges.row for edges in structures])
        cols = torch.cat([edges.col for edges in structures])
        sizes = torch.tensor([edges.num_edges for edges in structures])
        relation = torch.repeat_interleave(torch.arange(len(structures)), sizes)
        factor = torch.cat([edge_factors(edges, reduce, weighted=weighted) for edges in relations])
        indptr, order = csr.counting_sort(rows, structures[0].num_rows)
        return cls(CSR(indptr, cols[order], structures[0].num_cols), relation[order], factor[order])

    def combine(self, x: Tensor, coefficient: Tensor) -> Tensor:
        weight = coefficient[self.relation]
        return aggregate(self.structure, x, weight=weight * self.factor.to(weight.dtype))


@dataclass(frozen=True, eq=False)
class StackedEdges:
    """Edges of some types: sources are stacked by edge type, destinations by the keys of ``num_dst``.

    A key is an edge type, or a node type whose rows are the destinations of all edge types into it.
    """

    structure: CSR
    edge_ids: Tensor  # [E] int64: distinct over edge types, for draws

    @classmethod
    def of(
        cls,
        tables: Mapping[EdgeType, tuple[CSR, Tensor, Tensor]],
        num_dst: Mapping[Any, int],
        kinds: Sequence[EdgeType],
    ) -> StackedEdges:
        """``tables`` has the edges of each type with their rows and ids, ``kinds`` are all edge types."""
        starts = dict(zip(num_dst, accumulate([0, *num_dst.values()]), strict=False))
        rows, cols, ids, num_cols = [], [], [], 0
        for kind, (edges, edge_rows, edge_ids) in tables.items():
            rows.append(edge_rows + starts[kind if kind in starts else kind.dst])
            cols.append(edges.col + num_cols)
            ids.append(edge_ids + kinds.index(kind) * RELATION_IDS)
            num_cols += edges.num_cols
        indptr, order = csr.counting_sort(torch.cat(rows), sum(num_dst.values()))
        return cls(CSR(indptr, torch.cat(cols)[order], num_cols), torch.cat(ids)[order])


RELATION_IDS = 1 << 50
"""Edges of stacked types are drawn for by their store edge id plus a multiple of this."""


class LazyMergedRelations:
    """Merges edge types of a view at the first use; shared by the views that share their edges."""

    def __init__(self) -> None:
        self._relations: Mapping[EdgeType, object] | None = None
        self._merged: dict[Hashable, Any] = {}

    def get(self, relations: Mapping[EdgeType, object], key: Hashable, make: Callable[[], Any]) -> Any:
        if self._relations is not relations:
            self._relations, self._merged = relations, {}
        if key not in self._merged:
            self._merged[key] = make()
        return self._merged[key]
