"""GraphSAGE and GIN: sums, means and maxima of neighbours beside the node's own row."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnfleet.errors import ConfigError
from gnnfleet.graph.view import GraphView
from gnnfleet.nn.linear import Linear


class SAGEConv(nn.Module):
    """x' = W_l aggr(x_j) + b + W_r x (Hamilton et al., 2017); ``project`` is the pooling variant.

    ``aggr`` is mean, sum or max. Parameters as PyG's: ``lin_l``, ``lin_r``, ``lin``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        aggr: str = "mean",
        *,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if aggr not in ("mean", "sum", "max"):
            raise ConfigError(f"SAGE aggregates by mean, sum or max, found {aggr!r}")
        self.aggr = aggr
        self.lin = Linear(in_channels, in_channels) if project else None
        self.lin_l = Linear(in_channels, out_channels, bias=bias)
        self.lin_r = Linear(in_channels, out_channels, bias=False) if root_weight else None

    def precompute(self, view: GraphView, x: Tensor) -> Tensor | None:
        """The aggregate of x, where no parameter comes before it."""
        return None if self.lin is not None else view.aggregate(x, reduce=self.aggr)

    def forward(self, view: GraphView, x: Tensor, *, gathered: Tensor | None = None) -> Tensor:
        rows = x if self.lin is None else torch.relu(self.lin(x))
        out: Tensor
        if gathered is not None:
            out = self.lin_l(gathered)
        elif self.aggr != "max" and self.lin_l.out_channels < self.lin_l.in_channels:
            out = view.aggregate(F.linear(rows, self.lin_l.weight), reduce=self.aggr)
            out = out if self.lin_l.bias is None else out.add_(self.lin_l.bias)
        else:
            out = self.lin_l(view.aggregate(rows, reduce=self.aggr).to(rows.dtype))
        if self.lin_r is None:
            return out
        # Adding the second product in place saves a tensor of the layer's size; nothing saved for backward changes.
        return out.addmm_(x[: view.num_dst].to(out.dtype), self.lin_r.weight.t().to(out.dtype))


class GINConv(nn.Module):
    """x' = nn((1 + ε) x + Σ x_j) (Xu et al., 2019). ``eps`` is a buffer, or a parameter with ``train_eps``."""

    eps: Tensor

    def __init__(self, nn: nn.Module, eps: float = 0.0, train_eps: bool = False) -> None:
        super().__init__()
        self.nn = nn
        value = torch.full((1,), float(eps))
        if train_eps:
            self.eps = torch.nn.Parameter(value)
        else:
            self.register_buffer("eps", value)

    def precompute(self, view: GraphView, x: Tensor) -> Tensor:
        return view.aggregate(x)

    def forward(self, view: GraphView, x: Tensor, *, gathered: Tensor | None = None) -> Tensor:
        total = view.aggregate(x) if gathered is None else gathered
        out: Tensor = self.nn(total + (1 + self.eps) * x[: view.num_dst])
        return out
