"""All edge types of one node type merged into one list of edges with a type each.

A sum weighted by edge type then needs one weight per edge, for any number of types. The views of one process have the
same in ``graph/views/merged_relations.py``.
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
    """In-edges of all types, in blocks by the partition of their source."""

    blocks: tuple[EdgeBlock, ...]
    relation: Tensor  # [E] int64: index of the edge's type
    mean: Tensor  # [E] float64: one over the number of edges of that type into the same destination

    @classmethod
    def of(cls, relations: Sequence[RelationBlocks]) -> MergedEdges:
        inverse = [edges.inverse_degree(torch.float64, self_loops=False) for edges in relations]
        merged_blocks, types, means, start = [], [], [], 0
        for q in range(len(relations[0].in_blocks)):
            blocks = [edges.in_blocks[q] for edges in relations]
            rows = [edge_rows(block) for block in blocks]
            sizes = torch.tensor(list(map(len, rows)))
            mean = torch.cat([values[block_rows] for values, block_rows in zip(inverse, rows, strict=True)])
            merged, order = _join(blocks, torch.cat(rows), start)
            merged_blocks.append(merged)
            types.append(torch.repeat_interleave(torch.arange(len(relations)), sizes)[order])
            means.append(mean[order])
            start = merged.edges.stop
        return cls(tuple(merged_blocks), torch.cat(types), torch.cat(means))

    def weight(self, coefficient: Tensor, *, reduce: str) -> Tensor:
        """[E] the weight of each edge; differentiable in the coefficients of the types."""
        weight = coefficient[self.relation]
        return weight * self.mean.to(weight.dtype) if reduce == "mean" else weight


def _join(blocks: Sequence[EdgeBlock], rows: Tensor, start: int) -> tuple[EdgeBlock, Tensor]:
    """(the edges of several blocks as one, their order)."""
    first = blocks[0]
    indptr, order = csr.counting_sort(rows, first.num_rows)
    col = torch.cat([block.structure.col for block in blocks])[order]
    edge_ids = torch.cat([block.edge_ids for block in blocks])[order]
    rows_with_edges: Tensor | None = None
    if first.rows is not None:
        rows_with_edges = indptr.diff().nonzero()[:, 0].to(torch.int32)
        indptr = torch.cat([indptr[:-1][rows_with_edges.long()], indptr[-1:]])
    structure = CSR(indptr, col, first.structure.num_cols)
    return EdgeBlock(structure, rows_with_edges, first.num_rows, edge_ids, slice(start, start + len(col))), order
