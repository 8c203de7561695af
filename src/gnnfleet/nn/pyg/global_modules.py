"""torch_geometric modules that need more than the messages of one node: the largest group, or all nodes.

Functions take (view, module, the forward they replace, arguments of the call).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gnnfleet.graph.views.view import GraphView


@contextmanager
def replaced(module: torch.nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let ``module.name`` be ``function``."""
    module.__dict__[name] = function
    try:
        yield
    finally:
        module.__dict__.pop(name, None)  # an inner replacement may have removed it


def _largest(view: GraphView, count: int) -> int:
    """Collective. The largest count of all ranks, found by 12 bits at a time: a view has sums only."""
    largest = 0
    for shift in (24, 12, 0):
        histogram = torch.zeros(1 << 12)
        if count >> (shift + 12) == largest:
            histogram[(count >> shift) & 0xFFF] = 1
        largest = largest << 12 | int(view.sum_over_nodes(histogram).nonzero().max())
    return largest


def _with_group(size: int, forward: Any, x: Tensor, index: Tensor, dim_size: int, dim: int, **kwargs: Any) -> Tensor:
    """Aggregate with one more group, of ``size`` zeros before all others, and leave out its result."""
    dim = dim % x.dim()
    zeros = x.new_zeros(*x.shape[:dim], size, *x.shape[dim + 1 :])
    x, index = torch.cat([zeros, x], dim), torch.cat([index.new_zeros(size), index + 1])
    out: Tensor = forward(x, index, dim_size=dim_size + 1, dim=dim, **kwargs)
    return out.narrow(dim, 1, dim_size)


def _padded(view: GraphView, module: Any, forward: Any, x: Tensor, ptr: Any = None, **kwargs: Any) -> Tensor:
    """Collective. Pad groups to the largest of all ranks, which is that of the whole graph."""
    largest = _largest(view, int(torch.bincount(kwargs["index"], minlength=1).max()))
    return _with_group(max(largest, 1), forward, x, **kwargs)


def _quantile(view: GraphView, module: Any, forward: Any, x: Tensor, ptr: Any = None, **kwargs: Any) -> Tensor:
    """Take quantiles, also where the first nodes have no messages, or all."""
    return _with_group(2, forward, x, **kwargs)


def _equilibrium(view: GraphView, module: Any, forward: Any, x: Tensor, dim_size: int, **kwargs: Any) -> Any:
    """Collective. Minimize an energy whose second term is a mean over all nodes."""
    nodes = view.sum_over_nodes(x.new_full((1,), dim_size))  # includes those without messages
    with replaced(module, "reg", lambda y: module.softplus(module.lamb) * y.square().sum() / nodes):
        return forward(x, dim_size=dim_size, **kwargs)


def _gps(view: GraphView, module: Any, forward: Any, x: Tensor, edge_index: Tensor, **kwargs: Any) -> Any:
    """Collective. Attend to all nodes of the graph."""
    attend, count = module.attn.forward, int(view.sum_over_nodes(x.new_full((1,), len(x))))

    def attend_to_all(query: Tensor, *others: Tensor, mask: Any = None, **options: Any) -> Any:
        rows = view.gather_rows(query[0], torch.arange(count))[None]
        return attend(query, rows, rows, need_weights=False) if others else attend(rows)[:, view.node_ids]

    with replaced(module.attn, "forward", attend_to_all):
        return forward(x, edge_index, **kwargs)


def _hetero_batch_norm(view: GraphView, module: Any, forward: Any, x: Tensor, type_vec: Tensor) -> Any:
    """Collective. Take the statistics of every type over all nodes."""
    if not module.training and module.track_running_stats:
        return forward(x, type_vec)
    member = torch.nn.functional.one_hot(type_vec, module.num_types).t().to(x.dtype)
    with torch.no_grad():
        count = view.sum_over_nodes(member.sum(1, keepdim=True))
        mean = view.sum_over_nodes(member @ x) / count.clamp(min=1)
        var = view.sum_over_nodes(member @ (x - mean[type_vec]).square()) / count.clamp(min=1)
    present = count[:, 0].nonzero()[:, 0]  # a row of every type, also of those without local nodes
    with replaced(module, "mean_var", lambda *args, **kwargs: (mean, var)):
        return forward(torch.cat([x, mean[present]]), torch.cat([type_vec, present]))[: len(x)]


GLOBAL_MODULES: dict[str, Callable[..., Any]] = {
    "QuantileAggregation": _quantile,
    "EquilibriumAggregation": _equilibrium,
    "GPSConv": _gps,
    "HeteroBatchNorm": _hetero_batch_norm,
    **dict.fromkeys(
        [
            "LSTMAggregation", "GRUAggregation", "SortAggregation", "GraphMultisetTransformer", "LCMAggregation",
            "SetTransformerAggregation", "PatchTransformerAggregation",
        ],
        _padded,
    ),
}  # fmt: skip
