"""Two-layer perceptron of GIN, with norms over the nodes of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.linear import apply_linear
from gnnfleet.nn.norm import make_norm

Activation = Callable[[Tensor], Tensor]


class MLP(torch.nn.Module):
    """lin_n(act(norm_{n−1}(lin_{n−1}(… x)))), [N, C_0] → [N, C_n]. Parameters ``lins.i``, ``norms.i``, as PyG's MLP."""

    def __init__(self, channels: Sequence[int], *, act: Activation = torch.relu_, norm: str = "none") -> None:
        super().__init__()
        self.act = act
        self.lins = torch.nn.ModuleList(torch.nn.Linear(*pair) for pair in pairwise(channels))
        self.norms = torch.nn.ModuleList(make_norm(norm, width) or torch.nn.Identity() for width in channels[1:-1])

    def reset_parameters(self) -> None:
        for module in (*self.lins, *self.norms):
            if not isinstance(module, torch.nn.Identity):
                module.reset_parameters()

    def forward(self, view: GraphView, x: Tensor) -> Tensor:
        for lin, norm in zip(self.lins, self.norms, strict=False):
            plain = isinstance(norm, torch.nn.Identity)
            relu = plain and self.act is torch.relu_
            x = apply_linear(lin, x, relu=relu)
            x = x if plain else norm(view, x)
            x = x if relu else self.act(x)
        return apply_linear(self.lins[-1], x)
