"""All edge types within one node type as one list of edges that know their type.

See ``graph/views/merged_relations.py``.

Weighing types against each other is then a sum with weights of one number per edge, whatever the number of types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.ops import csr
from gnnfleet.ops.csr import CSR
from gnnfleet.sharded.full_batch.partition_blocks import EdgeBlock, RelationBlocks, edge_rows


@dataclass(frozen=True, eq=False)
class MergedEdges:
    """In-edges of all types, cut by the part of their source."""

    blocks: tuple[EdgeBlock, ...]
    relation: Tensor  # [E] int64: the number of the edge's type
    mean: Tensor  # [E] float64: one over the number of edges of that type into the same destination

    @classmethod
    def of(cls, several: Sequence[RelationBlocks]) -> MergedEdges:
        inverse = [edges.inverse_degree(torch.float64, self_loops=False) for edges in several]
        cuts, relations, means, start = [], [], [], 0
        for q in range(len(several[0].in_blocks)):
            blocks = [edges.in_blocks[q] for edges in several]
            rows = [edge_rows(block) for block in blocks]
            sizes = torch.tensor([len(found) for found in rows])
            mean = torch.cat([values[found] for values, found in zip(inverse, rows, strict=True)])
            cut, order = _join(blocks, torch.cat(rows), start)
            cuts.append(cut)
            relations.append(torch.repeat_interleave(torch.arange(len(several)), sizes)[order])
            means.append(mean[order])
            start = cut.edges.stop
        return cls(tuple(cuts), torch.cat(relations), torch.cat(means))

    def weight(self, coefficient: Tensor, *, reduce: str) -> Tensor:
        """[E] what each edge's source is multiplied by; differentiable in the coefficients of the types."""
        weight = coefficient[self.relation]
        return weight * self.mean.to(weight.dtype) if reduce == "mean" else weight


def _join(blocks: Sequence[EdgeBlock], rows: Tensor, start: int) -> tuple[EdgeBlock, Tensor]:
    """(the edges of several blocks as one, their order)."""
    first = blocks[0]
    indptr, order = csr.counting_sort(rows, first.num_rows)
    col = torch.cat([block.structure.col for block in blocks])[order]
    edge_ids = torch.cat([block.edge_ids for block in blocks])[order]
    busy: Tensor | None = None
    if first.rows is not None:
        busy = indptr.diff().nonzero()[:, 0].to(torch.int32)
        indptr = torch.cat([indptr[:-1][busy.long()], indptr[-1:]])
    structure = CSR(indptr, col, first.structure.num_cols)
    return EdgeBlock(structure, busy, first.num_rows, edge_ids, slice(start, start + len(col))), order
