"""GATv2 (Brody, Alon and Yahav, https://arxiv.org/abs/2105.14491). H heads of C channels."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.graph.view import GraphView
from gnnfleet.nn.conv.gat import finish
from gnnfleet.nn.linear import GlorotLinear, glorot_


class GATv2Conv(torch.nn.Module):
    """x'_i = Σ_{j ∈ N(i) ∪ {i}} softmax_j(a·LeakyReLU(Θ_r x_i + Θ_l x_j + Θ_e e_ji)) Θ_l x_j.

    Parameters ``lin_l.*``, ``lin_r.*`` (the same with ``share_weights``), ``att`` [1, H, C], ``lin_edge.weight``,
    ``res.weight``, ``bias``, as PyG's.
    """

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
        share_weights: bool = False,
        residual: bool = False,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.heads, self.concat = in_channels, out_channels, heads, concat
        self.negative_slope, self.dropout, self.add_self_loops = negative_slope, dropout, add_self_loops
        self.share_weights = share_weights
        total = out_channels * (heads if concat else 1)
        self.lin_l = GlorotLinear(in_channels, heads * out_channels, bias=bias)
        self.lin_r = self.lin_l if share_weights else GlorotLinear(in_channels, heads * out_channels, bias=bias)
        self.att = torch.nn.Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else GlorotLinear(edge_dim, heads * out_channels, bias=False)
        self.res = GlorotLinear(in_channels, total, bias=False) if residual else None
        self.bias = torch.nn.Parameter(torch.empty(total)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]
        glorot_(self.att)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, view: GraphView, x: Tensor, *, edge_attr: Tensor | None = None) -> Tensor:
        """[N_src, in] → [N_dst, H·C], or [N_dst, C] when heads are averaged; edge_attr [E, edge_dim]."""
        left = self.lin_l(x)
        right = left[: view.num_dst] if self.share_weights else self.lin_r(x[: view.num_dst])
        edge = None
        if edge_attr is not None and self.lin_edge is not None:
            edge_attr = edge_attr[:, None] if edge_attr.dim() == 1 else edge_attr
            edge = self.lin_edge(edge_attr.to(left.dtype))
        out = view.attend(
            left,
            src=left,
            dst=right,
            score="v2",
            vector=self.att[0],
            edge=edge,
            heads=self.heads,
            slope=self.negative_slope,
            dropout=self.dropout if self.training else 0.0,
            loops=self.add_self_loops,
        )
        return finish(view, out, x, layer=self)
