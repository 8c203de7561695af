"""Baseline for full-batch training on a partitioned graph: fetch all remote rows at once and keep them until backward.

Attention is computed with plain torch operations; autograd keeps tensors of edges × heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.halo_exchange import RingExchange, RowTable
from gnnfleet.ops.aggregate import aggregate
from gnnfleet.ops.csr import CSR, counting_sort
from gnnfleet.sharded.full_batch.grad_exchange import exchange_grads
from gnnfleet.sharded.full_batch.partition_blocks import edge_rows
from gnnfleet.sharded.full_batch.ring_view import RingView


class _Fetch(torch.autograd.Function):
    """Rows of all ranks in one table, which is kept until backward."""

    @staticmethod
    def forward(ctx: Any, ring: RingExchange, plan: Any, x: Tensor) -> Tensor:
        ctx.ring, ctx.plan = ring, plan
        ctx.starts, end = {}, len(x)
        for q, count in enumerate(plan.recv_counts):
            ctx.starts[q] = slice(end, end + count)
            end += count
        table = x.new_empty(end, x.shape[1])
        table[: len(x)] = x

        def use_rows(q: int, rows: list[Tensor]) -> None:
            if q != ring.world.rank:
                table[ctx.starts[q]] = rows[0]

        ring.run([RowTable(plan, x.detach().contiguous())], use_rows)
        ctx.rows = len(x)
        return table

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        rank = ctx.ring.world.rank

        def use_rows(q: int, rows: list[Tensor]) -> list[Tensor]:
            return [(grad[: ctx.rows] if q == rank else grad[ctx.starts[q]]).contiguous()]

        (total,) = exchange_grads(ctx.ring, [(ctx.plan, grad)], [], use_rows, op="rows")
        return None, None, total


class ClassicalView(RingView):
    """A RingView for one node type and one edge type, without blockwise fetching and fused attention."""

    @classmethod
    def from_ring_view(cls, view: RingView) -> RingView:
        ring = replace(view.ring, group=view.ring.world.size)
        return cls(**{**view.__dict__, "ring": ring})

    def _table(self, x: Tensor) -> Tensor:
        return _Fetch.apply(self.ring, self.blocks.exchange_plan(self._kind, "in"), x.flatten(1))

    def _structure(self, loops: bool) -> tuple[CSR, Tensor]:
        cache = self.blocks.__dict__.setdefault("_classical", {})
        if loops not in cache:
            rows, cols, start = [], [], self.num_src
            for q, block in enumerate(self._edges.blocks(self_loops=loops)):
                is_local = q == self.ring.world.rank
                rows.append(edge_rows(block))
                cols.append(block.structure.col.long() + (0 if is_local else start))
                start += 0 if is_local else block.structure.num_cols
            row = torch.cat(rows)
            indptr, order = counting_sort(row, self.num_dst)
            cache[loops] = CSR(indptr, torch.cat(cols)[order].to(torch.int32), start), row[order]
        return cache[loops]

    def aggregate(self, x: Tensor, *, reduce: str = "sum", weight: Any = None, self_loops: bool = False) -> Tensor:
        assert weight is None
        table = self._table(x)
        out = aggregate(self._structure(self_loops)[0], table, reduce=reduce)
        if out.requires_grad:
            out.register_hook(lambda grad, kept=table: None)  # the table lives as long as the graph of backward
        return out

    def aggregate_with_self(self, x: Tensor, *, reduce: str = "sum") -> tuple[Tensor, Tensor]:
        return self.aggregate(x, reduce=reduce), x

    def attend(self, value: Tensor, *, src: Tensor, dst: Tensor, heads: int, self_loops: bool, **_: Any) -> Tensor:
        structure, row = self._structure(self_loops)
        table, scores = self._table(value), self._table(src)
        col = structure.col.long()
        logits = torch.nn.functional.leaky_relu(scores[col] + dst[row], 0.2)
        highest = torch.full((self.num_dst, heads), -torch.inf).scatter_reduce(
            0, row[:, None].expand(-1, heads), logits.detach(), "amax"
        )
        mass = torch.exp(logits - highest[row])
        share = mass / torch.zeros(self.num_dst, heads).index_add(0, row, mass)[row]
        width = value.shape[1] // heads
        outs = [
            aggregate(structure, table[:, h * width : (h + 1) * width].contiguous(), weight=share[:, h].contiguous())
            for h in range(heads)
        ]
        return torch.cat(outs, 1)
