"""Data of a graph that a model does not read, said once by ``train`` and ``plan``."""

from __future__ import annotations

from typing import Any

from gnnfleet.graph.graph import Graph
from gnnfleet.nn.base import Model
from gnnfleet.nn.config import ModelConfig
from gnnfleet.nn.pyg.module import PygModule


def describe_unused(config: ModelConfig, graph: Graph, model: Any = None) -> tuple[str, ...]:
    """Return a remark for each kind of edge data that the graph has and the model ignores, unless the user chose so.

    A custom model is judged by the arguments of its forward; if it gets the view itself, by its layers.
    """
    remarks: list[str] = []
    tables, name = graph.edges.values(), config.label
    has_weight = any(edges.weight is not None for edges in tables)
    if config.is_custom:
        if has_weight and not _may_read(model, "edge_weight"):
            remarks.append(f"edge weights are not used by model {name}: {_missing(model, 'edge_weight')}")
        if _has_attr(graph) and not _may_read(model, "edge_attr"):
            remarks.append(f"edge features are not used by model {name}: {_missing(model, 'edge_attr')}")
    else:
        if has_weight and config.edge_weight and not config.uses_edge_weight:
            setting = f" with aggr={config.aggr}: aggr=mean uses them" if name == "sage" else ""
            remarks.append(f"edge weights are not used by model {name}{setting}")
        if _has_attr(graph) and config.edge_features and not config.uses_edge_features:
            remarks.append(f"edge features are not used by model {name}: sage, gin, gat, gatv2 and res+ use them")
    if not config.is_temporal and any(edges.time is not None for edges in tables):
        remarks.append(f"edge times are not used by model {name}: strategy temporal trains on events")
    return tuple(remarks)


def _has_attr(graph: Graph) -> bool:
    return any(edges.attr is not None and edges.attr.shape[1] for edges in graph.edges.values())


def _may_read(model: Any, argument: str) -> bool:
    if isinstance(model, PygModule):
        return argument in model.inputs
    # Model.compute gives its layers view and x only; layers of other packages may ask the view.
    own = type(model).compute is not Model.compute
    return own or any(not type(layer).__module__.startswith("gnnfleet.") for layer in model.layers)


def _missing(model: Any, argument: str) -> str:
    if isinstance(model, PygModule):
        return f"{type(model.module).__name__}.forward has no argument {argument}"
    return "override compute, and pass view.weight and view.attr to the layers"
