"""GAT (https://arxiv.org/abs/1710.10903) and GATv2 (https://arxiv.org/abs/2105.14491). H heads of C channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.nn.linear import Conv, GlorotLinear, apply_linear, edge_rows, glorot_, to_float32
from gnnfleet.ops.linear import bias_relu, multi_linear, sum_linear


class AttentionConv(Conv):
    """x'_i = concat_h or mean_h(out_ih) + Θ_res x_i + b, the end of an attention layer.

    Parameters ``lin_edge.weight``, ``res.weight``, ``bias``.
    """

    mask_id = 0  # of attention dropout, among the masks of a model's layer

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
        self.edge_dim = edge_dim
        total = out_channels * (heads if concat else 1)
        self.lin_edge = None if edge_dim is None else GlorotLinear(edge_dim, heads * out_channels, bias=False)
        self.res = GlorotLinear(in_channels, total, bias=False) if residual else None
        self.bias = torch.nn.Parameter(torch.zeros(total)) if bias else None
        self._add_parameters()

    def _add_parameters(self) -> None:
        """Add those of the score, unless the constructor of a subclass does."""

    def forward(self, view: GraphView, x: Tensor, *, edge_attr: Tensor | None = None, relu: bool = False) -> Tensor:
        """[N_src, in] → [N_dst, H·C], or [N_dst, C] if heads are averaged; edge_attr [E, edge_dim]."""
        value, src, dst = self._own_terms(view, x)
        attr = edge_rows(edge_attr, self.lin_edge, src.dtype)
        out = view.attend(
            value,
            src=src,
            dst=dst,
            edge=None if attr is None else to_float32(self._edge_term(attr)),
            heads=self.heads,
            slope=self.negative_slope,
            dropout=self.dropout if self.training else 0.0,
            mask_id=self.mask_id,
            self_loops=self.add_self_loops,
            **self.score_options,
        )
        return self.finish(out, x, rows=view.num_dst, relu=relu)

    def _own_terms(self, view: GraphView, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(value, src, dst) of ``view.attend`` for one table of rows."""
        raise NotImplementedError

    def _edge_term(self, attr: Tensor) -> Tensor:
        """Term of edge features [E, edge_dim] in the score."""
        raise NotImplementedError

    def terms(self, x_src: Tensor, x_dst: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(value, src, dst) of ``view.attend`` for sources and destinations of different types."""
        raise NotImplementedError

    @property
    def score_options(self) -> dict[str, Any]:
        """Options of ``view.attend`` that choose the score."""
        return {}

    def finish(self, out: Tensor, x: Tensor, *, rows: int, relu: bool = False) -> Tensor:
        """Average heads, add the residual of the first ``rows`` rows of x, and the bias."""
        fresh = not self.concat  # otherwise it is saved for backward and must not be written to
        if not self.concat:
            out = out.view(out.shape[0], self.heads, self.out_channels).mean(1)
        if self.res is not None:
            residual = sum_linear([(x, self.res.weight)], rows=rows)
            out, fresh = (out + residual if residual.dtype != out.dtype else residual.add_(out)), True
        return bias_relu(out, self.bias, relu=relu, fresh=fresh)


class GATConv(AttentionConv):
    """x'_i = Σ_{j ∈ N(i) ∪ {i}} softmax_j(LeakyReLU(a_src·Θx_j + a_dst·Θx_i + a_edge·Θ_e e_ji)) Θ x_j.

    Parameters ``lin.weight``, ``att_src``, ``att_dst`` [1, H, C], ``lin_edge.weight``, ``att_edge``, ``res.weight``,
    ``bias``, as PyG's. The edge term of a self-loop is the mean of the node's in-edges.
    """

    def _add_parameters(self) -> None:
        shape = 1, self.heads, self.out_channels
        self.lin = GlorotLinear(self.in_channels, self.heads * self.out_channels, bias=False)
        self.att_src, self.att_dst = torch.nn.Parameter(torch.empty(shape)), torch.nn.Parameter(torch.empty(shape))
        self.att_edge = None if self.edge_dim is None else torch.nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for vector in (self.att_src, self.att_dst, self.att_edge):
            if vector is not None:
                glorot_(vector)

    def _own_terms(self, view: GraphView, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            fold = self._spread() @ self.lin.weight
        value, scores = multi_linear(x, [self.lin.weight, fold])
        src, dst = to_float32(scores).chunk(2, 1)
        return value, src, first_rows(dst, view.num_dst)

    def terms(self, x_src: Tensor, x_dst: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            fold_src, fold_dst = (self._spread() @ self.lin.weight).chunk(2)
        value, src = multi_linear(x_src, [self.lin.weight, fold_src])
        return value, to_float32(src), to_float32(sum_linear([(x_dst, fold_dst)]))

    def _spread(self) -> Tensor:
        """[2H, H·C] block-diagonal att_src, then att_dst.

        Its product with ``lin.weight`` gives scores as thin products of x, whose gradients do not touch the values.
        """
        identity = torch.eye(self.heads, dtype=self.att_src.dtype)[:, :, None]
        return torch.cat([(identity * vector[0][None]).flatten(1) for vector in (self.att_src, self.att_dst)])

    def _edge_term(self, attr: Tensor) -> Tensor:
        """[E, H] ⟨att_edge, lin_edge(attr)⟩, without the intermediate product [E, H·C]."""
        assert self.lin_edge is not None and self.att_edge is not None
        fold = self.lin_edge.weight.view(self.heads, self.out_channels, -1)
        return functional.linear(attr, torch.einsum("hcf,hc->hf", fold, self.att_edge[0]))


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
        options = negative_slope, dropout, add_self_loops, edge_dim, bias, residual
        super().__init__(in_channels, out_channels, heads, concat, *options)
        self.share_weights = share_weights
        self.lin_l = GlorotLinear(in_channels, heads * out_channels, bias=bias)
        self.lin_r = self.lin_l if share_weights else GlorotLinear(in_channels, heads * out_channels, bias=bias)
        self.att = torch.nn.Parameter(torch.empty(1, heads, out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        glorot_(self.att)

    def _own_terms(self, view: GraphView, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value = apply_linear(self.lin_l, x)
        src = to_float32(value)
        if self.share_weights:
            return value, src, first_rows(src, view.num_dst)
        return value, src, to_float32(apply_linear(self.lin_r, x, rows=view.num_dst))

    def _edge_term(self, attr: Tensor) -> Tensor:
        assert self.lin_edge is not None
        out: Tensor = self.lin_edge(attr)
        return out

    def terms(self, x_src: Tensor, x_dst: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value = apply_linear(self.lin_l, x_src)
        return value, to_float32(value), to_float32(apply_linear(self.lin_r, x_dst))

    @property
    def score_options(self) -> dict[str, Any]:
        return {"score": "v2", "vector": self.att[0]}
