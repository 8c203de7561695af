"""From store ids to the rows of a view, in whatever order the rows lie, and rows picked by them."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.ops.aggregate import aggregate
from gnnfleet.ops.csr import CSR

# A table has a place for every id up to the largest; sparser ids than one in this many are searched for instead.
_SPARSE = 8


class RowIndex:
    """The inverse of ``node_ids`` [N], each id once: a table where ids are dense, otherwise ids sorted with their rows.

    A whole graph in any order gets a table of N places; a small block of a large graph costs memory for its own rows.
    """

    def __init__(self, node_ids: Tensor) -> None:
        self._count = len(node_ids)
        highest = int(node_ids.max()) if self._count else -1
        self._table: Tensor | None = None
        if highest < _SPARSE * self._count:
            self._table = torch.full((highest + 1,), -1, dtype=torch.int64)
            self._table[node_ids] = torch.arange(self._count)
        else:
            self._ids, self._order = torch.sort(node_ids)

    def rows(self, store_ids: Tensor, *, below: int | None = None) -> Tensor:
        """[n] the row of each id; raises InputError for one that is not here, or not among the first ``below`` rows."""
        if store_ids.dim() != 1 or store_ids.is_floating_point() or store_ids.dtype == torch.bool:
            raise InputError(
                f"store ids are whole numbers of shape [n], found {store_ids.dtype} of shape {list(store_ids.shape)}"
            )
        ids = store_ids.long()
        found = self._search(ids) if self._table is None else self._look_up(self._table, ids)
        absent = found < 0 if below is None else (found < 0) | (found >= below)
        if bool(absent.any()):
            missing = int(ids[absent.nonzero()[0, 0]])
            raise InputError(
                f"node {missing} is not in this view: it has {self._count if below is None else below} rows"
            )
        return found

    def _look_up(self, table: Tensor, ids: Tensor) -> Tensor:
        inside = (ids >= 0) & (ids < len(table))
        if bool(inside.all()):
            return table[ids]
        found = torch.full_like(ids, -1)
        found[inside] = table[ids[inside]]
        return found

    def _search(self, ids: Tensor) -> Tensor:
        at = torch.searchsorted(self._ids, ids).clamp(max=self._count - 1)
        return torch.where(self._ids[at] == ids, self._order[at], -1)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """``x[rows]``; the gradient of a row taken several times is summed in one order, whatever the number of threads."""
    if x.dtype not in (torch.float32, torch.float64, torch.bfloat16) or x.device.type != "cpu":
        return x.index_select(0, rows)
    one_each = CSR(torch.arange(len(rows) + 1), rows, x.shape[0])
    table = x[:, None] if x.dim() == 1 else x
    return aggregate(one_each, table).to(x.dtype).view(len(rows), *x.shape[1:])
