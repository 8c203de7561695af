"""Edges of a structure split into blocks with compact rows and columns, as in a partitioned graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gnnfleet.ops.csr import CSR
from tests.ops.attend_cases import compress


@dataclass(frozen=True, eq=False)
class Block:
    """Some edges; ``rows``, ``cols`` and ``edges`` map those of ``structure`` to the full structure."""

    structure: CSR
    rows: torch.Tensor  # int32
    cols: torch.Tensor  # int64
    edges: torch.Tensor  # int64

    def transposed(self, num_rows: int) -> tuple[CSR, torch.Tensor]:
        """The block by source, with full rows as columns, and the position of each edge in the block."""
        by_source, positions = self.structure.transposed
        return CSR(by_source.indptr, self.rows[by_source.col.long()], num_rows), positions


def split_edges(structure: CSR, parts: int, *, seed: int) -> list[Block]:
    """Put each edge into one of ``parts`` blocks at random; order of blocks and of edges within a row is random too."""
    random = torch.Generator().manual_seed(seed)
    part = torch.randint(0, parts, (structure.num_edges,), generator=random)
    return [_block(structure, part == number, random) for number in torch.randperm(parts, generator=random).tolist()]


def _block(structure: CSR, chosen: torch.Tensor, random: torch.Generator) -> Block:
    edges = chosen.nonzero()[:, 0]
    edges = edges[torch.randperm(len(edges), generator=random)]
    edges = edges[torch.argsort(structure.row[edges], stable=True)]
    rows, row = structure.row[edges].unique(return_inverse=True)
    cols, col = structure.col[edges].long().unique(return_inverse=True)
    inner = compress(col.to(structure.col.dtype), row, len(cols), len(rows))
    return Block(inner, rows.int(), cols, edges)
