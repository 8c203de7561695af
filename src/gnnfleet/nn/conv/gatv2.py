"""GATv2 (Brody, Alon and Yahav, https://arxiv.org/abs/2105.14491). H heads of C channels."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.nn.conv.attention import AttentionConv
from gnnfleet.nn.linear import GlorotLinear, apply_linear, glorot_, to_float32


class GATv2Conv(AttentionConv):
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
        super().__init__(
            in_channels, out_channels, heads=heads, concat=concat, edge_dim=edge_dim, bias=bias, residual=residual
        )
        self.negative_slope, self.dropout, self.add_self_loops = negative_slope, dropout, add_self_loops
        self.share_weights = share_weights
        self.lin_l = GlorotLinear(in_channels, heads * out_channels, bias=bias)
        self.lin_r = self.lin_l if share_weights else GlorotLinear(in_channels, heads * out_channels, bias=bias)
        self.att = torch.nn.Parameter(torch.empty(1, heads, out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        glorot_(self.att)

    def forward(self, view: GraphView, x: Tensor, *, edge_attr: Tensor | None = None, relu: bool = False) -> Tensor:
        """[N_src, in] → [N_dst, H·C], or [N_dst, C] if heads are averaged; edge_attr [E, edge_dim]."""
        left = apply_linear(self.lin_l, x)
        src = to_float32(left)
        if self.share_weights:
            dst = first_rows(src, view.num_dst)
        else:
            dst = to_float32(apply_linear(self.lin_r, x, rows=view.num_dst))
        attr = self._edge_rows(edge_attr, src.dtype)
        out = view.attend(
            left,
            src=src,
            dst=dst,
            score="v2",
            vector=self.att[0],
            edge=None if attr is None or self.lin_edge is None else to_float32(self.lin_edge(attr)),
            heads=self.heads,
            slope=self.negative_slope,
            dropout=self.dropout if self.training else 0.0,
            mask_id=self.mask_id,
            self_loops=self.add_self_loops,
        )
        return self._finish(view, out, x, relu=relu)
