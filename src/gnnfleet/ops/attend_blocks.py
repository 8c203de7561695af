"""Blockwise attention: running sums over blocks of edges, their normalization, and the two halves of backward.

A distributed view calls them on the rank that has the rows; ``attend`` calls them in one process. N rows, H heads, C
channels of a value, D depth of a score's inputs (1 for "add"), E edges. All tensors have the value's dtype, or float32
if the value is bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.native import _native, num_threads

SCORES = {"add": 0, "v2": 1, "dot": 2}


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The score function with its sizes and constants, and dropout with its (key, stream)."""

    score: str
    heads: int
    channels: int
    depth: int = 1
    slope: float = 0.2
    scale: float = 1.0
    dropout: float = 0.0
    dropout_key: tuple[int, int] = (0, 0)

    def kernel_args(self) -> dict[str, Any]:
        key, stream = self.dropout_key
        numbers = {"heads": self.heads, "channels": self.channels, "depth": self.depth}
        rule = {"score": SCORES[self.score], "slope": float(self.slope), "scale": float(self.scale)}
        return {**numbers, **rule, "dropout": float(self.dropout), "key": key, "place": stream}


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionInputs:
    """Inputs of attention. Rows may be strided, as in a received message."""

    value: Tensor  # [N_src, H·C] float32, float64 or bfloat16
    src: Tensor  # [N_src, H·D]
    dst: Tensor  # [N_dst, H·D]
    edge: Tensor | None = None  # [E, H·D]
    vector: Tensor | None = None  # [H·D], for "v2"
    edge_ids: Tensor | None = None  # [E] int64 store edge ids that key dropout; None: positions

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors but the value."""
        return torch.float32 if self.value.dtype == torch.bfloat16 else self.value.dtype

    def kernel_args(self) -> dict[str, Any]:
        vector = None if self.vector is None else self.vector.detach().reshape(1, -1)
        rows = {"value": _rows(self.value), "src": _rows(self.src), "dst": _rows(self.dst)}
        edge_ids = None if self.edge_ids is None else self.edge_ids.contiguous()
        return {**rows, "edge": None if self.edge is None else _rows(self.edge), "vector": vector, "edge_ids": edge_ids}


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Some of the edges, by destination or by source.

    ``rows`` ([n] int32, distinct) maps rows of the structure to rows of the inputs, if it has only some of them.
    ``positions`` ([E] int64) maps its edges to rows of ``edge`` and ``edge_ids``, if they are not in order.
    """

    structure: CSR
    rows: Tensor | None = None
    positions: Tensor | None = None

    def kernel_args(self) -> dict[str, Any]:
        rows = {"indptr": self.structure.indptr.contiguous(), "col": self.structure.col.contiguous()}
        return {**rows, "rows": self.rows, "positions": self.positions}

    def workers(self, spec: AttentionSpec) -> int:
        return _workers(self.structure.num_edges * spec.heads * (spec.channels + spec.depth))


@dataclass(frozen=True, eq=False)
class AttentionState:
    """Running sums per destination; after ``finish_attention``: output, log-sum-exp, and normalized pos and mass."""

    num: Tensor  # [N_dst, H·C] → out
    max: Tensor  # [N_dst, H] → lse
    den: Tensor  # [N_dst, H]
    pos: Tensor | None = None  # [N_dst, H·C], additive scores only: the share of num with a positive score
    mass: Tensor | None = None  # [N_dst, H], the same of den

    def kernel_args(self) -> dict[str, Any]:
        return {"num": self.num, "max": self.max, "den": self.den, "pos": self.pos, "mass": self.mass}


def update_attention(
    state: AttentionState, spec: AttentionSpec, inputs: AttentionInputs, block: AttentionBlock
) -> None:
    """Add the edges of a block, by destination, to the state in place."""
    _check(block, inputs.value)
    args = {**_kernel_args(spec, inputs, block), **state.kernel_args()}
    _native.attend_forward(**args, fresh=False, finish=False)


def finish_attention(state: AttentionState, spec: AttentionSpec) -> AttentionState:
    """Normalize in place: the fields of the state become out, lse, den, pos and mass. Rows without edges are 0."""
    args = {"heads": spec.heads, "channels": spec.channels, "threads": _workers(state.num.numel())}
    _native.attend_finish(**args, **state.kernel_args())
    return state


def attention_pass(
    spec: AttentionSpec, inputs: AttentionInputs, block: AttentionBlock, *, positive: bool = False, finish: bool = True
) -> AttentionState:
    """The state of all edges in one pass, or of a first block of edges without ``finish``.

    ``positive`` keeps ``pos`` and ``mass``, which ``destination_gradient`` needs for additive scores.
    """
    assert block.rows is None and (not positive or spec.score == "add")
    _check(block, inputs.value)
    rows = block.structure.num_rows
    wide, narrow = (rows, spec.heads * spec.channels), (rows, spec.heads)
    num, top, den = (empty_buffer(shape, inputs.dtype) for shape in (wide, narrow, narrow))
    pos, mass = (empty_buffer(shape, inputs.dtype) if positive else None for shape in (wide, narrow))
    state = AttentionState(num, top, den, pos, mass)
    args = {**_kernel_args(spec, inputs, block), **state.kernel_args()}
    _native.attend_forward(**args, fresh=True, finish=finish)
    return state


@dataclass(frozen=True, eq=False)
class DestinationStats:
    """Values of a destination that its sources need besides its gradient: views of ``packed`` [N_dst, …]."""

    packed: Tensor  # additive: [dst | lse | D]; otherwise [lse | D]
    lse_dee: Tensor  # [N_dst, 2H]: [lse | D], D = <grad, out>


def destination_gradient(
    spec: AttentionSpec, state: AttentionState, grad: Tensor, dst: Tensor
) -> tuple[DestinationStats, Tensor | None]:
    """(statistics, gradient of an additive ``dst``), computed at the destination from its finished state.

    The gradient is None unless the state has ``pos``. It lacks edge terms: with those use ``target_gradient``.
    """
    additive = spec.score == "add"
    heads = spec.heads
    packed = empty_buffer((grad.shape[0], (3 if additive else 2) * heads), grad.dtype)
    d_dst = None if state.pos is None else empty_buffer((grad.shape[0], heads), grad.dtype)
    args = {"heads": heads, "channels": spec.channels, "slope": float(spec.slope), "threads": _workers(grad.numel())}
    rows = {"grad": grad, "out": state.num, "lse": state.max, "pos": state.pos, "mass": state.mass}
    dst_rows = dst.detach().contiguous() if additive else None
    _native.attend_local(**args, **rows, dst=dst_rows, side=packed, d_dst=d_dst)
    return DestinationStats(packed, packed[:, -2 * heads :]), d_dst


def source_gradient(
    spec: AttentionSpec,
    inputs: AttentionInputs,
    block: AttentionBlock,
    *,
    grad: Tensor,
    side: Tensor,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(gradient of value, of src) over a block by source; ``grad`` and ``side`` ([lse | D]) are rows of destinations.

    Additive scores without an edge term need no dot product per edge. The result is added to ``into`` in place, which
    is required if the block has only some rows.
    """
    _check(block, inputs.dst)
    add = into is not None
    if into is None:
        assert block.rows is None
        into = empty_buffer(inputs.value.shape, inputs.dtype), empty_buffer(inputs.src.shape, inputs.dtype)
    args = {**_kernel_args(spec, inputs, block), "grad": _rows(grad), "side": _rows(side)}
    _native.attend_by_source(**args, d_value=into[0], d_src=into[1], add=add)
    return into


@dataclass(frozen=True, eq=False)
class TargetGradient:
    """Gradients of destinations and their in-edges; ``vector`` is this rank's term of the sum."""

    dst: Tensor
    edge: Tensor | None
    vector: Tensor | None


def target_gradient(
    spec: AttentionSpec,
    inputs: AttentionInputs,
    block: AttentionBlock,
    *,
    grad: Tensor,
    side: Tensor,
    needs: tuple[bool, bool] = (True, True),
    into: TargetGradient | None = None,
) -> TargetGradient:
    """Gradients of dst, and of (edge, vector) if ``needs`` says so, over a block by destination, for any score.

    They are added to ``into`` in place; rows of ``edge`` are overwritten.
    """
    _check(block, inputs.value)
    add = into is not None
    if into is None:
        assert block.rows is None
        edge, vector = (
            empty_buffer(tensor.shape, inputs.dtype) if need and tensor is not None else None
            for tensor, need in zip((inputs.edge, inputs.vector), needs, strict=True)
        )
        into = TargetGradient(empty_buffer(inputs.dst.shape, inputs.dtype), edge, vector)
    args = {**_kernel_args(spec, inputs, block), "grad": _rows(grad), "side": _rows(side)}
    vector_row = None if into.vector is None else into.vector.view(1, -1)
    _native.attend_by_target(**args, d_dst=into.dst, d_edge=into.edge, d_vector=vector_row, add=add)
    return into


def _kernel_args(spec: AttentionSpec, inputs: AttentionInputs, block: AttentionBlock) -> dict[str, Any]:
    return {**spec.kernel_args(), **inputs.kernel_args(), **block.kernel_args(), "threads": block.workers(spec)}


def _workers(numbers: int) -> int:
    # On a busy machine, waking a second thread takes longer than processing this many elements.
    return num_threads() if numbers > 1 << 16 else 1


def _check(block: AttentionBlock, other: Tensor) -> None:
    """Check that columns are rows of the other side, which the kernels rely on."""
    assert block.structure.num_cols == other.shape[0]
    if block.positions is not None:
        assert block.positions.shape == block.structure.col.shape


def _rows(tensor: Tensor) -> Tensor:
    """The detached tensor with contiguous rows."""
    tensor = tensor.detach()
    return tensor if tensor.dim() == 2 and tensor.stride(1) == 1 else tensor.contiguous()
