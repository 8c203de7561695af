"""Layers, models and heads. A layer is called as ``conv(view, x)`` with a graph view and node rows; it knows no rank.

``gf.nn.SAGE(hidden=256, layers=3)`` and its like describe a model; ``build_model`` builds it for a graph.
``Model`` is the base class of all models, including custom ones.
Names are imported on first use, so that settings can be read without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gnnfleet.nn.config import (
    GAT,
    GCN,
    GCN2,
    GIN,
    HGT,
    RGCN,
    SAGE,
    SIGN,
    TGAT,
    TGN,
    GATv2,
    HeteroGAT,
    HeteroGATv2,
    HeteroGIN,
    HeteroSAGE,
    ModelConfig,
    ResPlus,
)

if TYPE_CHECKING:
    from gnnfleet.nn.base import Model
    from gnnfleet.nn.conv import (
        GATConv,
        GATv2Conv,
        GCN2Conv,
        GCNConv,
        GENConv,
        GINConv,
        HeteroConv,
        HGTConv,
        ResPlusBlock,
        RGCNConv,
    )
    from gnnfleet.nn.conv.sage import SAGEConv
    from gnnfleet.nn.embedding import NodeEmbedding
    from gnnfleet.nn.heads import NodeHead
    from gnnfleet.nn.interop import load_model, load_pyg_state, save_model, to_pyg, to_pyg_state
    from gnnfleet.nn.linear import MLP
    from gnnfleet.nn.metrics import MetricState, roc_auc
    from gnnfleet.nn.model import GNN, build_model
    from gnnfleet.nn.norm import BatchNorm, LayerNorm

__all__ = [
    "GAT", "GCN", "GCN2", "GIN", "GNN", "HGT", "MLP", "RGCN", "SAGE", "SIGN", "TGAT", "TGN", "BatchNorm", "GATConv",
    "GATv2", "GATv2Conv", "GCN2Conv", "GCNConv", "GENConv", "GINConv", "HGTConv", "HeteroConv", "HeteroGAT",
    "HeteroGATv2", "HeteroGIN", "HeteroSAGE", "LayerNorm", "MetricState", "Model", "ModelConfig", "NodeEmbedding",
    "NodeHead", "RGCNConv", "ResPlus", "ResPlusBlock", "SAGEConv", "build_model", "load_model", "load_pyg_state",
    "roc_auc", "save_model", "to_pyg", "to_pyg_state",
]  # fmt: skip

_MODULES = {
    "base": "Model",
    "conv": "GATConv GATv2Conv GCN2Conv GCNConv GENConv GINConv HGTConv HeteroConv ResPlusBlock RGCNConv SAGEConv",
    "embedding": "NodeEmbedding",
    "heads": "NodeHead",
    "interop": "load_model load_pyg_state save_model to_pyg to_pyg_state",
    "linear": "MLP",
    "metrics": "MetricState roc_auc",
    "model": "GNN build_model",
    "norm": "BatchNorm LayerNorm",
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names.split():
            return getattr(import_module(f"gnnfleet.nn.{module}"), name)
    raise AttributeError(f"module 'gnnfleet.nn' has no attribute {name!r}")
