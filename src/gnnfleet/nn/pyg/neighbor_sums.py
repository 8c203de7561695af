"""Sums over neighbours on views that list only some in-edges of their sources: restricted rows, blocks, chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.view_base import COUNT, LOOPS, WEIGHTED
from gnnfleet.nn.pyg.hetero import with_function
from gnnfleet.nn.pyg.source_index import SourceIndex, plain

_NORM = "gcn_norm"


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
    degree = degree + loops.nan_to_num(2.0 if improved else 1.0)
    add = original.__globals__["add_remaining_self_loops"]
    edge_index, weight = add(edge_index, edge_weight, 2.0 if improved else 1.0, num_nodes)
    scale = torch.where(degree > 0, degree, torch.inf).rsqrt()
    src, dst = plain(edge_index)
    weight = scale.new_ones(len(dst)) if weight is None else weight
    return edge_index, (scale[src] * weight * scale[dst]).to(dtype if edge_weight is None else edge_weight.dtype)
