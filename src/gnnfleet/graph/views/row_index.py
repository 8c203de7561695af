"""Lookup of a view's rows by store id, in any order of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.ops.aggregate import aggregate
from gnnfleet.ops.csr import CSR

# Ids are looked up in a table with an entry per id up to the largest, or found by binary search if fewer than one in
# this many is present.
_MAX_TABLE_RATIO = 8


class RowIndex:
    """The inverse of ``node_ids`` [N] (no duplicates), in memory proportional to N: a table, or the sorted ids."""

    def __init__(self, node_ids: Tensor) -> None:
        self._count = len(node_ids)
        highest = int(node_ids.max()) if self._count else -1
        self._table: Tensor | None = None
        if highest < _MAX_TABLE_RATIO * self._count:
            self._table = torch.full((highest + 1,), -1, dtype=torch.int64)
            self._table[node_ids] = torch.arange(self._count)
        else:
            self._ids, self._order = torch.sort(node_ids)

    def rows(self, store_ids: Tensor, *, below: int | None = None) -> Tensor:
        """[n] the row of each id; raises InputError for an id that is absent or not among the first ``below`` rows."""
        if store_ids.dim() != 1 or store_ids.is_floating_point() or store_ids.dtype == torch.bool:
            raise InputError(
                f"store ids are {store_ids.dtype} of shape {list(store_ids.shape)}, expected whole numbers of shape [n]"
            )
        ids, limit = store_ids.long(), self._count if below is None else below
        rows = self._search(ids) if self._table is None else self._look_up(self._table, ids)
        is_missing = (rows < 0) | (rows >= limit)
        if bool(is_missing.any()):
            missing = int(ids[is_missing.nonzero()[0, 0]])
            raise InputError(f"node {missing} is not in this view: it has {limit} rows")
        return rows

    def _look_up(self, table: Tensor, ids: Tensor) -> Tensor:
        in_table = (ids >= 0) & (ids < len(table))
        if bool(in_table.all()):
            return table[ids]
        rows = torch.full_like(ids, -1)
        rows[in_table] = table[ids[in_table]]
        return rows

    def _search(self, ids: Tensor) -> Tensor:
        positions = torch.searchsorted(self._ids, ids).clamp(max=self._count - 1)
        return torch.where(self._ids[positions] == ids, self._order[positions], -1)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """``x[rows]``; gradients of a repeated row are summed in the same order for any number of threads."""
    if x.dtype not in (torch.float32, torch.float64, torch.bfloat16) or x.device.type != "cpu":
        return x.index_select(0, rows)
    one_edge_per_row = CSR(torch.arange(len(rows) + 1), rows, x.shape[0])
    table = x[:, None] if x.dim() == 1 else x
    return aggregate(one_edge_per_row, table).to(x.dtype).view(len(rows), *x.shape[1:])
