"""Convolutions, called as ``conv(view, x)``, with PyG's constructors and parameter names."""

from gnnfleet.nn.conv.gat import GATConv
from gnnfleet.nn.conv.gatv2 import GATv2Conv
from gnnfleet.nn.conv.gcn import GCNConv
from gnnfleet.nn.conv.gcn2 import GCN2Conv
from gnnfleet.nn.conv.gin import GINConv
from gnnfleet.nn.conv.resplus import GENConv, ResPlusBlock
from gnnfleet.nn.conv.rgcn import RGCNConv
from gnnfleet.nn.conv.sage import SAGEConv

__all__ = [
    "GATConv",
    "GATv2Conv",
    "GCN2Conv",
    "GCNConv",
    "GENConv",
    "GINConv",
    "RGCNConv",
    "ResPlusBlock",
    "SAGEConv",
]
