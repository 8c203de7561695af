"""The pieces attention is made of, callable one by one: sums over some of the edges, their end, and backward's halves.

A view whose graph is spread over ranks calls them where the data is; ``attend`` calls them in one process. Numbers: N
rows, H heads, C channels of a value, D depth of a score's inputs (1 for "add"), E edges. Everything is of the value's
dtype, or of float32 where the value is bfloat16.
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
    """What is computed: the score and its numbers, and dropout with its (key, place)."""

    score: str
    heads: int
    channels: int
    depth: int = 1
    slope: float = 0.2
    scale: float = 1.0
    dropout: float = 0.0
    dropout_key: tuple[int, int] = (0, 0)

    def kernel_args(self) -> dict[str, Any]:
        key, place = self.dropout_key
        numbers = {"heads": self.heads, "channels": self.channels, "depth": self.depth}
        rule = {"score": SCORES[self.score], "slope": float(self.slope), "scale": float(self.scale)}
        return {**numbers, **rule, "dropout": float(self.dropout), "key": key, "place": place}


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionInputs:
    """What it is computed from. Rows may lie further apart than they are wide, as in a received message."""

    value: Tensor  # [N_src, H·C] float32, float64 or bfloat16
    src: Tensor  # [N_src, H·D]
    dst: Tensor  # [N_dst, H·D]
    edge: Tensor | None = None  # [E, H·D]
    vector: Tensor | None = None  # [H·D], for "v2"
    edge_ids: Tensor | None = None  # [E] int64 store edge ids, what dropout goes by; none: the positions

    @property
    def dtype(self) -> torch.dtype:
        """Of everything but the value."""
        return torch.float32 if self.value.dtype == torch.bfloat16 else self.value.dtype

    def kernel_args(self) -> dict[str, Any]:
        vector = None if self.vector is None else self.vector.detach().reshape(1, -1)
        rows = {"value": _rows(self.value), "src": _rows(self.src), "dst": _rows(self.dst)}
        edge_ids = None if self.edge_ids is None else self.edge_ids.contiguous()
        return {**rows, "edge": None if self.edge is None else _rows(self.edge), "vector": vector, "edge_ids": edge_ids}


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Some of the edges, by destination or by source.

    ``rows`` ([n] int32) says which rows of the inputs the rows of the structure are, when it holds only some; no row
    twice. ``positions`` ([E] int64) says where an edge is in ``edge`` and ``edge_ids``, when not in order.
    """

    structure: CSR
    rows: Tensor | None = None
    positions: Tensor | None = None

    def kernel_args(self) -> dict[str, Any]:
        rows = {"indptr": self.structure.indptr.contiguous(), "col": self.structure.col.contiguous()}
        return {**rows, "rows": self.rows, "positions": self.positions}

    def workers(self, form: AttentionSpec) -> int:
        """How many threads the edges are worth."""
        return _workers(self.structure.num_edges * form.heads * (form.channels + form.depth))


@dataclass(frozen=True, eq=False)
class AttentionState:
    """Running sums of each destination; after ``finish_attention``: output, lse, and pos and mass divided alike."""

    num: Tensor  # [N_dst, H·C] → out
    max: Tensor  # [N_dst, H] → lse
    den: Tensor  # [N_dst, H]
    pos: Tensor | None = None  # [N_dst, H·C], additive scores only: the share of num with a positive score
    mass: Tensor | None = None  # [N_dst, H], the same of den

    def kernel_args(self) -> dict[str, Any]:
        return {"num": self.num, "max": self.max, "den": self.den, "pos": self.pos, "mass": self.mass}


def init_attention(form: AttentionSpec, num_dst: int, *, dtype: torch.dtype, positive: bool = False) -> AttentionState:
    """The state before any edge; ``positive`` keeps what ``destination_gradient`` needs for additive scores."""
    state = _empty_state(form, num_dst, dtype, positive)
    for tensor in (state.num, state.den, state.pos, state.mass):
        if tensor is not None:
            tensor.zero_()
    # The lowest number, not −inf: differences of it must not be NaN.
    state.max.fill_(torch.finfo(dtype).min)
    return state


def update_attention(
    state: AttentionState, form: AttentionSpec, inputs: AttentionInputs, piece: AttentionBlock
) -> None:
    """Add the edges of a piece, by destination, to the state, in place."""
    _check(piece, inputs.value)
    words = {**_kernel_args(form, inputs, piece), **state.kernel_args()}
    _native.attend_forward(**words, fresh=False, finish=False)


def finish_attention(state: AttentionState, form: AttentionSpec) -> AttentionState:
    """Divide, in place: the state's fields are out, lse, den, pos and mass from here on. Rows without edges are 0."""
    words = {"heads": form.heads, "channels": form.channels, "threads": _workers(state.num.numel())}
    _native.attend_finish(**words, **state.kernel_args())
    return state


def attention_pass(
    form: AttentionSpec, inputs: AttentionInputs, piece: AttentionBlock, *, positive: bool = False, finish: bool = True
) -> AttentionState:
    """``init_attention``, ``update_attention`` and ``finish`` in one pass; without ``finish`` for the first of several pieces."""
    assert piece.rows is None
    _check(piece, inputs.value)
    state = _empty_state(form, piece.structure.num_rows, inputs.dtype, positive)
    words = {**_kernel_args(form, inputs, piece), **state.kernel_args()}
    _native.attend_forward(**words, fresh=True, finish=finish)
    return state


@dataclass(frozen=True, eq=False)
class DestinationStats:
    """What sources need to know of a destination besides its gradient; views of one [N_dst, …] tensor, ``packed``."""

    packed: Tensor  # additive: [dst | lse | D]; otherwise [lse | D]
    lse_dee: Tensor  # [N_dst, 2H]: [lse | D], D = <grad, out>


def destination_gradient(
    form: AttentionSpec, state: AttentionState, grad: Tensor, dst: Tensor
) -> tuple[DestinationStats, Tensor | None]:
    """(side, gradient of an additive ``dst``): all a destination can do alone, from its finished state.

    The gradient is None unless the state has ``pos``, and misses the edges' terms: with those use ``target_gradient``.
    """
    additive = form.score == "add"
    heads = form.heads
    packed = empty_buffer((grad.shape[0], (3 if additive else 2) * heads), grad.dtype)
    d_dst = None if state.pos is None else empty_buffer((grad.shape[0], heads), grad.dtype)
    words = {"heads": heads, "channels": form.channels, "slope": float(form.slope), "threads": _workers(grad.numel())}
    rows = {"grad": grad, "out": state.num, "lse": state.max, "pos": state.pos, "mass": state.mass}
    own = dst.detach().contiguous() if additive else None
    _native.attend_local(**words, **rows, dst=own, side=packed, d_dst=d_dst)
    return DestinationStats(packed, packed[:, -2 * heads :]), d_dst


def source_gradient(
    form: AttentionSpec,
    inputs: AttentionInputs,
    piece: AttentionBlock,
    *,
    grad: Tensor,
    side: Tensor,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(gradient of value, of src) over a piece by source; ``grad`` and ``side`` ([lse | D]) are rows of destinations.

    Without an edge term and for additive scores this is the form that takes no dot product per edge. ``into`` is added
    to, in place; it is needed where the piece holds only some rows.
    """
    _check(piece, inputs.dst)
    add = into is not None
    if into is None:
        assert piece.rows is None
        into = empty_buffer(inputs.value.shape, inputs.dtype), empty_buffer(inputs.src.shape, inputs.dtype)
    words = {**_kernel_args(form, inputs, piece), "grad": _rows(grad), "side": _rows(side)}
    _native.attend_by_source(**words, d_value=into[0], d_src=into[1], add=add)
    return into


@dataclass(frozen=True, eq=False)
class TargetGradient:
    """Gradients that belong to destinations and to their in-edges; ``vector`` is this rank's share of the sum."""

    dst: Tensor
    edge: Tensor | None
    vector: Tensor | None


def target_gradient(
    form: AttentionSpec,
    inputs: AttentionInputs,
    piece: AttentionBlock,
    *,
    grad: Tensor,
    side: Tensor,
    wanted: tuple[bool, bool] = (True, True),
    into: TargetGradient | None = None,
) -> TargetGradient:
    """Gradients of dst, and of edge and vector where ``wanted``, over a piece by destination, for any score.

    ``into`` is added to, in place, but for ``edge``, in which every edge has its own row.
    """
    _check(piece, inputs.value)
    add = into is not None
    if into is None:
        assert piece.rows is None
        edge, vector = (
            empty_buffer(tensor.shape, inputs.dtype) if want and tensor is not None else None
            for tensor, want in zip((inputs.edge, inputs.vector), wanted, strict=True)
        )
        into = TargetGradient(empty_buffer(inputs.dst.shape, inputs.dtype), edge, vector)
    words = {**_kernel_args(form, inputs, piece), "grad": _rows(grad), "side": _rows(side)}
    vector_row = None if into.vector is None else into.vector.view(1, -1)
    _native.attend_by_target(**words, d_dst=into.dst, d_edge=into.edge, d_vector=vector_row, add=add)
    return into


def _kernel_args(form: AttentionSpec, inputs: AttentionInputs, piece: AttentionBlock) -> dict[str, Any]:
    return {**form.kernel_args(), **inputs.kernel_args(), **piece.kernel_args(), "threads": piece.workers(form)}


def _workers(numbers: int) -> int:
    # Waking a second thread on a busy machine takes longer than working through this many numbers.
    return num_threads() if numbers > 1 << 16 else 1


def _empty_state(form: AttentionSpec, num_dst: int, dtype: torch.dtype, positive: bool) -> AttentionState:
    assert not positive or form.score == "add"
    wide, narrow = (num_dst, form.heads * form.channels), (num_dst, form.heads)
    num, top, den = (empty_buffer(shape, dtype) for shape in (wide, narrow, narrow))
    if not positive:
        return AttentionState(num, top, den)
    return AttentionState(num, top, den, empty_buffer(wide, dtype), empty_buffer(narrow, dtype))


def _check(piece: AttentionBlock, other: Tensor) -> None:
    """The kernels trust columns: they must be rows of what lies on the other side."""
    assert piece.structure.num_cols == other.shape[0]
    if piece.positions is not None:
        assert piece.positions.shape == piece.structure.col.shape


def _rows(tensor: Tensor) -> Tensor:
    """Detached, with each row's numbers side by side."""
    tensor = tensor.detach()
    return tensor if tensor.dim() == 2 and tensor.stride(1) == 1 else tensor.contiguous()
