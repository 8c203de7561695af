"""Twelve complete torch_geometric models, none of which knows of workers.

gnnfleet train shop/ --model examples/models/pyg_models.py:gat --strategy sar --workers 4

Width and dropout come from --set model.hidden=64 and --set model.dropout=0.5.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import BatchNorm1d, Dropout, Linear, ModuleList, ReLU, Sequential
from torch.nn.functional import dropout, elu, log_softmax, relu


class GCN(torch.nn.Module):
    """Two convolutions, weighted by edges if there are weights."""

    def __init__(self, in_channels, hidden, out_channels, p):
        super().__init__()
        self.first = pyg.GCNConv(in_channels, hidden)
        self.second = pyg.GCNConv(hidden, out_channels)
        self.p = p

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        x = relu(self.first(dropout(x, self.p, self.training), edge_index, edge_weight))
        return self.second(dropout(x, self.p, self.training), edge_index, edge_weight)


class GAT(torch.nn.Module):
    """Four heads, ELU, dropout on features and on attention, a linear skip."""

    def __init__(self, in_channels, hidden, out_channels, p):
        super().__init__()
        self.first = pyg.GATConv(in_channels, hidden // 4, heads=4, dropout=p)
        self.second = pyg.GATConv(hidden, out_channels, heads=4, concat=False, dropout=p)
        self.skip = Linear(in_channels, hidden)
        self.p = p

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = dropout(x, self.p, self.training)
        x = elu(self.first(x, edge_index) + self.skip(x))
        return self.second(dropout(x, self.p, self.training), edge_index)


class SAGE(torch.nn.Module):
    """Three convolutions with batch norm, log-probabilities as output."""

    def __init__(self, in_channels, hidden, out_channels, p):
        super().__init__()
        widths = [in_channels, hidden, hidden, out_channels]
        self.convs = ModuleList(pyg.SAGEConv(i, o) for i, o in pairwise(widths))
        self.norms = ModuleList(BatchNorm1d(hidden) for _ in range(2))
        self.drop = Dropout(p)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = self.drop(relu(norm(conv(x, edge_index))))
        return log_softmax(self.convs[-1](x, edge_index), dim=-1)


class GIN(torch.nn.Module):
    """An MLP with batch norm in every convolution, and one that reads the last."""

    def __init__(self, in_channels, hidden, out_channels, p):
        super().__init__()

        def mlp(width):
            return Sequential(Linear(width, hidden), BatchNorm1d(hidden), ReLU(), Linear(hidden, hidden), ReLU())

        self.convs = ModuleList(pyg.GINConv(mlp(width), train_eps=True) for width in (in_channels, hidden))
        self.head = pyg.MLP([hidden, hidden, out_channels], dropout=p, norm="layer_norm")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index)
        return self.head(x)


class JumpingNet(torch.nn.Module):
    """Four convolutions, whose outputs an LSTM weighs for every node."""

    def __init__(self, in_channels, hidden, out_channels, p):
        super().__init__()
        self.enter = Linear(in_channels, hidden)
        self.convs = ModuleList(pyg.GraphConv(hidden, hidden, aggr="mean") for _ in range(4))
        self.jump = pyg.JumpingKnowledge("lstm", hidden, 4)
        self.leave = Linear(hidden, out_channels)
        self.p = p

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x, outputs = relu(self.enter(x)), []
        for conv in self.convs:
            x = dropout(relu(conv(x, edge_index)), self.p, self.training)
            outputs.append(x)
        return self.leave(self.jump(outputs))


class Propagated(torch.nn.Module):
    """Predictions of an MLP, spread by personalized PageRank."""

    def __init__(self, in_channels, hidden, out_channels, p):
        super().__init__()
        self.mlp = pyg.MLP([in_channels, hidden, out_channels], dropout=p, norm=None)
        self.spread = pyg.APPNP(K=5, alpha=0.1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.spread(self.mlp(x), edge_index)


class Adaptive(torch.nn.Module):
    """Features of three hops by TAGConv, then a simplified convolution of two hops."""

    def __init__(self, in_channels, hidden, out_channels, p):
        super().__init__()
        self.first = pyg.TAGConv(in_channels, hidden, K=3)
        self.second = pyg.SGConv(hidden, out_channels, K=2)
        self.p = p

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = torch.tanh(self.first(x, edge_index))
        return self.second(dropout(x, self.p, self.training), edge_index)


class Spectral(torch.nn.Module):
    """A Chebyshev filter and an ARMA filter, added."""

    def __init__(self, in_channels, hidden, out_channels, p):
        super().__init__()
        self.cheb = pyg.ChebConv(in_channels, hidden, K=3)
        self.arma = pyg.ARMAConv(in_channels, hidden, num_stacks=2, num_layers=2, dropout=p)
        self.leave = Linear(hidden, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.leave(relu(self.cheb(x, edge_index) + self.arma(x, edge_index)))


class DeepGCN(torch.nn.Module):
    """GCNII: eight convolutions that each read the first rows."""

    def __init__(self, in_channels, hidden, out_channels, p):
        super().__init__()
        self.enter, self.leave = Linear(in_channels, hidden), Linear(hidden, out_channels)
        self.convs = ModuleList(pyg.GCN2Conv(hidden, alpha=0.1, theta=0.5, layer=i + 1) for i in range(8))
        self.p = p

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = first = relu(self.enter(dropout(x, self.p, self.training)))
        for conv in self.convs:
            x = relu(conv(dropout(x, self.p, self.training), first, edge_index))
        return self.leave(dropout(x, self.p, self.training))


class ResidualGEN(torch.nn.Module):
    """DeeperGCN: pre-activation residual blocks with a learnt softmax aggregation."""

    def __init__(self, in_channels, hidden, out_channels, p):
        super().__init__()
        self.enter, self.leave = Linear(in_channels, hidden), Linear(hidden, out_channels)
        self.blocks = ModuleList(
            pyg.DeepGCNLayer(
                pyg.GENConv(hidden, hidden, aggr="softmax", learn_t=True, norm="layer"),
                pyg.LayerNorm(hidden, mode="node"), ReLU(), block="res+", dropout=p,
            )
            for _ in range(4)
        )  # fmt: skip

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, edge_index)
        return self.leave(relu(x))


class EdgePNA(torch.nn.Module):
    """Four aggregations in three scales, of messages with edge features if there are any."""

    def __init__(self, in_channels, hidden, out_channels, p, edge_dim):
        super().__init__()
        aggregators, scalers = ["mean", "max", "min", "std"], ["identity", "amplification", "attenuation"]
        degrees = torch.tensor([1, 4, 9, 16, 9, 4, 1])
        self.enter = Linear(in_channels, hidden)
        self.convs = ModuleList(
            pyg.PNAConv(hidden, hidden, aggregators, scalers, degrees, edge_dim=edge_dim, towers=2) for _ in range(2)
        )
        self.norms = ModuleList(pyg.BatchNorm(hidden) for _ in range(2))
        self.head = pyg.MLP([hidden, out_channels], norm=None)
        self.p = p

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        x = self.enter(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + dropout(relu(norm(conv(x, edge_index, edge_attr))), self.p, self.training)
        return self.head(x)


class GatedTransformer(torch.nn.Module):
    """Attention with a gated skip, as in UniMP, then a recurrent update of four steps."""

    def __init__(self, in_channels, hidden, out_channels, p, edge_dim):
        super().__init__()
        self.attend = pyg.TransformerConv(in_channels, hidden // 2, heads=2, beta=True, dropout=p, edge_dim=edge_dim)
        self.norm = torch.nn.LayerNorm(hidden)
        self.gated = pyg.GatedGraphConv(hidden, num_layers=2)
        self.leave = Linear(hidden, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        x = relu(self.norm(self.attend(x, edge_index, edge_attr)))
        return self.leave(x + self.gated(x, edge_index))


def _factory(kind, reads_edges=False):
    def make(config, graph, out_channels):
        widths = graph.single_nodes.x.shape[1], config.hidden, out_channels, config.dropout
        attr = graph.single_edges.attr
        return kind(*widths, None if attr is None else attr.shape[1]) if reads_edges else kind(*widths)

    return make


gcn, gat, sage, gin, jumping = (_factory(kind) for kind in (GCN, GAT, SAGE, GIN, JumpingNet))
appnp, tag, spectral, gcn2, deeper = (_factory(kind) for kind in (Propagated, Adaptive, Spectral, DeepGCN, ResidualGEN))
pna, transformer = (_factory(kind, reads_edges=True) for kind in (EdgePNA, GatedTransformer))
