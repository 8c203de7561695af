"""User-defined messages, built for some edges at a time.

A message is a function of per-edge tensors: ``message(src, dst, edge, *params)`` with ``src[name]`` the rows of the
sources of some edges, ``dst[name]`` those of their destinations, ``edge[name]`` the edges' own data and ``edge["id"]``
their store edge ids. It must key random numbers by those ids, and must not capture parameters: they are passed in, so
that their gradients are gradients of the function's inputs. R destinations, E edges, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError, first_line
from gnnfleet.ops.csr import CSR

Message = Callable[..., Any]
"""Its attribute ``edges_at_once``, if it has one, replaces ``EDGES_AT_ONCE``."""
REDUCES = ("sum", "mean", "max", "softmax")
EDGES_AT_ONCE = 1 << 18

LeafKey = tuple[str, str | int]
"""("src" | "dst" | "edge", name) or ("params", number)."""
Leaves = dict[LeafKey, Tensor]


def autocast_dtype() -> torch.dtype | None:
    """The dtype of autocast; None if it is off."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageCall:
    """Arguments that all blocks of a call share, created in forward: in backward autocast may be off."""

    message: Message
    reduce: str
    num_dst: int
    dst: Mapping[str, Tensor] = field(default_factory=dict)  # [R, …]
    params: Sequence[Tensor] = ()
    precision: torch.dtype | None = field(default_factory=autocast_dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageBlock:
    """Some of the edges.

    ``rows`` ([n] int32, distinct) maps rows of the structure to destinations, if it has only some of them.
    ``ties`` ([E] int64, 0 or more) numbers the edges of all blocks for max; by default positions, for a single block.
    """

    structure: CSR
    edge_ids: Tensor  # [E] int64
    src: Mapping[str, Tensor] = field(default_factory=dict)  # [columns of the structure, …]
    edge: Mapping[str, Tensor] = field(default_factory=dict)  # [E, …]
    rows: Tensor | None = None
    ties: Tensor | None = None

    def __post_init__(self) -> None:
        edges = self.structure.num_edges
        assert all(len(tensor) == self.structure.num_cols for tensor in self.src.values())
        assert all(len(tensor) == edges for tensor in (self.edge_ids, *self.edge.values()))
        assert self.rows is None or len(self.rows) == self.structure.num_rows
        assert self.ties is None or len(self.ties) == edges


@dataclass(frozen=True, eq=False)
class MessageChunk:
    """Consecutive edges of a block; a row may extend beyond them."""

    edges: slice
    target: slice | Tensor  # their destinations
    runs: Tensor  # [n + 1] offsets of the edges of each destination in the chunk
    row: Tensor  # [E] position of an edge's destination in ``target``
    dst: Tensor  # [E] its destination

    @property
    def count(self) -> int:
        return len(self.row)


def message_chunks(call: MessageCall, block: MessageBlock) -> Iterator[MessageChunk]:
    """All edges of a block, at most ``EDGES_AT_ONCE`` at a time."""
    count, at_once = block.structure.num_edges, getattr(call.message, "edges_at_once", EDGES_AT_ONCE)
    for low in range(0, count, at_once):
        yield chunk_of(block, low, min(low + at_once, count))


def chunk_of(block: MessageBlock, low: int, high: int) -> MessageChunk:
    """Edges low … high − 1."""
    indptr = block.structure.indptr
    first = int(torch.searchsorted(indptr, low, right=True)) - 1
    last = max(int(torch.searchsorted(indptr, high)), first)  # without edges: no rows
    runs = indptr[first : last + 1].clamp(low, high) - low
    row = torch.repeat_interleave(torch.arange(last - first, device=runs.device), runs.diff(), output_size=high - low)
    if block.rows is None:
        return MessageChunk(slice(low, high), slice(first, last), runs, row, row + first)
    rows = block.rows[first:last]
    return MessageChunk(slice(low, high), rows, runs, row, rows.index_select(0, row))


def build_message(
    call: MessageCall, block: MessageBlock, chunk: MessageChunk, needs_grad: Collection[LeafKey] = ()
) -> tuple[tuple[Tensor, ...], Leaves]:
    """The message of some edges ((value,), or (score, value) for softmax), and the leaves it was built from.

    Leaves in ``needs_grad`` require gradients. Raises ConfigError if the message returns something else, or depends on
    a tensor with a gradient that was not passed in.
    """
    col = block.structure.col[chunk.edges]
    leaves: Leaves = {("src", name): tensor.detach().index_select(0, col) for name, tensor in block.src.items()}
    leaves |= {("dst", name): tensor.detach().index_select(0, chunk.dst) for name, tensor in call.dst.items()}
    leaves |= {("edge", name): tensor.detach()[chunk.edges] for name, tensor in block.edge.items()}
    leaves |= {("params", i): tensor.detach() for i, tensor in enumerate(call.params)}
    for key in needs_grad:
        leaves[key].requires_grad_()
    src, dst, edge = (
        {str(name): leaf for (group, name), leaf in leaves.items() if group == kind} for kind in ("src", "dst", "edge")
    )
    edge["id"] = block.edge_ids[chunk.edges]
    params = [leaves["params", i] for i in range(len(call.params))]
    with torch.autocast("cpu", dtype=call.precision or torch.bfloat16, enabled=call.precision is not None):
        parts = _parts(call, call.message(src, dst, edge, *params), chunk.count)
    _check_captured(parts, leaves)
    return parts, leaves


def check_no_captured(call: MessageCall, block: MessageBlock) -> None:
    """Raise ConfigError if the message uses a tensor with a gradient that was not passed in.

    Forward checks a few edges, since a call whose inputs need no gradient has no backward that could notice.
    """
    some = min(block.structure.num_edges, 16)
    if some:
        with torch.enable_grad():
            build_message(call, block, chunk_of(block, 0, some))


def empty_message(call: MessageCall, block: MessageBlock) -> tuple[Tensor, ...]:
    """The message of no edges, for its shape."""
    try:
        return build_message(call, block, chunk_of(block, 0, 0))[0]
    except RuntimeError as error:
        raise ConfigError(
            f"the message fails on zero edges ({first_line(error)}): write sizes instead of −1 in its shapes"
        ) from error


def _parts(call: MessageCall, built: Any, count: int) -> tuple[Tensor, ...]:
    parts: tuple[Any, ...] = built if isinstance(built, tuple) else (built,)
    for part in parts:
        if not isinstance(part, Tensor) or not part.is_floating_point() or part.shape[:1] != (count,):
            actual = f"{part.dtype} {list(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            raise ConfigError(f"a message is a float tensor with a row for each of {count} edges, found {actual}")
    shapes = [list(part.shape) for part in parts]
    if call.reduce == "softmax":
        if len(parts) != 2 or len(shapes[0]) != 2 or shapes[1][:2] != shapes[0]:
            raise ConfigError(f"a softmax message returns (score [E, H], value [E, H, …]), found {shapes}")
    elif len(parts) != 1:
        raise ConfigError(f"a message reduced by {call.reduce} is one tensor, found {len(parts)}")
    return parts


def _check_captured(parts: tuple[Tensor, ...], leaves: Leaves) -> None:
    """Walk the autograd graph: a leaf that was not passed in would silently lose its gradient."""
    passed = {id(leaf) for leaf in leaves.values()}
    todo = [part.grad_fn for part in parts if part.grad_fn is not None]
    captured = [part for part in parts if part.grad_fn is None and part.requires_grad and id(part) not in passed]
    seen = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in passed:
            captured.append(variable)
        todo += [following for following, _ in node.next_functions if following is not None]
    if captured:
        shape = list(captured[0].shape)
        raise ConfigError(f"the message uses a parameter of shape {shape} that was not passed in: add it to params=(…)")
