"""Graph attention: additive scores (GAT) and scores after the nonlinearity (GATv2). H heads, C channels each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gnnfleet.graph.view import GraphView
from gnnfleet.nn.linear import Linear, glorot_


class _Attention(nn.Module):
    """What both have in common: heads joined or averaged, a residual, a bias."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        bias: bool = True,
        residual: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.out_channels, self.concat = heads, out_channels, concat
        self.negative_slope, self.dropout, self.add_self_loops = negative_slope, dropout, add_self_loops
        total = out_channels * (heads if concat else 1)
        self.lin_edge = Linear(edge_dim, heads * out_channels, bias=False, glorot=True) if edge_dim else None
        self.res = Linear(in_channels, total, bias=False, glorot=True) if residual else None
        self.bias = nn.Parameter(torch.zeros(total)) if bias else None

    def _join(self, out: Tensor, x: Tensor, num_dst: int) -> Tensor:
        if not self.concat:
            out = out.view(num_dst, self.heads, self.out_channels).mean(1)
        if self.res is not None:
            out = out + self.res(x[:num_dst])
        return out if self.bias is None else out + self.bias


class GATConv(_Attention):
    """α_ij = softmax_j LeakyReLU(a_src·W x_j + a_dst·W x_i (+ a_edge·W_e e_ij)) (Veličković et al., 2018).

    Parameters as PyG's: ``lin.weight``, ``att_src``, ``att_dst``, ``bias``, ``lin_edge``, ``att_edge``, ``res``.
    """

    def __init__(self, in_channels: int, out_channels: int, heads: int = 1, **options: Any) -> None:
        super().__init__(in_channels, out_channels, heads, **options)
        self.lin = Linear(in_channels, heads * out_channels, bias=False, glorot=True)
        self.att_src = nn.Parameter(glorot_(torch.empty(1, heads, out_channels)))
        self.att_dst = nn.Parameter(glorot_(torch.empty(1, heads, out_channels)))
        self.att_edge = None if self.lin_edge is None else nn.Parameter(glorot_(torch.empty(1, heads, out_channels)))

    def forward(self, view: GraphView, x: Tensor, *, edge_attr: Tensor | None = None) -> Tensor:
        value = self.lin(x)
        split = value.view(len(x), self.heads, self.out_channels)
        edge = None
        if edge_attr is not None and self.lin_edge is not None and self.att_edge is not None:
            edge = (self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels) * self.att_edge).sum(-1)
        out = view.attend(
            value,
            src=(split * self.att_src).sum(-1),
            dst=(split[: view.num_dst] * self.att_dst).sum(-1),
            score="add",
            edge=edge,
            slope=self.negative_slope,
            dropout=self.dropout,
            loops=self.add_self_loops,
        )
        return self._join(out, x, view.num_dst)


class GATv2Conv(_Attention):
    """α_ij = softmax_j a·LeakyReLU(W_l x_j + W_r x_i (+ W_e e_ij)) (Brody et al., 2022).

    Parameters as PyG's: ``lin_l``, ``lin_r``, ``att``, ``bias``, ``lin_edge``, ``res``.
    """

    def __init__(
        self, in_channels: int, out_channels: int, heads: int = 1, *, share_weights: bool = False, **options: Any
    ) -> None:
        super().__init__(in_channels, out_channels, heads, **options)
        bias = self.bias is not None
        self.lin_l = Linear(in_channels, heads * out_channels, bias=bias, glorot=True)
        self.lin_r = self.lin_l if share_weights else Linear(in_channels, heads * out_channels, bias=bias, glorot=True)
        self.att = nn.Parameter(glorot_(torch.empty(1, heads, out_channels)))

    def forward(self, view: GraphView, x: Tensor, *, edge_attr: Tensor | None = None) -> Tensor:
        value = self.lin_l(x)
        own = value[: view.num_dst] if self.lin_r is self.lin_l else self.lin_r(x[: view.num_dst])
        out = view.attend(
            value,
            src=value,
            dst=own,
            score="v2",
            vector=self.att.flatten(),
            heads=self.heads,
            edge=None if edge_attr is None or self.lin_edge is None else self.lin_edge(edge_attr),
            slope=self.negative_slope,
            dropout=self.dropout,
            loops=self.add_self_loops,
        )
        return self._join(out, x, view.num_dst)
