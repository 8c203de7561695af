"""Feature-parallel first layer, as in P³: every rank has some feature columns of all nodes.

No features are exchanged during training. Every rank receives the edges of the first blocks of all ranks and sums its
columns over them. Those sums, as wide as the hidden layer, go to the rank of the batch, and their gradients go to all
ranks. It pays where features are much wider than the hidden layer.
P ranks, F features, N nodes, H the width of the first layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.all_to_all import ByteBuffer, all_to_all_bytes
from gnnfleet.comm.collectives import max_over_ranks
from gnnfleet.comm.world import World
from gnnfleet.graph.views.local import LocalEdges, LocalView
from gnnfleet.graph.views.view_base import Degrees, NodeRows, stored_degrees
from gnnfleet.nn.base import Model
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.gather import gather
from gnnfleet.sharded.sampling.dist_sampler import SampledBatch

PIECE_BYTES = 32 << 20
"""Bytes of features that a rank sends at a time when columns are redistributed."""

_HEADER = 5  # numbers before a block: nodes, destinations, edges, whether it has weights, whether it has scales
_NO_IDS = torch.empty(0, dtype=torch.int64)


class FeatureColumns:
    """Collective. This rank's columns, [N, F / P] by store id."""

    def __init__(self, world: World, x: Tensor, ids: Tensor, degrees: dict[int, Tensor], count: int) -> None:
        self._world, width = world, int(x.shape[1])
        bounds = [width * q // world.size for q in range(world.size + 1)]
        self.columns = slice(bounds[world.rank], bounds[world.rank + 1])
        self.rows = torch.empty(count, bounds[world.rank + 1] - bounds[world.rank], dtype=x.dtype)
        self._degree = {number: torch.empty(count, dtype=degree.dtype) for number, degree in degrees.items()}
        step = max(1, PIECE_BYTES // max(1, width * x.element_size()))
        for start in range(0, int(max_over_ranks(world, len(ids))), step):
            self._redistribute(x, ids, degrees, bounds, slice(start, start + step))

    def _redistribute(
        self, x: Tensor, ids: Tensor, degrees: dict[int, Tensor], bounds: list[int], piece: slice
    ) -> None:
        messages = []
        for q in range(self._world.size):
            buffer = ByteBuffer()
            buffer.write(torch.tensor([len(ids[piece])]))
            buffer.write(ids[piece].long())
            buffer.write(x[piece, bounds[q] : bounds[q + 1]])
            for degree in degrees.values():
                buffer.write(degree[piece])
            messages.append(buffer.message)
        for message in all_to_all_bytes(self._world, messages, op="feature columns"):
            buffer = ByteBuffer(message)
            count = int(buffer.read(1, torch.int64))
            received_ids = buffer.read(count, torch.int64)
            self.rows[received_ids] = buffer.read(count, self.rows.dtype, self.rows.shape[1])
            for degree in self._degree.values():
                degree[received_ids] = buffer.read(count, degree.dtype)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + sum(degree.nbytes for degree in self._degree.values())

    def degrees_of(self, ids: Tensor) -> Degrees:
        """In-degrees of nodes by store id; weighted if the graph has weights."""
        return stored_degrees(lambda number: self._degree[number][ids], self._degree)

    def exchange_blocks(self, world: World, sampled: Sequence[SampledBatch]) -> list[list[LocalView]]:
        """Collective. By batch and rank, the first blocks of all ranks. One round."""
        buffer = ByteBuffer()
        for batch in sampled:
            _write_block(buffer, batch.views[0])
        messages = all_to_all_bytes(world, [buffer.message] * world.size, op="blocks of the first layer")
        received = [ByteBuffer(message) for message in messages]
        return [[self._read_block(buffer, batch.views[0]) for buffer in received] for batch in sampled]

    def _read_block(self, buffer: ByteBuffer, like: LocalView) -> LocalView:
        """The next block of a rank, with the types of this rank's block."""
        ((kind, relation),), (name,) = like.relations.items(), like.nodes
        index_dtype = relation.structure.col.dtype
        nodes, rows, edges, has_weight, has_scale = buffer.read(_HEADER, torch.int64).tolist()
        ids = buffer.read(nodes, torch.int64)
        structure = CSR(buffer.read(rows + 1, torch.int64), buffer.read(edges, index_dtype), nodes)
        weight = None
        if has_weight:
            assert relation.weight is not None
            weight = buffer.read(edges, relation.weight.dtype)
        scale = buffer.read(rows, torch.float64) if has_scale else None
        local_edges = LocalEdges(structure, _NO_IDS, weight, sampling_scale=None if scale is None else lambda: scale)
        return LocalView({name: NodeRows(ids, rows, self.degrees_of(ids))}, {kind: local_edges}, key=like.key)

    def first_layer(self, model: Model, blocks: Sequence[LocalView], dtype: torch.dtype) -> Tensor:
        """Collective. [D, H] the first layer's product of this rank's block; differentiable in the model's weights."""
        partial = []
        for view in blocks:
            x = gather(self.rows, view.node_ids, _read_dtype(self.rows.dtype)).to(dtype)
            partial.append(model.column_partial(view, x, self.columns))
        out: Tensor = _SumAcrossRanks.apply(self._world, *partial)  # type: ignore[no-untyped-call]
        return out


def _read_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _write_block(buffer: ByteBuffer, view: LocalView) -> None:
    (relation,) = view.relations.values()
    structure = relation.structure
    scale = None if relation.sampling_scale is None else relation.sampling_scale()
    header = [view.num_src, view.num_dst, structure.num_edges, relation.weight is not None, scale is not None]
    buffer.write(torch.tensor(header, dtype=torch.int64))
    buffer.write(view.node_ids.long())
    buffer.write(structure.indptr)
    buffer.write(structure.col)
    for values in (relation.weight, scale):
        if values is not None:
            buffer.write(values)


class _SumAcrossRanks(torch.autograd.Function):
    """Takes the partial sums for each rank and returns the sum of what all ranks computed for this one."""

    @staticmethod
    def forward(ctx: Any, world: World, *partial: Tensor) -> Tensor:
        ctx.world, ctx.rows = world, [len(rows) for rows in partial]
        like = partial[world.rank]
        messages = all_to_all_bytes(world, [_to_bytes(rows) for rows in partial], op="sums of the first layer")
        total = torch.zeros(like.shape, dtype=like.dtype)
        for message in messages:  # in the order of ranks: the same sum everywhere
            total += message.view(like.dtype).view(like.shape)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        world: World = ctx.world
        messages = all_to_all_bytes(world, [_to_bytes(grad)] * world.size, op="gradients of the first layer")
        grads = (
            message.view(grad.dtype).view(count, *grad.shape[1:])
            for message, count in zip(messages, ctx.rows, strict=True)
        )
        return None, *grads


def _to_bytes(rows: Tensor) -> Tensor:
    return rows.detach().contiguous().view(-1).view(torch.uint8)
