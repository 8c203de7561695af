"""Layers: constructor words and parameter names as PyG's; forward takes a view instead of an edge_index."""

from gnnfleet.nn.conv.gat import GATConv, GATv2Conv
from gnnfleet.nn.conv.gcn import GCN2Conv, GCNConv
from gnnfleet.nn.conv.resplus import GENConv, ResPlus
from gnnfleet.nn.conv.rgcn import RGCNConv
from gnnfleet.nn.conv.sage import GINConv, SAGEConv

__all__ = ["GATConv", "GATv2Conv", "GCN2Conv", "GCNConv", "GENConv", "GINConv", "RGCNConv", "ResPlus", "SAGEConv"]
