"""All edge types within one node type as one list of edges that know their type: for models of many relations.

Hundreds of relations would each need an output of the size of all nodes; here a relation is a coefficient of an edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gnnfleet.graph.graph import EdgeType
from gnnfleet.ops import csr
from gnnfleet.ops.aggregate import aggregate
from gnnfleet.ops.csr import CSR


@runtime_checkable
class CombinesRelations(Protocol):
    """A view that can weigh edge types against each other in one sum. Others offer ``aggregate_relations``."""

    @property
    def edge_types(self) -> tuple[EdgeType, ...]: ...

    def combine_relations(self, x: Tensor, coefficient: Tensor, *, reduce: str) -> Tensor:
        """[N_dst, F]: Σ_r coefficient[r] · (sum or mean over the edges of type r), types in the view's order."""


@dataclass(frozen=True, eq=False)
class MergedRelations:
    """The edges of all types by destination."""

    structure: CSR
    relation: Tensor  # [E] int64: the number of the edge's type
    mean_weight: Tensor  # [E] one over the number of edges of that type into the same destination

    @classmethod
    def of(cls, structures: list[CSR]) -> MergedRelations:
        rows = torch.cat([cut.row for cut in structures])
        cols = torch.cat([cut.col for cut in structures])
        sizes = torch.tensor([cut.num_edges for cut in structures])
        relation = torch.repeat_interleave(torch.arange(len(structures)), sizes)
        mean = torch.cat([cut.indptr.diff().double()[cut.row.long()] for cut in structures]).reciprocal()
        indptr, order = csr.counting_sort(rows, structures[0].num_rows)
        return cls(CSR(indptr, cols[order], structures[0].num_cols), relation[order], mean[order])

    def combine(self, x: Tensor, coefficient: Tensor, *, reduce: str) -> Tensor:
        weight = coefficient[self.relation]
        if reduce == "mean":
            weight = weight * self.mean_weight.to(weight.dtype)
        return aggregate(self.structure, x, weight=weight)


@dataclass(eq=False)
class LazyMergedRelations:
    """Merges the edge types of a view when first asked; views that share their edges share it."""

    _of: Mapping[EdgeType, object] | None = None
    _found: MergedRelations | None = field(default=None, repr=False)

    def get(self, relations: Mapping[EdgeType, object], structures: list[CSR]) -> MergedRelations:
        if self._found is None or self._of is not relations:
            self._of, self._found = relations, MergedRelations.of(structures)
        return self._found
