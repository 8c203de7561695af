"""The first layer by columns: every rank has some columns of the features of all nodes, as in P³.

Features do not travel. Every rank hears the edges of all ranks' first blocks and adds what its columns give to their
rows; those sums, as wide as the hidden layer, go to whoever works on the batch, and their gradients to all. It pays
where features are much wider than the hidden layer. P ranks, F features, N nodes, H the width of the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.all_to_all import ByteBuffer, all_to_all_bytes
from gnnfleet.comm.collectives import max_over_ranks
from gnnfleet.comm.world import World
from gnnfleet.graph.views.local import LocalEdges, LocalView
from gnnfleet.graph.views.view_base import NodeRows
from gnnfleet.nn.base import Model
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.gather import gather
from gnnfleet.sharded.sampling.dist_sampler import SampledBatch

PIECE_BYTES = 32 << 20
"""Bytes of features that a rank sends at a time when columns are dealt."""

_HEAD = 5  # numbers before a block: nodes, destinations, edges, whether there are weights, whether there are shares


class FeatureColumns:
    """This rank's columns, [N, F / P] by store id; all ranks make and call it together."""

    def __init__(self, world: World, x: Tensor, ids: Tensor, degrees: dict[bool, Tensor], count: int) -> None:
        self._world, width = world, int(x.shape[1])
        cuts = [width * q // world.size for q in range(world.size + 1)]
        self.columns = slice(cuts[world.rank], cuts[world.rank + 1])
        self.rows = torch.empty(count, cuts[world.rank + 1] - cuts[world.rank], dtype=x.dtype)
        self._degree = {weighted: torch.empty(count, dtype=torch.float32) for weighted in degrees}
        step = max(1, PIECE_BYTES // max(1, width * x.element_size()))
        most = int(max_over_ranks(world, len(ids)))
        for low in range(0, most, step):
            self._redistribute(x, ids, degrees, cuts, slice(low, low + step))

    def _redistribute(self, x: Tensor, ids: Tensor, degrees: dict[bool, Tensor], cuts: list[int], which: slice) -> None:
        messages = []
        for q in range(self._world.size):
            parcel = ByteBuffer()
            parcel.write(torch.tensor([len(ids[which])]))
            parcel.write(ids[which].long())
            parcel.write(x[which, cuts[q] : cuts[q + 1]])
            for degree in degrees.values():
                parcel.write(degree[which])
            messages.append(parcel.message)
        for message in all_to_all_bytes(self._world, messages, what="columns of features"):
            parcel = ByteBuffer(message)
            count = int(parcel.read(1, torch.int64))
            where = parcel.read(count, torch.int64)
            self.rows[where] = parcel.read(count, self.rows.dtype, self.rows.shape[1])
            for degree in self._degree.values():
                degree[where] = parcel.read(count, torch.float32)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + sum(degree.nbytes for degree in self._degree.values())

    def degrees_of(self, ids: Tensor) -> Callable[[bool], Tensor]:
        """In-degrees of some nodes, by store id; weighted where there are weights."""
        return lambda weighted: self._degree[weighted and True in self._degree][ids]

    def exchange_blocks(self, world: World, sampled: Sequence[SampledBatch]) -> list[list[LocalView]]:
        """By batch and rank, the blocks whose first layer is worked on here: those of all ranks. One round."""
        parcel = ByteBuffer()
        for one in sampled:
            _put_block(parcel, one.views[0])
        message = parcel.message
        heard = [
            ByteBuffer(each) for each in all_to_all_bytes(world, [message] * world.size, what="blocks of a first layer")
        ]
        return [[self._take_block(each, one.views[0]) for each in heard] for one in sampled]

    def _take_block(self, parcel: ByteBuffer, like: LocalView) -> LocalView:
        """The next block of a rank, in the types of this rank's own."""
        ((kind, relation),), (name,) = like.relations.items(), like.nodes
        index = relation.structure.col.dtype
        nodes, rows, edges, weighted, shared = parcel.read(_HEAD, torch.int64).tolist()
        ids = parcel.read(nodes, torch.int64)
        structure = CSR(parcel.read(rows + 1, torch.int64), parcel.read(edges, index), nodes)
        weight = None
        if weighted:
            assert relation.weight is not None
            weight = parcel.read(edges, relation.weight.dtype)
        share = parcel.read(rows, torch.float64) if shared else None
        told = LocalEdges(structure, _NONE, weight, sampling_scale=None if share is None else lambda: share)
        return LocalView({name: NodeRows(ids, rows, self.degrees_of(ids))}, {kind: told}, key=like.key)

    def first_layer(self, model: Model, blocks: Sequence[LocalView], dtype: torch.dtype) -> Tensor:
        """[D, H] the first layer's product of this rank's block; differentiable in the model's weights."""
        partial = []
        for view in blocks:
            x = gather(self.rows, view.node_ids, _wide(self.rows.dtype)).to(dtype)
            partial.append(model.column_partial(view, x, self.columns))
        out: Tensor = _SumAcrossRanks.apply(self._world, *partial)  # type: ignore[no-untyped-call]
        return out


_NONE = torch.empty(0, dtype=torch.int64)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _put_block(parcel: ByteBuffer, view: LocalView) -> None:
    (relation,) = view.relations.values()
    structure = relation.structure
    share = None if relation.sampling_scale is None else relation.sampling_scale()
    counts = [view.num_src, view.num_dst, structure.num_edges, relation.weight is not None, share is not None]
    parcel.write(torch.tensor(counts, dtype=torch.int64))
    parcel.write(view.node_ids.long())
    parcel.write(structure.indptr)
    parcel.write(structure.col)
    for values in (relation.weight, share):
        if values is not None:
            parcel.write(values)


class _SumAcrossRanks(torch.autograd.Function):
    """What ranks made for each other: by rank in, the sum of what all made for this one out."""

    @staticmethod
    def forward(ctx: Any, world: World, *partial: Tensor) -> Tensor:
        ctx.world, ctx.rows = world, [len(part) for part in partial]
        like = partial[world.rank]
        found = all_to_all_bytes(world, [_raw(part) for part in partial], what="first layers of others")
        total = torch.zeros(like.shape, dtype=like.dtype)
        for message in found:  # in the order of ranks: the same sum everywhere
            total += message.view(like.dtype).view(like.shape)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        world: World = ctx.world
        found = all_to_all_bytes(world, [_raw(grad)] * world.size, what="gradients of first layers")
        shape = grad.shape[1:]
        each = (message.view(grad.dtype).view(n, *shape) for message, n in zip(found, ctx.rows, strict=True))
        return None, *each


def _raw(rows: Tensor) -> Tensor:
    return rows.detach().contiguous().view(-1).view(torch.uint8)
