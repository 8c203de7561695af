"""The convolutions of a model, by its configuration: which, how wide, with which heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.graph.graph import EdgeType
from gnnfleet.nn.config import ModelConfig
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
from gnnfleet.nn.mlp import MLP
from gnnfleet.nn.norm import make_norm


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Works in place: give it fresh tensors."""
    return torch.relu_ if name == "relu" else _elu


def _elu(x: Tensor) -> Tensor:
    return functional.elu(x, inplace=True)


def make_layers(
    config: ModelConfig, width: int, out: int, *, edge_types: Sequence[EdgeType], edge_dim: int | None
) -> tuple[torch.nn.ModuleList, torch.nn.ModuleList]:
    """(one conv per layer, the linear maps before the first and after the last: none but for gcn2 and res+)."""
    if config.name in ("gcn2", "res+"):
        lins = [torch.nn.Linear(width, config.hidden), torch.nn.Linear(config.hidden, out)]
        make = _gcn2 if config.name == "gcn2" else _block
        return torch.nn.ModuleList(make(config, i) for i in range(config.layers)), torch.nn.ModuleList(lins)
    widths = [width, *[config.hidden] * (config.layers - 1), out]
    convs = torch.nn.ModuleList()
    for i, (wide, narrow) in enumerate(pairwise(widths)):
        last = i == config.layers - 1
        if config.name == "rgcn":
            bases = config.bases or None
            convs.append(RGCNConv(wide, narrow, len(edge_types), num_bases=bases, relations=edge_types))
        elif config.name in ("gat", "gatv2"):
            convs.append(_attention(config, wide, narrow, last=last, edge_dim=edge_dim))
        else:
            convs.append(_plain(config, wide, narrow))
    return convs, torch.nn.ModuleList()


def _plain(config: ModelConfig, wide: int, narrow: int) -> torch.nn.Module:
    if config.name == "gcn":
        return GCNConv(wide, narrow, residual=config.residual)
    if config.name == "gin":
        mlp = MLP([wide, narrow, narrow], act=activation(config.act), norm=config.norm)
        return GINConv(mlp, train_eps=config.train_eps)
    assert config.name == "sage"
    pool = config.aggr == "pool"
    return SAGEConv(wide, narrow, aggr="max" if pool else config.aggr, project=pool)


def _attention(config: ModelConfig, wide: int, narrow: int, *, last: bool, edge_dim: int | None) -> torch.nn.Module:
    """Heads side by side in hidden layers, averaged in the last, as PyG's GAT."""
    heads = (config.out_heads or config.heads) if last else config.heads
    dropout = config.dropout if config.attention_dropout is None else config.attention_dropout
    kind = GATConv if config.name == "gat" else GATv2Conv
    return kind(
        wide,
        narrow if last else narrow // heads,
        heads=heads,
        concat=not last,
        dropout=dropout,
        edge_dim=edge_dim,
        residual=config.residual,
    )


def _gcn2(config: ModelConfig, index: int) -> torch.nn.Module:
    return GCN2Conv(config.hidden, config.alpha, config.theta, index + 1, shared_weights=config.shared_weights)


def _block(config: ModelConfig, index: int) -> torch.nn.Module:
    conv = GENConv(config.hidden, config.hidden, norm="batch" if config.norm == "batch" else "layer")
    return ResPlusBlock(conv, make_norm(config.norm, config.hidden), activation(config.act), config.dropout)
