"""Base of GAT and GATv2: heads, edge features, residual and bias. H heads of C channels."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.linear import GlorotLinear
from gnnfleet.ops.linear import bias_relu, sum_linear


class AttentionConv(torch.nn.Module):
    """x'_i = concat_h or mean_h(out_ih) + Θ_res x_i + b, the end of an attention layer.

    Parameters ``lin_edge.weight``, ``res.weight``, ``bias``.
    """

    mask_id = 0  # of attention dropout, among the masks of a model's layer

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        heads: int,
        concat: bool,
        edge_dim: int | None,
        bias: bool,
        residual: bool,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.heads, self.concat = in_channels, out_channels, heads, concat
        self.edge_dim = edge_dim
        total = out_channels * (heads if concat else 1)
        self.lin_edge = None if edge_dim is None else GlorotLinear(edge_dim, heads * out_channels, bias=False)
        self.res = GlorotLinear(in_channels, total, bias=False) if residual else None
        self.bias = torch.nn.Parameter(torch.zeros(total)) if bias else None

    def reset_parameters(self) -> None:
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def _edge_rows(self, attr: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """[E, edge_dim]; None if the layer or the graph has no edge features."""
        if attr is None or self.edge_dim is None:
            return None
        attr = attr[:, None] if attr.dim() == 1 else attr
        if attr.shape[1] != self.edge_dim:
            raise ConfigError(f"edge features must have {self.edge_dim} columns, found {attr.shape[1]}")
        return attr.to(dtype)

    def _finish(self, view: GraphView, out: Tensor, x: Tensor, *, relu: bool) -> Tensor:
        """Finish ``out`` [N_dst, H·C] of ``view.attend``, which is saved for backward and must not be written to."""
        fresh = not self.concat
        if not self.concat:
            out = out.view(out.shape[0], self.heads, self.out_channels).mean(1)
        if self.res is not None:
            residual = sum_linear([(x, self.res.weight)], rows=view.num_dst)
            out, fresh = (out + residual if residual.dtype != out.dtype else residual.add_(out)), True
        return bias_relu(out, self.bias, relu=relu, fresh=fresh)
