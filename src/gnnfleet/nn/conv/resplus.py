"""DeeperGCN (Li, Xiong, Thabet and Ghanem, https://arxiv.org/abs/2006.07739): softmax aggregation and res+ blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.nn.linear import to_float32
from gnnfleet.nn.norm import LayerNorm, batch_norm


class GENConv(torch.nn.Module):
    """x'_i = MLP(x_i + Σ_j softmax_j(t m_j) m_j), m_j = ReLU(x_j) + eps, the softmax of each channel by itself.

    Parameters ``mlp.0.weight``, ``mlp.1.*`` (the norm), ``mlp.4.weight``, ``lin_src.weight`` and ``lin_dst.weight``
    when widths differ, ``aggr_module.t`` when it is learnt: as PyG's GENConv of two MLP layers.
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
    ) -> None:
        super().__init__()
        self.eps, inner = eps, expansion * out_channels
        if in_channels != out_channels:
            self.lin_src = torch.nn.Linear(in_channels, out_channels, bias=bias)
            self.lin_dst = torch.nn.Linear(in_channels, out_channels, bias=bias)
        self.aggr_module = _Temperature(t, learn=learn_t)
        middle: torch.nn.Module = torch.nn.BatchNorm1d(inner) if norm == "batch" else LayerNorm(inner)
        # Places 2 and 3 are PyG's activation and dropout: they keep the numbers of its keys.
        self.mlp = torch.nn.ModuleList(
            [
                torch.nn.Linear(out_channels, inner, bias=bias),
                middle,
                torch.nn.Identity(),
                torch.nn.Identity(),
                torch.nn.Linear(inner, out_channels, bias=bias),
            ]
        )

    def forward(self, view: GraphView, x: Tensor) -> Tensor:
        """[N_src, in] → [N_dst, out]."""
        own = first_rows(x, view.num_dst)
        if hasattr(self, "lin_src"):
            x, own = self.lin_src(x), self.lin_dst(own)
        # A softmax for every channel is attention with as many heads; slope 1 leaves scores as they are.
        value = torch.relu(to_float32(x)) + self.eps
        score, none = value if self.aggr_module.is_one else value * self.aggr_module.t, value.new_zeros(own.shape)
        out = view.attend(value, src=score, dst=none, heads=int(value.shape[1]), slope=1.0)
        out = self.mlp[0](out + own)
        middle = self.mlp[1]
        out = batch_norm(view, out, middle) if isinstance(middle, torch.nn.BatchNorm1d) else middle(view, out)
        result: Tensor = self.mlp[4](torch.relu_(out))
        return result


class _Temperature(torch.nn.Module):
    """The inverse temperature ``t`` [1]; in the state only when it is learnt, as in PyG."""

    t: Tensor

    def __init__(self, t: float, *, learn: bool) -> None:
        super().__init__()
        self.is_one = t == 1.0 and not learn
        if learn:
            self.t = torch.nn.Parameter(torch.full((1,), t))
        else:
            self.register_buffer("t", torch.full((1,), t), persistent=False)


class ResPlusBlock(torch.nn.Module):
    """x' = x + conv(dropout(act(norm(x)))): PyG's DeepGCNLayer(block="res+"). Parameters ``conv.*``, ``norm.*``."""

    def __init__(
        self,
        conv: torch.nn.Module,
        norm: torch.nn.Module | None = None,
        act: Callable[[Tensor], Tensor] = torch.relu_,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.conv, self.norm, self.act, self.dropout = conv, norm, act, dropout

    def before(self, view: GraphView, x: Tensor, *, place: int = 0) -> Tensor:
        """dropout(act(norm(x))); also what ends a stack of blocks, with a ``place`` of its own for the draws."""
        x = self.act(x.clone() if self.norm is None else self.norm(view, x))
        return view.dropout(x, self.dropout if self.training else 0.0, place=place)

    def forward(self, view: GraphView, x: Tensor) -> Tensor:
        """[N_src, F] → [N_dst, F]."""
        out: Tensor = self.conv(view, self.before(view, x))
        return out + first_rows(x, view.num_dst)
