"""Convolutions of a model, built from its configuration."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import torch

from gnnfleet.graph.graph import EdgeType
from gnnfleet.nn import conv
from gnnfleet.nn.config import HETERO_MODELS, ModelConfig
from gnnfleet.nn.linear import MLP, activation
from gnnfleet.nn.norm import make_norm


def make_layers(
    config: ModelConfig,
    width: int,
    out: int,
    edge_types: Sequence[EdgeType],
    read_types: Sequence[Collection[str]],
    *,
    edge_dim: int | None,
) -> tuple[torch.nn.ModuleList, torch.nn.ModuleList]:
    """Return (one conv per layer, linear maps of gcn2 and res+ before and after, of ``HETERO_MODELS`` after them).

    ``read_types`` has the node types that each layer computes, ``edge_dim`` is the number of columns per edge that a
    layer multiplies.
    """
    convs, lins = torch.nn.ModuleList(), torch.nn.ModuleList()
    if config.name in HETERO_MODELS:
        lins.append(torch.nn.Linear(config.hidden, out))
        return convs.extend(_hetero(config, edge_types, types) for types in read_types), lins
    if config.name in ("gcn2", "res+"):
        lins.extend([torch.nn.Linear(width, config.hidden), torch.nn.Linear(config.hidden, out)])
        for i in range(config.layers):
            gcn2 = config.alpha, config.theta, i + 1, config.shared_weights
            convs.append(
                conv.GCN2Conv(config.hidden, *gcn2) if config.name == "gcn2" else _block(config, edge_dim=edge_dim)
            )
        return convs, lins
    widths = [width, *[config.hidden] * (config.layers - 1), out]
    for i, (in_width, out_width) in enumerate(pairwise(widths)):
        last = i == config.layers - 1
        if config.name == "rgcn":
            bases = config.bases or None
            convs.append(conv.RGCNConv(in_width, out_width, len(edge_types), num_bases=bases, relations=edge_types))
        elif config.name in ("gat", "gatv2"):
            convs.append(_attention(config, in_width, out_width, last=last, edge_dim=edge_dim))
        else:
            convs.append(_plain(config, in_width, out_width, edge_dim))
    return convs, lins


def _plain(config: ModelConfig, width: int, out: int, edge_dim: int | None = None) -> torch.nn.Module:
    name = config.name.removeprefix("hetero-")
    if name == "gcn":
        return conv.GCNConv(width, out, residual=config.residual)
    if name == "gin":
        mlp = MLP([width, out, out], act=activation(config.act), norm=config.norm)
        return conv.GINConv(mlp, train_eps=config.train_eps, edge_dim=edge_dim)
    assert name == "sage"
    pool = config.aggr == "pool"
    return conv.SAGEConv(width, out, aggr="max" if pool else config.aggr, project=pool, edge_dim=edge_dim)


def _attention(config: ModelConfig, width: int, out: int, *, last: bool, edge_dim: int | None) -> torch.nn.Module:
    """Heads are concatenated in hidden layers and averaged in the last, as in PyG's GAT."""
    heads = (config.out_heads or config.heads) if last else config.heads
    dropout = config.dropout if config.attention_dropout is None else config.attention_dropout
    conv_class = conv.GATConv if config.name == "gat" else conv.GATv2Conv
    return conv_class(
        width,
        out if last else out // heads,
        heads=heads,
        concat=not last,
        dropout=dropout,
        edge_dim=edge_dim,
        residual=config.residual,
    )


def _hetero(config: ModelConfig, edge_types: Sequence[EdgeType], node_types: Collection[str]) -> torch.nn.Module:
    """A layer of a heterogeneous model, with the relations into ``node_types``.

    Each destination has a term of its own row: that of the conv, of the skip of HGT, or a root.
    """
    kinds = [kind for kind in edge_types if kind.dst in node_types]
    hidden, heads, dropout = config.hidden, config.heads, config.attention_dropout
    if config.name == "hgt":
        all_types = list(dict.fromkeys([*node_types, *(kind.src for kind in kinds)]))
        return conv.HGTConv(hidden, hidden, (all_types, kinds), heads, dropout=dropout or 0.0)
    is_attention = config.name in ("hetero-gat", "hetero-gatv2")
    convs: dict[EdgeType, torch.nn.Module] = {}
    for kind in kinds:
        if is_attention:
            conv_class = conv.GATConv if config.name == "hetero-gat" else conv.GATv2Conv
            rate = config.dropout if dropout is None else dropout
            convs[kind] = conv_class(hidden, hidden // heads, heads, dropout=rate, add_self_loops=False)
        else:
            convs[kind] = _plain(config, hidden, hidden)
    reached = () if is_attention else {kind.dst for kind in kinds}
    types = [kind for kind in node_types if kind not in reached]
    roots = {kind: torch.nn.Linear(hidden, hidden, bias=not is_attention) for kind in types}
    return conv.HeteroConv(convs, roots=roots)


def _block(config: ModelConfig, *, edge_dim: int | None) -> torch.nn.Module:
    inner = "batch" if config.norm == "batch" else "layer"
    layer = conv.GENConv(config.hidden, config.hidden, norm=inner, edge_dim=edge_dim)
    norm = None if config.norm == "none" else make_norm(config.norm, config.hidden)
    return conv.ResPlusBlock(layer, norm, activation(config.act), config.dropout)
