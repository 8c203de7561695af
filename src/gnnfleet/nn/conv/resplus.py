"""DeeperGCN (Li, Xiong, Thabet and Ghanem, https://arxiv.org/abs/2006.07739): softmax aggregation and res+ blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.nn.linear import edge_rows, to_float32
from gnnfleet.nn.norm import LayerNorm, batch_norm
from gnnfleet.ops.aggregate import accumulate_dtype

Tensors = Mapping[str, Tensor]


class GENConv(torch.nn.Module):
    """x'_i = MLP(x_i + Σ_j softmax_j(t m_ji) m_ji), m_ji = ReLU(x_j + Θ_e e_ji) + eps, with a softmax per channel.

    Parameters ``mlp.0.weight``, ``mlp.1.*`` (the norm), ``mlp.4.weight``, ``lin_src.weight`` and ``lin_dst.weight``
    if widths differ, ``lin_edge.weight`` with ``edge_dim``, ``aggr_module.t`` if it is learnt: as PyG's GENConv with
    two MLP layers.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        t: float = 1.0,
        learn_t: bool = False,
        norm: str = "batch",
        expansion: int = 2,
        eps: float = 1e-7,
        bias: bool = False,
        edge_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.lin_edge = None if edge_dim is None else torch.nn.Linear(edge_dim, out_channels, bias=bias)
        self.eps, inner = eps, expansion * out_channels
        if in_channels != out_channels:
            self.lin_src = torch.nn.Linear(in_channels, out_channels, bias=bias)
            self.lin_dst = torch.nn.Linear(in_channels, out_channels, bias=bias)
        self.aggr_module = _Temperature(t, learn=learn_t)
        hidden_norm: torch.nn.Module = torch.nn.BatchNorm1d(inner) if norm == "batch" else LayerNorm(inner)
        # Modules 2 and 3 stand for PyG's activation and dropout, so that keys have PyG's numbers.
        first, last = torch.nn.Linear(out_channels, inner, bias=bias), torch.nn.Linear(inner, out_channels, bias=bias)
        self.mlp = torch.nn.ModuleList([first, hidden_norm, torch.nn.Identity(), torch.nn.Identity(), last])

    def combine(self, view: GraphView, x: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """[N_src, in] → [N_dst, out] the input of the MLP."""
        root = first_rows(x, view.num_dst)
        if hasattr(self, "lin_src"):
            x, root = self.lin_src(x), self.lin_dst(root)
        attr = edge_rows(edge_attr, self.lin_edge, accumulate_dtype(x.dtype))
        if attr is not None and self.lin_edge is not None:
            t, bias = self.aggr_module.t, self.lin_edge.bias
            params = (t, self.lin_edge.weight) if bias is None else (t, self.lin_edge.weight, bias)
            message_of = partial(_edge_message, self.eps)
            return view.propagate(message_of, src={"x": x}, edge={"attr": attr}, params=params, reduce="softmax") + root
        # A softmax per channel is attention with one head per channel; slope 1 leaves scores unchanged.
        message = torch.relu(to_float32(x)) + self.eps
        score = message if self.aggr_module.is_one else message * self.aggr_module.t
        zero = message.new_zeros(root.shape)
        return view.attend(message, src=score, dst=zero, heads=int(message.shape[1]), slope=1.0) + root

    def forward(self, view: GraphView, x: Tensor, *, edge_attr: Tensor | None = None) -> Tensor:
        """[N_src, in] → [N_dst, out]; edge_attr [E, edge_dim]."""
        hidden = self.mlp[0](self.combine(view, x, edge_attr))
        norm = self.mlp[1]
        hidden = batch_norm(view, hidden, norm) if isinstance(norm, torch.nn.BatchNorm1d) else norm(view, hidden)
        out: Tensor = self.mlp[4](torch.relu_(hidden))
        return out


def _edge_message(eps: float, src: Tensors, dst: Tensors, edge: Tensors, t: Tensor, *lin: Tensor) -> tuple[Tensor, ...]:
    message = torch.relu(to_float32(src["x"]) + functional.linear(edge["attr"], *lin)) + eps
    return message * t, message


class _Temperature(torch.nn.Module):
    """Inverse temperature ``t`` [1]; part of the state only if it is learnt, as in PyG."""

    t: Tensor

    def __init__(self, t: float, *, learn: bool) -> None:
        super().__init__()
        self.is_one = t == 1.0 and not learn
        if learn:
            self.t = torch.nn.Parameter(torch.full((1,), t))
        else:
            self.register_buffer("t", torch.full((1,), t), persistent=False)


class ResPlusBlock(torch.nn.Module):
    """x' = x + conv(dropout(act(norm(x)))), PyG's DeepGCNLayer(block="res+"). Parameters ``conv.*``, ``norm.*``."""

    def __init__(
        self,
        conv: torch.nn.Module,
        norm: torch.nn.Module | None = None,
        act: Callable[[Tensor], Tensor] = torch.relu_,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.conv, self.norm, self.act, self.dropout = conv, norm, act, dropout

    def before(self, view: GraphView, x: Tensor, *, mask_id: int = 0) -> Tensor:
        """dropout(act(norm(x))); also ends a stack of blocks, then with another ``mask_id``."""
        x = self.act(x.clone() if self.norm is None else self.norm(view, x))
        return view.dropout(x, self.dropout if self.training else 0.0, mask_id=mask_id)

    def forward(self, view: GraphView, x: Tensor, **edge_data: Tensor) -> Tensor:
        """[N_src, F] → [N_dst, F]; ``edge_data`` is for the conv."""
        out: Tensor = self.conv(view, self.before(view, x), **edge_data)
        return out + first_rows(x, view.num_dst)
