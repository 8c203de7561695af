"""Edge-softmax attention in one process, differentiable: out_i = Σ_j k_ij softmax_j(s_ij) value_j over in-edges j → i.

Nothing of size edges × heads is kept for backward, which rebuilds the weights from the inputs and the log-sum-exp.
``attend_blocks`` has the operations on blocks of edges, ``reference.attend`` the plain version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnfleet.errors import ConfigError
from gnnfleet.ops import attend_blocks as blocks
from gnnfleet.ops import reference
from gnnfleet.ops.attend_blocks import SCORES, AttentionBlock, AttentionInputs, AttentionSpec
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.draws import Draws


def attend(
    structure: CSR,
    value: Tensor,
    *,
    src: Tensor,
    dst: Tensor,
    score: str,
    vector: Tensor | None = None,
    edge: Tensor | None = None,
    heads: int | None = None,
    slope: float = 0.2,
    dropout: float = 0.0,
    draws: Draws | None = None,
    edge_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention over the in-edges of each row of ``structure``, [N_dst, H·C] or [N_dst, H, C] as ``value`` is.

    ``score`` "add": LeakyReLU(src_j + dst_i + edge_ij), [N, H] each; "v2": <vector, LeakyReLU(the same)>,
    [N, H·D] each; "dot": scale · <src_j, dst_i>, by default scale is 1/√D. The number of heads comes from ``heads`` or
    from an input that has a dimension for them. Dropout is keyed by ``edge_ids`` (default: positions). Rows without
    in-edges give 0, edges of score −inf have weight 0. Raises ConfigError.
    """
    structure.check()
    inputs = AttentionInputs(value=value, src=src, dst=dst, edge=edge, vector=vector, edge_ids=edge_ids)
    counts = RowCounts(structure.num_cols, structure.num_rows, structure.num_edges)
    spec, flat = prepare(
        inputs, counts, score=score, heads=heads, slope=slope, dropout=dropout, draws=draws, scale=scale
    )
    if value.device.type == "cpu":
        plan = _AttentionPlan(structure, spec, edge_ids)
        out: Tensor = _Attend.apply(flat.value, flat.src, flat.dst, flat.edge, flat.vector, plan)  # type: ignore[no-untyped-call]
    else:
        terms = {"vector": flat.vector, "edge": flat.edge, "heads": spec.heads, "edge_ids": edge_ids, "draws": draws}
        rule = {"score": score, "slope": slope, "dropout": dropout, "scale": spec.scale}
        out = reference.attend(structure, flat.value, src=flat.src, dst=flat.dst, **terms, **rule)  # type: ignore[arg-type]
    return out if value.dim() == 2 else out.view(structure.num_rows, spec.heads, spec.channels)


@dataclass(frozen=True)
class RowCounts:
    """Number of rows that inputs must have."""

    sources: int
    destinations: int
    edges: int


def prepare(
    inputs: AttentionInputs,
    counts: RowCounts,
    *,
    score: str = "add",
    heads: int | None = None,
    slope: float = 0.2,
    dropout: float,
    draws: Draws | None,
    scale: float | None = None,
) -> tuple[AttentionSpec, AttentionInputs]:
    """(the specification, the inputs with two dimensions each and ``vector`` with one); see ``attend``.

    Raises ConfigError for inputs that do not match.
    """
    if score not in SCORES:
        raise ConfigError(f"score must be one of {', '.join(SCORES)}, found {score!r}")
    _check_types(inputs, score)
    spec = _shape_spec(inputs, score, _heads(inputs, score) if heads is None else heads)
    spec = replace(spec, slope=slope, scale=1 / math.sqrt(spec.depth) if scale is None else scale)
    _check_shapes(counts, inputs, spec)
    return replace(spec, dropout=dropout, dropout_key=_dropout_args(dropout, draws)), _flatten(inputs)


@dataclass(frozen=True, eq=False)
class _AttentionPlan:
    structure: CSR
    spec: AttentionSpec
    edge_ids: Tensor | None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        src: Tensor,
        dst: Tensor,
        edge: Tensor | None,
        vector: Tensor | None,
        plan: _AttentionPlan,
    ) -> Tensor:
        inputs = AttentionInputs(value=value, src=src, dst=dst, edge=edge, vector=vector, edge_ids=plan.edge_ids)
        local = plan.spec.score == "add" and edge is None
        state = blocks.attention_pass(
            plan.spec, inputs, AttentionBlock(plan.structure), positive=local and ctx.needs_input_grad[2]
        )
        ctx.save_for_backward(value, src, dst, edge, vector, state.num, state.max, state.pos, state.mass)
        ctx.plan = plan
        return state.num

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, src, dst, edge, vector, out, lse, pos, mass = ctx.saved_tensors
        plan: _AttentionPlan = ctx.plan
        inputs = AttentionInputs(value=value, src=src, dst=dst, edge=edge, vector=vector, edge_ids=plan.edge_ids)
        grad = grad.contiguous()
        needs = ctx.needs_input_grad
        side, d_dst = blocks.destination_gradient(plan.spec, blocks.AttentionState(out, lse, lse, pos, mass), grad, dst)
        d_value = d_src = d_edge = d_vector = None
        if needs[0] or needs[1]:
            transposed, positions = plan.structure.transposed
            source_inputs = (
                inputs if plan.spec.score != "add" else replace(inputs, dst=side.packed[:, : plan.spec.heads])
            )
            block = AttentionBlock(transposed, positions=positions)
            d_value, d_src = blocks.source_gradient(plan.spec, source_inputs, block, grad=grad, side=side.lse_dee)
            d_value = d_value.to(value.dtype)
        if d_dst is None and (needs[2] or needs[3] or needs[4]):
            needs_edge_vector = bool(needs[3]), bool(needs[4])
            target = blocks.target_gradient(
                plan.spec, inputs, AttentionBlock(plan.structure), grad=grad, side=side.lse_dee, needs=needs_edge_vector
            )
            d_dst, d_edge, d_vector = target.dst, target.edge, target.vector
        return d_value, d_src, d_dst, d_edge, d_vector, None


def _check_types(inputs: AttentionInputs, score: str) -> None:
    if inputs.value.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise ConfigError(f"value must be float32, float64 or bfloat16, found {inputs.value.dtype}")
    for name in ("value", "src", "dst", "edge", "vector"):
        tensor: Tensor | None = getattr(inputs, name)
        if tensor is None:
            continue
        if name != "value" and tensor.dtype != inputs.dtype:
            raise ConfigError(f"{name} must be {inputs.dtype} with a {inputs.value.dtype} value, found {tensor.dtype}")
        if tensor.dim() not in ((1, 2) if name == "vector" else (2, 3)):
            raise ConfigError(f"{name} must have a row per {_ROW_OF[name]}, found shape {list(tensor.shape)}")
    if (inputs.vector is not None) != (score == "v2"):
        raise ConfigError(f"vector goes with score 'v2' and only with it, found score {score!r}")
    if inputs.edge is not None and score == "dot":
        raise ConfigError("score 'dot' takes no edge term: use 'add' or 'v2'")


_ROW_OF = {"value": "source", "src": "source", "dst": "destination", "edge": "edge", "vector": "head"}


def _heads(inputs: AttentionInputs, score: str) -> int:
    for tensor in (inputs.value, inputs.src, inputs.dst):
        if tensor.dim() == 3:
            return tensor.shape[1]
    if score == "add":
        return inputs.src.shape[1]
    if inputs.vector is not None and inputs.vector.dim() == 2:
        return inputs.vector.shape[0]
    raise ConfigError("the number of heads is ambiguous: pass heads=, or value as [rows, heads, channels]")


def _shape_spec(inputs: AttentionInputs, score: str, heads: int) -> AttentionSpec:
    width, inner = math.prod(inputs.value.shape[1:]), math.prod(inputs.src.shape[1:])
    if heads < 1 or width < heads or inner < heads or width % heads or inner % heads:
        raise ConfigError(f"value and src must have a multiple of {heads} heads columns, found {width} and {inner}")
    if score == "add" and inner != heads:
        raise ConfigError(f"score 'add' takes one number per head, {heads}, found src of {inner} columns")
    return AttentionSpec(score=score, heads=heads, channels=width // heads, depth=inner // heads)


def _check_shapes(counts: RowCounts, inputs: AttentionInputs, spec: AttentionSpec) -> None:
    inner = spec.heads * spec.depth
    expected = {"value": (counts.sources, spec.heads * spec.channels), "src": (counts.sources, inner)}
    expected |= {"dst": (counts.destinations, inner), "edge": (counts.edges, inner)}
    for name, shape in expected.items():
        tensor: Tensor | None = getattr(inputs, name)
        if tensor is None:
            continue
        if (tensor.shape[0], math.prod(tensor.shape[1:])) != shape or (
            tensor.dim() == 3 and tensor.shape[1] != spec.heads
        ):
            raise ConfigError(f"{name} must be {list(shape)} for {spec.heads} heads, found {list(tensor.shape)}")
    if inputs.vector is not None and inputs.vector.numel() != inner:
        raise ConfigError(f"vector must have {inner} numbers, found {list(inputs.vector.shape)}")
    ids = inputs.edge_ids
    if ids is not None and (ids.dtype != torch.int64 or ids.shape != (counts.edges,)):
        raise ConfigError(f"edge_ids must be int64 [{counts.edges}], found {ids.dtype} {list(ids.shape)}")


def _dropout_args(dropout: float, draws: Draws | None) -> tuple[int, int]:
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout must be at least 0 and below 1, found {dropout}")
    if not dropout:
        return 0, 0
    if draws is None:
        raise ConfigError("dropout needs draws: pass the key of its mask")
    return draws.kernel_args


def _flatten(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with two dimensions each, ``vector`` with one."""

    def flat(tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() == 2 else tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))

    edge = None if inputs.edge is None else flat(inputs.edge)
    vector = None if inputs.vector is None else inputs.vector.reshape(-1)
    return replace(
        inputs, value=flat(inputs.value), src=flat(inputs.src), dst=flat(inputs.dst), edge=edge, vector=vector
    )
