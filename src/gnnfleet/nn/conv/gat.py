"""GAT (Veličković et al., https://arxiv.org/abs/1710.10903). H heads of C channels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.nn.conv.attention import AttentionConv
from gnnfleet.nn.linear import GlorotLinear, glorot_, to_float32
from gnnfleet.ops.linear import multi_linear


class GATConv(AttentionConv):
    """x'_i = Σ_{j ∈ N(i) ∪ {i}} softmax_j(LeakyReLU(a_src·Θx_j + a_dst·Θx_i + a_edge·Θ_e e_ji)) Θ x_j.

    Parameters ``lin.weight``, ``att_src``, ``att_dst`` [1, H, C], ``lin_edge.weight``, ``att_edge``, ``res.weight``,
    ``bias``, as PyG's. The edge term of a self-loop is the mean of the node's in-edges.
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
        residual: bool = False,
    ) -> None:
        super().__init__(
            in_channels, out_channels, heads=heads, concat=concat, edge_dim=edge_dim, bias=bias, residual=residual
        )
        self.negative_slope, self.dropout, self.add_self_loops = negative_slope, dropout, add_self_loops
        self.lin = GlorotLinear(in_channels, heads * out_channels, bias=False)
        self.att_src = torch.nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = torch.nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_edge = None if edge_dim is None else torch.nn.Parameter(torch.empty(1, heads, out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for vector in (self.att_src, self.att_dst, self.att_edge):
            if vector is not None:
                glorot_(vector)

    def forward(self, view: GraphView, x: Tensor, *, edge_attr: Tensor | None = None, relu: bool = False) -> Tensor:
        """[N_src, in] → [N_dst, H·C], or [N_dst, C] if heads are averaged; edge_attr [E, edge_dim]."""
        with torch.autocast("cpu", enabled=False):
            fold = self._spread() @ self.lin.weight
        value, scores = multi_linear(x, [self.lin.weight, fold])
        src, dst = to_float32(scores).chunk(2, 1)
        out = view.attend(
            value,
            src=src,
            dst=first_rows(dst, view.num_dst),
            edge=self._edge_term(self._edge_rows(edge_attr, src.dtype)),
            heads=self.heads,
            slope=self.negative_slope,
            dropout=self.dropout if self.training else 0.0,
            mask_id=self.mask_id,
            self_loops=self.add_self_loops,
        )
        return self._finish(view, out, x, relu=relu)

    def _spread(self) -> Tensor:
        """[2H, H·C] block-diagonal att_src, then att_dst.

        Its product with ``lin.weight`` gives scores as thin products of x, whose gradients do not touch the values.
        """
        identity = torch.eye(self.heads, dtype=self.att_src.dtype)[:, :, None]
        return torch.cat([(identity * vector[0][None]).flatten(1) for vector in (self.att_src, self.att_dst)])

    def _edge_term(self, attr: Tensor | None) -> Tensor | None:
        """[E, H] ⟨att_edge, lin_edge(attr)⟩, without the intermediate product [E, H·C]."""
        if attr is None or self.lin_edge is None or self.att_edge is None:
            return None
        fold = self.lin_edge.weight.view(self.heads, self.out_channels, -1)
        return to_float32(functional.linear(attr, torch.einsum("hcf,hc->hf", fold, self.att_edge[0])))
