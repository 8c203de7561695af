"""Any differentiable message over edges, in bounded memory: built for some rows at a time and rebuilt in backward.

A message is a function of per-edge tensors: ``message(src, dst, edge, *params)`` with ``src[name]`` the rows of the
sources of some edges, ``dst[name]`` those of their destinations, ``edge[name]`` the edges' own data and ``edge["id"]``
their store edge ids. It must not draw random numbers but by those ids, and must not capture parameters: those are
passed in, so that their gradients are gradients of the function's inputs. E edges, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.ops.aggregate import sum_rows
from gnnfleet.ops.csr import Compressed
from gnnfleet.ops.rows import gather

Message = Callable[..., Any]
REDUCES = ("sum", "mean", "max", "softmax")
EDGES_AT_ONCE = 1 << 18


@dataclass(frozen=True, eq=False)
class _Call:
    """Everything about a call that is not a tensor with a gradient; tensors travel beside it in one flat list."""

    structure: Compressed
    message: Message
    reduce: str
    names: tuple[tuple[str, str], ...]  # ("src" | "dst" | "edge", name) of the first tensors; parameters follow
    edge_ids: Tensor


def propagate(
    structure: Compressed,
    message: Message,
    *,
    src: Mapping[str, Tensor] | None = None,
    dst: Mapping[str, Tensor] | None = None,
    edge: Mapping[str, Tensor] | None = None,
    params: Sequence[Tensor] = (),
    reduce: str = "sum",
    edge_ids: Tensor | None = None,
) -> Tensor:
    """[R, …]: messages of the edges of each row, summed, averaged, maximised, or weighted by a softmax.

    For ``softmax`` the message returns (score [E, H], value [E, H, C]). Rows without edges give 0; of equal maxima the
    first edge gets the gradient. Raises ConfigError when the message depends on a tensor that was not passed in.
    """
    if reduce not in REDUCES:
        raise ConfigError(f"cannot reduce by {reduce!r}: choose one of {', '.join(REDUCES)}")
    groups = {"src": src or {}, "dst": dst or {}, "edge": edge or {}}
    expected = {"src": structure.num_cols, "dst": structure.num_rows, "edge": structure.num_edges}
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            if tensor.shape[0] != expected[group]:
                raise ConfigError(f"{group}[{name!r}] has {tensor.shape[0]} rows, expected {expected[group]}")
    names = tuple((group, name) for group, tensors in groups.items() for name in tensors)
    ids = torch.arange(structure.num_edges) if edge_ids is None else edge_ids
    call = _Call(structure, message, reduce, names, ids)
    flat = [tensor for tensors in groups.values() for tensor in tensors.values()]
    out: Tensor = _Propagate.apply(call, *flat, *params)  # type: ignore[no-untyped-call]
    return out


class _Propagate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        pieces = [
            _reduce(call, _build(call, tensors, low, high, grad=False)[0], low, high) for low, high in _ranges(call)
        ]
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, tensors = ctx.call, ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        totals = [t.new_zeros(t.shape) if need else None for t, need in zip(tensors, wanted, strict=True)]
        for low, high in _ranges(call):
            with torch.enable_grad():
                built, leaves = _build(call, tensors, low, high, grad=True)
                out = _reduce(call, built, low, high)
            if not out.requires_grad:
                continue
            asked = [i for i, need in enumerate(wanted) if need]
            found = torch.autograd.grad(out, [leaves[i] for i in asked], grad[low:high], allow_unused=True)
            for i, part in zip(asked, found, strict=True):
                if part is not None:
                    _add(call, totals, i, part, low, high)
        return None, *totals


def _ranges(call: _Call) -> Iterator[tuple[int, int]]:
    """Rows whose edges fit one piece; at least one piece, so that an empty graph has an output shape too."""
    indptr, low = call.structure.indptr, 0
    while True:
        limit = indptr[low] + EDGES_AT_ONCE
        high = max(int(torch.searchsorted(indptr, limit, right=True)) - 1, low + 1)
        high = min(high, call.structure.num_rows)
        yield low, high
        low = high
        if low >= call.structure.num_rows:
            return


def _edges(call: _Call, low: int, high: int) -> slice:
    return slice(int(call.structure.indptr[low]), int(call.structure.indptr[high]))


def _build(call: _Call, tensors: Sequence[Tensor], low: int, high: int, *, grad: bool) -> tuple[Any, list[Tensor]]:
    """The message of the edges of some rows, and the leaves it was built from, one per tensor."""
    here = _edges(call, low, high)
    index: dict[str, Any] = {
        "src": call.structure.col[here].long(),
        "dst": call.structure.row[here].long(),
        "edge": here,
    }
    groups: dict[str, dict[str, Tensor]] = {"src": {}, "dst": {}, "edge": {}}
    leaves = []
    for (group, name), tensor in zip(call.names, tensors, strict=False):
        leaf = tensor.detach()[index[group]].requires_grad_(grad and tensor.is_floating_point())
        groups[group][name] = leaf
        leaves.append(leaf)
    params = tensors[len(call.names) :]
    leaves += [param.detach().requires_grad_(grad and param.is_floating_point()) for param in params]
    groups["edge"]["id"] = call.edge_ids[here]
    built = call.message(groups["src"], groups["dst"], groups["edge"], *leaves[len(call.names) :])
    if grad:
        _refuse_strangers(built, leaves)
    return built, leaves


def _parts(built: Any) -> tuple[Tensor, ...]:
    return built if isinstance(built, tuple) else (built,)


def _refuse_strangers(built: Any, leaves: Sequence[Tensor]) -> None:
    """Walk the message's graph: a leaf that was not passed in would lose its gradient without a word."""
    known = {id(leaf) for leaf in leaves}
    todo = [part.grad_fn for part in _parts(built) if part.grad_fn is not None]
    strangers = [
        part for part in _parts(built) if part.grad_fn is None and part.requires_grad and id(part) not in known
    ]
    seen = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            strangers.append(variable)
        todo += [following for following, _ in node.next_functions if following is not None]
    if strangers:
        shape = list(strangers[0].shape)
        raise ConfigError(f"the message uses a parameter of shape {shape} that was not passed in: add it to params=(…)")


def _reduce(call: _Call, built: Any, low: int, high: int) -> Tensor:
    count = high - low
    rows = call.structure.row[_edges(call, low, high)].long() - low
    runs = call.structure.indptr[low : high + 1] - call.structure.indptr[low]
    if call.reduce == "softmax":
        score, value = built
        return _softmax(score, value, rows, runs)
    if call.reduce == "max":
        return _first_max(built, rows, count)
    out = _sum_runs(built, rows, runs)
    if call.reduce == "mean":
        degree = runs.diff().clamp(min=1).to(out.dtype)
        out = out / degree.view(-1, *([1] * (out.dim() - 1)))
    return out


def _sum_runs(built: Tensor, rows: Tensor, runs: Tensor) -> Tensor:
    """Sums over the edges of each row, which follow one another: row i has edges runs[i] … runs[i + 1] − 1."""
    if built.device.type != "cpu" or built.dtype not in (torch.float32, torch.float64):
        return built.new_zeros(len(runs) - 1, *built.shape[1:]).index_add(0, rows, built)
    out: Tensor = _SumRuns.apply(built, rows, runs)  # type: ignore[no-untyped-call]
    return out


class _SumRuns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, built: Tensor, rows: Tensor, runs: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        edges = Compressed(runs, torch.arange(len(built), dtype=torch.int32), len(built))
        return sum_rows(edges, built.reshape(len(built), _width(built))).view(len(runs) - 1, *built.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        flat = grad.reshape(len(grad), _width(grad)).contiguous()
        return gather(flat, rows).view(len(rows), *grad.shape[1:]), None, None


def _width(rows: Tensor) -> int:
    return rows.shape[1:].numel()


def _softmax(score: Tensor, value: Tensor, rows: Tensor, runs: Tensor) -> Tensor:
    if score.dim() != 2 or value.shape[:2] != score.shape:
        raise ConfigError(
            f"a softmax message returns (score [E, H], value [E, H, …]), found {list(score.shape)}, {list(value.shape)}"
        )
    place = rows[:, None].expand_as(score)
    top = score.new_full((len(runs) - 1, score.shape[1]), -torch.inf).scatter_reduce(0, place, score.detach(), "amax")
    weight = (score - top[rows]).exp()
    total = _sum_runs(weight, rows, runs)
    weight = weight / total[rows]
    spread = weight.view(*weight.shape, *([1] * (value.dim() - 2)))
    return _sum_runs(spread * value, rows, runs)


def _first_max(built: Tensor, rows: Tensor, count: int) -> Tensor:
    out = built.new_zeros(count, *built.shape[1:])
    if not len(rows):
        return out
    place = rows.view(-1, *([1] * (built.dim() - 1))).expand_as(built)
    best = torch.full_like(out, -torch.inf).scatter_reduce(0, place, built.detach(), "amax")
    number = torch.arange(len(rows)).view(-1, *([1] * (built.dim() - 1))).expand_as(built)
    number = torch.where(built.detach() == best[rows], number, len(rows))
    winner = torch.full(out.shape, len(rows)).scatter_reduce(0, place, number, "amin")
    return torch.where(winner < len(rows), built.gather(0, winner.clamp(max=len(rows) - 1)), out)


def _add(call: _Call, totals: list[Tensor | None], i: int, part: Tensor, low: int, high: int) -> None:
    """Add a piece's gradient where its rows came from."""
    total = totals[i]
    assert total is not None
    if i >= len(call.names):
        total += part
        return
    group, here = call.names[i][0], _edges(call, low, high)
    if group == "edge":
        total[here] = part
        return
    native = part.device.type == "cpu" and part.dtype in (torch.float32, torch.float64)
    index = call.structure.col if group == "src" else call.structure.row
    if not native:
        total.index_add_(0, index[here].long(), part)
    elif group == "dst":
        runs = call.structure.indptr[low : high + 1] - call.structure.indptr[low]
        total[low:high] = _sum_runs(part, index[here], runs)
    else:
        piece = Compressed(torch.tensor([0, len(part)]), index[here], total.shape[0])
        turned, order = piece.transposed
        edges = Compressed(turned.indptr, order, len(part))
        sum_rows(edges, part.reshape(len(part), _width(part)), out=total.view(len(total), _width(total)))
