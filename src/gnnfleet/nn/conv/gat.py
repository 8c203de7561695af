"""GAT (Veličković et al., https://arxiv.org/abs/1710.10903). H heads of C channels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.errors import ConfigError
from gnnfleet.graph.view import GraphView
from gnnfleet.nn.linear import GlorotLinear, add_linear, glorot_


class GATConv(torch.nn.Module):
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
        super().__init__()
        self.in_channels, self.out_channels, self.heads, self.concat = in_channels, out_channels, heads, concat
        self.negative_slope, self.dropout, self.add_self_loops = negative_slope, dropout, add_self_loops
        total = out_channels * (heads if concat else 1)
        self.lin = GlorotLinear(in_channels, heads * out_channels, bias=False)
        self.att_src = torch.nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = torch.nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_edge = None if edge_dim is None else torch.nn.Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else GlorotLinear(edge_dim, heads * out_channels, bias=False)
        self.res = GlorotLinear(in_channels, total, bias=False) if residual else None
        self.bias = torch.nn.Parameter(torch.empty(total)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]
        for vector in (self.att_src, self.att_dst, self.att_edge):
            if vector is not None:
                glorot_(vector)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, view: GraphView, x: Tensor, *, edge_attr: Tensor | None = None) -> Tensor:
        """[N_src, in] → [N_dst, H·C], or [N_dst, C] when heads are averaged; edge_attr [E, edge_dim]."""
        value = self.lin(x)
        src, dst = _scores(value, self.att_src), _scores(value[: view.num_dst], self.att_dst)
        out = view.attend(
            value,
            src=src,
            dst=dst,
            edge=self._edge_term(edge_attr),
            heads=self.heads,
            slope=self.negative_slope,
            dropout=self.dropout if self.training else 0.0,
            loops=self.add_self_loops,
        )
        return finish(view, out, x, layer=self)

    def _edge_term(self, attr: Tensor | None) -> Tensor | None:
        """[E, H] <att_edge, lin_edge(attr)>, without the product of size E × H·C in between."""
        if attr is None or self.lin_edge is None or self.att_edge is None:
            return None
        attr = attr[:, None] if attr.dim() == 1 else attr
        fold = self.lin_edge.weight.view(self.heads, self.out_channels, -1)
        return functional.linear(attr.to(fold.dtype), torch.einsum("hcf,hc->hf", fold, self.att_edge[0]))


def _scores(value: Tensor, vector: Tensor) -> Tensor:
    """[n, H] <vector_h, value_h>."""
    heads, channels = vector.shape[1:]
    return torch.einsum("nhc,hc->nh", value.view(value.shape[0], heads, channels), vector[0])


def finish(view: GraphView, out: Tensor, x: Tensor, *, layer: torch.nn.Module) -> Tensor:
    """Heads side by side or averaged, then residual and bias: the end of both attention layers."""
    if not layer.concat:
        out = out.view(out.shape[0], layer.heads, layer.out_channels).mean(1)  # type: ignore[arg-type]
    if layer.res is not None:
        # attend keeps its output for backward: it must not be written to.
        out = add_linear(out if not layer.concat else out.clone(), x[: view.num_dst], layer.res.weight)  # type: ignore[arg-type, union-attr]
    return out if layer.bias is None else out + layer.bias  # type: ignore[operator]


def check_edge_attr(attr: Tensor | None, edge_dim: int | None) -> None:
    """Raise ConfigError when edge features are not as wide as the layer expects."""
    width = None if attr is None else (1 if attr.dim() == 1 else attr.shape[1])
    if edge_dim is not None and width is not None and width != edge_dim:
        raise ConfigError(f"edge features must have {edge_dim} columns, found {width}")
