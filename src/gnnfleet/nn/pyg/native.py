"""torch_geometric convolutions on the verbs of a view: our layers compute them with the parameters of the module.

Only convolutions of these very classes, with options that our layer has too, run so, and only on all edges with their
own weights and features. In all other calls the code of torch_geometric runs on the ``SourceIndex``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.conv import GATConv, GATv2Conv, GCN2Conv, GCNConv, GENConv, GINConv, RGCNConv, SAGEConv
from gnnfleet.nn.pyg.source_index import SourceIndex

_STEPS = {"forward", "propagate", "message", "aggregate", "update", "message_and_aggregate", "edge_update"}
_CALLED = {"nn", "mlp", "aggr_module"}  # children that our layers call, or do not use; of others they read the weights
_FUSES_RELU = (SAGEConv, GCNConv, GATConv, GATv2Conv)
_REDUCES = ("sum", "add", "mean", "max")
_signature = cache(inspect.signature)


class _GENConv(GENConv):
    def forward(self, view: GraphView, x: Tensor, *, edge_attr: Tensor | None = None) -> Tensor:
        out: Tensor = self.mlp(self.combine(view, x, edge_attr))
        return out


def _attention(module: Any) -> dict[str, Any] | None:
    is_mean = module.fill_value == "mean" or module.lin_edge is None or not module.add_self_loops
    return {} if is_mean and getattr(module, "lin", module) is not None else None


def _gcn(module: Any) -> dict[str, Any] | None:
    # Where it adds no loops, torch_geometric has those of the graph in the degree. The effect of ``improved`` on edges
    # without weights depends on its version.
    if (module.normalize and not module.add_self_loops) or getattr(module, "improved", False):
        return None
    width = {"in_channels": module.lin.weight.shape[1]} if hasattr(module, "lin") else {}
    return {**width, "loop": float(module.add_self_loops), "res": None}


def _gen(module: Any) -> dict[str, Any] | None:
    softmax = module.aggr_module
    if hasattr(module, "msg_norm") or softmax.semi_grad or softmax.channels != 1:
        return None
    t = softmax.t if isinstance(softmax.t, Tensor) else torch.tensor([softmax.t])
    aggregation = SimpleNamespace(t=t, is_one=not softmax.learn and softmax.t == 1)
    return {"aggr_module": aggregation, "lin_edge": getattr(module, "lin_edge", None)}


def _sage(module: Any) -> dict[str, Any]:
    return {"in_channels": module.lin_l.weight.shape[1], "lin_edge": None}


def _rgcn(module: Any) -> dict[str, Any] | None:
    return None if module.num_blocks else {"in_channels": module.weight.shape[1], "relations": None}


class Peer(NamedTuple):
    layer: type[torch.nn.Module]
    attributes: Callable[[Any], dict[str, Any] | None]  # those that the module lacks; None: options that ours lacks
    aggrs: tuple[str, ...] = ("sum", "add")
    edge_input: str = ""


_PEERS = {
    "SAGEConv": Peer(SAGEConv, _sage, _REDUCES),
    "GATConv": Peer(GATConv, _attention, edge_input="edge_attr"),
    "GATv2Conv": Peer(GATv2Conv, _attention, edge_input="edge_attr"),
    "GINConv": Peer(GINConv, lambda _: {"lin": None}),
    "GINEConv": Peer(GINConv, lambda module: None if module.lin is None else {}, edge_input="edge_attr"),
    "GCNConv": Peer(GCNConv, _gcn, edge_input="edge_weight"),
    "GCN2Conv": Peer(GCN2Conv, _gcn, edge_input="edge_weight"),
    "RGCNConv": Peer(RGCNConv, _rgcn, _REDUCES, "edge_type"),
    "GENConv": Peer(_GENConv, _gen, ("softmax",), "edge_attr"),
}


def is_convolution(module: torch.nn.Module) -> bool:
    return hasattr(module, "register_propagate_forward_pre_hook")


def describe(module: torch.nn.Module) -> tuple[str, ...]:
    """Count the convolutions that ``run_native`` runs, for the user; nothing if there are no convolutions."""
    convolutions = list(filter(is_convolution, module.modules()))
    count = sum(find_peer(None, child) is not None for child in convolutions)
    return (f"{count} of {len(convolutions)} convolutions run on gnnfleet kernels",) if convolutions else ()


def run_native(
    peer: Peer,
    view: GraphView,
    module: Any,
    next_mask: Callable[[], int],
    forward: Any,
    *args: Any,
    relu: bool = False,
    **kwargs: Any,
) -> Any:
    """The forward of a convolution on the verbs of ``view``, or its own ``forward`` for other inputs.

    ``next_mask`` numbers the masks of attention dropout of a pass; ``relu`` applies a ReLU to the result.
    """
    inputs = _signature(module.__class__.forward).bind(module, *args, **kwargs).arguments
    rows = [inputs.pop(name) for name in ("self", "x", "x_0") if name in inputs][1:]
    index, others = inputs.pop("edge_index"), {name: t for name, t in inputs.items() if t is not None}
    own: Any = index.fetcher.inputs if isinstance(index, SourceIndex) else {}
    if (
        not isinstance(index, SourceIndex)
        or index.edge_ids is not index.fetcher.edges.edge_ids
        or index.sources != (True, False)
        or not all(isinstance(t, Tensor) and t.dim() == 2 and len(t) == view.num_src for t in rows)
        or not all(name == peer.edge_input and not t._version and t is own.get(name) for name, t in others.items())
        or (peer.layer is _GENConv and others and not hasattr(module, "lin_edge"))  # adds features as they are
    ):
        assert index.fetcher.aggregated is None if isinstance(index, SourceIndex) else True, "its edges are left out"
        out = forward(*args, **kwargs)
        return torch.relu(out) if relu else out
    drops = getattr(module, "dropout", 0.0) and module.training and view.training
    data: Any = {"weight": view.weight} if "edge_weight" in others else {}
    data |= {"edge_attr": view.attr} if "edge_attr" in others else {}
    data |= {"relu": True} if relu else {}
    if index.fetcher.aggregated is not None and rows[0] is index.fetcher.features:
        data["aggregated"] = index.fetcher.aggregated
    return peer.layer.forward(_layer_of(peer, module, next_mask() if drops else 0), view, *rows, **data)


def fuses_relu(module: Any) -> bool:
    """True if ``run_native`` replaces the forward of a convolution and our layer has a fused ReLU."""
    return getattr(module.forward, "func", None) is run_native and module.forward.args[0].layer in _FUSES_RELU


def aggregate_features(view: GraphView, module: Any, x: Tensor, *, weight: Tensor | None) -> Tensor | None:
    """Aggregate of the features in a convolution, if our layer of it takes that as ``aggregated``, else None."""
    peer = find_peer(view, module)
    if peer is None or not hasattr(peer.layer, "aggregate"):
        return None
    layer: Any = _layer_of(peer, module, 0)
    with torch.no_grad():
        out: Tensor | None = peer.layer.aggregate(layer, view, x, weight=weight)
    return out


def _layer_of(peer: Peer, module: Any, mask_id: int) -> torch.nn.Module:
    """Our layer with the parameters and options of a convolution."""
    layer = object.__new__(peer.layer)
    options = {"mask_id": mask_id, "aggr": module.aggr.replace("add", "sum")}
    layer.__dict__.update(vars(module), **options, **(peer.attributes(module) or {}))
    return layer


def find_peer(view: GraphView | None, module: Any) -> Peer | None:
    """Our layer of the same class and options, if nothing of the module is changed or observed from outside."""
    relations = getattr(module, "num_relations", 1)
    if view is not None and (len(view.node_types), len(view.edge_types)) != (1, relations):
        return None
    peer = _PEERS.get(type(module).__name__)
    if peer is None or not type(module).__module__.startswith("torch_geometric.nn.") or module.aggr not in peer.aggrs:
        return None
    aggregation = f"{module.aggr.replace('add', 'sum')}aggregation"
    is_standard = (
        type(module.aggr_module).__name__.lower() == aggregation
        and (module.flow, module.explain, module.decomposed_layers) == ("source_to_target", None, 1)
        and module.node_dim in (-2, 0)
        and _STEPS.isdisjoint(vars(module))
        and not _has_hooks(module)
        and not any(map(torch.nn.parameter.is_lazy, module.parameters()))
        and all(_is_linear(child) for name, child in module.named_children() if name not in _CALLED)
    )
    return peer if is_standard and peer.attributes(module) is not None else None


def _has_hooks(module: torch.nn.Module) -> bool:
    """True if a call of the module, or a step of it, runs hooks."""
    return any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks") and "ward" in name)


def _is_linear(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "Linear" and hasattr(module, "bias") and not _has_hooks(module)
