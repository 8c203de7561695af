"""Layers, models and heads. A layer takes a view of the graph and rows: ``conv(view, x)``; it never knows a rank.

``gf.nn.SAGE(hidden=256, layers=3)`` and its like describe a model; ``build_model`` makes it for a graph.
``Model`` is what all models are, yours too.
"""

from gnnfleet.nn.base import Model
from gnnfleet.nn.config import GAT, GCN, GCN2, GIN, RGCN, SAGE, TGAT, TGN, GATv2, ModelConfig, ResPlus
from gnnfleet.nn.conv import (
    GATConv,
    GATv2Conv,
    GCN2Conv,
    GCNConv,
    GENConv,
    GINConv,
    ResPlusBlock,
    RGCNConv,
    SAGEConv,
)
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.nn.heads import MetricState, NodeHead, roc_auc
from gnnfleet.nn.interop import load_pyg_state, to_pyg_state
from gnnfleet.nn.mlp import MLP
from gnnfleet.nn.model import GNN, build_model
from gnnfleet.nn.norm import BatchNorm, LayerNorm

__all__ = [
    "GAT",
    "GCN",
    "GCN2",
    "GIN",
    "GNN",
    "MLP",
    "RGCN",
    "SAGE",
    "TGAT",
    "TGN",
    "BatchNorm",
    "GATConv",
    "GATv2",
    "GATv2Conv",
    "GCN2Conv",
    "GCNConv",
    "GENConv",
    "GINConv",
    "LayerNorm",
    "MetricState",
    "Model",
    "ModelConfig",
    "NodeEmbedding",
    "NodeHead",
    "RGCNConv",
    "ResPlus",
    "ResPlusBlock",
    "SAGEConv",
    "build_model",
    "load_pyg_state",
    "roc_auc",
    "to_pyg_state",
]
