"""Sums over neighbours on views that list only some in-edges: restricted rows, chunks, and sampled blocks.

Degrees are static numbers of the whole graph. Sums over sampled neighbours are scaled up to all neighbours; means,
maxima and weights of a softmax are those of the sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.local import SELF_LOOP_IDS
from gnnfleet.graph.views.view_base import COUNT, LOOPS, WEIGHTED
from gnnfleet.nn.pyg.hetero import with_function
from gnnfleet.nn.pyg.source_index import SourceIndex, plain

_NORM = "gcn_norm"
_MEANS = {"ClusterGCNConv"}  # their sums are divided by the number of messages


def normalization_rule(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Call the forward of a convolution that uses gcn_norm with degrees of the whole graph."""
    original = getattr(type(module).forward, "__globals__", {}).get(_NORM)
    if original is None or original.__module__ != "torch_geometric.nn.conv.gcn_conv":
        return None
    return with_function(_NORM, lambda view: partial(_normalize, original))


def _normalize(
    original: Any,
    edge_index: Any,
    edge_weight: Tensor | None = None,
    num_nodes: int | None = None,
    improved: bool = False,
    add_self_loops: bool = True,
    flow: str = "source_to_target",
    dtype: torch.dtype | None = None,
) -> tuple[Any, Tensor]:
    """``gcn_norm`` of torch_geometric; the degrees are static numbers wherever a view does not list all in-edges."""
    edges = edge_index.fetcher.edges if isinstance(edge_index, SourceIndex) else None
    if edges is None or edges.fetched_degree is None:
        return original(edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype)  # type: ignore[no-any-return]
    is_graph = edge_index.edge_ids is edges.edge_ids and (
        edge_weight is None or edge_weight is edge_index.fetcher.inputs.get("edge_weight")
    )
    if not is_graph or flow != "source_to_target" or not add_self_loops:
        raise ConfigError("gcn_norm needs degrees of other edges or weights than those of the graph with self-loops")
    degree = edges.fetched_degree(COUNT if edge_weight is None else WEIGHTED).double()
    loops = edges.fetched_degree(LOOPS).double() if edge_weight is not None else torch.ones_like(degree)
    loops = loops.nan_to_num(2.0 if improved else 1.0)
    degree = degree + loops
    add = original.__globals__["add_remaining_self_loops"]
    count = len(edges.source_ids)
    edge_index, weight = add(edge_index, edge_weight, 1.0, count)
    scale = torch.where(degree > 0, degree, torch.inf).rsqrt()
    src, dst = plain(edge_index)
    # A sample may lack the self-loop of a node.
    weight = scale.new_ones(()) if weight is None else torch.cat([weight[: len(dst) - count], loops[:count]])
    return edge_index, (scale[src] * weight * scale[dst]).to(dtype if edge_weight is None else edge_weight.dtype)


def scaled_messages(convolution: Any, index: Any, messages: Tensor) -> Tensor:
    """Scale messages that a convolution sums over a sample of the neighbours; self-loops that it added stay."""
    edges = index.fetcher.edges if isinstance(index, SourceIndex) else None
    if edges is None or edges.sampling_scale is None or not _is_sum(convolution):
        return messages
    scale = edges.sampling_scale()[plain(index)[1].clamp(max=edges.num_dst - 1)]
    scale = torch.where(index.edge_ids < SELF_LOOP_IDS, scale, 1.0).to(messages.dtype)
    shape = [1] * messages.dim()
    shape[convolution.node_dim] = len(scale)
    return messages * scale.view(shape)


def _is_sum(convolution: Any) -> bool:
    """True if messages are summed with weights that do not depend on their number; raises ConfigError if unknown."""
    kinds = [kind for kind in type(convolution).__mro__ if kind.__name__ != "MessagePassing"]
    functions = [f for kind in kinds for f in vars(kind).values() if isinstance(f, FunctionType)]
    aggregations = {type(module).__name__ for module in getattr(convolution.aggr_module, "modules", list)()}
    is_own = any(f.__name__ == "aggregate" for f in functions) or not aggregations
    if is_own or (len(aggregations) > 1 and not aggregations.isdisjoint({"SumAggregation", "MulAggregation"})):
        raise ConfigError(
            f"{type(convolution).__name__} combines messages in its own way, so sums over sampled neighbours cannot be "
            "scaled to all of them: read all neighbours (strategy.fanouts of −1), or use sar or pipe"
        )
    is_normalized = any("softmax" in f.__code__.co_names for f in functions) or kinds[0].__name__ in _MEANS
    return aggregations == {"SumAggregation"} and not is_normalized
