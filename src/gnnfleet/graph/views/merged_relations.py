"""All edge types within one node type merged to one edge list, for models with many relations.

Aggregating hundreds of relations one by one needs an output for each. Merged, a relation is a coefficient of its edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gnnfleet.graph.graph import EdgeType
from gnnfleet.ops import csr
from gnnfleet.ops.aggregate import aggregate
from gnnfleet.ops.csr import CSR


@runtime_checkable
class CombinesRelations(Protocol):
    """A view that can sum over edge types with coefficients. Other views have only ``aggregate_relations``."""

    @property
    def edge_types(self) -> tuple[EdgeType, ...]: ...

    def combine_relations(self, x: Tensor, coefficient: Tensor, *, reduce: str) -> Tensor:
        """[N_dst, F]: Σ_r coefficient[r] · (sum or mean over the edges of type r), in the order of ``edge_types``."""


@dataclass(frozen=True, eq=False)
class MergedRelations:
    """The edges of all types by destination."""

    structure: CSR
    relation: Tensor  # [E] int64: the index of the edge type
    mean_weight: Tensor  # [E] one over the number of edges of that type into the same destination

    @classmethod
    def of(cls, structures: list[CSR]) -> MergedRelations:
        rows = torch.cat([edges.row for edges in structures])
        cols = torch.cat([edges.col for edges in structures])
        sizes = torch.tensor([edges.num_edges for edges in structures])
        relation = torch.repeat_interleave(torch.arange(len(structures)), sizes)
        mean = torch.cat([edges.indptr.diff().double()[edges.row.long()] for edges in structures]).reciprocal()
        indptr, order = csr.counting_sort(rows, structures[0].num_rows)
        return cls(CSR(indptr, cols[order], structures[0].num_cols), relation[order], mean[order])

    def combine(self, x: Tensor, coefficient: Tensor, *, reduce: str) -> Tensor:
        weight = coefficient[self.relation]
        if reduce == "mean":
            weight = weight * self.mean_weight.to(weight.dtype)
        return aggregate(self.structure, x, weight=weight)


class LazyMergedRelations:
    """Merges the edge types of a view at the first use; shared by the views that share their edges."""

    def __init__(self) -> None:
        self._relations: Mapping[EdgeType, object] | None = None
        self._merged: MergedRelations | None = None

    def get(self, relations: Mapping[EdgeType, object], structures: list[CSR]) -> MergedRelations:
        if self._merged is None or self._relations is not relations:
            self._relations, self._merged = relations, MergedRelations.of(structures)
        return self._merged
