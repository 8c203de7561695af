"""Convolutions, called as ``conv(view, x)``, with PyG's constructors and parameter names."""

from gnnfleet.nn.conv.gat import GATConv as GATConv
from gnnfleet.nn.conv.gat import GATv2Conv as GATv2Conv
from gnnfleet.nn.conv.gcn import GCN2Conv as GCN2Conv
from gnnfleet.nn.conv.gcn import GCNConv as GCNConv
from gnnfleet.nn.conv.gin import GINConv as GINConv
from gnnfleet.nn.conv.hetero import HeteroConv as HeteroConv
from gnnfleet.nn.conv.hetero import HGTConv as HGTConv
from gnnfleet.nn.conv.resplus import GENConv as GENConv
from gnnfleet.nn.conv.resplus import ResPlusBlock as ResPlusBlock
from gnnfleet.nn.conv.rgcn import RGCNConv as RGCNConv
from gnnfleet.nn.conv.sage import SAGEConv as SAGEConv
