"""GIN (Xu, Hu, Leskovec and Jegelka, https://arxiv.org/abs/1810.00826)."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.nn.linear import MLP


class GINConv(torch.nn.Module):
    """x'_i = nn((1 + eps) x_i + Σ_{j ∈ N(i)} x_j). Parameters ``nn.*`` and ``eps`` (a buffer unless learnt), as PyG's.

    ``nn`` is any module on rows, or ``gnnfleet.nn.MLP`` if batch norm must see the nodes of all ranks.
    """

    eps: Tensor

    def __init__(self, nn: torch.nn.Module, eps: float = 0.0, train_eps: bool = False) -> None:
        super().__init__()
        self.nn, self.initial_eps = nn, eps
        if train_eps:
            self.eps = torch.nn.Parameter(torch.full((1,), eps))
        else:
            self.register_buffer("eps", torch.full((1,), eps))

    def reset_parameters(self) -> None:
        for module in self.nn.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        self.eps.data.fill_(self.initial_eps)

    def aggregate(self, view: GraphView, x: Tensor, *, weight: Tensor | None = None) -> Tensor:
        """[N_dst, in] sum over neighbours, the part of the layer that does not depend on its parameters."""
        return view.aggregate(x)

    def forward(self, view: GraphView, x: Tensor, *, aggregated: Tensor | None = None) -> Tensor:
        """[N_src, in] → [N_dst, out]; ``aggregated`` is the output of ``aggregate`` for the same x."""
        aggregated = view.aggregate(x) if aggregated is None else aggregated
        rows = torch.addcmul(aggregated, first_rows(x, view.num_dst), 1 + self.eps)
        out: Tensor = self.nn(view, rows) if isinstance(self.nn, MLP) else self.nn(rows)
        return out
