"""GIN (Xu, Hu, Leskovec and Jegelka, https://arxiv.org/abs/1810.00826)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.nn.linear import MLP, edge_rows
from gnnfleet.ops.aggregate import accumulate_dtype

Tensors = Mapping[str, Tensor]


class GINConv(torch.nn.Module):
    """x'_i = nn((1 + eps) x_i + Σ_{j ∈ N(i)} w_ji x_j). Parameters ``nn.*`` and ``eps``, as PyG's.

    ``nn`` is any module on rows, or ``gnnfleet.nn.MLP`` if batch norm must see the nodes of all ranks. With
    ``edge_dim`` it is GINE (https://arxiv.org/abs/1905.12265): messages are w_ji ReLU(x_j + Θ_e e_ji + b), with
    ``lin.*`` as PyG's GINEConv.
    """

    eps: Tensor

    def __init__(
        self, nn: torch.nn.Module, eps: float = 0.0, train_eps: bool = False, edge_dim: int | None = None
    ) -> None:
        super().__init__()
        self.nn, self.initial_eps = nn, eps
        width = next(p.shape[-1] for p in nn.parameters() if p.dim() > 1) if edge_dim else 0
        self.lin = torch.nn.Linear(edge_dim, width) if edge_dim else None
        if train_eps:
            self.eps = torch.nn.Parameter(torch.full((1,), eps))
        else:
            self.register_buffer("eps", torch.full((1,), eps))

    def reset_parameters(self) -> None:
        for module in self.nn.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        if self.lin is not None:
            self.lin.reset_parameters()
        self.eps.data.fill_(self.initial_eps)

    def aggregate(
        self, view: GraphView, x: Tensor, *, weight: Tensor | None = None, edge_attr: Tensor | None = None
    ) -> Tensor | None:
        """[N_dst, in] sum over neighbours; None if it depends on the parameters of the layer."""
        return view.aggregate(x, weight=weight) if self.lin is None else None

    def forward(
        self,
        view: GraphView,
        x: Tensor,
        *,
        weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
        aggregated: Tensor | None = None,
    ) -> Tensor:
        """[N_src, in] → [N_dst, out]; ``aggregated`` is the output of ``aggregate`` for the same inputs."""
        attr = edge_rows(edge_attr, self.lin, accumulate_dtype(x.dtype))
        if attr is not None and self.lin is not None:
            edge = {"attr": attr} if weight is None else {"attr": attr, "weight": weight.to(attr.dtype)}
            aggregated = view.propagate(_message, src={"x": x}, edge=edge, params=(self.lin.weight, self.lin.bias))
        elif aggregated is None:
            aggregated = view.aggregate(x, weight=weight)
        rows = torch.addcmul(aggregated, first_rows(x, view.num_dst), 1 + self.eps)
        out: Tensor = self.nn(view, rows) if isinstance(self.nn, MLP) else self.nn(rows)
        return out


def _message(src: Tensors, dst: Tensors, edge: Tensors, weight: Tensor, bias: Tensor) -> Tensor:
    message = torch.relu(src["x"] + functional.linear(edge["attr"], weight, bias))
    return message * edge["weight"][:, None] if "weight" in edge else message
