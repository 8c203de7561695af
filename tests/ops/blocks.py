"""Edges of a structure dealt into blocks with compact rows and columns: what a graph spread over ranks has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gnnfleet.ops.csr import CSR
from tests.ops.attend_cases import compress


@dataclass(frozen=True, eq=False)
class Cut:
    """Some edges: rows and columns of ``structure`` are ``rows`` and ``cols`` of the whole, edges its ``edges``."""

    structure: CSR
    rows: torch.Tensor  # int32
    cols: torch.Tensor  # int64
    edges: torch.Tensor  # int64

    def turned(self, num_rows: int) -> tuple[CSR, torch.Tensor]:
        """By source, with columns that are rows of the whole; and the position here of each edge there."""
        turned, positions = self.structure.transposed
        return CSR(turned.indptr, self.rows[turned.col.long()], num_rows), positions


def deal(structure: CSR, parts: int, *, seed: int) -> list[Cut]:
    """Every edge in one of ``parts`` blocks, drawn; the blocks in a drawn order, edges of a row in drawn order too."""
    random = torch.Generator().manual_seed(seed)
    part = torch.randint(0, parts, (structure.num_edges,), generator=random)
    return [_cut(structure, part == number, random) for number in torch.randperm(parts, generator=random).tolist()]


def _cut(structure: CSR, chosen: torch.Tensor, random: torch.Generator) -> Cut:
    at = chosen.nonzero()[:, 0]
    at = at[torch.randperm(len(at), generator=random)]
    at = at[torch.argsort(structure.row[at], stable=True)]
    rows, row = structure.row[at].unique(return_inverse=True)
    cols, col = structure.col[at].long().unique(return_inverse=True)
    inner = compress(col.to(structure.col.dtype), row, len(cols), len(rows))
    return Cut(inner, rows.int(), cols, at)
